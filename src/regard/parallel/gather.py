"""Whole tensors from the shards of all ranks, and sums over ranks, as functions that autograd differentiates."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from regard.errors import ProblemError, RefusalError
from regard.parallel.derivatives import no_tangents
from regard.parallel.layout import Layout
from regard.torch_internals import leave_out_of_graphs


def gathered(shard: Tensor, layout: Layout, rank: int, group: dist.ProcessGroup | None, dim: int) -> Tensor:
    """The tensor of the whole sequence on every rank.

    The gradient of a shard is its part of the gradient of the whole: every rank computes the same loss of it.

    Raises:
        ProblemError: the shard has another number of tokens than the layout says.
    """
    if shard.shape[dim] != layout.counts[rank]:
        raise ProblemError(
            f"unshard of {list(shard.shape)}: expected {layout.counts[rank]} tokens in dim {dim}, as rank {rank} has "
            f"of {layout}."
        )
    return _Gathered.apply(shard, layout, rank, group, dim)  # pyright: ignore[reportReturnType]


def summed(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The sum over all ranks; the gradient of a rank's tensor is that of the sum."""
    return _Summed.apply(tensor, group)  # pyright: ignore[reportReturnType]


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, shard: Tensor, layout: Layout, rank: int, group: dist.ProcessGroup | None, dim: int
    ) -> Tensor:
        ctx.layout, ctx.rank, ctx.dim = layout, rank, dim
        most = max(layout.counts)  # gloo gathers tensors of one size
        sizes = list(shard.shape)
        sizes[dim] = most
        padded = shard.new_zeros(sizes)
        padded.narrow(dim, 0, shard.shape[dim]).copy_(shard)
        parts = [torch.empty_like(padded) for _ in range(layout.ranks)]
        dist.all_gather(parts, padded, group=group)
        return layout.unshard([part.narrow(dim, 0, n) for part, n in zip(parts, layout.counts, strict=True)], dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        part = _Part.apply(grads[0], ctx.layout, ctx.rank, ctx.dim)
        return part, None, None, None, None  # pyright: ignore[reportReturnType]

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        raise no_tangents("unshard")


leave_out_of_graphs(_Gathered.backward)


class _Part(torch.autograd.Function):
    """A rank's part of a gradient of the whole; its own gradient would need those of all ranks."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, layout: Layout, rank: int, dim: int) -> Tensor:
        return layout.shard(whole, rank, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        raise RefusalError(
            "the gradient of unshard was differentiated, and a second derivative would need the gradients of all "
            "ranks: compute what is differentiated twice on one rank, from tensors that are not sharded."
        )

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        raise no_tangents("the gradient of unshard")


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        raise no_tangents("the sum over ranks")
