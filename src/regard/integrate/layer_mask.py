"""A mask that passes through a transformers model, from where it is made to the attention of every layer.

transformers passes the result of a mask function on as it is, if that counts as a finished mask: a tensor, or torch's
`BlockMask`, of four dimensions. `LayerMask` is a BlockMask by type alone: it contains a regard mask. A model that
computes with its masks (slices them, joins two) gets the dense bool tensor at that moment, and one that adds them to
scores the numbers that eager attention adds: 0, and the least float where a pair is hidden.

A mask of transformers is for all tokens by position. Where a cache with an eviction policy keeps some of them, these
have moved, in order, to just before the new ones, and each query sees all of them:

    mask for 9 keys, 2 queries       4 of 7 earlier tokens are kept
    x x x x x x x x .                x x x x x .
    x x x x x x x x x                x x x x x x

That is possible where each query sees all earlier tokens but padding, which no row keeps.
"""

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import masking_utils

from regard.describe.mask import And, Mask, Not, Or, is_made_of
from regard.describe.mask_by_rule import Causal, KeyLengths, Window
from regard.describe.mask_by_table import Documents, TensorMask
from regard.errors import RefusalError
from regard.integrate.layer_call import KnownCall
from regard.integrate.lazy import DenseOnUse
from regard.torch_internals import in_func_vmap, is_mapped

_ADDITIONS = frozenset({torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__})

_BlockMask: Any = masking_utils.BlockMask  # pyright: ignore[reportPrivateImportUsage]  the very class it tests for


class LayerMask(DenseOnUse, _BlockMask):
    """A mask and the sizes of its call; one for all layers of a kind in a forward pass.

    Args:
        mask: None keeps everything.
        shape: (batch, 1, queries, keys) of the call.
        offset: position of the first query, the first key being at 0; a tensor where it is known on the device alone.
        device: where the model computes.
        padding: bool [batch, tokens] from position 0, where False is padding; None: there is none.
        read: makes the mask from what the padding is, where `mask` has it as a tensor that the host did not read.
        dropped: tokens of the text before the first key, which a cache dropped.

    Attributes:
        call: its shape; an attribute is read faster than the property.
        offset_tensor: the offset as a tensor: in a graph of `torch.compile` an int would be a constant.
        known: the call of a layer under this mask, for the layers after it: see `regard.integrate.layer_call`.
        packed: what `within` returned last, and for which ids.
        packed_by: the same for the numbers of `regard.integrate.packed.kept_apart`, with their versions and sizes.
        is_mapped: whether `torch.vmap` maps over it: it is another mask for each row then, and cannot be read.

    ```
    >>> from regard import Causal
    >>> mask = LayerMask(Causal(), (1, 1, 2, 3), 1, "cpu")
    >>> mask
    LayerMask(Causal(), shape=(1, 1, 2, 3), offset=1)
    >>> mask[0, 0, :, 1:]
    tensor([[ True, False],
            [ True,  True]])

    ```
    """

    def __init__(
        self,
        mask: Mask | None,
        shape: tuple[int, int, int, int],
        offset: int | Tensor,
        device: torch.device | str,
        padding: Tensor | None = None,
        read: Callable[[], Mask | None] | None = None,
        dropped: int = 0,
    ) -> None:
        # BlockMask's own __init__ wants block tables that this mask does not need.
        self.mask, self.call, self.offset, self._device, self.padding = mask, shape, offset, device, padding
        # read on the host, unless it is on a GPU
        self.offset_tensor = (
            offset if isinstance(offset, Tensor) else torch.scalar_tensor(offset, dtype=torch.int64, device="cpu")
        )
        self._dense: Tensor | None = None
        self._read, self.dropped = read, dropped
        self._by_rule: tuple[Mask | None] | None = None
        self.known: KnownCall | None = None
        self.packed: tuple[Tensor, LayerMask] | None = None
        self.packed_by: tuple[Tensor, Tensor, object, LayerMask] | None = None
        self.is_mapped = mask is not None and in_func_vmap() and self._is_mapped(mask)

    def _is_mapped(self, mask: Mask) -> bool:
        """Whether it contains a tensor that is mapped over, or a function of a user's own that has captured one."""
        if is_made_of(mask, (Causal, Window, KeyLengths, Documents, TensorMask)):
            return any(map(is_mapped, mask.tensors()))
        return is_mapped(self.dense())

    @property
    def mask_by_rule(self) -> Mask | None:
        """The mask with the padding as a length of each row, if it is one; read on the host when first used."""
        if self._read is None:
            return self.mask
        if self._by_rule is None:
            self._by_rule = (self._read(),)
        return self._by_rule[0]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, 1, queries, keys)."""
        return self.call

    @property
    def ndim(self) -> int:
        """4, for GPT-2, which needs no dense mask for that."""
        return 4

    def within(self, ids: Tensor) -> "LayerMask":
        """The mask that also hides the tokens of other packed sequences: itself if it does so already.

        Made once for all layers of a pass, which pass equal ids.

        Args:
            ids: the sequence of each token, [batch, tokens].
        """
        if torch.compiler.is_compiling():
            return self._and(Documents(ids))
        if any(type(part) is Documents and torch.equal(part.ids, ids) for part in _parts(self.mask)):
            return self
        if self.packed is None or not torch.equal(self.packed[0], ids):
            self.packed = ids, self._and(Documents(ids))
        return self.packed[1]

    def _and(self, other: Mask) -> "LayerMask":
        mask, read = other if self.mask is None else self.mask & other, self._read

        def read_both() -> Mask:
            by_rule = self.mask_by_rule
            return other if by_rule is None else by_rule & other

        return LayerMask(
            mask, self.call, self.offset, self._device, self.padding, None if read is None else read_both, self.dropped
        )

    def contiguous(self) -> "LayerMask":
        """Itself: `generate` calls it."""
        return self

    def to(self, *args: Any, **kwargs: Any) -> "LayerMask":
        """Itself: the few tensors in a mask are moved with the queries and keys."""
        return self

    def dense(self) -> Tensor:
        """The mask as a tensor, bool [batch, 1, queries, keys]; made once, when a model first computes with it."""
        if self._dense is None:
            batch, _, queries, keys = self.call
            b = torch.arange(batch, device=self._device)[:, None, None, None]
            rows = torch.arange(queries, device=self._device)[:, None]
            q = rows + (self.offset_tensor if torch.compiler.is_compiling() else self.offset)
            k = torch.arange(keys, device=self._device)
            kept = torch.ones((), dtype=torch.bool, device=self._device)
            if self.mask is not None:
                kept = _keep(self.mask, b, torch.zeros_like(b), q, k)
            self._dense = kept.expand(batch, 1, queries, keys)
        return self._dense

    to_dense = dense

    def __getitem__(self, index: Any) -> Any:
        """The last queries as a mask by rule (Gemma 4 slices so in every pass); of any other index the tensor."""
        first = self._first_of_last(index)
        if first is None:
            return super().__getitem__(index)
        if first == 0:
            return self
        shape = (*self.call[:2], self.call[2] - first, self.call[3])
        return LayerMask(self.mask, shape, self.offset + first, self._device, self.padding, self._read, self.dropped)

    def _first_of_last(self, index: Any) -> int | None:
        """The first query of an index that keeps the last ones, `[:, :, first:, :]`; None for another index or mask."""
        if not (isinstance(index, tuple) and len(cast("tuple[Any, ...]", index)) == 4):
            return None
        *others, rows = (index[i] for i in (0, 1, 3, 2))
        if any(each != slice(None) for each in others) or not isinstance(rows, slice):
            return None
        if rows.stop is not None or rows.step not in (None, 1):
            return None
        first = rows.indices(self.call[2])[0]
        return first if first < self.call[2] and (first == 0 or _is_by_position(self.mask)) else None

    def __add__(self, other: Any) -> Any:
        """The scores with it: some models add a mask in attention of their own (BigBird-Pegasus's encoder, GIT)."""
        return torch.add(self, other)

    def __radd__(self, other: Any) -> Any:
        """The same."""
        return torch.add(other, self)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Iterable[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """In a torch function it is its dense tensor, or what is added to floats."""
        if function in _ADDITIONS:
            floats = [x.dtype for x in args if isinstance(x, Tensor) and x.is_floating_point()]
            args = [x._added(floats[0]) if floats and isinstance(x, LayerMask) else x for x in args]
        return super().__torch_function__(function, types, tuple(args), kwargs)

    def _added(self, dtype: torch.dtype) -> Tensor:
        """What eager attention adds to scores."""
        kept = self.dense()
        return torch.zeros(kept.shape, dtype=dtype, device=kept.device).masked_fill(~kept, torch.finfo(dtype).min)

    def __repr__(self) -> str:
        return f"LayerMask({self.mask!r}, shape={self.call}, offset={self.offset})"

    __str__ = __repr__


def _is_by_position(mask: Mask | None) -> bool:
    """Whether a mask has no table of the queries of the call."""
    if isinstance(mask, TensorMask):
        return mask.offset is not None or mask.mask.shape[-2] == 1
    return mask is None or all(_is_by_position(part) for part in mask.parts() if isinstance(part, Mask))


def _keep(mask: Mask, *at: Tensor) -> Tensor:
    """`mask.keep`, where the rows of a table without an offset are the queries of the call."""
    if type(mask) is And:
        return _keep(mask.a, *at) & _keep(mask.b, *at)
    if type(mask) is Or:
        return _keep(mask.a, *at) | _keep(mask.b, *at)
    if type(mask) is Not:
        return ~_keep(mask.a, *at)
    if type(mask) is TensorMask and mask.offset is None:
        return mask.mask.to(at[0].device)
    return mask.keep(*at)


def mask_over_kept(given: LayerMask, kept: int, rows: slice, skip: int, cache: object) -> Mask | None:
    """The mask of queries over `kept` earlier tokens and the new ones.

    Args:
        given: the mask of the pass.
        kept: earlier tokens that are kept.
        rows: of the batch.
        skip: new tokens at the beginning that are padding, and left out.
        cache: named in the error.

    Raises:
        RefusalError: a mask that may hide earlier tokens.
    """
    mask = given.mask_by_rule
    if not _shows_all_earlier(mask):
        raise RefusalError(
            f"{mask!r} for {cache!r}, which drops tokens: it tells by position which keys a query sees, "
            "and the remaining ones have moved. Use a cache that keeps all."
        )
    queries, parts = given.shape[2], _parts(mask)
    if all(type(part) is Causal or _is_padding(part) for part in parts):
        return Causal() if any(type(part) is Causal for part in parts) else None
    if queries == 1:
        return Causal()
    new = given.dense()[rows, :, skip:, given.shape[3] - queries + skip :]
    return TensorMask(F.pad(new, (kept, 0), value=True))


def _shows_all_earlier(mask: Mask | None) -> bool:
    """Whether each query sees all tokens before it, except padding."""
    if type(mask) is And:
        return _shows_all_earlier(mask.a) and _shows_all_earlier(mask.b)
    if type(mask) is Or:
        return _shows_all_earlier(mask.a) or _shows_all_earlier(mask.b)
    return mask is None or type(mask) is Causal or _is_padding(mask)


def _parts(mask: Mask | None) -> list[Mask]:
    """The masks that have to keep a pair, each of them."""
    if type(mask) is And:
        return [*_parts(mask.a), *_parts(mask.b)]
    return [] if mask is None else [mask]


def _is_padding(mask: Mask) -> bool:
    return type(mask.a if type(mask) is Not else mask) is KeyLengths
