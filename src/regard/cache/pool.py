"""`PagePool`: the keys and values of many sequences, in pages that they share.

What sequences have in common is stored once: forks share their pages, prompts that begin alike find the pages of those
before them, and a shared page is copied when one of its holders writes to it. Kwon et al. 2023, PagedAttention,
arXiv:2309.06180, §4.
"""

import dataclasses
from collections.abc import Iterable
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.cache.lengthen import lengthen
from regard.cache.pages import Page
from regard.cache.reuse import adopt
from regard.cache.room import Room, check_pool
from regard.cache.rows import rows_of
from regard.cache.sequence import Sequence
from regard.cache.store import Form, describe_tensor
from regard.errors import ProblemError
from regard.storage.codec import Codec
from regard.storage.hadamard import hadamard
from regard.storage.stored import StoredTensor


class PagePool:
    """Pages for one layer's keys and values, and the sequences in them.

    >>> import torch
    >>> from regard import Causal, attend
    >>> pool = PagePool(pages=64, page=16)
    >>> first, second = pool.sequence(), pool.sequence()
    >>> for sequence, tokens in ((first, 40), (second, 7)):  # two prompts
    ...     _ = pool.append([sequence], torch.randn(1, 2, tokens, 8), torch.randn(1, 2, tokens, 8))
    >>> third = first.fork()  # shares three pages with it
    >>> keys, values = pool.append([first, second, third], torch.randn(3, 2, 1, 8), torch.randn(3, 2, 1, 8))
    >>> keys.lengths
    tensor([41,  8, 41])
    >>> attend(torch.randn(3, 4, 1, 8), keys, values, mask=Causal()).shape  # each row its own keys
    torch.Size([3, 4, 1, 8])
    >>> second.free()
    >>> pool
    PagePool(60 of 64 pages of 16 tokens free, 2 sequences: k [tokens, 2, 8], v [tokens, 2, 8] float32: 6,400 bytes,
             131,072 held)

    Args:
        pages: so many at most, of both forms together; None: as many as are needed, memory grows by doubling. Without a
            codec the memory of all is made when the first tokens come.
        page: tokens of a page. With a codec a multiple of 16; keys then share a channel's scale among as many tokens as
            divide both the page and `codec.group`.
        codec: how numbers are written: `Int8`, `Int4`, `Fp8`, or a float type; None: the type that they come in. A page
            is written as codes once, when all its tokens are older than `codec.residual` and none of them is one of the
            first `codec.sinks` of the sequence.

    Raises:
        ProblemError: such a pool cannot be.
    """

    def __init__(self, pages: int | None = None, page: int = 16, codec: Codec | torch.dtype | None = None) -> None:
        check_pool(pages, page, codec)
        if isinstance(codec, Codec) and codec.keys is None:
            codec = dataclasses.replace(codec, keys="channel")
        self.room = Room(pages, page, codec)

    @property
    def bytes(self) -> int:
        """Bytes of what is stored: tokens as they are written, those in shared pages once, and scales."""
        return stored_bytes(self.room, cast(list[Sequence], list(self.room.sequences)))

    @property
    def allocated_bytes(self) -> int:
        """Bytes of memory that are held, free pages included."""
        room = self.room
        return (
            0
            if room.form is None
            else room.numbers.allocated_bytes + (0 if room.codes is None else room.codes.allocated_bytes)
        )

    @property
    def free_pages(self) -> int:
        """Pages that no sequence holds: of those that may be or, without a limit, of those there is memory for."""
        room = self.room
        return len(room.plain.spare) + len(room.coded.spare) if room.limit is None else room.limit - room.used

    def sequence(self, tokens: Iterable[int] | Int[Tensor, " tokens"] | None = None) -> Sequence:
        """A new sequence.

        Args:
            tokens: the ids of its prompt. It then starts with the pages of earlier sequences that began with the same
                ids, as many whole pages as there are, always less than the whole prompt: `sequence.tokens` of them are
                there, and the keys and values of `tokens[sequence.tokens:]` are to be computed and appended.

        Raises:
            ProblemError: tokens are not ids.

        >>> pool, ids = PagePool(page=16), list(range(50))
        >>> first = pool.sequence(ids)
        >>> _ = pool.append([first], torch.randn(1, 2, 50, 8), torch.randn(1, 2, 50, 8))
        >>> pool.sequence(ids[:40] + [7, 7]).tokens
        32
        """
        sequence = Sequence(self.room, None if tokens is None else _ids(tokens))
        adopt(sequence)
        return sequence

    def append(
        self,
        sequences: list[Sequence],
        k: Float[Tensor, "rows kv_heads new qk_dim"],
        v: Float[Tensor, "rows kv_heads new v_dim"],
        tokens: Int[Tensor, "rows new"] | None = None,
    ) -> tuple[StoredTensor, StoredTensor]:
        """Put new tokens behind sequences, as many behind each; all tokens of these come back, for `attend`.

        Args:
            sequences: one for each batch row, of any lengths.
            k: [rows, kv_heads, new, qk_dim]; new may be 0, to read what is stored.
            v: [rows, kv_heads, new, v_dim].
            tokens: the ids of the new tokens, [rows, new], so that their pages can be found by others; needed only for
                those that were not in the prompt, and only if the ids of all before them are known.

        Returns:
            Keys and values of all tokens of these sequences. They stay true until something is next written.

        Raises:
            ProblemError: what came does not fit, or the pool is full. Nothing was changed then.
        """
        if not isinstance(sequences, list | tuple):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ProblemError(f"sequences are {_named(sequences)}: expected a list, one for each batch row.")
        sequences = list(sequences)
        self._check(sequences, k, v)
        ids = None if tokens is None else _new_ids(sequences, tokens, k.shape[2])
        if self.room.codec is not None and self.room.codec.rotate:
            k, v = hadamard(k), hadamard(v)
        return self.write(sequences, k, v, ids)

    def write(
        self, sequences: list[Sequence], k: Tensor, v: Tensor, ids: list[list[int]] | None = None
    ) -> tuple[StoredTensor, StoredTensor]:
        """`append` of what was checked, and turned where the codec rotates."""
        room, new = self.room, k.shape[2]
        if room.form is None:
            room.settle(Form(k.shape[0], k.shape[1], k.shape[3], v.shape[3], k.dtype, k.device))
        rows = rows_of(room, sequences)
        if ids is not None or new > rows.slack:
            lengthen(room, rows, sequences, k, v, ids)
        elif new:
            rows.extend(k, v)
            for sequence in sequences:
                sequence.tokens += new
        return rows.stored()

    def select(self, sequences: list[Sequence], rows: list[int]) -> list[Sequence]:
        """Sequences in a new order, `rows` of those given: repeated ones are forks, left out ones are freed."""
        table = rows_of(self.room, sequences) if self.room.form is not None else None
        first: set[int] = set()
        chosen: list[Sequence] = []
        for row in rows:
            chosen.append(sequences[row].fork() if row in first else sequences[row])
            first.add(row)
        for row, sequence in enumerate(sequences):
            if row not in first:
                sequence.free()
        if table is not None:
            table.select(self.room.tensor(rows), chosen)
        return chosen

    def __repr__(self) -> str:
        room = self.room
        free = f"{self.free_pages:,} of {room.limit:,}" if room.limit is not None else f"{self.free_pages:,} made"
        codec = "" if room.kept_as is None else f", {str(room.kept_as).removeprefix('torch.')}"
        said = f"PagePool({free} pages of {room.page} tokens free, {len(room.sequences)} sequences{codec}"
        if room.form is None:
            return f"{said})"
        sides = ", ".join(
            f"{name} [tokens, {room.form.kv_heads}, {dim}]" for name, dim in zip("kv", room.form.dims, strict=True)
        )
        kind = str(room.form.dtype).removeprefix("torch.")
        return f"{said}: {sides} {kind}: {self.bytes:,} bytes, {self.allocated_bytes:,} held)"

    def _check(self, sequences: list[Sequence], k: object, v: object) -> None:
        _check_sequences(self.room, sequences)
        if not isinstance(k, Tensor) or not isinstance(v, Tensor):
            raise ProblemError(f"k is {_named(k)} and v {_named(v)}: expected two tensors [rows, kv_heads, new, dim].")
        if (
            k.ndim != 4 or v.ndim != 4 or k.shape[:3] != v.shape[:3] or k.dtype != v.dtype or k.device != v.device
            or not k.is_floating_point() or len(k) != len(sequences)
        ):  # fmt: skip
            raise ProblemError(
                f"k is {describe_tensor(k)} and v {describe_tensor(v)} for {len(sequences)} sequences: expected "
                f"[{len(sequences)}, kv_heads, new, dim], a row for each, with the same kv_heads and new tokens, of "
                "one float type and on one device."
            )
        form = self.room.form
        if form is not None and (k.shape[1], k.shape[3], v.shape[3], k.dtype, k.device) != form[1:]:
            raise ProblemError(
                f"k is {describe_tensor(k)} and v {describe_tensor(v)}, and the pool stores "
                f"{str(form.dtype).removeprefix('torch.')} keys [tokens, {form.kv_heads}, {form.qk_dim}] and "
                f"values [tokens, {form.kv_heads}, {form.v_dim}] on "
                f"{form.device}: a pool is for one layer; others need pools of their own."
            )
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            raise ProblemError(
                "keys or values that gradients flow to were appended to a pool, which serves inference: run under "
                "torch.no_grad() or torch.inference_mode()."
            )


def _check_sequences(room: Room, sequences: list[Sequence]) -> None:
    if not sequences:
        raise ProblemError("append([]): expected one sequence or more.")
    for row, sequence in enumerate(sequences):
        if not isinstance(sequence, Sequence):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ProblemError(f"row {row} is {_named(sequence)}: expected a sequence that pool.sequence() made.")
        if sequence.room is not room:
            raise ProblemError(f"row {row} is a sequence of another pool: its pages are there.")
        sequence.check()
    if len(set(sequences)) < len(sequences):
        raise ProblemError("a sequence stands in two rows: sequence.fork() makes another that begins alike.")


def _ids(tokens: object) -> list[int]:
    """The ids of a prompt."""
    if isinstance(tokens, Tensor):
        if tokens.ndim != 1 or tokens.is_floating_point() or tokens.is_complex():
            raise ProblemError(
                f"tokens are {describe_tensor(tokens)}: expected the ids of one sequence, int64 [tokens]."
            )
        tokens = tokens.tolist()
    found = list(tokens) if isinstance(tokens, Iterable) else [None]
    if not all(isinstance(token, int) for token in found):
        raise ProblemError(f"tokens are {tokens!r}: expected the ids of a prompt, whole numbers.")
    return cast(list[int], found)


def _new_ids(sequences: list[Sequence], tokens: object, new: int) -> list[list[int]]:
    """The ids of new tokens, row by row."""
    if not isinstance(tokens, Tensor) or tokens.is_floating_point() or tokens.shape != (len(sequences), new):
        raise ProblemError(
            f"tokens are {_named(tokens)}: expected the ids of what is appended, [{len(sequences)}, {new}]."
        )
    ids = cast(list[list[int]], tokens.tolist())
    for row, (sequence, theirs) in enumerate(zip(sequences, ids, strict=True)):
        start = sequence.tokens
        if len(sequence.ids) < start:
            raise ProblemError(
                f"tokens name what comes behind {start} tokens of row {row}, of which only {len(sequence.ids)} have "
                "ids: leave tokens out, or name those before as well."
            )
        known = sequence.ids[start : start + new]
        if known != theirs[: len(known)]:
            raise ProblemError(f"tokens of row {row} are {theirs}, and its prompt goes on with {known}.")
    return ids


def stored_bytes(room: Room, sequences: Iterable[Sequence]) -> int:
    """Bytes of the tokens of sequences, as they are written; those in shared pages once."""
    if room.form is None:
        return 0
    filled: dict[Page, int] = {}
    for sequence in sequences:
        for page, tokens in sequence.filled():
            filled[page] = max(filled.get(page, 0), tokens)
    coded = 0 if room.codes is None else room.codes.page_bytes
    return sum(
        tokens * (room.numbers.page_bytes if page.home is room.plain else coded) // room.page
        for page, tokens in filled.items()
    )


def _named(t: object) -> str:
    return describe_tensor(t) if isinstance(t, Tensor) else f"{type(t).__name__} {t!r}"
