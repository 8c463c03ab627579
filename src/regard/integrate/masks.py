"""Regard masks made from transformers' descriptions of masks.

transformers describes a mask as a Python function of positions, `fn(batch, head, query, key)`, composed of closures
(`and_masks(sliding_window_overlay(4096), causal_mask_function)`), and a padding mask `[batch, keys]`. Evaluated at
every pair, such a function gives a dense mask. But each closure has a name and contains its parameters, which give the
same mask in regard: `Causal() & Window(4096)`. A function with an unknown name (a user's own) becomes a table, or a
`MaskFunction`.

Source: `transformers/masking_utils.py`, versions 5.17 to 5.24.
"""

import functools
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import sdpa_mask

from regard.describe.mask import And, Mask, Or, is_made_of
from regard.describe.mask_by_rule import Causal, KeyLengths, Window
from regard.describe.mask_by_table import Documents, TensorMask
from regard.describe.mask_function import MaskFunction
from regard.torch_internals import is_mapped

Predicate = Callable[..., Any]
"""`fn(batch, head, query, key) -> bool tensor`, on positions."""


@dataclass(frozen=True)
class MaskRequest:
    """The arguments of transformers' mask function: one request per forward pass and kind of layer.

    In transformers the keys of a call start at position `kv_offset` (a sliding cache has dropped those before), in
    regard at 0, so all positions are shifted by `kv_offset`:

        10 tokens in the cache, window 4, 2 new tokens: q_offset 10, kv_offset 7, keys 7 8 9 10 11
        in regard: keys 0 1 2 3 4, first query at 10 - 7 = 3
    """

    function: Predicate
    batch: int
    queries: int
    keys: int
    q_offset: int
    kv_offset: int
    padding: Tensor | None  # bool [batch, tokens], from position 0
    by_vmap: bool  # the function may be defined for scalars only
    device: torch.device | str
    documents: Tensor | None = None  # of packed tokens, [batch, tokens]
    packed: Tensor | None = None  # position of each token in its own document, [batch, tokens]

    @property
    def offset(self) -> int:
        """The position of the first query, where the first key is at 0."""
        return self.q_offset - self.kv_offset

    @property
    def positions(self) -> int:
        """One past the last position of the call."""
        return max(self.offset + self.queries, self.keys)


def to_mask(request: MaskRequest) -> Mask | None:
    """The mask; None keeps everything.

    ```
    >>> from transformers.masking_utils import sliding_window_causal_mask_function as sliding
    >>> to_mask(MaskRequest(sliding(4), 1, 9, 9, 0, 0, None, False, "cpu"))
    Causal() & Window(left=4)

    ```
    """
    mask = _convert(request.function, request)
    return _all_of([mask, _padding(request, mask)])


def real_keys(padding: Tensor, keys: int, kv_offset: int) -> Tensor:
    """Which of the keys of a call are no padding, bool [batch, keys]; those beyond the padding mask are."""
    kept = padding[:, kv_offset : kv_offset + keys]
    return torch.nn.functional.pad(kept, (0, keys - kept.shape[1]))


def is_of_step(mask: Mask | None) -> bool:
    """Whether a mask is causal, with windows at most: then one query needs no position on the host."""
    return is_of_distances(mask) and _is_causal(mask)


def is_of_distances(mask: Mask | None) -> bool:
    """Whether a mask is causal or a window, or keeps all."""
    return mask is None or is_made_of(mask, (Causal, Window))


def _convert(function: Predicate, request: MaskRequest) -> Mask | None:
    reader = _READERS.get(_name(function))
    return _unknown(function, request) if reader is None else reader(function, request)


def _name(function: Predicate) -> str:
    """`sliding_window_overlay` for the closures that it makes; "" for what is not transformers' own."""
    if getattr(function, "__module__", "") != "transformers.masking_utils":
        return ""
    return getattr(function, "__qualname__", "").partition(".")[0]


def _closure(function: Predicate) -> dict[str, Any]:
    """The variables of a closure, by name."""
    return dict(zip(function.__code__.co_freevars, (c.cell_contents for c in function.__closure__ or ()), strict=True))


def _all_of(masks: Iterable[Mask | None]) -> Mask | None:
    parts = sorted((m for m in masks if m is not None), key=lambda m: type(m) is not Causal)  # Causal() first
    return functools.reduce(operator.and_, parts) if parts else None


def _and(function: Predicate, request: MaskRequest) -> Mask | None:
    parts: tuple[Predicate, ...] = _closure(function)["mask_functions"]
    *others, last = sorted(parts, key=_is_packed)  # before transformers 5.24 documents come first
    if _is_packed(last):
        request = replace(request, documents=_ids(last))
    return _all_of([_convert(part, request) for part in (*others, last)])


def _is_packed(function: Predicate) -> bool:
    return _name(function) == "packed_sequence_mask_function"


def _or(function: Predicate, request: MaskRequest) -> Mask | None:
    parts = [_convert(part, request) for part in _closure(function)["mask_functions"]]
    masks = [m for m in parts if m is not None]
    return functools.reduce(operator.or_, masks) if len(masks) == len(parts) else None


def _window(left: int | None, right: int | None, request: MaskRequest) -> Mask | None:
    """The window, without the sides that no pair of the call reaches: more backends take a simpler mask.

    A side that is out of reach at one step of a static cache is so at all steps, so one graph serves them all.
    """
    farthest_back, farthest_ahead = request.positions - 1, request.keys - 1 - request.offset
    left = None if left is None or left > farthest_back else left
    right = None if right is None or right > farthest_ahead else right
    return None if left is None and right is None else Window(left, right)


def _sliding(function: Predicate, request: MaskRequest) -> Mask | None:
    if not _closure(function)["sliding_window"]:  # 0: of a model that has a layer without a window
        return None
    return _window(_closure(function)["sliding_window"], None, request)  # key > query - size


def _sliding_both_ways(function: Predicate, request: MaskRequest) -> Mask | None:
    size = _closure(function)["sliding_window"] + 1  # |query - key| <= size there; `<` here
    return _window(size, size, request)


def _chunks(function: Predicate, request: MaskRequest) -> Mask:
    """Chunks of equal size, counted from the first token that is no padding: documents."""
    variables = _closure(function)
    left: Tensor = variables["left_padding"]
    at = (
        torch.arange(request.positions, device=left.device) + request.kv_offset
        if request.packed is None
        else request.packed
    )
    return Documents((at - left[:, None]) // variables["chunk_size"])


def _blocks(function: Predicate, request: MaskRequest) -> Mask:
    """Spans (images) that see all of themselves; tokens of no span have -1."""
    ids: Tensor = _closure(function)["block_sequence_ids"][:, request.kv_offset :]
    return Documents(ids) & TensorMask(ids[:, None, None, : request.keys] >= 0)


def _documents(function: Predicate, request: MaskRequest) -> Mask:
    return Documents(_ids(function))


def _ids(function: Predicate) -> Tensor:
    return _closure(function)["packed_sequence_mask"]


def _remapped(function: Predicate, request: MaskRequest) -> Mask | None:
    """A mask of positions that are counted from the start of each packed document.

    Within a document these increase by one, so masks of distances are the same for positions in the row; pairs of two
    documents are hidden besides.
    """
    if (ids := request.documents) is None:
        return _unknown(function, request)
    variables = _closure(function)
    positions = variables["position_ids"]
    by_one = ((positions.diff() == 1) & (ids.diff() == 0)) | (ids.diff() > 0)
    inner = _convert(variables["mask_function"], replace(request, documents=None, packed=positions))
    return inner if by_one.all() and _of_distances(inner) else _unknown(function, request)


def _of_distances(mask: Mask | None) -> bool:
    if type(mask) is And or type(mask) is Or:
        return _of_distances(mask.a) and _of_distances(mask.b)
    return mask is None or type(mask) in (Causal, Window, Documents)  # Documents: chunks of the packed positions


def _unknown(function: Predicate, request: MaskRequest) -> Mask:
    """A function with an unknown name.

    Functions that transformers itself vmaps may be defined for scalars only: they are tabulated, as transformers does.
    The others broadcast. transformers evaluates them for head 0 alone, and so does regard.
    """
    if request.by_vmap:
        return TensorMask(_table(function, request))
    q0 = k0 = request.kv_offset
    return MaskFunction(lambda b, h, q, k: function(b, torch.zeros_like(h), q + q0, k + k0))


def _table(function: Predicate, request: MaskRequest) -> Tensor:
    """bool [batch, 1, queries, keys], made by transformers."""
    table = sdpa_mask(
        batch_size=request.batch,
        q_length=request.queries,
        kv_length=request.keys,
        q_offset=request.q_offset,
        kv_offset=request.kv_offset,
        mask_function=function,
        allow_is_causal_skip=False,
        use_vmap=request.by_vmap,
        device=request.device,
    )
    assert table is not None  # only None where a skip is allowed
    return table


def _padding(request: MaskRequest, mask: Mask | None) -> Mask | None:
    """The padding mask: a length per row where it is to the right, its complement to the left, else dense.

    Keys that a causal mask hides anyway (slots of future tokens in a static cache) do not count.
    """
    if request.padding is None:
        return None
    kept = real_keys(request.padding, request.keys, request.kv_offset)
    if is_mapped(kept):  # another for each row, by vmap: it cannot be read
        return TensorMask(kept[:, None, None, :])
    seen = kept[:, : request.offset + request.queries] if _is_causal(mask) else kept
    if bool(seen.all()):
        return None
    count, at = seen.sum(-1), torch.arange(seen.shape[1], device=seen.device)
    if torch.equal(seen, at < count[:, None]):
        return KeyLengths(count)
    if torch.equal(seen, at >= seen.shape[1] - count[:, None]):
        return ~KeyLengths(seen.shape[1] - count)
    return TensorMask(kept[:, None, None, :])


def _is_causal(mask: Mask | None) -> bool:
    if type(mask) is And:
        return _is_causal(mask.a) or _is_causal(mask.b)
    return type(mask) is Causal


_READERS: dict[str, Callable[[Predicate, MaskRequest], Mask | None]] = {
    "causal_mask_function": lambda function, request: Causal(),
    "bidirectional_mask_function": lambda function, request: None,
    "and_masks": _and,
    "or_masks": _or,
    "sliding_window_overlay": _sliding,
    "sliding_window_bidirectional_overlay": _sliding_both_ways,
    "chunked_overlay": _chunks,
    "blockwise_overlay": _blocks,
    "packed_sequence_mask_function": _documents,
    "remap_positions_for_packed_sequence": _remapped,
}
