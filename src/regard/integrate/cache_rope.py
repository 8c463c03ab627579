"""The `Rope` that rotates the keys of a transformers model, for a `Rolling` cache to re-rotate its sinks.

transformers passes no sines and cosines to its caches, so they come from the config. The `Rope` that the config
describes is compared with what the model's own functions compute, on random keys: neighbours or halves, part of the
dimensions or all. A model whose rotation no `Rope` computes is refused; a wrong one would give no error.
"""

import ast
import importlib
import inspect
import textwrap
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from regard.describe.position import Rope
from regard.errors import ProblemError
from regard.integrate.decoder import classes_of
from regard.integrate.modules import scaling_of

_ROTATE = "apply_rotary_pos_emb"


def rope_for(config: Any, kind: str = "full_attention", source: Any = None) -> Rope:
    """The rotation of the keys of a decoder's layers of a kind.

    Args:
        config: of the decoder.
        kind: of the layers, where each has a rotation of its own.
        source: the config whose file has the decoder's attention; None: `config`.

    Raises:
        ProblemError: keys carry positions in another way, not in all layers, or by angles that change with the length.

    >>> from transformers import LlamaConfig
    >>> rope_for(LlamaConfig(head_dim=64))
    Rope(dim=64, base=10000.0)
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    parameters = parameters.get(kind, parameters) if "rope_theta" not in parameters else parameters
    if not parameters or parameters.get("rope_theta") is None or "mrope_section" in parameters:
        _refuse(config, "its keys are not rotated by a rotary embedding of one position per token")
    function, file = _function_of(config, classes_of(config if source is None else source))
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    base, fraction = float(parameters["rope_theta"]), parameters.get("partial_rotary_factor") or Rope.fraction
    scaling = scaling_of(dict(parameters), config)
    if scaling is not None and scaling.looks_at_length():
        _refuse(config, f"the angles of {type(scaling).__name__} change as the text grows, under keys that are kept")
    k, at = torch.arange(1.0, 5 * dim + 1).sin().view(1, 1, 5, dim), torch.tensor([[0, 1, 7, 100, 1000]])
    expected = _rotate(config, file, function, k, at, kind)
    for interleaved in (False, True):
        rope = Rope(dim, base, scaling, fraction, interleaved)
        if expected is not None and torch.allclose(rope.rotate(k, at), expected, atol=1e-3):
            return rope
    return _refuse(config, f"its {function.__name__} rotates keys in another way than a Rope does")


def _function_of(config: Any, classes: tuple[type[nn.Module], ...]) -> tuple[Any, str]:
    """(the function that rotates keys in every attention class, whatever the layer; the file that it is in).

    Some models rotate in some layers only. Nothing public says so, so it is read from the source of their attention.
    """
    function: Any = None
    for module in classes:
        try:
            forward = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(module.forward)))).body[0]
        except (OSError, TypeError, SyntaxError):
            continue
        assert isinstance(forward, ast.FunctionDef)
        if not any(_writes_to_cache(node) for node in ast.walk(forward)):
            continue
        calls = [node for node in ast.walk(forward) if _is_rotation(node)]
        always = [
            node for statement in forward.body if not isinstance(statement, ast.If) for node in ast.walk(statement)
        ]
        if not calls or any(call not in always for call in calls):
            _refuse(config, f"{module.__name__} does not rotate the keys of all layers by {_ROTATE}")
        function = vars(inspect.getmodule(module))[calls[0].func.id]  # type: ignore[attr-defined]
    if function is None:
        _refuse(config, "the source of its attention cannot be read")
    return function, classes[0].__module__


def _writes_to_cache(node: ast.AST) -> bool:
    """`past_key_values.update(k, v, layer)`: a dict's takes one argument, a cache of convolutions two."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "update"
        and len(node.args) + len(node.keywords) >= 3
    )


def _is_rotation(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.startswith(_ROTATE)


def _rotate(config: Any, file: str, function: Any, k: Tensor, at: Tensor, kind: str) -> Tensor | None:
    """Keys at these positions as the model rotates them; None where its functions take other arguments."""
    for name, member in vars(importlib.import_module(file)).items():
        if not name.endswith("RotaryEmbedding") or "Vision" in name or not inspect.isclass(member):
            continue
        embedding = cast(Any, member)
        try:
            rotary = embedding(config)
            takes_kind = "layer_type" in inspect.signature(rotary.forward).parameters
            cos, sin = rotary(k, at, kind) if takes_kind else rotary(k, at)
            part = k[..., : cos.shape[-1]] if cos.shape[-1] < k.shape[-1] else k
            out = function(part, part, cos, sin)[1]
            return torch.cat([out, k[..., out.shape[-1] :]], -1)
        except (TypeError, ValueError, RuntimeError, KeyError, AttributeError):
            continue
    return None


def _refuse(config: Any, why: str) -> NoReturn:
    raise ProblemError(
        f"Rolling with a {config.model_type} model: {why}, so the cache cannot re-rotate its sinks when it drops the "
        "tokens after them. Take Contiguous() with an eviction policy (evict=), or give the rotation yourself, "
        "Rolling(window, rope=Rope(...))."
    )
