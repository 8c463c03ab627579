"""Run as a file: digests of the bits of calls that take every way through a forward pass.

Arguments: the instruction sets.
"""

import hashlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

from regard import Alibi, Causal, Prefix, State, TensorBias, TensorMask, Window, attend_state
from regard.backend.native import Native

TOKENS = 1200  # 19 tiles of queries, so the last one has none beside it; more than one span of keys


def calls(dtype: torch.dtype, dim: int) -> Iterator[tuple[Any, ...]]:
    """q, k, v and the words of a call; heads of 4, so that there are enough tiles to go through keys in pairs."""
    q, k, v = (torch.randn(1, 4, TOKENS, width).to(dtype) for width in (dim, dim, 40))
    v[:, :, 1100] = torch.nan  # hidden from most rows of its tile
    window = Causal() & (Window(150) | Prefix(4))
    yield 3 * q, k, v, {"mask": Causal()}
    yield q, k, v, {"mask": window, "bias": Alibi(4), "softcap": 20.0}
    yield q, k, v[:, :, :1000].repeat(1, 1, 2, 1)[:, :, :TOKENS], {"bias": TensorBias(torch.randn(4, TOKENS, TOKENS))}
    yield q, k, v, {"mask": TensorMask(torch.rand(4, TOKENS, TOKENS) > 0.97)}
    wide = torch.randn(1, 4, TOKENS, 64).to(dtype)
    for heads, kv_heads in ((4, 4), (4, 2), (3, 1), (4, 1)):  # 1 to 4 rows of a span that is streamed
        yield q[:, :heads, -1:], k[:, :kv_heads], wide[:, :kv_heads], {}


def digest(state: State) -> str:
    """Of an output and its log-sum-exp."""
    return hashlib.sha256(state.out.float().numpy().tobytes() + state.lse.numpy().tobytes()).hexdigest()[:8]


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    made = [call for dtype in (torch.float32, torch.bfloat16) for dim in (40, 161) for call in calls(dtype, dim)]
    for isa in sys.argv[1:]:
        engine = Native(name=f"native {isa}", isa=isa)
        found = (digest(attend_state(q, k, v, **words, backend=engine)) for q, k, v, words in made)
        sys.stdout.write(f"{isa} {' '.join(found)}\n")
