"""The `Rope` that rotates the keys of a transformers model, for a `Rolling` cache to re-rotate its sinks.

transformers passes no sines and cosines to its caches, so they come from the config. A `Rope` is made of what the
config describes, and compared with the keys that the model's own attention classes write into a cache. Each layer is
tried by itself, small (two heads, random weights) and on the same token at some positions, so its keys differ by their
rotation alone:

    key at position p = rotate(key without rotation, p)

A model whose keys no `Rope` gives is refused, and so is one whose attention cannot be tried; a wrong rotation would
give no error.
"""

import copy
import importlib
import inspect
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import get_layer_types_and_kwargs

from regard.describe.position import Rope
from regard.errors import ProblemError
from regard.integrate.cache_argument import ATTENTION_NAMES, takes
from regard.integrate.decoder import classes_of, config_of_layer
from regard.integrate.modules import fraction_of, scaling_of

_AT = torch.tensor([[0, 1, 7, 100, 1000]])
"""The positions of the token. The key at 0 has no rotation."""

_FAILURES = (TypeError, ValueError, RuntimeError, LookupError, AttributeError, AssertionError, ImportError)
"""What a model's code raises where it cannot be tried in this way."""


class _CacheWrite(Exception):  # noqa: N818  no error: it ends a forward at the cache
    """Carries the keys [1, kv_heads, tokens, dim] that attention writes into its cache."""


class _KeysOnly(DynamicCache):
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> NoReturn:
        raise _CacheWrite(key_states)


def rope_for(config: Any, kind: str = "full_attention", source: Any = None) -> Rope:
    """The rotation of the keys of a decoder's layers of a kind.

    Args:
        config: of the decoder.
        kind: of the layers, where each has a rotation of its own. If no layer is of this kind, all layers count.
        source: the config whose file has the decoder's attention; None: `config`.

    Raises:
        ProblemError: keys carry positions in another way, not in all layers, or by angles that change with the length.

    >>> from transformers import LlamaConfig
    >>> rope_for(LlamaConfig(head_dim=64))
    Rope(dim=64)
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    parameters = parameters.get(kind, parameters) if "rope_theta" not in parameters else parameters
    if not parameters or parameters.get("rope_theta") is None or "mrope_section" in parameters:
        _refuse(config, "its keys are not rotated by a rotary embedding of one position per token")
    config = config_of_layer(config, _layers_of(config, kind)[0])
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    base, fraction = float(parameters["rope_theta"]), fraction_of(parameters)
    scaling = scaling_of(dict(parameters), config)
    if scaling is not None and scaling.looks_at_length():
        _refuse(config, f"the angles of {type(scaling).__name__} change as the text grows, under keys that are kept")
    ropes = [Rope(dim, base, scaling, fraction, interleaved) for interleaved in (False, True)]
    with torch.no_grad(), torch.device("cpu"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return _match(config, kind, ropes, classes_of(config if source is None else source))


def _match(config: Any, kind: str, ropes: list[Rope], classes: tuple[type[nn.Module], ...]) -> Rope:
    """The one of these that gives the keys of every layer. Raises `ProblemError` where none does."""
    small, why = _small(config, ropes[0].dim), ""
    for angles in _angles(small, kind, classes[0].__module__ if classes else ""):
        try:
            keys = list(_keys(small, kind, classes, angles))
        except _FAILURES as error:
            why = why or f"its attention cannot be tried by itself ({type(error).__name__}: {error})"
            continue
        for rope in ropes:
            if keys and all(_is_rotated_by(rope, k) for _, k in keys):
                if angles is not None:
                    _check_angles(config, kind, small, classes, rope)
                return rope
        constant = [name for name, k in keys if torch.allclose(k, k[:, :, :1].expand_as(k))]
        if constant:
            _refuse(config, f"{constant[0]} does not rotate the keys of all layers")
        if keys:
            why = f"its {keys[0][0]} rotates keys in another way than a Rope does"
    return _refuse(config, why or "its attention cannot be tried by itself")


def _check_angles(config: Any, kind: str, small: Any, classes: tuple[type[nn.Module], ...], rope: Rope) -> None:
    """Raise `ProblemError` if the decoder may give its layers of a kind angles of another base, or none.

    Its attention, tried by itself, cannot tell. It tells that they have angles if it needs them, or makes its own.
    """
    try:
        without = list(_keys(small, kind, classes, None))
    except _FAILURES:
        return
    if all(_is_rotated_by(rope, keys) for _, keys in without):
        return
    missing = object()
    position = getattr(config, "position_embedding_type", missing)
    bases = getattr(config, "layer_rope_theta", None)
    base = config.rope_parameters["rope_theta"] if bases else None
    if position == "rope" or (bases and all(bases[i] == base for i in _layers_of(config, kind))):
        return
    said = "its attention runs without angles as well"
    if position is not missing:
        said = f"position_embedding_type is {position!r}"
    elif bases:
        said = f"layer_rope_theta is {bases}"
    _refuse(config, f"{said}, so the keys of some layers may not be rotated, or by the angles of another base")


def _small(config: Any, dim: int) -> Any:
    """The config with two heads of as many channels."""
    small = copy.deepcopy(config)
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 2 * dim, "head_dim": dim}
    for name, size in sizes.items():
        if hasattr(small, name):
            with suppress(AttributeError):  # Falcon computes head_dim from the others
                setattr(small, name, size)
    return small


def _angles(small: Any, kind: str, file: str) -> Iterator[tuple[Tensor, Tensor] | None]:
    """(cos, sin) by each class of rotary embeddings in a model's file; None, for attention that makes its own."""
    for embedding in vars(importlib.import_module(file)).values() if file else ():
        if not (inspect.isclass(embedding) and issubclass(embedding, nn.Module)):
            continue
        takes = inspect.signature(embedding.forward).parameters
        if "position_ids" not in takes or "RotaryEmbedding" not in embedding.__name__:
            continue
        try:
            rotary: Any = embedding(small)
            yield rotary(torch.zeros(1), _AT, *([kind] if "layer_type" in takes else []))
        except _FAILURES:
            continue
    yield None


def _keys(small: Any, kind: str, classes: tuple[type[nn.Module], ...], angles: Any) -> Iterator[tuple[str, Tensor]]:
    """(class, keys [1, 2, tokens, dim] that it writes into a cache) of each layer of a kind."""
    attentions = [cast(Any, c) for c in classes if "Attention" in c.__name__ and takes(c.__init__, "layer_idx")]
    for layer in _layers_of(small, kind):
        for attention in attentions:
            if not any(takes(attention.forward, name) for name in ATTENTION_NAMES):
                continue
            keys = _keys_of(attention(small, layer_idx=layer), small.hidden_size, angles)
            if keys is not None:
                yield attention.__name__, keys


def _layers_of(config: Any, kind: str) -> list[int]:
    """The layers of a kind; all of them where none is of it."""
    try:
        kinds = get_layer_types_and_kwargs(config)[0]
    except AttributeError as error:  # of a config that has one for each of several decoders
        _refuse(config, f"its config does not tell its layers ({error})")
    return [i for i, of in enumerate(kinds) if of == kind] or list(range(len(kinds)))


def _keys_of(attention: nn.Module, size: int, angles: Any) -> Tensor | None:
    """The keys of one token at some positions, as a module writes them into its cache; None where it writes none."""
    attention = attention.float().eval()
    for weight in attention.parameters():
        weight.normal_()  # norms, too: one behind the rotation would scale its channels
    known = {
        "hidden_states": torch.randn(1, 1, size).expand(1, _AT.shape[1], size),
        "position_embeddings": angles,
        "position_ids": _AT,
        "attention_mask": None,
        **dict.fromkeys(ATTENTION_NAMES, _KeysOnly()),
    }
    own = inspect.signature(attention.forward).parameters.get("shared_kv_states")
    if own is not None and own.default is own.empty:  # Gemma 4's; with a dict Dory's writes nothing into the cache
        known["shared_kv_states"] = {}
    try:
        attention(**{name: value for name, value in known.items() if takes(attention.forward, name)})
    except _CacheWrite as write:
        return write.args[0]
    return None


def _is_rotated_by(rope: Rope, keys: Tensor) -> bool:
    if keys.shape != (1, 2, _AT.shape[1], rope.dim):
        return False
    keys = keys / keys.abs().amax()
    first = keys[:, :, :1] / rope.rotate(torch.ones(1, 1, 1, rope.dim), 0)  # some rotations scale as well
    return torch.allclose(rope.rotate(first.expand_as(keys), _AT), keys, atol=1e-3)


def _refuse(config: Any, why: str) -> NoReturn:
    raise ProblemError(
        f"Rolling with a {config.model_type} model: {why}, so the cache cannot re-rotate its sinks when it drops the "
        "tokens after them. Use Contiguous() with an eviction policy (evict=), or give the rotation yourself, "
        "Rolling(window, rope=Rope(...))."
    )
