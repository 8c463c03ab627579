"""Calls of every kind, each with its weights by the definition: float64, every matrix in full."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard import Alibi, Causal, Documents, KeyLengths, Prefix, T5Bias, TensorBias, TensorMask, Window, attend
from regard.calls import Call, observe_calls
from regard.inspect.weights.lazy import Weights

BATCH, HEADS, KV_HEADS, QUERIES, KEYS, DIM = 2, 6, 3, 29, 29, 7


@dataclass(frozen=True, eq=False)
class Dense64:
    """A [batch, heads, queries, keys], and which pairs the mask keeps."""

    weights: Tensor
    keep: Tensor
    sink_share: Tensor  # [batch, heads, queries]


def definition(call: Call) -> Dense64:
    """The weights of a call, from its words."""
    q, k = call.q.double(), call.k.double().repeat_interleave(call.q.shape[1] // call.k.shape[1], dim=1)
    batch, heads, queries, keys = *q.shape[:3], k.shape[2]
    b, h = torch.arange(batch)[:, None, None, None], torch.arange(heads)[None, :, None, None]
    i, j = call.offset + torch.arange(queries)[None, None, :, None], torch.arange(keys)[None, None, None, :]
    s = q @ k.mT * call.scale
    s = s if call.softcap is None else call.softcap * torch.tanh(s / call.softcap)
    for term in [] if call.bias is None else call.bias.terms():  # a sum of two in half precision would be rounded
        s = s + term.value(b, h, i, j).double()
    keep = torch.ones(1, 1, 1, 1, dtype=torch.bool) if call.mask is None else call.mask.keep(b, h, i, j)
    keep = keep.expand(batch, heads, queries, keys)
    sink = torch.full((heads,), -torch.inf) if call.sink is None else call.sink
    column = sink.double()[None, :, None, None].expand(batch, heads, queries, 1)
    full = torch.cat([s.masked_fill(~keep, -torch.inf), column], dim=-1).softmax(dim=-1).nan_to_num(0.0)
    return Dense64(full[..., :-1], keep, full[..., -1])


def called(q: Tensor, k: Tensor, **words: Any) -> Call:
    """The call that `attend` tells of."""
    calls: list[Call] = []
    with observe_calls(calls.append):
        attend(q, k, torch.randn_like(k), **words)
    return calls[0]


def drawn(queries: int = QUERIES, **words: Any) -> Call:
    """A call with random queries and keys."""
    return called(torch.randn(BATCH, HEADS, queries, DIM), torch.randn(BATCH, KV_HEADS, KEYS, DIM), **words)


CASES: dict[str, Callable[[], Call]] = {
    "no mask": drawn,
    "causal": lambda: drawn(mask=Causal()),
    "window with sinks": lambda: drawn(mask=Causal() & (Window(5) | Prefix(2))),
    "window both ways": lambda: drawn(mask=Window(4, 3)),
    "scale and softcap": lambda: drawn(mask=Causal(), scale=3.0, softcap=2.0),
    "learned sinks": lambda: drawn(mask=Causal(), sink=torch.randn(HEADS)),
    "padding to the right": lambda: drawn(mask=Causal() & KeyLengths(torch.tensor([11, KEYS]))),
    "padding to the left": lambda: drawn(mask=Causal() & ~KeyLengths(torch.tensor([0, 13]))),
    "alibi": lambda: drawn(mask=Causal(), bias=Alibi(HEADS)),
    "a bias by buckets of distance": lambda: drawn(mask=Causal(), bias=T5Bias(torch.randn(8, HEADS), max_distance=16)),
    "two biases in half precision": lambda: drawn(
        mask=Causal(), bias=T5Bias(torch.randn(8, HEADS).bfloat16()) + T5Bias(torch.randn(32, HEADS).bfloat16())
    ),
    "a bias per head": lambda: drawn(mask=Causal(), bias=TensorBias(torch.randn(1, HEADS, QUERIES, KEYS))),
    "a mask per head": lambda: drawn(mask=TensorMask(torch.rand(1, HEADS, QUERIES, KEYS) < 0.5)),
    "a mask for all heads": lambda: drawn(mask=TensorMask(torch.rand(BATCH, 1, QUERIES, KEYS) < 0.5)),
    "a mask of keys": lambda: drawn(mask=TensorMask(torch.rand(BATCH, 1, 1, KEYS) < 0.7)),
    "documents per row": lambda: drawn(mask=Causal() & Documents(torch.randint(0, 3, (BATCH, KEYS)).sort().values)),
    "all at once": lambda: drawn(
        mask=Causal() & (Window(7) | Prefix(2)) & ~KeyLengths(torch.tensor([0, 13])),
        bias=Alibi(HEADS) + TensorBias(torch.randn(BATCH, HEADS, QUERIES, KEYS)),
        scale=2.0,
        softcap=3.0,
        sink=torch.randn(HEADS),
    ),
    "the last few queries": lambda: drawn(queries=5, mask=Causal()),
    "the last query": lambda: drawn(queries=1, mask=Causal() & Window(7), sink=torch.randn(HEADS)),
    "queries in the middle": lambda: drawn(queries=5, mask=Causal(), offset=11),
    "a bias for the last few": lambda: drawn(queries=5, bias=TensorBias(torch.randn(BATCH, 1, 5, KEYS))),
    "heads without groups": lambda: called(torch.randn(1, 3, 13, 5), torch.randn(1, 3, 13, 5), mask=Causal()),
    "a single key head": lambda: called(torch.randn(1, 5, 13, 5), torch.randn(1, 1, 13, 5), mask=Causal()),
    "float64": lambda: called(torch.randn(1, 4, 13, 5).double(), torch.randn(1, 2, 13, 5).double(), mask=Causal()),
}


def pattern(q: Tensor, k: Tensor, **words: Any) -> Weights:
    """The weights of hand-made queries and keys [heads, tokens, dim], at scale 1 and in float64."""
    return Weights.of(called(q[None].double(), k[None].double(), scale=1.0, **words))
