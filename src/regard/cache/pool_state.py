"""What a pickle stores of the pages of a pool, its prefix tree and its block tables: lists of indices.

These objects refer to one another in long chains, which a pickle would follow with one recursive call per page. So a
page is stored as its index, and a tree node as its position in one list, parents first.
"""

from collections import OrderedDict
from typing import Any

from regard.cache.block_table import BlockTable
from regard.cache.pages import Page, PageAllocator, PrefixNode


def to_indices(
    plain: PageAllocator, coded: PageAllocator, root: PrefixNode, tables: list[BlockTable]
) -> dict[str, Any]:
    """Pages, nodes and block tables as plain values."""
    nodes = _nodes(root)
    positions = {id(node): i for i, node in enumerate(nodes)}
    return {
        "plain": _page_state(plain),
        "coded": _page_state(coded),
        "twins": [(page.index, page.twin.index) for page in plain.pages if page.twin is not None],
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
    for i, j in state["twins"]:
        page, twin = plain.pages[i], coded.pages[j]
        page.twin, twin.twin = twin, page
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
        table.plain = [plain.pages[index] for index in fields["plain"]]
        table.coded = [coded.pages[index] for index in fields["coded"]]
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
    is_reachable = id(table.node) in positions  # else the node was pruned, and the pages are indexed anew
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
