"""The page of all public names, docs/api.md: `python docs/refresh.py api` writes it.

Read from the sources, so no optional package is needed: a name of `__all__` is followed through its imports.
"""

# a script, not a part of a package

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "api.md"

MODULES = {
    "regard": "guide.md",
    "regard.rope": "guide.md#arguments-of-attend",
    "regard.scores": "guide.md#arguments-of-attend",
    "regard.cache": "caches.md",
    "regard.nn": "../src/regard/nn/README.md",
    "regard.linear": "guide.md#linear-attention",
    "regard.flex": "guide.md#flexattentions-functions",
    "regard.integrate": "guide.md#in-models-of-transformers",
    "regard.integrate.onnx": "guide.md#onnx",
    "regard.parallel": "parallel.md",
    "regard.cost": "cost.md",
    "regard.evaluate": "evaluate.md",
    "regard.inspect": "../src/regard/inspect/README.md",
    "regard.inspect.intervene": "../src/regard/inspect/intervene/README.md",
    "regard.inspect.measures": "../src/regard/inspect/README.md",
    "regard.extend": "extending.md",
}
"""The public modules, and where each is explained."""


def page() -> str:
    """The page as Markdown."""
    lines = [
        "# All public names",
        "",
        "The names of each public module and the first line of their docstrings, which `help(name)` shows whole.",
        "`python docs/refresh.py api` makes this page.",
    ]
    for module, guide in MODULES.items():
        lines += ["", f"## {module}", "", f"Explained in [{guide.removeprefix('../')}]({guide}).", "", "| name | |"]
        lines += ["|---|---|", *(f"| `{name}` | {_first_line(module, name)} |" for name in names(module))]
    return "\n".join(lines) + "\n"


def names(module: str) -> list[str]:
    """The `__all__` of a module."""
    source = "regard.public" if module == "regard" else module
    for node in _tree(source).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    raise AssertionError(f"{module} has no __all__")


def _first_line(module: str, name: str) -> str:
    text = docstring("regard.public" if module == "regard" else module, name) or ""
    return text.strip().partition("\n")[0].replace("|", "\\|")


def docstring(module: str, name: str) -> str | None:
    """The docstring of a name, or the text below a constant."""
    body = _tree(module).body
    for at, node in enumerate(body):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name and (text := ast.get_docstring(node)):
            return text  # an overload has none
        if isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            below = body[at + 1] if at + 1 < len(body) else None
            if ast.unparse(target) == name and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                return str(below.value.value)
    for node in ast.walk(_tree(module)):
        if isinstance(node, ast.ImportFrom) and node.module:
            original = next((each.name for each in node.names if (each.asname or each.name) == name), None)
            if original is not None and node.module.startswith("regard"):
                return docstring(node.module, original)
            if original is not None:
                return f"torch's `{original}`."
    return None


@functools.cache
def _tree(module: str) -> ast.Module:
    path = ROOT / "src" / Path(*module.split("."))
    return ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())
