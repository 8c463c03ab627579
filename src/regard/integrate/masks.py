"""transformers' masks, read back into regard's words.

transformers describes a mask as a Python function of positions, `fn(batch, head, query, key)`, which it puts together
from closures (`and_masks(sliding_window_overlay(4096), causal_mask_function)`) and a padding mask `[batch, keys]`.
Asked at every pair, such a function gives a dense mask. But each closure has a name and holds its numbers, so the words
can be read off: `Causal() & Window(4096)`. What is not known by name (a function of the user's) is kept as it is:
tabulated, or as `MaskFunction`.

Source: `transformers/masking_utils.py`, versions 5.17 to 5.23.
"""

import functools
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import sdpa_mask

from regard.describe.mask import And, Mask, Or
from regard.describe.mask_by_rule import Causal, KeyLengths, Window
from regard.describe.mask_by_table import Documents, MaskFunction, TensorMask

Predicate = Callable[..., Any]
"""`fn(batch, head, query, key) -> bool tensor`, on positions."""


@dataclass(frozen=True)
class Asked:
    """What transformers asks a mask for: one per forward pass and kind of layer.

    A call's keys start at position `kv_offset` there (a sliding cache has forgotten those before) and at 0 here, so
    everything is moved by `kv_offset`:

        cached tokens seen 10, window 4, 2 new ones: q_offset 10, kv_offset 7, keys 7 8 9 10 11
        here: keys 0 1 2 3 4, first query at 10 - 7 = 3
    """

    function: Predicate
    batch: int
    queries: int
    keys: int
    q_offset: int
    kv_offset: int
    padding: Tensor | None  # bool [batch, tokens], from position 0
    by_vmap: bool  # the function may hold for scalars only
    device: torch.device | str
    packed: Tensor | None = None  # position of each token in its own document, [batch, tokens]

    @property
    def offset(self) -> int:
        """The position of the first query, where the first key is at 0."""
        return self.q_offset - self.kv_offset

    @property
    def positions(self) -> int:
        """One past the last position of the call."""
        return max(self.offset + self.queries, self.keys)


def read(asked: Asked) -> Mask | None:
    """The mask in words; None keeps everything.

    ```
    >>> from transformers.masking_utils import sliding_window_causal_mask_function as sliding
    >>> read(Asked(sliding(4), 1, 9, 9, 0, 0, None, False, "cpu"))
    Causal() & Window(left=4)

    ```
    """
    mask = _words(asked.function, asked)
    return _all_of([mask, _padding(asked, mask)])


def _words(function: Predicate, asked: Asked) -> Mask | None:
    reader = _READERS.get(_name(function))
    return _unknown(function, asked) if reader is None else reader(function, asked)


def _name(function: Predicate) -> str:
    """`sliding_window_overlay` for the closures that it makes; "" for what is not transformers' own."""
    if getattr(function, "__module__", "") != "transformers.masking_utils":
        return ""
    return getattr(function, "__qualname__", "").partition(".")[0]


def _held(function: Predicate) -> dict[str, Any]:
    """The variables that a closure holds, by name."""
    return dict(zip(function.__code__.co_freevars, (c.cell_contents for c in function.__closure__ or ()), strict=True))


def _all_of(masks: Iterable[Mask | None]) -> Mask | None:
    said = sorted((m for m in masks if m is not None), key=lambda m: not isinstance(m, Causal))  # reads better
    return functools.reduce(operator.and_, said) if said else None


def _and(function: Predicate, asked: Asked) -> Mask | None:
    parts: tuple[Predicate, ...] = _held(function)["mask_functions"]
    if [_name(part) for part in parts] == ["packed_sequence_mask_function", "remap_positions_for_packed_sequence"]:
        return _packed(function, asked)
    return _all_of([_words(part, asked) for part in parts])


def _or(function: Predicate, asked: Asked) -> Mask | None:
    said = [_words(part, asked) for part in _held(function)["mask_functions"]]
    kept = [m for m in said if m is not None]
    return functools.reduce(operator.or_, kept) if len(kept) == len(said) else None


def _window(left: int | None, right: int | None, asked: Asked) -> Mask | None:
    """The window, without the sides that are out of reach: a plainer mask is open to more engines.

    What is out of reach at one step of a static cache is so at all of them: then one graph serves them all.
    """
    farthest_back, farthest_ahead = asked.positions - 1, asked.keys - 1 - asked.offset
    left = None if left is None or left > farthest_back else left
    right = None if right is None or right > farthest_ahead else right
    return None if left is None and right is None else Window(left, right)


def _sliding(function: Predicate, asked: Asked) -> Mask | None:
    return _window(_held(function)["sliding_window"], None, asked)  # key > query - size


def _sliding_both_ways(function: Predicate, asked: Asked) -> Mask | None:
    size = _held(function)["sliding_window"] + 1  # |query - key| <= size there; `<` here
    return _window(size, size, asked)


def _chunks(function: Predicate, asked: Asked) -> Mask:
    """Chunks of equal size, counted from the first token that is no padding: documents."""
    held = _held(function)
    left: Tensor = held["left_padding"]
    at = torch.arange(asked.positions, device=left.device) + asked.kv_offset if asked.packed is None else asked.packed
    return Documents((at - left[:, None]) // held["chunk_size"])


def _blocks(function: Predicate, asked: Asked) -> Mask:
    """Spans (images) that see all of themselves; tokens of no span have -1."""
    ids: Tensor = _held(function)["block_sequence_ids"][:, asked.kv_offset :]
    return Documents(ids) & TensorMask(ids[:, None, None, : asked.keys] >= 0)


def _documents(function: Predicate, asked: Asked) -> Mask:
    return Documents(_held(function)["packed_sequence_mask"])


def _packed(function: Predicate, asked: Asked) -> Mask | None:
    """Packed documents, the inner mask asked at positions counted from each document's start.

    Within a document those run on by ones, so masks of distances say the same of positions in the row.
    """
    documents, remapped = _held(function)["mask_functions"]
    ids: Tensor = _held(documents)["packed_sequence_mask"]
    held = _held(remapped)
    run_on = ((held["position_ids"].diff() == 1) & (ids.diff() == 0)) | (ids.diff() > 0)
    inner = _words(held["mask_function"], replace(asked, packed=held["position_ids"]))
    if run_on.all() and _of_distances(inner):
        return _all_of([inner, Documents(ids)])
    return _unknown(function, asked)


def _of_distances(mask: Mask | None) -> bool:
    if isinstance(mask, And | Or):
        return _of_distances(mask.a) and _of_distances(mask.b)
    return mask is None or isinstance(mask, Causal | Window | Documents)  # Documents: chunks of the packed positions


def _unknown(function: Predicate, asked: Asked) -> Mask:
    """A function that is not known by name.

    Those that transformers itself vmaps may hold for scalars only: they are tabulated, as transformers does. The others
    broadcast. transformers asks for head 0 alone, so that is what is asked here.
    """
    if asked.by_vmap:
        return TensorMask(_table(function, asked))
    q0 = k0 = asked.kv_offset
    return MaskFunction(lambda b, h, q, k: function(b, torch.zeros_like(h), q + q0, k + k0))


def _table(function: Predicate, asked: Asked) -> Tensor:
    """bool [batch, 1, queries, keys], by transformers' own hand."""
    table = sdpa_mask(
        batch_size=asked.batch,
        q_length=asked.queries,
        kv_length=asked.keys,
        q_offset=asked.q_offset,
        kv_offset=asked.kv_offset,
        mask_function=function,
        allow_is_causal_skip=False,
        use_vmap=asked.by_vmap,
        device=asked.device,
    )
    assert table is not None  # only None where a skip is allowed
    return table


def _padding(asked: Asked, mask: Mask | None) -> Mask | None:
    """The padding mask: a length per row where it is to the right, its complement to the left, else dense.

    Keys that a causal mask hides anyway (those of a static cache that are still to come) do not count.
    """
    if asked.padding is None:
        return None
    kept = asked.padding[:, asked.kv_offset : asked.kv_offset + asked.keys]
    kept = torch.nn.functional.pad(kept, (0, asked.keys - kept.shape[1]))
    seen = kept[:, : asked.offset + asked.queries] if _is_causal(mask) else kept
    if bool(seen.all()):
        return None
    count, at = seen.sum(-1), torch.arange(seen.shape[1], device=seen.device)
    if torch.equal(seen, at < count[:, None]):
        return KeyLengths(count)
    if torch.equal(seen, at >= seen.shape[1] - count[:, None]):
        return ~KeyLengths(seen.shape[1] - count)
    return TensorMask(kept[:, None, None, :])


def _is_causal(mask: Mask | None) -> bool:
    if isinstance(mask, And):
        return _is_causal(mask.a) or _is_causal(mask.b)
    return isinstance(mask, Causal)


_READERS: dict[str, Callable[[Predicate, Asked], Mask | None]] = {
    "causal_mask_function": lambda function, asked: Causal(),
    "bidirectional_mask_function": lambda function, asked: None,
    "and_masks": _and,
    "or_masks": _or,
    "sliding_window_overlay": _sliding,
    "sliding_window_bidirectional_overlay": _sliding_both_ways,
    "chunked_overlay": _chunks,
    "blockwise_overlay": _blocks,
    "packed_sequence_mask_function": _documents,
}
