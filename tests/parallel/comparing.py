"""Results of several ranks beside those of one process."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard import attend
from regard.parallel import Layout
from tests.parallel import cases
from tests.parallel.workers import Workers

N = 53
IDS = torch.tensor([0] * 11 + [1] * 23 + [2] * 19)


def layouts(ranks: int, tokens: int = N) -> dict[str, Layout]:
    dealt = tuple(tuple(range(a, min(a + 5, tokens)) for a in range(5 * r, tokens, 5 * ranks)) for r in range(ranks))
    return {
        "contiguous": Layout.contiguous(tokens, ranks),
        "zigzag": Layout.zigzag(tokens, ranks),
        "striped": Layout.striped(tokens, ranks),
        "in many pieces": Layout(tokens, dealt),
        "one rank has nothing": Layout.of_counts([tokens - 3 * (ranks - 2), *[3] * (ranks - 2), 0]),
    }


def some(batch: int = 2, heads: int = 4, kv_heads: int = 2, tokens: int = N, seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(batch, h, tokens, 16, generator=g) for h in (heads, kv_heads))
    v, dout = (torch.randn(batch, h, tokens, 8, generator=g) for h in (kv_heads, heads))
    return {"q": q, "k": k, "v": v, "dout": dout}


def in_one_process(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, **more: Any) -> tuple[Tensor, list[Tensor]]:
    """(out, gradients) in float64."""
    learned = cases.learned_tensors(more)
    leaves = [t.to(torch.float64, copy=True).requires_grad_() for t in (q, k, v)]
    for t in learned:
        t.requires_grad_()
    out = attend(*leaves, **more, backend="reference64")
    wanted = [*leaves, *learned]
    grads = torch.autograd.grad(out, wanted, dout.double(), allow_unused=True, materialize_grads=True)
    for t in learned:
        t.requires_grad_(False)
    return out.detach(), [grad.double() for grad in grads]


def joined(found: list[Any], queries: Layout, keys: Layout) -> tuple[Tensor, list[Tensor]]:
    """(out, gradients) of the whole, from those of the ranks: gradients of learned tensors are summed."""
    layouts = [queries, keys, keys]
    shards = [[out for out, _ in found], *([grads[i] for _, grads in found] for i in range(3))]
    whole: list[Tensor] = []
    for layout, parts in zip([queries, *layouts], shards, strict=True):
        at = torch.cat([torch.tensor(layout.indices(rank)) for rank in range(layout.ranks)])
        whole.append(torch.cat(parts, 2)[:, :, at.argsort()])
    learned = zip(*(grads[3:] for _, grads in found), strict=True)
    sums = [sum(each, torch.zeros(())) for each in learned]  # each rank has one to add up, be it of zeros
    return whole[0], [*whole[1:], *sums]


def check(
    ranks: Workers,
    layout: Layout,
    tensors: dict[str, Tensor],
    function: Callable[..., Any] = cases.ring,
    **more: Any,
) -> None:
    """Assert that outputs and gradients are those of one process, in float64."""
    out, grads = in_one_process(**tensors, **{name: value for name, value in more.items() if name != "shape"})
    found = ranks.run(function, **tensors, layout=layout, timeout=30.0, **more)
    own_out, own_grads = joined(found, layout, layout)
    for own, exact in zip([own_out, *own_grads], [out, *grads], strict=True):
        assert_close(own, exact)


def assert_close(own: Tensor, exact: Tensor) -> None:
    """Assert equality within the rounding of float32, relative to the largest element."""
    largest = float(exact.abs().max()) if exact.numel() else 0.0
    torch.testing.assert_close(own.double(), exact, rtol=0.0, atol=4e-6 * max(largest, 1.0))
