"""The `Rope` by which a transformers model turns its keys, for a `Rolling` cache to turn its sinks on.

transformers hands its caches no sines and cosines, so they come from the config. What the words say is compared with
what the model's own functions compute, on random keys: neighbours or halves, part of the dimensions or all. A model
whose rotation cannot be said so is refused; a wrong one would go unnoticed.
"""

import ast
import importlib
import inspect
import textwrap
from typing import Any, cast

import torch
from torch import Tensor, nn

from regard.describe.position import Rope
from regard.errors import ProblemError
from regard.integrate.modules import scaling_of

_TURNS = "apply_rotary_pos_emb"


def rope_for(config: Any, classes: list[type[nn.Module]], kind: str = "full_attention") -> Rope:
    """The rotation of the keys of a decoder's layers of a kind.

    Args:
        config: of the decoder.
        classes: of its attention (`touches.attention_classes`).
        kind: of the layers, where each has a rotation of its own.

    Raises:
        ProblemError: keys carry positions in another way, not in all layers, or by angles that change with the length.

    >>> from transformers import LlamaConfig
    >>> from transformers.models.llama.modeling_llama import LlamaAttention
    >>> rope_for(LlamaConfig(head_dim=64), [LlamaAttention])
    Rope(dim=64, base=10000.0)
    """
    said = getattr(config, "rope_parameters", None) or {}
    said = said.get(kind, said) if "rope_theta" not in said else said
    if not said or said.get("rope_theta") is None or "mrope_section" in said:
        _refuse(config, "its keys are not turned by a rotary embedding of one position per token")
    function = _function_of(config, classes)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    base, fraction = float(said["rope_theta"]), said.get("partial_rotary_factor") or Rope.fraction
    scaling = scaling_of(dict(said), config)
    if scaling is not None and scaling.looks_at_length():
        _refuse(config, f"the angles of {type(scaling).__name__} change as the text grows, under keys that are kept")
    k, at = torch.arange(1.0, 5 * dim + 1).sin().view(1, 1, 5, dim), torch.tensor([[0, 1, 7, 100, 1000]])
    theirs = _turned(config, classes, function, k, at, kind)
    for interleaved in (False, True):
        rope = Rope(dim, base, scaling, fraction, interleaved)
        if theirs is not None and torch.allclose(rope.rotate(k, at), theirs, atol=1e-3):
            return rope
    _refuse(config, f"its {function.__name__} turns keys in another way than a Rope does")
    raise AssertionError


def _function_of(config: Any, classes: list[type[nn.Module]]) -> Any:
    """The function that turns keys in every attention class, whatever the layer."""
    found: Any = None
    for module in classes:
        forward = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(module.forward)))).body[0]
        assert isinstance(forward, ast.FunctionDef)
        calls = [node for node in ast.walk(forward) if _is_turn(node)]
        always = [
            node for statement in forward.body if not isinstance(statement, ast.If) for node in ast.walk(statement)
        ]
        if not calls or any(call not in always for call in calls):
            _refuse(config, f"{module.__name__} does not turn the keys of all layers by {_TURNS}")
        found = vars(inspect.getmodule(module))[calls[0].func.id]  # type: ignore[attr-defined]
    if found is None:
        _refuse(config, "the source of its attention cannot be read")
    return found


def _is_turn(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.startswith(_TURNS)


def _turned(
    config: Any, classes: list[type[nn.Module]], function: Any, k: Tensor, at: Tensor, kind: str
) -> Tensor | None:
    """Keys at these positions as the model turns them; None where its functions take other arguments."""
    file = importlib.import_module(classes[0].__module__)
    for name, found in vars(file).items():
        if not name.endswith("RotaryEmbedding") or "Vision" in name or not inspect.isclass(found):
            continue
        made = cast(Any, found)
        try:
            rotary = made(config)
            takes_kind = "layer_type" in inspect.signature(rotary.forward).parameters
            cos, sin = rotary(k, at, kind) if takes_kind else rotary(k, at)
            turning = k[..., : cos.shape[-1]] if cos.shape[-1] < k.shape[-1] else k
            out = function(turning, turning, cos, sin)[1]
            return torch.cat([out, k[..., out.shape[-1] :]], -1)
        except (TypeError, ValueError, RuntimeError, KeyError, AttributeError):
            continue
    return None


def _refuse(config: Any, why: str) -> None:
    raise ProblemError(
        f"Rolling with a {config.model_type} model: {why}, so its sinks cannot be turned on as tokens between are "
        "forgotten. Take Contiguous() with a policy of forgetting (evict=), or give the rotation yourself, "
        "Rolling(window, rope=Rope(...))."
    )
