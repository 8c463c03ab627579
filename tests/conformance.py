"""One table of named calls, which every engine computes or refuses in words (`tests/backend/test_conformance.py`).

Sizes are primes where the name does not say otherwise, so that no two axes can be taken for one another.
"""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from regard import (
    Alibi,
    Causal,
    Dilated,
    Documents,
    Global,
    KeyLengths,
    Prefix,
    T5Bias,
    TensorBias,
    TensorMask,
    Tree,
    Window,
    attend,
)
from regard.scores import Additive, Bilinear, Cosine, Dot, Epanechnikov, Gaussian, Laplacian
from tests.oracle import Case, dense, worst


def _tensor(*sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(sum(sizes)))


def _call(
    queries: int, keys: int, heads: int = 4, kv_heads: int = 2, dim: int = 16, v_dim: int | None = None, **words: object
) -> Case:
    q, k = _tensor(2, heads, queries, dim), _tensor(2, kv_heads, keys, dim)
    return Case(q, k, _tensor(2, kv_heads, keys, v_dim or dim), dict(words))


def _unlike(**words: object) -> Case:
    """Queries of 16 numbers and keys of 24."""
    return Case(_tensor(2, 4, 53, 16), _tensor(2, 2, 131, 24), _tensor(2, 2, 131, 8), dict(words))


def _additive(*heads: int) -> Additive:
    """For queries of 16 numbers and keys of 24; with heads, one per query head and one per key head."""
    of_q, of_k = ((heads[0],), (heads[1],)) if heads else ((), ())
    return Additive(_tensor(*of_q, 11, 16) / 4, _tensor(*of_k, 11, 24) / 4, _tensor(*of_q, 11))


CASES: dict[str, Callable[[], Case]] = {
    "dense": lambda: _call(37, 53),
    "multi-head": lambda: _call(37, 53, kv_heads=4),
    "multi-query": lambda: _call(37, 53, kv_heads=1),
    "values of another size": lambda: _call(37, 53, v_dim=24),
    "causal": lambda: _call(131, 131, mask=Causal()),
    "causal, three tiles": lambda: _call(293, 293, mask=Causal()),
    "causal, keys before the queries": lambda: _call(37, 149, mask=Causal()),
    "causal, corner at the top left": lambda: _call(37, 53, mask=Causal(), offset=0),
    "causal, more queries than keys": lambda: _call(53, 37, mask=Causal()),
    "decoding": lambda: _call(1, 307, mask=Causal()),
    "window": lambda: _call(293, 293, mask=Causal() & Window(41)),
    "window longer than the sequence": lambda: _call(131, 131, mask=Causal() & Window(4096)),
    "window and sinks": lambda: _call(293, 293, mask=Causal() & (Window(41) | Prefix(4))),
    "window to both sides": lambda: _call(131, 131, mask=Window(17, 5)),
    "prefix-LM": lambda: _call(131, 131, mask=Causal() | Prefix(torch.tensor([11, 43]))),
    "ragged padding": lambda: _call(53, 131, mask=KeyLengths(torch.tensor([131, 29]))),
    "a row of nothing but padding": lambda: _call(53, 53, mask=Causal() & KeyLengths(torch.tensor([53, 0]))),
    "packed documents": lambda: _call(211, 211, mask=Causal() & Documents(torch.arange(211) // 47)),
    "longformer": lambda: _call(211, 211, mask=Window(19, 19) | Global([0, 101])),
    "strided": lambda: _call(131, 131, mask=Causal() & (Window(13) | Dilated(13))),
    "a tree of drafts": lambda: _call(7, 149, mask=Tree([-1, 0, 0, 1, 1, 2, -1])),
    "any mask": lambda: _call(53, 131, mask=TensorMask(_tensor(2, 4, 53, 131) > 0)),
    "a mask per head": lambda: _call(53, 131, mask=TensorMask(_tensor(4, 53, 131) > 0)),
    "alibi": lambda: _call(131, 131, mask=Causal(), bias=Alibi(4)),
    "alibi, heads no power of two": lambda: _call(131, 131, heads=6, mask=Causal(), bias=Alibi(6)),
    "t5": lambda: _call(131, 131, bias=T5Bias(_tensor(32, 4))),
    "a bias tensor": lambda: _call(53, 131, bias=TensorBias(_tensor(2, 1, 53, 131))),
    "alibi, slopes of the call": lambda: _call(
        53, 131, mask=Causal(), bias=Alibi(slopes=torch.tensor([0.3, 0.05, 0.1, 0.01]))
    ),
    "biases added": lambda: _call(53, 131, bias=TensorBias(_tensor(4, 53, 131)) + Alibi(4)),
    "softcap": lambda: _call(131, 131, mask=Causal(), softcap=2.0),
    "scale": lambda: _call(37, 53, scale=1.0),
    "scale 0, causal": lambda: _call(37, 37, mask=Causal(), scale=0.0),
    "scale below 0, causal": lambda: _call(37, 37, mask=Causal(), scale=-0.5),
    "cosine": lambda: _call(131, 131, mask=Causal(), score=Cosine(), scale=7.0),
    "bilinear": lambda: _unlike(score=Bilinear(_tensor(16, 24) / 4), mask=Causal()),
    "bilinear per head": lambda: _unlike(score=Bilinear(_tensor(4, 16, 24) / 4), scale=0.5, bias=Alibi(4)),
    "additive": lambda: _unlike(score=_additive(), mask=Causal() & Window(41), softcap=3.0),
    "additive per head": lambda: _unlike(
        score=_additive(4, 2), mask=TensorMask(_tensor(4, 53, 131) > 0), sink=_tensor(4)
    ),
    "gaussian": lambda: _call(53, 131, dim=3, score=Gaussian(0.7), mask=Causal()),
    "laplacian": lambda: _call(53, 131, dim=3, score=Laplacian(0.7), mask=KeyLengths(torch.tensor([131, 29]))),
    "epanechnikov, some with no neighbour": lambda: _call(53, 131, dim=2, score=Epanechnikov(0.3), mask=Causal()),
    "sinks learned per head": lambda: _call(131, 131, mask=Causal() & Window(41), sink=_tensor(4)),
    "everything": lambda: _call(
        53,
        211,
        v_dim=24,
        mask=Causal() & (Window(41) | Prefix(4)) & KeyLengths(torch.tensor([211, 190])),
        bias=Alibi(4) + T5Bias(_tensor(32, 4), bidirectional=False),
        softcap=3.0,
        sink=_tensor(4),
        scale=0.3,
    ),
}
"""Each name makes its call anew: a test builds only the call that it needs."""

DIFFERENTIATED = (
    "values of another size",
    "causal, more queries than keys",
    "window and sinks",
    "prefix-LM",
    "a row of nothing but padding",
    "a mask per head",
    "t5",
    "a bias tensor",
    "biases added",
    "softcap",
    "sinks learned per head",
    "everything",
)
"""The cases that try every part of a backward pass."""


def dot_products() -> list[str]:
    """The names of the calls whose scores are dot products, at least once queries and keys are prepared."""
    dots = None | Dot | Cosine | Bilinear
    return [name for name, make in CASES.items() if isinstance(make().words.get("score"), dots)]


@lru_cache(maxsize=64)  # every engine is compared with the same formula
def formula(name: str, dtype: torch.dtype, computed_in: torch.dtype) -> Tensor:
    """The output of a call whose tensors are rounded to `dtype`, from the formula, computed in another type."""
    return dense(CASES[name]().to(dtype), computed_in)[0]


def computes_the_formula(name: str, dtype: torch.dtype, engine: str) -> None:
    """Run a case of the table; the error is at most that of plain PyTorch in its type, or a rounding or two."""
    case = CASES[name]().to(dtype)
    out = attend(case.q, case.k, case.v, **case.words, backend=engine)
    truth, naive = formula(name, dtype, torch.float64), formula(name, dtype, dtype)
    units = {torch.float64: 32, torch.float32: 3}.get(dtype, 0.5) * torch.finfo(dtype).eps * float(case.v.abs().max())
    assert worst(out, truth) <= max((1.5 if dtype == torch.float32 else 1.0) * worst(naive, truth), units)


def differentiated(case: Case, backend: str) -> list[Tensor]:
    """The output and the gradients of q, k, v, of the sink and of the tensors of the bias."""
    leaves = [t.clone().requires_grad_() for t in (case.q, case.k, case.v)]
    words = dict(case.words)
    if isinstance(sink := words.get("sink"), Tensor):
        words["sink"] = sink.clone().requires_grad_()
        leaves.append(words["sink"])
    if (bias := words.get("bias")) is not None:
        leaves += [t.requires_grad_() for t in bias.tensors() if t.is_floating_point()]
    out = attend(*leaves[:3], **words, backend=backend)
    up = torch.linspace(-9, 9, out.numel(), dtype=torch.float64).cos().view(out.shape).to(out.device, out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, up, allow_unused=True)]
