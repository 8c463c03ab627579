"""A program for torchrun: ring attention on the ranks that there are, beside attention in this process."""

import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from regard import Alibi, Causal, Window, attend
from regard.parallel import Layout, ring_attend, ulysses_attend


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, layout = dist.get_rank(), Layout.zigzag(53, dist.get_world_size())
    torch.manual_seed(0)
    whole = [torch.randn(1, heads, 53, 16) for heads in (4, 2, 2)]
    more = {"mask": Causal() & Window(30), "bias": Alibi(4)}
    exact = attend(*whole, **more)
    start = time.monotonic()
    for function in (ring_attend, ulysses_attend):
        shards = [layout.shard(t, rank).clone().requires_grad_() for t in whole]
        out = function(*shards, **more, layout=layout, timeout=30.0)
        out.sum().backward()
        torch.testing.assert_close(out.detach(), layout.shard(exact, rank), rtol=1e-5, atol=4e-6)
        assert all(t.grad is not None for t in shards)
    sys.stdout.write(f"rank {rank} of {dist.get_world_size()} is right after {time.monotonic() - start:.3f} s\n")
    sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
