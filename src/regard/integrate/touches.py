"""What a model does with its keys and values between its cache and its attention function: nothing, mostly.

```python
key_states, value_states = past_key_values.update(key_states, value_states, self.layer_idx)   # out of the cache
key_states = key_states.to(query_states.dtype)                                               # <- touched
attn_output, _ = attention_interface(self, query_states, key_states, value_states, ...)       # into attention
```

A `StoredTensor` can pass through code that only hands it on or asks for its shape, type or device. So can latents,
which `expand_kv` hands on as they are (`latent.py`). A model that slices, casts or repeats the keys of the cache must
get tensors. Whether a model does so is read from the source of its attention classes; without source, it counts as one
that does.
"""

import ast
import functools
import importlib
import inspect
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

ASKED = {"shape", "dtype", "device", "ndim"}
"""What may be asked of a handle as of a tensor."""

_STATEMENTS = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.If, ast.Return)

_INTERFACE = "ALL_ATTENTION_FUNCTIONS"
"""Where models look their attention function up."""


@functools.cache
def touch(module: type[nn.Module]) -> str | None:
    """The first line of a module's forward that computes with what its cache gave; None: it hands it on.

    ```
    >>> from transformers.models.llama.modeling_llama import LlamaAttention
    >>> from transformers.models.jetmoe.modeling_jetmoe import JetMoeAttention
    >>> touch(LlamaAttention), touch(JetMoeAttention)
    (None, 'key_states = key_states.repeat(1, self.top_k, 1, 1)')

    ```
    """
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(module.forward)))
        function = ast.parse(source).body[0]
    except (OSError, TypeError, SyntaxError):
        return "its source cannot be read"
    if not isinstance(function, ast.FunctionDef):
        return "its source cannot be read"
    return _touched(function)


@functools.cache
def passed(module: type[nn.Module]) -> frozenset[str]:
    """The keywords that a module's forward passes to its attention function by name; none where there is no source.

    ```
    >>> from transformers.models.llama.modeling_llama import LlamaAttention
    >>> sorted(passed(LlamaAttention))
    ['dropout', 'scaling']

    ```
    """
    try:
        function = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(module.forward)))).body[0]
    except (OSError, TypeError, SyntaxError):
        return frozenset()
    if not isinstance(function, ast.FunctionDef):
        return frozenset()
    interfaces = _interfaces(function)
    calls = (node for node in ast.walk(function) if isinstance(node, ast.Call) and _calls(node, interfaces))
    return frozenset(word.arg for call in calls for word in call.keywords if word.arg is not None)


def attention_classes(model: Any) -> list[type[nn.Module]]:
    """The classes of a model, or of the file that its config belongs to, that write to a transformers cache."""
    if isinstance(model, nn.Module):
        found: Iterable[type] = dict.fromkeys(type(module) for module in model.modules())
    else:
        name = type(model).__module__.replace(".configuration_", ".modeling_")
        try:
            file = importlib.import_module(name)
        except ImportError:
            return []
        found = [x for x in vars(file).values() if inspect.isclass(x) and x.__module__ == name]
    return [cls for cls in found if issubclass(cls, nn.Module) and _updates(cls)]


@functools.cache
def _updates(module: type[nn.Module]) -> bool:
    """Whether a module's forward calls `past_key_values.update(k, v, layer)`."""
    try:
        function = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(module.forward))))
    except (OSError, TypeError, SyntaxError, AttributeError):
        return False
    return any(_is_update(node) for node in ast.walk(function))


def _is_update(node: ast.AST) -> bool:
    """`something.update(k, v, layer)`: a dict's takes one argument, a cache of convolutions two."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "update"
        and len(node.args) + len(node.keywords) >= 3
    )


def _gives(node: ast.AST) -> bool:
    """Whether it gives keys and values: the `update` of a cache, or `self.expand_kv(latents, rotated)`."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    return node.func.attr == "expand_kv" or _is_update(node)


def _touched(function: ast.FunctionDef) -> str | None:
    begins = min(
        (node.lineno for node in ast.walk(function) if isinstance(node, ast.Call) and _gives(node)), default=None
    )
    if begins is None:
        return None
    names, interfaces = _given(function), _interfaces(function)
    if not names:
        return "what its cache gives is not kept under a name"
    fine = {*_handed_on(function, interfaces), *_eager_alone(function)}
    for node in ast.walk(function):
        if not isinstance(node, ast.Name) or not isinstance(node.ctx, ast.Load) or node.id not in names:
            continue
        if node.lineno > begins and id(node) not in fine:
            return _line_of(function, node)
    return None


def _given(function: ast.FunctionDef) -> set[str]:
    """The names that what a cache gives is put under."""
    found: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and any(_gives(part) for part in ast.walk(node.value)):
            found |= {name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    return found


def _interfaces(function: ast.FunctionDef) -> set[str]:
    """The names of attention functions: `attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface(...)`."""
    found: set[str] = set()
    for node in ast.walk(function):
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        value = getattr(node, "value", None)
        if targets and value is not None and _INTERFACE in ast.dump(value):
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def _handed_on(function: ast.FunctionDef, interfaces: set[str]) -> Iterator[int]:
    """The uses (by id of the node) that a handle can take: an argument of an attention function, `.shape`, storing.

    Layers that share keys store them: `shared[self.layer_idx] = key_states, value_states`.
    """
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and (_gives(node) or _calls(node, interfaces)):
            yield from (id(value) for value in [*node.args, *(word.value for word in node.keywords)])
        elif isinstance(node, ast.Attribute) and node.attr in ASKED:
            yield id(node.value)
        elif isinstance(node, ast.Assign) and not isinstance(node.targets[0], ast.Name):
            values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
            if all(isinstance(target, ast.Subscript) for target in node.targets):
                yield from (id(value) for value in values)


def _eager_alone(function: ast.FunctionDef) -> Iterator[int]:
    """What is done for eager attention alone: `if using_eager and self.reorder_and_upcast_attn`, in GPT-2."""
    for node in ast.walk(function):
        if isinstance(node, ast.If) and any("eager" in name for name in _all_of(node.test)):
            yield from (id(part) for statement in node.body for part in ast.walk(statement))


def _all_of(test: ast.expr) -> list[str]:
    """The names that must all be true for `a and b and ...` to be."""
    parts = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]
    return [part.id for part in parts if isinstance(part, ast.Name)]


def _calls(node: ast.Call, interfaces: set[str]) -> bool:
    return isinstance(node.func, ast.Name) and node.func.id in interfaces


def _line_of(function: ast.FunctionDef, node: ast.AST) -> str:
    """The statement that a node stands in, on one line."""
    holder: ast.AST = node
    for statement in ast.walk(function):
        if isinstance(statement, _STATEMENTS) and any(part is node for part in ast.walk(statement)):
            holder = statement
    said = ast.unparse(holder).splitlines()[0]
    return said if len(said) <= 100 else said[:97] + "..."
