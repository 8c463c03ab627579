"""Train a model on a sequence that is sharded over processes, and check that nothing changes.

    torchrun --nproc-per-node 2 examples/ring.py                  # two processes on this machine
    torchrun --nproc-per-node 4 examples/ring.py --tokens 8192 --steps 5

Each process has some tokens of every sequence: `context_parallel` shards the inputs, attention is a ring, and the loss
is that of the whole sequence. The gradients of a process are those of its tokens, so they are summed before the step.
At the end the logits are compared with those of one process.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist

from regard import Rope
from regard.nn import Decoder
from regard.parallel import context_parallel


def main() -> None:
    """Train, and print what happens on the first rank."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--tokens", type=int, default=2048, help="of the sequence (default: 2048)")
    parser.add_argument("--steps", type=int, default=3, help="of training (default: 3)")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun: torchrun --nproc-per-node 2 examples/ring.py")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        train(args.tokens, args.steps)
    finally:
        dist.destroy_process_group()


def train(tokens: int, steps: int) -> None:
    """Some steps of a small model on one long sequence."""
    torch.manual_seed(0)  # the same weights and tokens on every rank
    device = f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"
    model = Decoder(64, 64, layers=2, heads=4, kv_heads=2, position=Rope(16)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    ids = torch.randint(64, (1, tokens + 1), device=device)
    inputs, targets = ids[:, :-1], ids[:, 1:]
    for step in range(steps):
        start = time.perf_counter()
        with context_parallel() as cp:
            logits = model(inputs)  # the logits of this rank's tokens
            shard = cp.shard
            assert shard is not None
            own = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), shard.shard(targets).flatten(), reduction="sum"
            )
            loss = shard.sum(own / targets.numel())
            loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}  loss {loss.item():.4f}  {time.perf_counter() - start:.2f} s", flush=True)
    with torch.no_grad(), context_parallel() as cp:
        whole = cp.unshard(model(inputs))
    if dist.get_rank() == 0:
        with torch.no_grad():
            error = (whole - model(inputs)).abs().max().item()
        layout = cp.layout(tokens)
        print(f"{dist.get_world_size()} ranks, {list(layout.counts)} tokens; largest difference {error:.1e}")


if __name__ == "__main__":
    main()
