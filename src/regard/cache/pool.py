"""`PagePool`: the KV cache of many sequences, in pages that sequences share.

A token prefix that several sequences have in common is stored once: forks share their pages, a prompt finds the pages
of earlier sequences that begin with the same tokens, and a shared page is copied when one of its owners writes to it.
Kwon et al. 2023, PagedAttention, arXiv:2309.06180, §4.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.cache.append_tokens import append_tokens
from regard.cache.batch_table import batch_table
from regard.cache.check import check_codec, check_inference, check_page, form_of, name_of
from regard.cache.page_storage import PageStorage
from regard.cache.sequence import Sequence
from regard.cache.store import check_has_data, describe_tensor
from regard.describe.whole_number import whole
from regard.errors import ProblemError
from regard.integers import as_integer
from regard.storage.codec import Codec
from regard.storage.hadamard import hadamard
from regard.storage.stored import StoredTensor
from regard.torch_internals import leave_out_of_graphs


class PagePool:
    """Pages for the keys and values of one layer, and the sequences that use them.

    Several threads may use the sequences, each sequence in one thread at a time.

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
             131,072 allocated)

    Args:
        pages: at most this many pages, plain pages and pages of codes together; None: no limit, memory grows by
            doubling. With a limit and without a codec, all memory is allocated when the first tokens arrive.
        page: tokens per page. With a codec a multiple of 16. The tokens of a page that share the scale of a key channel
            are the greatest common divisor of `page` and `codec.group`.
        codec: how elements are stored: `Int8`, `Int4`, `Fp8`, or a float type; None: the type of the first tokens. A
            page is written as codes once, when all its tokens are older than `codec.residual` and none of them is one
            of the first `codec.sinks` tokens of the sequence.

    Raises:
        ProblemError: arguments out of range, or a page that the codec cannot fill with whole groups.
    """

    def __init__(self, pages: int | None = None, page: int = 16, codec: Codec | torch.dtype | None = None) -> None:
        pages = None if pages is None else whole(pages, "PagePool(pages)", "pages", least=1)
        page = whole(page, "PagePool(page)", least=1)
        check_codec(codec, "PagePool(codec=...)")
        check_page(page, codec)
        if isinstance(codec, Codec) and codec.keys is None:
            codec = dataclasses.replace(codec, keys="channel")
        self.storage = PageStorage(pages, page, codec)

    @property
    def bytes(self) -> int:
        """Bytes of the stored tokens and their scales; tokens in shared pages count once."""
        return self.storage.stored_bytes(self.storage.held.tables)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of allocated memory, free pages included."""
        storage = self.storage
        if storage.form is None:
            return 0
        coded = 0 if storage.coded_memory is None else storage.coded_memory.allocated_bytes
        return storage.plain_memory.allocated_bytes + coded

    @property
    def free_pages(self) -> int:
        """Pages that no sequence refers to: up to the limit or, without a limit, in the memory allocated so far."""
        storage = self.storage
        with storage.exclusive:
            if storage.limit is None:
                return len(storage.plain.free) + len(storage.coded.free)
            return storage.limit - storage.used

    def sequence(self, tokens: Iterable[int] | Int[Tensor, " tokens"] | None = None) -> Sequence:
        """A new sequence.

        Args:
            tokens: the token ids of its prompt. The sequence then starts with the pages of earlier sequences that began
                with the same ids: as many whole pages as there are, always less than the whole prompt. It has
                `sequence.tokens` tokens then; compute and append the keys and values of `tokens[sequence.tokens:]`.

        Raises:
            ProblemError: tokens are not ids.

        >>> pool, ids = PagePool(page=16), list(range(50))
        >>> first = pool.sequence(ids)
        >>> _ = pool.append([first], torch.randn(1, 2, 50, 8), torch.randn(1, 2, 50, 8))
        >>> pool.sequence(ids[:40] + [7, 7]).tokens
        32
        """
        ids = None if tokens is None else _prompt_ids(tokens)
        with self.storage.exclusive:
            sequence = Sequence(self.storage, ids)
            try:
                sequence.adopt_known_pages()
            except BaseException:  # Ctrl-C: it may have retained a page that it does not list
                self.storage.count_references()
                raise
        return sequence

    def append(
        self,
        sequences: list[Sequence],
        k: Float[Tensor, "rows kv_heads new qk_dim"],
        v: Float[Tensor, "rows kv_heads new v_dim"],
        tokens: Int[Tensor, "rows new"] | None = None,
    ) -> tuple[StoredTensor, StoredTensor]:
        """Append new tokens to sequences, the same number to each; returns all their keys and values, for `attend`.

        Args:
            sequences: one for each batch row, of any lengths.
            k: [rows, kv_heads, new, qk_dim]; new may be 0, to read what is stored.
            v: [rows, kv_heads, new, v_dim].
            tokens: the ids of the new tokens, [rows, new], so that other sequences can find their pages; needed only
                for tokens that were not in the prompt, and only if the ids of all earlier tokens are known.

        Returns:
            Handles to the keys and values of all tokens of these sequences; valid until one of these is appended to,
            cropped or freed.

        Raises:
            ProblemError: the arguments do not fit, or the pool is full. Nothing was changed then.
        """
        if not isinstance(sequences, list | tuple):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ProblemError(f"sequences are {name_of(sequences)}: expected a list, one for each batch row.")
        sequences = list(sequences)
        _check_sequences(self.storage, sequences)
        self._check_elements(sequences, k, v)
        ids = None if tokens is None else _new_ids(sequences, tokens, k.shape[2])
        if self.storage.codec is not None and self.storage.codec.rotate:
            k, v = hadamard(k), hadamard(v)
        return self.write(sequences, k, v, ids)

    def write(
        self, sequences: list[Sequence], k: Tensor, v: Tensor, ids: list[list[int]] | None = None
    ) -> tuple[StoredTensor, StoredTensor]:
        """`append` without checks, of keys and values that are rotated already where the codec rotates."""
        storage = self.storage
        stored = _extend(storage, sequences, k, v) if ids is None and storage.form is not None else None
        return append_tokens(storage, sequences, k, v, ids) if stored is None else stored

    def select(self, sequences: list[Sequence], rows: list[int]) -> list[Sequence]:
        """`sequences[row]` for each row of `rows`: a repeated sequence is forked, a sequence not in `rows` is freed.

        Raises:
            ProblemError: a row is no index of a sequence; then nothing was changed.
        """
        rows = _checked_rows(rows, len(sequences))
        chosen, kept = self.chosen(sequences, rows), set(rows)
        for row, sequence in enumerate(sequences):  # last: it cannot be undone
            if row not in kept:
                sequence.free()
        return chosen

    def chosen(self, sequences: list[Sequence], rows: list[int]) -> list[Sequence]:
        """`select` without freeing the sequences that are not in `rows`."""
        seen: set[int] = set()
        chosen: list[Sequence] = []
        with self.storage.exclusive:
            batch = None if self.storage.form is None else batch_table(self.storage, sequences)
            for row in rows:
                chosen.append(sequences[row].fork() if row in seen else sequences[row])
                seen.add(row)
            if batch is not None:
                batch.select(self.storage.index_tensor(rows), chosen)
        return chosen

    def __repr__(self) -> str:
        storage = self.storage
        free = f"{self.free_pages:,}" + (" allocated" if storage.limit is None else f" of {storage.limit:,}")
        codec = "" if storage.stored_as is None else f", {str(storage.stored_as).removeprefix('torch.')}"
        text = f"PagePool({free} pages of {storage.page} tokens free, {len(storage.held.tables)} sequences{codec}"
        if storage.form is None:
            return f"{text})"
        sides = ", ".join(
            f"{name} [tokens, {storage.form.kv_heads}, {dim}]"
            for name, dim in zip("kv", storage.form.dims, strict=True)
        )
        dtype = str(storage.form.dtype).removeprefix("torch.")
        return f"{text}: {sides} {dtype}: {self.bytes:,} bytes, {self.allocated_bytes:,} allocated)"

    def _check_elements(self, sequences: list[Sequence], k: Tensor, v: Tensor) -> None:
        new = form_of(k, v)
        if new.batch != len(sequences):
            raise ProblemError(
                f"k is {describe_tensor(k)} and v {describe_tensor(v)} for {len(sequences)} sequences: expected one "
                f"batch row for each sequence, [{len(sequences)}, kv_heads, tokens, dim]."
            )
        self.storage.check_form(k, v)
        check_inference(k, v, "pool")


for _method in (PagePool.sequence, PagePool.write, PagePool.chosen):  # else each length has a graph of its own
    leave_out_of_graphs(_method)


def _extend(
    storage: PageStorage, sequences: list[Sequence], k: Tensor, v: Tensor
) -> tuple[StoredTensor, StoredTensor] | None:
    """`append_tokens` where no page changes, else None; after an error nothing was changed either."""
    before = [sequence.tokens for sequence in sequences]
    try:
        with storage.exclusive:
            batch = batch_table(storage, sequences)
            if k.shape[2] > batch.slack:
                return None
            if k.shape[2]:
                batch.extend(k, v)
                for sequence in sequences:
                    sequence.tokens += k.shape[2]
            return batch.stored()
    except BaseException:
        for sequence, tokens in zip(sequences, before, strict=True):
            sequence.tokens, sequence.batch = tokens, None
        raise


def _check_sequences(storage: PageStorage, sequences: list[Sequence]) -> None:
    if not sequences:
        raise ProblemError("append([]): expected one sequence or more.")
    for row, sequence in enumerate(sequences):
        if not isinstance(sequence, Sequence):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ProblemError(f"row {row} is {sequence!r}: expected a sequence that pool.sequence() made.")
        if sequence.storage is not storage:
            raise ProblemError(f"row {row} is a sequence of another pool: its pages are there.")
        sequence.check_usable()
    if len(set(sequences)) < len(sequences):
        raise ProblemError("one sequence is in two rows: sequence.fork() makes another with the same tokens.")


def _checked_rows(rows: Iterable[int], count: int) -> list[int]:
    chosen = [whole(row, "a row of select", "sequences") for row in rows]
    if any(not 0 <= row < count for row in chosen):
        raise ProblemError(f"select({chosen}): expected indices of the sequences 0 to {count - 1}.")
    return chosen


def _prompt_ids(tokens: object) -> list[int]:
    """The ids of a prompt as a list."""
    if isinstance(tokens, Tensor):
        if tokens.ndim != 1 or tokens.is_floating_point() or tokens.is_complex():
            raise ProblemError(
                f"tokens are {describe_tensor(tokens)}: expected the ids of one sequence, int64 [tokens]."
            )
        check_has_data(tokens, "sequence(tokens)")
        tokens = tokens.tolist()
    is_list = isinstance(tokens, Iterable) and not isinstance(tokens, bytes | bytearray | Mapping)
    given = cast("Iterable[object]", tokens) if is_list else [None]
    ids = [token if type(token) is int else as_integer(token) for token in given]
    if None in ids:
        raise ProblemError(f"tokens are {tokens!r}: expected the ids of a prompt, whole numbers.")
    return cast(list[int], ids)


def _new_ids(sequences: list[Sequence], tokens: object, new: int) -> list[list[int]]:
    """The ids of new tokens, row by row."""
    if not isinstance(tokens, Tensor) or tokens.is_floating_point() or tokens.shape != (len(sequences), new):
        raise ProblemError(
            f"tokens are {name_of(tokens)}: expected the ids of what is appended, [{len(sequences)}, {new}]."
        )
    check_has_data(tokens, "append(tokens=...)")
    ids = cast(list[list[int]], tokens.tolist())
    for row, (sequence, theirs) in enumerate(zip(sequences, ids, strict=True)):
        start = sequence.tokens
        if len(sequence.ids) < start:
            raise ProblemError(
                f"tokens are the ids after {start} tokens of row {row}, of which only {len(sequence.ids)} have ids: "
                "leave tokens out, or give the ids of the earlier tokens as well."
            )
        known = sequence.ids[start : start + new]
        if known != theirs[: len(known)]:
            raise ProblemError(f"tokens of row {row} are {theirs}, and its prompt goes on with {known}.")
    return ids
