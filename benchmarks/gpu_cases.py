"""The cases of `./bench gpu`: calls by their sizes, masks and storage, and what they should give."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from regard import Alibi, Causal, Documents, KVCache, Mask, Prefix, Window
from regard.cache import Codec, Fp8, Int4, Int8, Paged
from regard.describe.mask import CallSizes, kept_pairs

Tensors = tuple[Tensor, Tensor, Tensor]

CODECS: dict[str, Codec] = {"int8": Int8(), "fp8": Fp8(), "int4": Int4()}


@dataclass(frozen=True)
class GpuCase:
    """A call, with random q, k and v.

    Attributes:
        section, name: where it is listed.
        queries, keys, heads, kv_heads, dim, batch: sizes; the queries are the last tokens.
        causal, window, prefix, document: the mask: k <= q; the last `window` tokens; the first `prefix` tokens, too;
            documents of `document` tokens, one after the other.
        alibi, softcap, sink: a bias by distance; a cap; one learned logit for each head.
        backward: whether the gradients of q, k and v are computed as well.
        page, codec: for decoding, how keys and values are stored; None for tensors of the type of the call.
        quick: whether `--quick` has it.
    """

    section: str
    name: str
    queries: int
    keys: int
    heads: int = 16
    kv_heads: int = 16
    dim: int = 128
    batch: int = 1
    causal: bool = True
    window: int | None = None
    prefix: int | None = None
    document: int | None = None
    alibi: bool = False
    softcap: float | None = None
    sink: bool = False
    backward: bool = False
    page: int | None = None
    codec: str | None = None
    quick: bool = False

    @property
    def group(self) -> int:
        """Query heads for each key head."""
        return self.heads // self.kv_heads

    @property
    def is_plain(self) -> bool:
        """Whether torch needs no mask tensor: nothing beside the causal triangle, or one query that sees all keys."""
        return not (self.window or self.prefix or self.document or self.alibi or self.softcap or self.sink)

    def mask(self) -> Mask | None:
        """The mask as regard takes it."""
        if not self.causal:
            return None
        mask: Mask = Causal()
        if self.window:
            mask &= Window(self.window) | Prefix(self.prefix) if self.prefix else Window(self.window)
        elif self.prefix:
            mask |= Prefix(self.prefix)
        return mask & Documents(torch.arange(self.keys) // self.document) if self.document else mask

    def keep(self, q: Any, k: Any) -> Any:
        """The mask as FlexAttention takes it: whether these positions are kept; `q` counts from the first key."""
        keep = k <= q
        if self.window:
            near = q - k < self.window
            keep = keep & (near | (k < self.prefix) if self.prefix else near)
        elif self.prefix:
            keep = keep | (k < self.prefix)
        return keep & (q // self.document == k // self.document) if self.document else keep

    def tensors(self, dtype: torch.dtype, device: torch.device) -> Tensors:
        """Random q, k and v, [batch, heads, tokens, dim]."""

        def random(heads: int, tokens: int) -> Tensor:
            t = torch.randn(self.batch, heads, tokens, self.dim, dtype=dtype, device=device)
            return t.requires_grad_(self.backward)

        return random(self.heads, self.queries), random(self.kv_heads, self.keys), random(self.kv_heads, self.keys)

    def options(self, device: torch.device) -> dict[str, Any]:
        """The other arguments of `attend` that are not None."""
        options = {
            "mask": self.mask(),
            "bias": Alibi(self.heads) if self.alibi else None,
            "softcap": self.softcap,
            "sink": torch.linspace(-1, 2, self.heads, device=device) if self.sink else None,
        }
        return {name: value for name, value in options.items() if value is not None}

    def stored(self, k: Tensor, v: Tensor) -> tuple[Any, Any]:
        """The keys and values as `attend` gets them."""
        if self.page is None and self.codec is None:
            return k, v
        layout = None if self.page is None else Paged(self.page)
        return KVCache(layout, None if self.codec is None else CODECS[self.codec]).append(k, v)

    def slopes(self) -> Tensor:
        """ALiBi's, one for each head."""
        return 2.0 ** (-8 * torch.arange(1, self.heads + 1) / self.heads)

    def pairs(self) -> int:
        """Kept pairs of queries and keys, over all batch rows and heads."""
        return self.batch * self.heads * sum(_kept_keys(self, q) for q in range(self.keys - self.queries, self.keys))


def _kept_keys(case: GpuCase, q: int) -> int:
    """Keys that the query at position q sees."""
    if not case.causal:
        return case.keys
    first = q // case.document * case.document if case.document else 0
    if case.window is None:
        return q + 1 - first if case.prefix is None else max(q + 1, case.prefix) - first
    near = max(first, q + 1 - case.window)
    return q + 1 - near + max(0, min(case.prefix or 0, near) - first)


def _prefill() -> list[GpuCase]:
    lengths = [2**n << 10 for n in range(1, 7)]
    plain = [
        GpuCase(
            "prefill", f"causal, {n:,}, d {dim}", n, n, heads, heads, dim, max(1, 16384 // n),
            quick=(n, dim) in ((4096, 128), (16384, 128), (16384, 64)),
        )
        for dim, heads in ((128, 16), (64, 32)) for n in lengths
    ]  # fmt: skip
    of_16k: dict[str, dict[str, Any]] = {
        "no mask": {"causal": False, "quick": True},
        "causal, 32/8 heads": {"heads": 32, "kv_heads": 8},
        "window 4,096": {"window": 4096},
        "8 documents of 2,048": {"document": 2048, "quick": True},
        "prefix 2,048": {"prefix": 2048},
        "causal, sinks learned per head": {"sink": True},
        "ALiBi": {"alibi": True},
        "softcap 50": {"softcap": 50.0},
    }
    long: dict[str, tuple[int, dict[str, Any]]] = {
        "causal, 131,072": (1 << 17, {}),
        "window 4,096, 65,536": (1 << 16, {"window": 4096, "quick": True}),
        "window 4,096, 131,072": (1 << 17, {"window": 4096}),
        "window 4,096 and 4 first tokens, 65,536": (1 << 16, {"window": 4096, "prefix": 4}),
        "16 documents of 4,096, 65,536": (1 << 16, {"document": 4096}),
    }
    return [
        *plain,
        *(GpuCase("prefill", f"{name}, 16,384, d 128", 16384, 16384, **more) for name, more in of_16k.items()),
        *(GpuCase("prefill", f"{name}, d 128", tokens, tokens, **more) for name, (tokens, more) in long.items()),
    ]


def _training() -> list[GpuCase]:
    cases = [
        GpuCase("training", f"causal, {n:,}, d {dim}", n, n, heads, heads, dim, 16384 // n, backward=True)
        for dim, heads in ((128, 16), (64, 32))
        for n in (4096, 16384)
    ]
    first = replace(cases[0], quick=True)
    return [
        first,
        *cases[1:],
        replace(cases[1], name="window 4,096, 16,384, d 128", window=4096),
        replace(cases[1], name="8 documents of 2,048, 16,384, d 128", document=2048),
        replace(cases[1], name="causal, 32/8 heads, 16,384, d 128", heads=32, kv_heads=8),
        replace(cases[1], name="causal, sinks learned per head, 16,384, d 128", sink=True),
    ]


def _decode() -> list[GpuCase]:
    one = GpuCase("decode", "tensors", 1, 8192, 32, 8, 128, 64, quick=True)
    forms: dict[str, dict[str, Any]] = {
        "bf16, pages of 16": {"page": 16},
        "int8": {"codec": "int8"},
        "fp8": {"codec": "fp8"},
        "int4": {"codec": "int4"},
        "int8, pages of 128": {"codec": "int8", "page": 128},
        "fp8, pages of 128": {"codec": "fp8", "page": 128},
        "int4, pages of 128": {"codec": "int4", "page": 128},
    }
    stored = [replace(one, name=name, quick="pages of 128" not in name, **more) for name, more in forms.items()]
    return [
        *(replace(case, name=f"{case.name}, 64 x 8,192") for case in (one, *stored)),
        replace(one, name="tensors, window 1,024, 64 x 8,192", window=1024, quick=False),
        replace(one, name="tensors, 1 x 131,072", batch=1, keys=1 << 17, quick=False),
        replace(one, name="bf16, pages of 16, 1 x 131,072", batch=1, keys=1 << 17, page=16, quick=False),
    ]


CASES: tuple[GpuCase, ...] = (*_prefill(), *_training(), *_decode())

SECTIONS = {"prefill": "Prefill", "training": "Training: forward and backward", "decode": "Decoding, 32/8 heads, d 128"}


def shrunk(case: GpuCase) -> GpuCase:
    """The case with sizes that Triton's interpreter computes in a second, to try the way to the result on a CPU."""
    tokens = 150
    return replace(
        case,
        queries=1 if case.queries == 1 else tokens,
        keys=tokens,
        heads=2 * case.group,
        kv_heads=2,
        dim=32,
        batch=min(case.batch, 2),
        window=case.window and 40,
        prefix=case.prefix and 7,
        document=case.document and 50,
        page=case.page and 16,
    )


# ---- the truth ------------------------------------------------------------------------------------------------------

ROWS = 32
"""Queries of a batch row that are compared with the formula, evenly spread."""


def compared_rows(case: GpuCase) -> tuple[list[int], list[int]]:
    """The batch rows (first and last) and the queries that are compared."""
    count = min(case.queries, ROWS)
    queries = [round(i * (case.queries - 1) / max(1, count - 1)) for i in range(count)]
    return sorted({0, case.batch - 1}), queries


def picked(case: GpuCase, t: Tensor) -> Tensor:
    """The compared rows of q or of an output."""
    batches, queries = compared_rows(case)
    return t[batches][:, :, queries]


@torch.no_grad()
def formula(case: GpuCase, tensors: Tensors, options: dict[str, Any]) -> Tensor:
    """The compared rows of the output, float64, from the definition."""
    batches, queries = compared_rows(case)
    k, v = tensors[1], tensors[2]
    rows = picked(case, tensors[0])
    parts = [
        _attention(case, rows[i, None], k[b, None], v[b, None], queries, options, torch.float64)
        for i, b in enumerate(batches)
    ]
    return torch.cat(parts)


def formula_gradients(case: GpuCase, tensors: Tensors, dout: Tensor, options: dict[str, Any]) -> Tensors:
    """The gradients of the first batch row's first key head and its query heads, in float32."""
    cut = [t.detach()[:1, : case.group if i in (0, 3) else 1].float() for i, t in enumerate((*tensors, dout))]
    leaves = [t.requires_grad_() for t in cut[:3]]
    q, k, v = leaves
    out = _attention(case, q, k, v, list(range(case.queries)), options, torch.float32)
    dq, dk, dv = torch.autograd.grad(out, leaves, cut[3])
    return dq, dk, dv


def _attention(
    case: GpuCase, q: Tensor, k: Tensor, v: Tensor, queries: list[int], options: dict[str, Any], dtype: torch.dtype
) -> Tensor:
    """Attention of these queries [1, heads, len(queries), dim], by the formula."""
    heads = q.shape[1]
    position = torch.tensor(queries)[:, None] + case.keys - case.queries
    j, first = torch.arange(case.keys), torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    s = (q.unflatten(1, (-1, case.group)) @ k[:, :, None].mT).flatten(1, 2) / math.sqrt(case.dim)
    if case.softcap:
        s = case.softcap * torch.tanh(s / case.softcap)
    if case.alibi:
        distance = (position - j).abs().to(q.device, dtype)
        s = s - case.slopes()[:heads, None, None].to(q.device, dtype) * distance
    if (mask := case.mask()) is not None:
        sizes = CallSizes(case.batch, case.heads, case.queries, case.keys, case.keys - case.queries)
        keep = kept_pairs(mask.bind(sizes), first, first, position, j).to(q.device)
        s = s.masked_fill(~keep, -torch.inf)
    if case.sink:
        column = options["sink"][:heads, None, None].to(dtype).expand(1, heads, len(queries), 1)
        w = torch.softmax(torch.cat([s, column], dim=3), dim=3)[..., :-1]
    else:
        w = torch.softmax(s, dim=3)
    return (w.unflatten(1, (-1, case.group)) @ v[:, :, None]).flatten(1, 2)


def error(found: Tensor, truth: Tensor) -> float:
    """The norm of the difference by that of the truth; infinite where an element is NaN."""
    off = float((found.detach().to(truth.dtype) - truth).norm() / truth.norm())
    return off if math.isfinite(off) else math.inf


Call = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A library's call of q, k and v; to [batch, heads, queries, dim]."""
