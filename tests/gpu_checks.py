"""The table of `tests/conformance.py`, and stored keys, on a GPU: by the backends named, beside the float64 definition.

    python -m tests.gpu_checks --device cuda --of "triton bfloat16" [--after NAME]

It needs no pytest, so that it runs on a machine that has torch and little else; `scripts/gpu_first_run.py` starts it.
The first line of JSON has the names of the checks; each check prints two: its name before it starts, and what came of
it. So a check that ends the process is known by its name. After a fault in a kernel CUDA refuses further calls, and the
process ends with status 3.
"""

import argparse
import json
import math
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard import Alibi, Causal, KVCache, Prefix, RefusalError, Rope, TensorBias, Window, attend, attend_state
from regard.cache import Codec, Fp8, Int4, Int8, Latent, Paged, Rolling, StoredTensor
from regard.describe.serialized import deserialize
from regard.describe.spec import Spec
from tests.conformance import CASES, differentiated, dot_products
from tests.oracle import Case, dense, worst

LOST = 3
"""The exit status after which a new process must go on."""


class Found(NamedTuple):
    """What came of a check: the error of each result, in units of its limit, and what was refused."""

    errors: dict[str, float]
    note: str = ""


Run = Callable[[torch.device], Found]


@dataclass(frozen=True)
class Check:
    """A check by its name, "triton bfloat16 causal"."""

    name: str
    run: Run


# ---- the table ------------------------------------------------------------------------------------------------------

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}

ENGINES = ("triton", "sdpa", "flex")

MASKS_OF_TENSORS = ("prefix-LM", "ragged padding", "packed documents", "a mask per head")


LARGE_HEADS = (80, 128, 256)
"""Channels of a head with which kernels have other blocks than with those of the table."""

BESIDE: dict[str, Callable[[], dict[str, Any]]] = {
    "causal": lambda: {"mask": Causal()},
    "window": lambda: {"mask": Causal() & Window(130)},
    "a bias tensor": lambda: {"mask": Causal(), "bias": TensorBias(draw(4, 307, 307))},
    "alibi and softcap": lambda: {"mask": Causal(), "bias": Alibi(4), "softcap": 3.0},
}
"""What calls of such heads have besides q, k and v."""


def with_large_heads(dim: int, beside: str) -> Case:
    """A few tiles of queries, two for each head of keys."""
    q, k, v = (draw(1, heads, 307 + i, dim)[:, :, :307] for i, heads in enumerate((4, 2, 2)))
    return Case(q, k, v, BESIDE[beside]())


def conforms(
    engine: str, dtype: torch.dtype, make: Callable[[], Case], device: torch.device, *, move_mask: bool
) -> Found:
    """The output and the gradients of a case, or why they are refused."""
    case = make().to(dtype)
    truth, naive = dense(case)[0], dense(case, dtype)[0]
    on = moved(case, device, move_mask=move_mask)
    try:
        out = attend(on.q, on.k, on.v, **on.words, backend=engine)
    except RefusalError as refusal:
        return Found({}, "refused: " + "; ".join(line.strip() for line in str(refusal).split("\n")[2:-1]))
    eps = torch.finfo(dtype).eps
    units = (4 if dtype == torch.float32 else 0.5) * eps * float(case.v.abs().max())
    limit = max((2.0 if dtype == torch.float32 else 1.0) * worst(naive, truth), units)
    errors = {"out": worst(out.cpu(), truth) / limit}
    try:
        grads = differentiated(on, engine)[1:]
    except RefusalError:
        return Found(errors, "gradients refused")
    exact = differentiated(moved(case.to(torch.float64), torch.device("cpu"), move_mask=False), "reference64")[1:]
    names = ("dq", "dk", "dv", *(f"gradient {i}" for i in range(3, len(grads))))
    step = 2e-5 if dtype == torch.float32 else 4 * eps
    for label, found, true in zip(names, grads, exact, strict=True):
        size = max(1.0, float(true.abs().max())) if true.numel() else 1.0
        errors[label] = worst(found.cpu(), true) / (step * size)
    return Found(errors)


def moved(case: Case, device: torch.device, *, move_mask: bool) -> Case:
    """The case on a device, with tensors of its own; tensors of masks only if that is wanted."""

    def move(name: str, word: Any) -> Any:
        if isinstance(word, Tensor):
            return word.detach().clone().to(device)
        if not isinstance(word, Spec) or (name == "mask" and not move_mask):
            return word
        tensors, ints = list[Tensor](), list[int]()
        text = word.serialize(tensors, ints)
        return deserialize(text, [t.detach().clone().to(device) for t in tensors], ints)

    q, k, v = (t.to(device) for t in (case.q, case.k, case.v))
    return Case(q, k, v, {name: move(name, word) for name, word in case.words.items()})


# ---- decoding, and what holds beside the numbers ---------------------------------------------------------------------

CODECS: dict[str, Codec | None] = {
    "plain": None,
    "int8": Int8(),
    "fp8": Fp8(),
    "int4": Int4(),
    "rotated": Int8(rotate=True),
}

LATENTS: dict[str, Codec | None] = {"plain": None, "int8": Int8(16, 64), "fp8": Fp8(16, 64), "int4": Int4(16, 64)}
"""Of a latent with 576 channels."""


def decodes(dtype: torch.dtype, codec: Codec | None, page: int | None, queries: int, device: torch.device) -> Found:
    """The last queries over stored keys and values of another length in the second append."""
    cache = KVCache(None if page is None else Paged(page), codec)
    q, k, v = (draw(2, heads, tokens, 64).to(dtype) for heads, tokens in ((8, queries), (2, 1100), (2, 1100)))
    cache.append(k[:, :, :1099].to(device), v[:, :, :1099].to(device))
    keys, values = cache.append(k[:, :, 1099:].to(device), v[:, :, 1099:].to(device))
    errors = dict[str, float]()
    for name, mask in {"causal": Causal(), "window": Causal() & (Window(700) | Prefix(4))}.items():
        out = attend(q.to(device), keys, values, mask=mask, backend="triton").cpu()
        case = Case(q, as_tensor(keys).cpu(), as_tensor(values).cpu(), {"mask": mask})
        truth, naive = dense(case)[0], dense(case, dtype)[0]
        if dtype == torch.float32:  # a product is three of TF32, whose errors are parts of each summand, not of the sum
            units = 8 * torch.finfo(dtype).eps * float(dense(replace(case, v=case.v.abs()))[0].max())
        else:
            units = (2**-6 if codec is not None else 4 * torch.finfo(dtype).eps) * float(truth.abs().max())
        errors[name] = worst(out, truth) / max(2 * worst(naive, truth), units)
    return Found(errors)


def decodes_latents(dtype: torch.dtype, codec: Codec | None, device: torch.device) -> Found:
    """The absorbed decoding of MLA: values are the first channels of the keys, 512 of 576."""
    cache = KVCache(Latent(512), codec)
    q, entries = draw(2, 16, 1, 576).to(dtype) / 4, draw(2, 1, 300, 576).to(dtype)
    keys, values = cache.append(entries.to(device))
    out = attend(q.to(device), keys, values, mask=Causal() & Window(200), backend="triton").cpu()
    case = Case(q, as_tensor(keys).cpu(), as_tensor(values).cpu(), {"mask": Causal() & Window(200)})
    truth, naive = dense(case)[0], dense(case, dtype)[0]
    step = 2**-6 if codec is not None and dtype != torch.float32 else torch.finfo(dtype).eps * 4
    return Found({"out": worst(out, truth) / max(2 * worst(naive, truth), step * float(truth.abs().max()))})


def as_tensor(t: Tensor | StoredTensor) -> Tensor:
    """Stored keys or values, decoded."""
    return t if isinstance(t, Tensor) else t.dense()


def draw(*sizes: int) -> Tensor:
    """Random numbers, the same on every machine."""
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(sum(sizes)))


def hides_what_is_not_finite(device: torch.device) -> Found:
    """Hidden NaN and inf change no bit; visible ones reach their rows."""
    q, k, v = (draw(1, 2, 300 + i, 64)[:, :, :300].bfloat16().to(device) for i in range(3))
    clean = attend(q, k, v, mask=Causal(), backend="triton")
    k[0, 0, 290, 3] = v[0, 1, 299, 5] = torch.nan
    out = attend(q, k, v, mask=Causal(), backend="triton")
    same = torch.equal(out[:, 0, :290], clean[:, 0, :290]) and torch.equal(out[:, 1, :299], clean[:, 1, :299])
    seen = bool(out[:, 0, 290:].isnan().all()) and bool(out[0, 1, 299, 5].isnan())
    return Found({"hidden": 0.0 if same else math.inf, "visible": 0.0 if seen else math.inf})


POISONED = ("k", "v", "q", "dout")


def repairs_what_torch_lets_through(heads: int, tokens: int, dim: int, device: torch.device) -> Found:
    """NaN in one token of each: outputs, log-sum-exp and gradients of `sdpa` are NaN where those of `triton` are.

    Elsewhere they are those of `triton`, to a rounding.
    """
    if device.type != "cuda":
        return Found({}, "refused: torch's kernels for CUDA are called on a GPU alone")
    clean = [draw(2, n, tokens + i, dim)[:, :, :tokens].bfloat16() for i, n in enumerate((heads, 2, 2, heads))]
    errors, at = dict[str, float](), tokens * 3 // 4
    for name in (None, *POISONED):
        q, k, v, dout = (t.clone().to(device) for t in clean)
        if name is not None:
            {"q": q, "k": k, "v": v, "dout": dout}[name][0, 0, at, 3] = torch.nan
        leaves, both = [t.requires_grad_() for t in (q, k, v)], list[list[Tensor]]()
        for backend in ("sdpa", "triton"):
            out = attend(q, k, v, mask=Causal(), backend=backend)
            state = attend_state(*(t.detach() for t in leaves), mask=Causal(), backend=backend)
            both.append([out.detach(), state.lse, *torch.autograd.grad(out, leaves, dout)])
        for result, one, true in zip(("out", "lse", "dq", "dk", "dv"), *both, strict=True):
            same = torch.equal(one.isnan(), true.isnan())
            size = max(1.0, float(true.nan_to_num().abs().max()))
            step = 4 * torch.finfo(torch.bfloat16).eps * size
            off = worst(one.nan_to_num().cpu(), true.nan_to_num().cpu()) / step
            errors[f"{result}, {name or 'nothing'} with NaN"] = off if same else math.inf
    return Found(errors)


def weighs_rows_that_a_finite_bias_hides(queries: int, device: torch.device) -> Found:
    """Rows whose keys all have the same number of -1e9 or less: outputs and, unless it decodes, gradients."""
    keys = 1100 if queries == 1 else 300  # more than a span of keys, or a few tiles
    q, k, v = (draw(2, 4, n + i, 64)[:, :, :n].to(device) for i, n in enumerate((queries, keys, keys)))
    bias = draw(1, 1, queries, keys).to(device)
    bias[:, :, : max(1, queries // 2)] = torch.finfo(torch.float32).min
    leaves = [t.requires_grad_(queries > 64) for t in (q, k, v, bias)]
    found = attend(q, k, v, bias=TensorBias(bias), backend="triton")
    exact = (q.double() @ k.double().mT / 8 + bias.double()).softmax(-1) @ v.double()
    errors = {"out": worst(found.detach().cpu(), exact.detach().cpu()) / 2e-5}
    if queries > 64:
        dout = draw(*found.shape).to(device)
        both = torch.autograd.grad(found, leaves, dout), torch.autograd.grad(exact, leaves, dout.double())
        for name, one, true in zip(("dq", "dk", "dv", "dbias"), *both, strict=True):
            errors[name] = worst(one.cpu(), true.cpu()) / (2e-5 * max(1.0, float(true.abs().max())))
    return Found(errors)


def repeats_its_bits(device: torch.device) -> Found:
    """A row has the same bits in any batch and in each run, in prefill and in decoding; gradients in each run."""
    q, k, v = (draw(2, 4, 300 + i, 64)[:, :, :300].bfloat16().to(device).requires_grad_() for i in range(3))
    words: dict[str, Any] = {"mask": Causal() & Window(170), "backend": "triton"}
    whole = attend(q, k, v, **words)
    grads = [torch.autograd.grad(attend(q, k, v, **words).float().square().sum(), (q, k, v)) for _ in range(2)]
    one = attend(q[:, :, -1:].detach(), k.detach(), v.detach(), **words)
    rest = attend(q[1:, :, -1:].detach(), k[1:].detach(), v[1:].detach(), **words)
    same = {
        "runs": torch.equal(whole, attend(q, k, v, **words)),
        "batch": torch.equal(whole[1:2], attend(q[1:2], k[1:2], v[1:2], **words)),
        "gradients": all(torch.equal(a, b) for a, b in zip(*grads, strict=True)),
        "decoding": torch.equal(one[1:], rest),
    }
    return Found({name: 0.0 if is_same else math.inf for name, is_same in same.items()})


def is_captured(device: torch.device) -> Found:
    """A decoding step in a CUDA graph reads what is in its tensors when it is replayed."""
    if device.type != "cuda":
        return Found({}, "refused: a processor has no CUDA graphs")
    q, k, v = (draw(4, heads, tokens, 64).bfloat16().to(device) for heads, tokens in ((8, 1), (2, 900), (2, 900)))

    def step() -> Tensor:
        return attend(q, k, v, mask=Causal() & Window(500), backend="triton")

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    q.copy_(draw(4, 8, 1, 63 + 1).flip(0))
    graph.replay()
    return Found({"replay": 0.0 if torch.equal(out, step()) else math.inf})


STEPS: dict[str, tuple[dict[str, Any], int | None]] = {
    "contiguous": ({}, 400),
    "rolling": ({"layout": Rolling(256, sinks=4, rope=Rope(64))}, None),
    "pages": ({"layout": Paged(16)}, 400),
    "int8": ({"codec": Int8()}, 400),
    "int4": ({"codec": Int4()}, 400),
    "rolling int8": ({"layout": Rolling(256, sinks=4, rope=Rope(64)), "codec": Int8()}, None),
    "pages of int4": ({"layout": Paged(16), "codec": Int4()}, 400),
}


def steps_are_replayed(options: dict[str, Any], capacity: int | None, device: torch.device) -> Found:
    """Steps of a `StepCache` from a CUDA graph have the outputs of the cache itself; a processor calls them."""
    cache = KVCache(**options)
    cache.append(*(draw(2, 2, 300 + i, 64)[:, :, :300].bfloat16().to(device) for i in range(2)))
    steps = cache.steps(capacity)
    q, k, v = (draw(2, heads, 1, 64).bfloat16().to(device) for heads in (8, 2, 2))

    def step() -> Tensor:
        return attend(q, *steps.append(k, v), mask=Causal(), backend="triton")

    out = step()  # which compiles the kernels
    steps.position.sub_(1)
    graph = None
    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step()
    error = 0.0
    for n in range(2 if graph is None else 70):
        for t, seed in zip((q, k, v), range(3), strict=True):
            t.copy_(draw(*t.shape[:2], 2 + 3 * n + seed, 64)[:, :, -1:])
        if graph is None:
            out = step()
        else:
            graph.replay()
        exact = attend(q, *cache.append(k, v), mask=Causal(), backend="triton")
        error = max(error, worst(out.cpu(), exact.cpu()) / 2**-7)
    return Found({"replay": error})


# ---- all of them ----------------------------------------------------------------------------------------------------


def checks() -> Iterator[Check]:
    """Every check."""
    dots = dot_products()
    for engine in ENGINES:
        for kind, dtype in DTYPES.items():
            for name in dots:
                yield Check(f"{engine} {kind} {name}", partial(conforms, engine, dtype, CASES[name], move_mask=False))
    for kind, dtype in DTYPES.items():
        for dim in LARGE_HEADS:
            for beside in BESIDE:
                case = partial(with_large_heads, dim, beside)
                label = f"triton {kind} heads of {dim}, {beside}"
                yield Check(label, partial(conforms, "triton", dtype, case, move_mask=False))
    case = partial(with_large_heads, 128, "causal")
    label = "sdpa bfloat16 heads of 128, causal"
    yield Check(label, partial(conforms, "sdpa", torch.bfloat16, case, move_mask=False))
    for name in MASKS_OF_TENSORS:
        for kind, dtype in DTYPES.items():
            label = f"decode masks on the device: {name} {kind}"
            yield Check(label, partial(conforms, "triton", dtype, CASES[name], move_mask=True))
    for codec_name, codec in CODECS.items():
        for page in (None, 16):
            for kind, dtype in DTYPES.items():
                for queries in (1, 7):
                    where = "contiguous" if page is None else f"pages of {page}"
                    label = f"decode {codec_name} {where} {kind} {queries}"
                    yield Check(label, partial(decodes, dtype, codec, page, queries))
    for codec_name, codec in LATENTS.items():
        for kind, dtype in DTYPES.items():
            yield Check(f"decode latent {codec_name} {kind}", partial(decodes_latents, dtype, codec))
    for queries in (1, 130):
        run_of = partial(weighs_rows_that_a_finite_bias_hides, queries)
        yield Check(f"decode rows that a finite bias hides {queries}", run_of)
    yield Check("decode hidden NaN", hides_what_is_not_finite)
    for heads, tokens, dim in ((2, 300, 64), (8, 300, 128), (8, 512, 128)):
        label = f"decode hidden NaN by sdpa {heads} {tokens} {dim}"
        yield Check(label, partial(repairs_what_torch_lets_through, heads, tokens, dim))
    yield Check("decode same bits", repeats_its_bits)
    yield Check("decode CUDA graph", is_captured)
    for name, (options, capacity) in STEPS.items():
        yield Check(f"decode steps {name}", partial(steps_are_replayed, options, capacity))


KERNELS = (
    "triton bfloat16 everything",
    "triton float32 everything",
    "triton bfloat16 a bias tensor",
    *(f"decode {codec} pages of 16 bfloat16 1" for codec in CODECS),
    "decode plain contiguous float32 7",
    "decode latent plain bfloat16",
    "decode latent int8 bfloat16",
    "decode rows that a finite bias hides 130",
)
"""One small call of each kernel, for compute-sanitizer."""


def wanted(of: Sequence[str], shard: tuple[int, int], after: str | None) -> list[Check]:
    """The checks whose names begin with one of `of` ("kernels": those of KERNELS), a part of them, after a name."""
    exact = KERNELS if "kernels" in of else ()
    found = [check for check in checks() if check.name in exact or check.name.startswith(tuple(of))]
    found = found[shard[0] :: shard[1]]
    names = [check.name for check in found]
    return found[names.index(after) + 1 :] if after in names else found


def run(check: Check, device: torch.device) -> dict[str, Any]:
    """What came of a check, for JSON."""
    start = time.monotonic()
    result: dict[str, Any] = {"check": check.name, "ok": False}
    try:
        torch.manual_seed(0)
        found = check.run(device)
        result |= {"ok": all(x <= 1 for x in found.errors.values()), "errors": found.errors, "note": found.note}
    except Exception as fault:  # noqa: BLE001 - whatever it is, the other checks are still run
        last = traceback.extract_tb(fault.__traceback__)[-1]
        result |= {
            "note": f"{type(fault).__name__}: {str(fault).strip()[:600]}",
            "at": f"{last.filename}:{last.lineno}",
        }
        result["lost"] = "CUDA error" in str(fault)
    return result | {"seconds": round(time.monotonic() - start, 2)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run checks; 0 whatever they find, 3 where the GPU refuses further calls."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu_checks", description="Checks on a device, as JSON lines."
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--of", nargs="+", default=["triton", "sdpa", "flex", "decode"], help="beginnings of names")
    parser.add_argument("--shard", nargs=2, type=int, default=(0, 1), metavar=("I", "N"), help="the I-th of N parts")
    parser.add_argument("--after", help="go on after this check")
    options = parser.parse_args(arguments)
    torch.set_num_threads(2)  # other processes compute beside this one
    planned = wanted(options.of, tuple(options.shard), options.after)
    print(json.dumps({"planned": [check.name for check in planned]}), flush=True)
    for check in planned:
        print(json.dumps({"start": check.name}), flush=True)
        result = run(check, torch.device(options.device))
        result["errors"] = {name: x if math.isfinite(x) else str(x) for name, x in result.get("errors", {}).items()}
        print(json.dumps(result), flush=True)
        if result.get("lost"):
            return LOST
    return 0


if __name__ == "__main__":
    sys.exit(main())
