"""The files of view/: the modules joined into one script, the style sheet without comments, and the icon.

A browser that opens a file from the disk loads no module by its path, so the ES modules of view/ are joined. Each
module becomes a function that returns what the module exports; modules come in the order of their imports:

```
// dom.js                                   const module_dom = (() => {
export const $ = (id) => ...;                 const $ = (id) => ...;
                                              return { $ };
// main.js                          ->      })();
import { $ } from "./dom.js";               const module_main = (() => {
$("title").textContent = "...";               const { $ } = module_dom;
                                              $("title").textContent = "...";
                                              return {};
                                            })();
```

So a name that a module does not import is unknown to it. The bundler reads two forms, `import { a, b } from "./x.js";`
and `export` before `const`, `function`, `function*`, `async function` and `class`, both at the start of a line, and
fails on any other. `export let` is one of the others: the importer would keep the first value.
"""

import base64
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib.resources import files
from typing import NamedTuple

IMPORT = re.compile(r'^import \{([^{}]*)\} from "\./([\w-]+)\.js";$', re.MULTILINE)
EXPORT = re.compile(r"^export (?=(?:const|(?:async )?function\*?|class) ([\w$]+))", re.MULTILINE)
OTHER = re.compile(r"^(?:import|export)\b.*", re.MULTILINE)
COMMENT = re.compile(r"(?:^|\s)//(?: .*)?$")
"""A comment, to the end of its line. No string of the modules has two slashes between blanks."""


class BundleError(ValueError):
    """Modules that cannot be joined: an unknown module or name, a circle, or a form that the bundler does not read."""


class Module(NamedTuple):
    """A module taken apart: its imports by module, the names that it exports, and its text without both."""

    imports: dict[str, list[str]]
    exports: list[str]
    body: str


def bundle(read: Callable[[str], str], entry: str) -> str:
    r"""The module `entry` and all that it imports as one script, without comments and indentation.

    Args:
        read: the source of a module by its name: `read("dom")` is the text of dom.js.
        entry: the name of the module to begin with.

    Raises:
        BundleError: the modules cannot be joined; the message names the module.

    >>> sources = {"a": 'import { one } from "./b.js";\nalert(one);', "b": "export const one = 1; // a comment"}
    >>> print(bundle(sources.__getitem__, "a"))
    "use strict";(() => {
    const module_b = (() => {
    const one = 1;
    return { one };
    })();
    const module_a = (() => {
    const { one } = module_b;
    alert(one);
    return {  };
    })();
    })();
    """
    modules = read_modules(read, entry)
    try:
        order = list(TopologicalSorter({name: module.imports for name, module in modules.items()}).static_order())
    except CycleError as error:
        raise BundleError(f"modules import each other in a circle: {' -> '.join(error.args[1])}.") from None
    lines = (line for name in order for line in _join(name, modules[name]))
    return "\n".join(['"use strict";(() => {', *lines, "})();"])


def read_modules(read: Callable[[str], str], entry: str) -> dict[str, Module]:
    """The module `entry` and all that it imports, directly or through others, each with its imports checked."""
    modules: dict[str, Module] = {}
    wanted = [entry]
    while wanted:
        if (name := wanted.pop()) not in modules:
            modules[name] = parse(name, _source(read, name))
            wanted += modules[name].imports
    for name, module in modules.items():
        for source, names in module.imports.items():
            if unknown := [one for one in names if one not in modules[source].exports]:
                raise BundleError(f"{name}.js imports {', '.join(unknown)} from {source}.js, which does not export it.")
    return modules


def parse(name: str, source: str) -> Module:
    r"""One module taken apart. Raises `BundleError` for an import or export of another form, or a name imported twice.

    >>> parse("a", 'import { one } from "./b.js";\nexport const two = one + 1;')
    Module(imports={'b': ['one']}, exports=['two'], body='\nconst two = one + 1;')
    """
    imports: dict[str, list[str]] = {}
    for names, module in IMPORT.findall(source):
        imports.setdefault(module, []).extend(one.strip() for one in names.split(",") if one.strip())
    every = [one for names in imports.values() for one in names]
    if twice := sorted({one for one in every if every.count(one) > 1}):
        raise BundleError(f"{name}.js imports {', '.join(twice)} twice.")
    body = EXPORT.sub("", IMPORT.sub("", source))
    if other := OTHER.search(body):
        raise BundleError(
            f'{name}.js has {other[0]!r}: expected import {{ a, b }} from "./module.js"; or export before const, '
            "function or class."
        )
    return Module(imports, EXPORT.findall(source), body)


def _source(read: Callable[[str], str], name: str) -> str:
    try:
        return read(name)
    except (KeyError, FileNotFoundError):
        raise BundleError(f"there is no module {name}.js.") from None


def _join(name: str, module: Module) -> Iterator[str]:
    yield f"const module_{name} = (() => {{"
    for source, names in module.imports.items():
        yield f"const {{ {', '.join(names)} }} = module_{source};"
    yield from filter(None, (COMMENT.sub("", line).strip() for line in module.body.splitlines()))
    yield f"return {{ {', '.join(module.exports)} }};"
    yield "})();"


@cache
def view(name: str) -> str:
    """The text of a file of view/."""
    return files("regard.inspect.page").joinpath("view", name).read_text(encoding="utf-8")


@cache
def style() -> str:
    """The style sheet without comments, and without blanks around braces, semicolons and commas."""
    bare = re.sub(r"/\*.*?\*/", "", view("page.css"), flags=re.DOTALL)
    return re.sub(r"\s*([{};,])\s*", r"\1", bare).replace(": ", ":").replace(";}", "}").strip()


@cache
def script() -> str:
    """The modules of view/ as one script; see `bundle`."""
    return bundle(lambda name: view(f"{name}.js"), "main")


@cache
def icon() -> str:
    """A causal mask, 8 x 8, as a PNG in base64. It is inside the page, so that browsers ask no server for one."""
    pixels = b"".join(b"\0" + b"".join(b"\x1f\x6f\xc0" + _shade(q, k) for k in range(8)) for q in range(8))
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", 8, 8, 8, 6, 0, 0, 0)), (b"IDAT", zlib.compress(pixels)), (b"IEND", b"")]
    png = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    return base64.b64encode(png).decode("ascii")


def _shade(query: int, key: int) -> bytes:
    return bytes([0 if key > query else 255 - 30 * (query - key)])
