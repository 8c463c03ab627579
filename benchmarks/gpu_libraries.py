"""The calls of `./bench gpu`: regard's own, and those of other libraries, made for a case.

A maker returns a call of q, k and v, and has done before what a program does once: mask tensors, `BlockMask`, pages. It
raises `Unfit` where the library has no such call, or is not installed.
"""

import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu_cases import Call, GpuCase, Tensors
from regard import RefusalError, attend, explain

LARGEST_MASK = 16384**2
"""Elements of the largest mask tensor that torch gets; it computes with it in every form that its kernels take."""


class Unfit(Exception):  # noqa: N818 - it is a reason, not a fault
    """Why a library is not measured in a case."""


Maker = Callable[[GpuCase, Tensors, dict[str, Any]], Call]


# ---- regard ---------------------------------------------------------------------------------------------------------


def regard_by(backend: str | None) -> Maker:
    """regard's call by a backend, or by the one that it chooses."""

    def make(case: GpuCase, tensors: Tensors, options: dict[str, Any]) -> Call:
        q, k, v = tensors
        try:
            keys, values = case.stored(k, v)
            plan = explain(q, keys, values, **options, backend=backend)
        except RefusalError as refusal:
            raise Unfit("; ".join(line.strip() for line in str(refusal).split("\n")[2:-1])) from None
        if backend is not None and any(step.name == "gather" for step in plan.steps):
            raise Unfit(f"{backend} would copy all keys and values first")
        if case.page is None and case.codec is None:
            return lambda q, k, v: attend(q, k, v, **options, backend=backend)
        return lambda q, k, v: attend(q, keys, values, **options, backend=backend)

    return make


# ---- torch ----------------------------------------------------------------------------------------------------------


def sdpa_by(name: str) -> Maker:
    """torch's `scaled_dot_product_attention` by one of its backends, a member of `SDPBackend`."""

    def make(case: GpuCase, tensors: Tensors, options: dict[str, Any]) -> Call:
        from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: PLC0415

        if case.softcap or case.sink or case.page or case.codec:
            raise Unfit("no softcap, no sink, no pages, no codes")
        size = case.queries * case.keys
        if name == "MATH" and size * case.batch * case.heads > LARGEST_MASK:
            raise Unfit("it keeps all scores in memory")
        if not case.is_plain and size > LARGEST_MASK:
            raise Unfit(f"its mask alone would take {size / 2**30:,.0f} GiB")
        mask = None if case.is_plain else _mask_tensor(case, tensors[0])
        is_causal = case.is_plain and case.causal and case.queries > 1

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(SDPBackend.__members__[name]):
                return F.scaled_dot_product_attention(
                    q, k, v, attn_mask=mask, is_causal=is_causal, enable_gqa=case.group > 1
                )

        with no_kernel():
            call(*tensors)
        return call

    return make


@contextmanager
def no_kernel() -> Generator[None]:
    """Turn torch's error that a backend has no kernel into `Unfit`, with the warning that says why."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as refused:
            if "No available kernel" not in str(refused) and "No viable backend" not in str(refused):
                raise
            reasons = [str(each.message).split("(Triggered")[0].strip() for each in said]
            own = [reason for reason in reasons if "not been runtime disabled" not in reason]
            raise Unfit(f"no kernel: {own[-1][:100] if own else refused}") from None


def _mask_tensor(case: GpuCase, q: Tensor) -> Tensor:
    """The mask as bool, or with a bias as what is added, [1 or heads, queries, keys]."""
    rows, columns = _positions(case, q.device)
    keep = case.keep(rows, columns) if case.causal else torch.ones_like(rows <= columns)
    if not case.alibi:
        return keep
    added = -case.slopes()[:, None, None].to(q.device) * (rows - columns).abs()
    return added.masked_fill(~keep, -torch.inf).to(q.dtype)


def _positions(case: GpuCase, device: torch.device) -> tuple[Tensor, Tensor]:
    first = case.keys - case.queries
    return torch.arange(first, case.keys, device=device)[:, None], torch.arange(case.keys, device=device)


def flex_attention(case: GpuCase, tensors: Tensors, options: dict[str, Any]) -> Call:
    """torch's FlexAttention, compiled (on a CPU as it is), with a `BlockMask` of its own making."""
    from torch.nn.attention import flex_attention as flex  # noqa: PLC0415

    if case.page or case.codec:
        raise Unfit("no codes, and pages only by way of a mask")
    device = tensors[0].device
    attend_by_flex: Any = flex.flex_attention
    if device.type == "cuda":
        attend_by_flex = torch.compile(flex.flex_attention, dynamic=False)
    block_mask, score_mod = flex_mask(case, device), _score_mod(case, device)
    sink, aux = options.get("sink"), flex.AuxRequest(lse=True) if case.sink else None

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = attend_by_flex(
            q, k, v, score_mod=score_mod, block_mask=block_mask, enable_gqa=case.group > 1, return_aux=aux
        )
        if sink is None:
            return found
        out, lse = found[0], found[1].lse
        return out * torch.sigmoid(lse - sink[:, None]).unsqueeze(3).to(out.dtype)

    return call


def flex_mask(case: GpuCase, device: torch.device) -> Any:
    """FlexAttention's `BlockMask` of a case, from every pair; None where nothing is hidden."""
    from torch.nn.attention.flex_attention import create_block_mask  # noqa: PLC0415

    if not case.causal or (case.queries == 1 and case.is_plain):
        return None
    first = case.keys - case.queries

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return case.keep(q + first, k)

    compiled: dict[str, Any] = {"_compile": True} if device.type == "cuda" else {}  # else all pairs are in memory
    return create_block_mask(mask_mod, None, None, case.queries, case.keys, device=device.type, **compiled)


def _score_mod(case: GpuCase, device: torch.device) -> Any:
    cap, first, slopes = case.softcap, case.keys - case.queries, case.slopes().to(device)
    if not cap and not case.alibi:
        return None

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if cap:
            score = cap * torch.tanh(score / cap)
        return score - slopes[h] * (q + first - k).abs() if case.alibi else score

    return score_mod


# ---- packages that are measured where they are installed ------------------------------------------------------------


def _package(name: str) -> Any:
    try:
        return import_module(name)
    except (ImportError, OSError) as absent:  # OSError: a library of CUDA that is not there
        raise Unfit(f"{name} is not installed" if isinstance(absent, ModuleNotFoundError) else str(absent)) from None


def flash_attn(case: GpuCase, tensors: Tensors, options: dict[str, Any]) -> Call:
    """flash-attn 2: [batch, tokens, heads, dim], pages of 256 for paged keys; documents as sequences of their own."""
    package = _package("flash_attn")
    if case.prefix or case.sink or case.codec:
        raise Unfit("no prefix, no sinks, no codes")
    more: dict[str, Any] = {"causal": case.causal, "window_size": (case.window - 1, 0) if case.window else (-1, -1)}
    more |= {"alibi_slopes": case.slopes().to(tensors[0].device)} if case.alibi else {}
    more |= {"softcap": case.softcap} if case.softcap else {}
    if case.queries == 1:
        return _flash_attn_decoding(package, case, tensors, more)
    if case.document is None:
        return lambda q, k, v: package.flash_attn_func(*(_by_token(t) for t in (q, k, v)), **more).transpose(1, 2)
    ends = torch.arange(0, case.keys + 1, case.document, dtype=torch.int32, device=tensors[0].device)

    def documents(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = (_by_token(t).flatten(0, 1) for t in (q, k, v))
        out = package.flash_attn_varlen_func(*rows, ends, ends, case.document, case.document, **more)
        return out.unflatten(0, (case.batch, -1)).transpose(1, 2)

    return documents


def _flash_attn_decoding(package: Any, case: GpuCase, tensors: Tensors, more: dict[str, Any]) -> Call:
    k, v = (_by_token(t).contiguous() for t in tensors[1:])
    if case.page is not None:
        k, v, table = _pages(k, 256), _pages(v, 256), _page_table(case, 256, k.device)
        more = {**more, "block_table": table}
    lengths = torch.full((case.batch,), case.keys, dtype=torch.int32, device=k.device)
    return lambda q, _k, _v: package.flash_attn_with_kvcache(
        _by_token(q), k, v, cache_seqlens=lengths, **more
    ).transpose(1, 2)


def flashinfer(case: GpuCase, tensors: Tensors, options: dict[str, Any]) -> Call:
    """FlashInfer: one sequence for each call of prefill, pages of 16 for decoding."""
    package = _package("flashinfer")
    if case.prefix or case.sink or case.codec or case.document or case.alibi or case.softcap or case.backward:
        raise Unfit("not among the calls that this benchmark makes of it")
    window = case.window - 1 if case.window else -1
    if case.queries > 1:

        def prefill(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            found = [
                package.single_prefill_with_kv_cache(
                    *(t[i].transpose(0, 1) for t in (q, k, v)), causal=case.causal, window_left=window
                )
                for i in range(case.batch)
            ]
            return torch.stack(found).transpose(1, 2)

        return prefill
    page, device = case.page or 16, tensors[0].device
    table = _page_table(case, page, device)
    cache = tuple(_pages(_by_token(t), page) for t in tensors[1:])  # "NHD": [pages, tokens, heads, dim]
    wrapper = package.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(128 << 20, dtype=torch.uint8, device=device), "NHD", use_tensor_cores=case.group >= 4
    )
    starts = torch.arange(case.batch + 1, dtype=torch.int32, device=device) * table.shape[1]
    last = torch.full((case.batch,), page, dtype=torch.int32, device=device)
    wrapper.plan(
        starts, table.flatten(), last, case.heads, case.kv_heads, case.dim, page, window_left=window,
        q_data_type=tensors[0].dtype, kv_data_type=tensors[1].dtype,
    )  # fmt: skip
    return lambda q, _k, _v: wrapper.run(q[:, :, 0], cache)[:, :, None]


def _by_token(t: Tensor) -> Tensor:
    return t.transpose(1, 2)


def _pages(t: Tensor, page: int) -> Tensor:
    """[batch, tokens, heads, dim] as [pages, page, heads, dim]; tokens are a multiple of the page."""
    if t.shape[1] % page:
        raise Unfit(f"{t.shape[1]} tokens are no whole pages of {page}")
    return t.reshape(-1, page, *t.shape[2:]).contiguous()


def _page_table(case: GpuCase, page: int, device: torch.device) -> Tensor:
    each = case.keys // page
    return torch.arange(case.batch * each, dtype=torch.int32, device=device).view(case.batch, each)


LIBRARIES: dict[str, Maker] = {
    "regard": regard_by(None),
    "regard by triton": regard_by("triton"),
    "regard by sdpa": regard_by("sdpa"),
    "regard by flex": regard_by("flex"),
    "cuDNN": sdpa_by("CUDNN_ATTENTION"),
    "flash": sdpa_by("FLASH_ATTENTION"),
    "efficient": sdpa_by("EFFICIENT_ATTENTION"),
    "math": sdpa_by("MATH"),
    "FlexAttention": flex_attention,
    "flash-attn": flash_attn,
    "FlashInfer": flashinfer,
}
"""Their makers by name: regard's, torch's (by backend of `scaled_dot_product_attention`), and other packages'."""

COMPILING = ("regard by flex", "FlexAttention")
"""Libraries that compile a kernel for each case, which takes many seconds."""
