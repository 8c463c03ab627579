"""Each third-party package has one home; nothing else uses it. Imports between our own packages are import-linter's."""

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src" / "regard"

# What may be imported in which files or folders of src/regard only.
HOMES = {
    "triton": ["gpu/"],
    "torch.nn.attention": ["backend/flex.py", "flex/"],
    "torch.distributed": ["parallel/"],
    "torch.onnx": ["dispatch/onnx_form.py", "integrate/onnx.py"],
    "transformers": ["integrate/"],
    "ctypes": ["native.py", "native_calls.py", "integrate/heap.py", "huge_pages.py", "describe/tensors.py"],
    "rich": ["cli/"],
    "matplotlib": ["inspect/plot.py"],
    "xxhash": ["describe/"],
}


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything imported in a file, wherever it stands: `from a import b` names a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def attributes(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every `a.b.c` in a file: `torch.distributed.send` needs no more than `import torch`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.lineno, ast.unparse(node)


@cache
def used(path: Path) -> list[tuple[int, str]]:
    """(line, dotted name) of everything that a file imports or reaches through a module."""
    tree = ast.parse(path.read_text())
    return [*imported(tree), *attributes(tree)]


def strays(package: str, homes: list[str], sources: Path) -> list[str]:
    """The lines, `file:number`, of `sources` that use `package` outside its homes."""
    found: set[str] = set()
    for path in sources.rglob("*.py"):
        place = path.relative_to(sources).as_posix()
        if not any(place.startswith(home) for home in homes):
            found |= {f"{place}:{line}" for line, name in used(path) if f"{name}.".startswith(f"{package}.")}
    return sorted(found)


@pytest.mark.parametrize("package", HOMES)
def test_a_package_is_used_in_its_home_only(package: str):
    assert strays(package, HOMES[package], SOURCES) == []


@pytest.mark.parametrize(
    "line",
    [
        "import torch.distributed",
        "import torch.distributed.tensor as sharded",
        "from torch import nn, distributed",
        "from torch.distributed import send",
        "def late():\n    import torch.distributed",
        "torch.distributed.send(tensor)",
    ],
)
def test_a_stray_is_found_however_it_is_written(line: str, tmp_path: Path):
    (tmp_path / "parallel").mkdir()
    (tmp_path / "parallel" / "ring.py").write_text(line)
    (tmp_path / "attend.py").write_text(line)
    assert strays("torch.distributed", ["parallel/"], tmp_path) == [f"attend.py:{len(line.splitlines())}"]


# Modules of ours that are named by a string and imported when they are needed, which import-linter does not see. The
# first two import a leaf: only calls whose tensors are DTensors need it.
LATE = {
    "attention.py": ["regard.parallel.placement"],
    "state.py": ["regard.parallel.placement"],
    "__init__.py": ["regard.public", "regard.{name}"],
    "cost/__init__.py": ["regard.cost.{module}"],
    "parallel/__init__.py": ["regard.parallel.{module}"],
    "parallel/context.py": ["regard.integrate.sharded"],
    "parallel/layout.py": ["regard.parallel.balance"],
    "parallel/pair_counts.py": ["regard.describe.mask", "regard.describe.spec", "regard.parallel.tile_counts"],
    "parallel/route.py": ["regard.describe.mask"],
}


def imported_by_name(source: str) -> list[str]:
    """The modules of ours that a file imports by `import_module`, where the name is written there."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call) and node.args]
    named = [call.args[0] for call in calls if ast.unparse(call.func).endswith(("import_module", "__import__"))]
    names = {ast.unparse(name).lstrip("f").strip("'") for name in named}
    return sorted(name for name in names if f"{name}.".startswith("regard."))


def test_modules_that_are_imported_by_name_are_in_the_table():
    found = {path.relative_to(SOURCES).as_posix(): imported_by_name(path.read_text()) for path in SOURCES.rglob("*.py")}
    assert {name: modules for name, modules in found.items() if modules} == LATE


@pytest.mark.parametrize(
    "line",
    ['import_module("regard.nn")', "importlib.import_module('regard.nn')", '__import__("regard.nn")'],
)
def test_a_module_that_is_imported_by_name_is_found_however_it_is_written(line: str):
    assert imported_by_name(f"def late():\n    return {line}.name") == ["regard.nn"]
    assert imported_by_name('import_module(f"regard.{name}"), import_module(name)') == ["regard.{name}"]
    assert imported_by_name('import_module("regarding"), open("regard.nn")') == []


def private_names_of_torch(source: str) -> list[str]:
    """The private names of torch that a file uses: `torch.a._b`, `from torch._a import b`, `getattr(torch, "_a")`."""
    tree = ast.parse(source)
    dotted = {name for _, name in [*imported(tree), *attributes(tree)]}
    dotted |= {
        f"torch.{node.args[1].value}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr" and ast.unparse(node.args[0]) == "torch"
        if isinstance(node.args[1], ast.Constant)
    }
    is_private = re.compile(r"(torch|forward_ad)(\.\w+)*\._(?!_)|\w+\._version$").match
    return sorted(name for name in dotted if is_private(name))


def test_private_names_of_torch_are_in_one_package():
    found = {
        path.relative_to(SOURCES).as_posix(): private_names_of_torch(path.read_text()) for path in SOURCES.rglob("*.py")
    }
    assert {Path(name).parent.as_posix() for name, private in found.items() if private} == {"torch_internals"}


@pytest.mark.parametrize(
    "line",
    [
        "from torch._subclasses import FakeTensor",
        "import torch._dynamo",
        "torch._C._functorch.peek_interpreter_stack()",
        'getattr(torch, "_C")',
        "forward_ad._current_level",
        "torch.ops.aten._softmax(t, 1, False)",
        "t._version",
    ],
)
def test_a_private_name_is_found_however_it_is_written(line: str):
    assert private_names_of_torch(line)
    assert not private_names_of_torch("torch.__version__, torch.nn.functional.softmax(t._data), getattr(torch, name)")


def test_every_package_has_its_place_in_the_layers():
    """import-linter is silent about packages that no contract names."""
    found = {path.stem for path in SOURCES.iterdir() if path.suffix == ".py" or any(path.glob("*.py"))} - {"__init__"}
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = " ".join(layer for contract in contracts for layer in contract.get("layers", []))
    assert {name for name in found if f"regard.{name}" not in layers} == set()
