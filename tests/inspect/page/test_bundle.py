"""Modules joined into one script: what is joined, and what is refused."""

import shutil
import subprocess
from importlib.resources import files

import pytest

from regard.inspect.page.assets import BundleError, bundle, read_modules

VIEW = files("regard.inspect.page") / "view"


def view(name):
    return (VIEW / f"{name}.js").read_text(encoding="utf-8")


def joined(**sources):
    return bundle(sources.__getitem__, "main")


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ({"main": 'import { a } from "./gone.js";'}, "there is no module gone.js"),
        ({"main": 'import { a, b } from "./x.js";', "x": "export const a = 1;\nconst b = 2;"},
         "main.js imports b from x.js, which does not export it"),
        ({"main": 'import { a } from "./x.js";', "x": 'import { b } from "./y.js";\nexport const a = b;',
          "y": 'import { a } from "./x.js";\nexport const b = 1;'}, "in a circle: .* -> .* -> "),
        ({"main": 'import { a } from "./x.js";\nimport { a } from "./y.js";', "x": "export const a = 1;",
          "y": "export const a = 2;"}, "main.js imports a twice"),
        ({"main": 'import x from "./x.js";', "x": ""}, "main.js has 'import x from"),
        ({"main": 'import * as x from "./x.js";', "x": ""}, "main.js has 'import"),
        ({"main": 'import { a as b } from "./x.js";', "x": "export const a = 1;"}, "imports a as b from x.js"),
        ({"main": 'import { a } from "far/x.js";'}, "main.js has 'import"),
        ({"main": "export let count = 0;"}, "main.js has 'export let count = 0;'"),
        ({"main": "export default 1;"}, "main.js has 'export default 1;'"),
        ({"main": "const a = 1;\nexport { a };"}, "main.js has 'export { a };'"),
    ],
)  # fmt: skip
def test_what_cannot_be_joined_is_refused(sources, message):
    with pytest.raises(BundleError, match=message):
        joined(**sources)


def test_a_module_comes_once_and_after_all_that_it_imports():
    text = joined(
        main='import { a } from "./a.js";\nimport { b } from "./b.js";\nreport(a, b);',
        a='import { c } from "./c.js";\nexport const a = c;',
        b='import { c } from "./c.js";\nexport const b = c;',
        c="export const c = 1;",
    )
    assert [text.count(f"const module_{name} =") for name in "abc"] == [1, 1, 1]
    assert text.index("module_c =") < text.index("module_a =") < text.index("module_main =")
    assert text.index("module_c =") < text.index("module_b =")


def test_every_form_of_export_is_joined():
    forms = "const", "function", "function*", "async function", "class"
    source = "export const one = 1;\nexport function two() {}\nexport function* three() {}\n"
    source += "export async function four() {}\nexport class five {}"
    text = joined(main='import {\n  one, two,\n  three, four, five,\n} from "./x.js";', x=source)
    assert "return { one, two, three, four, five };" in text
    assert "const { one, two, three, four, five } = module_x;" in text
    assert all(f"\n{form} " in text for form in forms)


def test_every_module_of_the_page_is_used_by_it():
    modules = read_modules(view, "main")
    assert {f"{name}.js" for name in modules} == {f.name for f in VIEW.iterdir() if f.name.endswith(".js")}
    imported = {(source, name) for module in modules.values() for source, names in module.imports.items()
                for name in names}  # fmt: skip
    assert {(name, one) for name, module in modules.items() for one in module.exports} == imported


@pytest.mark.skipif(shutil.which("node") is None, reason="no node to run a script with")
def test_a_module_sees_its_own_names_and_what_it_imports_and_nothing_else():
    sources = {
        "main": 'import { next } from "./x.js";\nimport { own } from "./y.js";\nnext();\n'
        "console.log(next(), own, typeof hidden);",
        "x": "let hidden = 0; // counts\nexport const next = () => ++hidden;",
        "y": 'const hidden = "y";\nexport const own = hidden;',
    }
    ran = subprocess.run(["node", "-e", joined(**sources)], capture_output=True, text=True, check=True)
    assert ran.stdout == "2 y undefined\n"
