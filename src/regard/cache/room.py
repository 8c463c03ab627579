"""What the sequences of a pool share: its pages of both forms, their memory, and the limit on them."""

import math
from typing import Any, cast
from weakref import WeakSet

import torch
from torch import Tensor

from regard.cache.page_memory import CodedMemory, Grain, PlainMemory
from regard.cache.pages import Pages, Prefix
from regard.cache.room_state import read_by_number, said_by_number
from regard.cache.store import Form
from regard.errors import ProblemError
from regard.storage.codec import TILE, Codec

LEAST = 64
"""Tokens for which memory is made at first, and at least."""


class Room:
    """The pages of a pool.

    A sequence that is written by a codec has its first pages, `sinks` of them, as plain numbers, then pages of codes,
    then plain ones again; without a codec all its pages are plain. Plain pages and pages of codes lie in two memories,
    and each grows as it must; `limit` is on the pages in use of both together.

    Attributes:
        page: tokens of a page.
        codec: what writes codes; None: nothing does.
        sinks: pages that stay plain at the front of every sequence.
        residual: tokens at its end that stay plain.
        form: what a token is; the batch in it says nothing. None until the first tokens come.
        sequences: those that were not freed.
    """

    def __init__(self, limit: int | None, page: int, codec: Codec | torch.dtype | None) -> None:
        self.limit, self.page, self.kept_as = limit, page, codec
        self.codec = codec if isinstance(codec, Codec) else None
        self.sinks = 0 if self.codec is None else -(-self.codec.sinks // page)
        self.residual = 0 if self.codec is None else self.codec.residual
        self.plain, self.coded, self.root = Pages(), Pages(), Prefix()
        self.form: Form | None = None
        self.sequences: WeakSet[object] = WeakSet()
        self.numbers: PlainMemory
        self.codes: CodedMemory | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Pages, names and sequences refer to one another in long chains: they are said by number instead."""
        state = {name: value for name, value in self.__dict__.items() if name not in ("plain", "coded", "root")}
        return state | {"sequences": list(self.sequences), "numbers_of": said_by_number(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        sequences, numbers = state.pop("sequences"), state.pop("numbers_of")
        self.__dict__.update(state)
        self.sequences = WeakSet(sequences)
        read_by_number(self, sequences, numbers)

    @property
    def used(self) -> int:
        """Pages that sequences hold."""
        return self.plain.used + self.coded.used

    def settle(self, form: Form) -> None:
        """Have memory for tokens of this form; it is made by `make` when pages are needed.

        Raises:
            ProblemError: codes of no numbers.
        """
        if self.codec is not None and not all(form.dims):
            raise ProblemError(
                f"keys {form.qk_dim} wide and values {form.v_dim} came to pages of {self.codec.kind}: nothing can be "
                "written as codes where there are no numbers. Take codec=None."
            )
        dtype = self.kept_as if isinstance(self.kept_as, torch.dtype) else form.dtype
        self.form, self.numbers = form, PlainMemory(form, self.page, dtype)
        if self.codec is not None:
            grain = Grain(self.page, math.gcd(self.codec.group, self.page), self.codec.keys == "token")
            self.codes = CodedMemory(form, self.codec, grain)

    def coded_pages(self, tokens: int) -> int:
        """One past the last page that is written as codes, in a sequence of so many tokens that never was shorter."""
        return max(self.sinks, (tokens - self.residual) // self.page) if self.codec is not None else 0

    def check(self, more: int, wanted: int) -> None:
        """Raise `ProblemError` unless so many pages more may be in use.

        Args:
            more: pages in use afterwards, less those now.
            wanted: those that are asked for, for the message.
        """
        if self.limit is None or self.used + more <= self.limit:
            return
        raise ProblemError(
            f"{wanted} pages of {self.page} tokens are wanted, and {self.limit - self.used} of {self.limit} are free; "
            f"{len(self.sequences)} sequences hold the others. Nothing was changed: free() or crop() a sequence, or "
            "make a larger pool."
        )

    def make(self, plain: int, coded: int) -> None:
        """Have memory for so many plain pages and pages of codes, those in use now included."""
        for pages, memory, used in ((self.plain, self.numbers, plain), (self.coded, self.codes, coded)):
            if memory is not None and used > memory.pages:
                count = max(used, 2 * memory.pages, -(-LEAST // self.page))
                if self.limit is not None:
                    count = self.limit if self.codec is None else min(count, self.limit)
                memory.grow(count)
                pages.grow(count)

    def shrink(self) -> None:
        """Give back memory where less than half of it is held; what is known of spare pages is forgotten there."""
        for pages, memory in ((self.plain, self.numbers), (self.coded, self.codes)):
            count = max(pages.used + pages.used // 8, -(-LEAST // self.page))
            if memory is None or memory.pages < 2 * count:
                continue
            memory.shrink(pages.shrink(count), count)
            for sequence in self.sequences:  # whose tables have the numbers of before
                cast(Any, sequence).seat = None

    def tensor(self, numbers: list[int] | list[list[int]]) -> Tensor:
        """int64, where the memory is."""
        assert self.form is not None
        return torch.tensor(numbers, dtype=torch.int64, device=self.form.device)


def check_pool(pages: object, page: object, codec: object) -> None:
    """Raise `ProblemError` unless a pool can be made of this."""
    for name, number, least in (("pages", pages, 1), ("page", page, 1)):
        if number is None and name == "pages":
            continue
        if not isinstance(number, int) or isinstance(number, bool) or number < least:
            raise ProblemError(f"PagePool({name}={number!r}): expected a number, {least} or more.")
    if not (codec is None or isinstance(codec, Codec) or (isinstance(codec, torch.dtype) and codec.is_floating_point)):
        raise ProblemError(
            f"PagePool(codec={codec!r}): expected Int8(), Int4(), Fp8(), a float type as torch.bfloat16, or None."
        )
    check_pages(cast(int, page), codec)


def check_pages(page: int, codec: Codec | torch.dtype | None) -> None:
    """Raise `ProblemError` unless a page of this many tokens holds whole groups of the codec."""
    if isinstance(codec, Codec) and page % TILE:
        raise ProblemError(
            f"pages of {page} tokens with {codec!r}: the codes of {TILE} tokens lie side by side, so a page must be "
            f"a multiple of {TILE} tokens: {page + -page % TILE} would do."
        )
    if isinstance(codec, torch.dtype) and codec.itemsize < 2:
        raise ProblemError(
            f"pages of {codec}: expected a float type of 16 bits or more. Take codec=Fp8(), which has scales as well."
        )
