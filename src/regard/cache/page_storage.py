"""`PageStorage`: what the sequences of a pool share: the page allocators, their memory, and the limit on pages.

A pickle stores pages, the prefix tree and block tables as lists of indices. These objects refer to one another in long
chains, which a pickle would follow with one recursive call per page. So a page is stored as its index, and a tree node
as its position in one list, parents first.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from regard.cache.check import form_of
from regard.cache.held_pages import HeldPages
from regard.cache.page_memory import CodedPageMemory, KeyScales, PlainPageMemory
from regard.cache.pages import BlockTable, OwnPages, Page, PageAllocator, PrefixNode
from regard.cache.pool_lock import pool_lock
from regard.cache.store import Form, describe_tensor, with_spare
from regard.errors import ProblemError
from regard.storage.codec import Codec

MIN_TOKENS = 64
"""Tokens that memory is allocated for at first, and at least."""


class PageStorage:
    """The pages of a pool.

    A sequence that is written by a codec starts with `sink_pages` plain pages, then has pages of codes, then plain
    pages again; without a codec all its pages are plain. Plain pages and pages of codes are in two memories, and each
    grows on its own. `limit` applies to the pages in use of both together.

    Sequences may be used in several threads, each sequence in one at a time: what reads or changes more than the pages
    of its own sequences does so inside `exclusive`.

    Attributes:
        limit: pages that may be in use; None: no limit.
        page: tokens per page.
        stored_as: the codec or dtype that the pool was made with; None: the dtype of the first tokens.
        codec: the codec that writes codes; None: every page is plain.
        sink_pages: pages at the front of every sequence that stay plain.
        residual: tokens at the end of a sequence that stay plain.
        root: the root of the tree of known token prefixes.
        form: shape and dtype of a token (the batch size in it is not used); None until the first tokens arrive.
        held: the pages of all sequences that were not freed.
    """

    def __init__(self, limit: int | None, page: int, codec: Codec | torch.dtype | None) -> None:
        self.limit, self.page, self.stored_as = limit, page, codec
        self.codec = codec if isinstance(codec, Codec) else None
        self.sink_pages = 0 if self.codec is None else -(-self.codec.sinks // page)
        self.residual = 0 if self.codec is None else self.codec.residual
        self.plain, self.coded, self.root = PageAllocator(), PageAllocator(), PrefixNode()
        self.form: Form | None = None
        self.held, self._lock = HeldPages(), pool_lock()
        self.plain_memory: PlainPageMemory
        self.coded_memory: CodedPageMemory | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Pages, tree and block tables as indices."""
        with self.exclusive:
            tables, others = self.held.tables, ("plain", "coded", "root", "held", "_lock")
            state = {name: value for name, value in self.__dict__.items() if name not in others}
            return state | {"tables": tables, "indices": to_indices(self.plain, self.coded, self.root, tables)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        tables, indices = state.pop("tables"), state.pop("indices")
        self.__dict__.update(state)
        self.plain, self.coded, self.root = from_indices(indices, tables)
        self.held, self._lock = HeldPages(tables), pool_lock()
        self.count_references()  # a sequence may have been collected while its pool was pickled

    @property
    def exclusive(self) -> AbstractContextManager[Any]:
        """Inside of it no other thread reads or changes pages. First it releases those of sequences that are gone."""
        if self.held.any_gone:
            with self._lock:
                try:
                    self.held.release_gone()
                except BaseException:  # Ctrl-C
                    self.count_references()
                    raise
        return self._lock

    @property
    def used(self) -> int:
        """Pages in use, of both allocators."""
        return self.plain.used + self.coded.used

    def check_form(self, k: Tensor, v: Tensor) -> Form:
        """The shape and dtype of new tokens, which must be those of all others.

        Raises:
            ProblemError: they differ from those of the first tokens.
        """
        form, new = self.form, form_of(k, v)
        if form is not None and new[1:] != form[1:]:
            raise ProblemError(
                f"k is {describe_tensor(k)} and v {describe_tensor(v)}, and the pool stores "
                f"{str(form.dtype).removeprefix('torch.')} keys [tokens, {form.kv_heads}, {form.qk_dim}] and values "
                f"[tokens, {form.kv_heads}, {form.v_dim}] on {form.device}: a pool is for one layer. Give other layers "
                "pools of their own."
            )
        return new

    def set_form(self, form: Form) -> None:
        """Set the shape and dtype of tokens. Memory is allocated later, by `reserve`.

        Raises:
            ProblemError: a codec, and keys or values without elements.
        """
        if self.codec is not None and not all(form.dims):
            latent = ", or KVCache(Latent(rank), codec) if the values are channels of the keys" if form.qk_dim else ""
            raise ProblemError(
                f"keys have {form.qk_dim} dimensions and values {form.v_dim}, and the pages store {self.codec.kind} "
                f"codes: a codec needs elements. Use codec=None{latent}."
            )
        dtype = self.stored_as if isinstance(self.stored_as, torch.dtype) else form.dtype
        self.plain_memory = PlainPageMemory(form, self.page, dtype)
        if self.codec is not None:
            scales = KeyScales(self.page, math.gcd(self.codec.group, self.page), self.codec.keys == "token")
            self.coded_memory = CodedPageMemory(form, self.codec, scales)
        self.form = form  # last: whoever finds it finds memory

    def coded_page_end(self, tokens: int) -> int:
        """One past the last page that is written as codes, for a sequence of `tokens` tokens that was never cropped."""
        return max(self.sink_pages, (tokens - self.residual) // self.page) if self.codec is not None else 0

    def has_free(self, more: int) -> bool:
        """Whether the limit allows this many more pages in use."""
        return self.limit is None or self.used + more <= self.limit

    def check_free(self, more: int, wanted: int) -> None:
        """Raise `ProblemError` if the limit does not allow more pages in use.

        Args:
            more: pages in use afterwards, less those in use now.
            wanted: pages to be allocated, for the message.
        """
        if self.has_free(more):
            return
        assert self.limit is not None
        raise ProblemError(
            f"{wanted} pages of {self.page} tokens are wanted, and {self.limit - self.used} of {self.limit} are free; "
            f"{len(self.held.tables)} sequences hold the others. Nothing was changed: free() or crop() a sequence, or "
            "make a larger pool."
        )

    def reserve(self, plain: int, coded: int) -> None:
        """Have memory for this many plain and coded pages in use; it grows by doubling, or by an eighth more."""
        for pages, memory, used in ((self.plain, self.plain_memory, plain), (self.coded, self.coded_memory, coded)):
            if memory is None:
                continue
            if used > memory.pages:
                count = max(with_spare(used), 2 * memory.pages, -(-MIN_TOKENS // self.page))
                if self.limit is not None:
                    count = self.limit if self.codec is None else min(count, self.limit)
                memory.grow(count)
            if memory.pages > len(pages.pages):  # also where Ctrl-C came after the memory grew
                pages.grow(memory.pages)

    def count_references(self) -> None:
        """Find out again which pages are in use, after an error while they changed. No other page can be found then."""
        references = Counter(self.held.pages)
        for allocator in (self.plain, self.coded):
            for page in allocator.pages:
                page.references = references[page]
                if page.references:
                    allocator.free.pop(page, None)
                elif page not in allocator.free:
                    page.invalidate()
                    allocator.free[page] = None
                    allocator.free.move_to_end(page, last=False)

    def shrink(self) -> None:
        """Free memory of which less than half is in use. Free pages there can no longer be found by their tokens."""
        with self.exclusive:
            self._shrink()

    def _shrink(self) -> None:
        for pages, memory in ((self.plain, self.plain_memory), (self.coded, self.coded_memory)):
            count = max(with_spare(pages.used), -(-MIN_TOKENS // self.page))
            if memory is None or memory.pages < 2 * count:
                continue
            for table in self.held.tables:  # pages will have new indices
                table.batch = None
            tensors = memory.shrunk([page.index for page in pages.in_use], count)
            try:
                memory.tensors = tensors
                pages.shrink(count)
            except BaseException:  # Ctrl-C: the indices must be those of the new tensors
                memory.tensors = tensors
                pages.shrink(count)
                raise

    def page_bytes(self, plain: int, coded: int) -> int:
        """Bytes of this many plain and coded pages."""
        memory = 0 if self.coded_memory is None else coded * self.coded_memory.page_bytes
        return plain * self.plain_memory.page_bytes + memory

    def stored_bytes(self, tables: Iterable[BlockTable]) -> int:
        """Bytes of the tokens of some sequences as they are stored; those in shared pages count once."""
        if self.form is None:
            return 0
        tokens_of: dict[Page, int] = {}
        with self.exclusive:
            for table in tables:
                for page, tokens in table.page_tokens():
                    tokens_of[page] = max(tokens_of.get(page, 0), tokens)
        plain_bytes, coded_bytes = self.page_bytes(1, 0), self.page_bytes(0, 1)
        return sum(
            tokens * (plain_bytes if page.allocator is self.plain else coded_bytes) // self.page
            for page, tokens in tokens_of.items()
        )

    def index_tensor(self, values: list[int] | list[list[int]]) -> Tensor:
        """int64, on the device of the memory."""
        assert self.form is not None
        return torch.tensor(values, dtype=torch.int64, device=self.form.device)


def to_indices(
    plain: PageAllocator, coded: PageAllocator, root: PrefixNode, tables: list[BlockTable]
) -> dict[str, Any]:
    """Pages, nodes and block tables as plain values."""
    nodes = _nodes(root)
    positions = {id(node): i for i, node in enumerate(nodes)}
    return {
        "plain": _page_state(plain),
        "coded": _page_state(coded),
        "twins": [(page.index, page.twin.index, page.twin_tokens) for page in plain.pages if page.twin is not None],
        "nodes": [
            (
                None if node.parent is None else positions[id(node.parent)],
                node.ids,
                _index(node.pages.get(plain)),
                _index(node.pages.get(coded)),
            )
            for node in nodes
        ],
        "tables": [_table_state(table, positions) for table in tables],
    }


def from_indices(state: dict[str, Any], tables: list[BlockTable]) -> tuple[PageAllocator, PageAllocator, PrefixNode]:
    """The allocators and the root that `to_indices` was given; fills the tables, in the same order."""
    plain, coded = _allocator(state["plain"]), _allocator(state["coded"])
    for i, j, tokens in state["twins"]:
        plain.pages[i].pair(coded.pages[j], tokens)
    nodes: list[PrefixNode] = []
    for parent, ids, *indices in state["nodes"]:
        node = PrefixNode() if parent is None else nodes[parent].child(tuple(ids))
        for allocator, index in zip((plain, coded), indices, strict=True):
            if index is not None:
                node.add(allocator.pages[index])
        nodes.append(node)
    for table, fields in zip(tables, state["tables"], strict=True):
        table.batch, table.row = None, 0
        table.page, table.sink_pages, table.tokens = fields["page"], fields["sink_pages"], fields["tokens"]
        table.own = OwnPages(
            [plain.pages[index] for index in fields["plain"]], [coded.pages[index] for index in fields["coded"]]
        )
        table.indexed, table.node = fields["indexed"], nodes[fields["node"]]
        table.ids, table.is_exact = fields["ids"], fields["is_exact"]
        table.segments = None if fields["segments"] is None else tuple(fields["segments"])
    return plain, coded, nodes[0]


def _nodes(root: PrefixNode) -> list[PrefixNode]:
    """All nodes that can be reached, parents first."""
    nodes = [root]
    for node in nodes:  # the list grows while it is read
        nodes.extend(node.children.values())
    return nodes


def _page_state(allocator: PageAllocator) -> dict[str, list[int]]:
    return {
        "references": [page.references for page in allocator.pages],
        "free": [page.index for page in allocator.free],
    }


def _allocator(state: dict[str, list[int]]) -> PageAllocator:
    allocator = PageAllocator()
    allocator.pages = [Page(allocator, index) for index in range(len(state["references"]))]
    for page, references in zip(allocator.pages, state["references"], strict=True):
        page.references = references
    allocator.free = OrderedDict((allocator.pages[index], None) for index in state["free"])
    return allocator


def _table_state(table: BlockTable, positions: dict[int, int]) -> dict[str, Any]:
    is_reachable = id(table.node) in positions  # else the node was pruned, and the pages are indexed again
    return {
        "page": table.page,
        "sink_pages": table.sink_pages,
        "plain": [page.index for page in table.plain],
        "coded": [page.index for page in table.coded],
        "tokens": table.tokens,
        "ids": table.ids,
        "is_exact": table.is_exact,
        "segments": table.segments,
        "indexed": table.indexed if is_reachable else 0,
        "node": positions[id(table.node)] if is_reachable else 0,
    }


def _index(page: Page | None) -> int | None:
    return None if page is None else page.index
