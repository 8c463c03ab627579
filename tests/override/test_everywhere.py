"""`regard.everywhere`: which calls regard runs and which torch does, and its report."""

import os
import re
import subprocess
import sys
import threading
import warnings
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import regard
from regard import RefusalError, native
from regard.bench.rounds import on_threads
from regard.override import decide
from tests.override.of_torch import OF_TORCH, of_size, qkv, reasons, with_math

pytestmark = pytest.mark.skipif(not native.available(), reason="without the compiled library torch runs every call")


@pytest.mark.parametrize(
    "sizes",
    [
        [(64, 128, 64)] * 3,
        [(2, 3, 4, 128, 64)] * 3,
        [(2, 8, 128, 64), (2, 8, 128, 64), (2, 8, 128, 32)],
        [(2, 8, 128, 64), (1, 8, 128, 64), (2, 8, 128, 64)],
    ],
    ids=["three axes", "five axes", "narrow values", "keys that broadcast"],
)
def test_other_shapes_have_torchs_values_and_strides(sizes: list[tuple[int, ...]]):
    inputs = [of_size(*each) for each in sizes]
    theirs = F.scaled_dot_product_attention(*inputs)
    assert reasons(lambda: F.scaled_dot_product_attention(*inputs)) == [None]
    with regard.everywhere():
        ours = F.scaled_dot_product_attention(*inputs)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert ours.stride() == theirs.stride()


def test_heads_in_groups_are_regards():
    q, k = of_size(2, 8, 256, 64), of_size(2, 2, 256, 64)
    theirs = F.scaled_dot_product_attention(q, k, k, enable_gqa=True)
    with regard.everywhere() as caught:
        torch.testing.assert_close(
            F.scaled_dot_product_attention(q, k, k, enable_gqa=True), theirs, atol=1e-5, rtol=1e-5
        )
    assert caught.rows[0].form.why is None


PASSED = {
    "small": (decide.SMALL, lambda: F.scaled_dot_product_attention(*qkv(1, 2, 8, 16))),
    "dropout": (decide.DROPOUT, lambda: F.scaled_dot_product_attention(*qkv(), dropout_p=0.1)),
    "a chosen kernel": (decide.CHOSEN, lambda: with_math(*qkv())),
    "a mask and causal": (decide.MASK_AND_CAUSAL, lambda: masked_and_causal(*qkv())),
    "torch.func": (decide.TRANSFORM, lambda: differentiated(qkv()[0])),
    "a subclass": (decide.KIND, lambda: F.scaled_dot_product_attention(qkv()[0].as_subclass(Own), *qkv()[1:])),
    "fake tensors": (decide.KIND, lambda: faked(*qkv())),
    "weights": (decide.WEIGHTS, lambda: with_weights(of_size(2, 256, 128))),
}  # fmt: skip


def differentiated(x: Tensor) -> Tensor:
    return torch.func.grad(lambda q: F.scaled_dot_product_attention(q, q, q).sum())(x)


def masked_and_causal(*inputs: Tensor) -> None:
    with suppress(RuntimeError):  # torch 2.15 refuses both together on the CPU as well
        F.scaled_dot_product_attention(*inputs, torch.ones(256, 256, dtype=torch.bool), is_causal=True)


class Own(Tensor):
    pass


def faked(*inputs: Tensor) -> Tensor:
    with FakeTensorMode() as mode:
        return F.scaled_dot_product_attention(*map(mode.from_tensor, inputs))


@torch.no_grad()
def with_weights(x: Tensor) -> Tensor:
    return nn.MultiheadAttention(128, 4, batch_first=True).eval()(x, x, x)[1]


@pytest.mark.parametrize("name", PASSED)
def test_what_torch_does_better_or_otherwise_is_passed_on(name: str):
    why, run = PASSED[name]
    assert reasons(run) == [why]


def test_the_report_says_why_a_backend_refused_a_call():
    q, k, v = qkv()
    why = reasons(lambda: F.scaled_dot_product_attention(torch.complex(q, q).conj().imag, k, v))
    assert why == ["native: a tensor is lazily negated, or of a class with a __torch_dispatch__ of its own"]


def test_dropout_draws_what_it_draws_without_regard():
    inputs, found = qkv(), []
    for on in (False, True):
        torch.manual_seed(5)
        with regard.everywhere(on):
            found.append(F.scaled_dot_product_attention(*inputs, dropout_p=0.2))
    assert torch.equal(*found)


@pytest.mark.parametrize(
    "forward", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["vmap", "forward mode"]
)
def test_vmap_and_forward_mode_are_torchs(forward: bool):
    q = of_size(3, 2, 64, 256, 16)

    def attend(x: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(x, x, x)

    def run() -> Tensor:
        return torch.func.jvp(attend, (q,), (q,))[1] if forward else torch.vmap(attend)(q)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own forward-mode tables use what torch deprecates
        theirs = run()
        with regard.everywhere():
            ours = run()
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("sizes", [(1, 2, 8, 16), (2, 8, 1, 64), (8, 16), (2, 8, 16), (0, 2, 8, 16)], ids=str)
@pytest.mark.parametrize("gradients", [False, True])
def test_small_calls_have_the_bits_and_the_strides_of_torch(sizes: tuple[int, ...], gradients: bool):
    found = []
    inputs = [t.transpose(-2, -3).contiguous().transpose(-2, -3) if t.ndim > 2 else t for t in qkv(*sizes)]
    inputs = [t.requires_grad_(gradients) for t in inputs]
    for on in (False, True):
        with regard.everywhere(on):
            for words in ({}, {"is_causal": True}, {"scale": 0.3}):
                out = F.scaled_dot_product_attention(*inputs, **words)
                found.append([out, *(torch.autograd.grad(out.sum(), inputs) if gradients else ())])
    for theirs, ours in zip(found[:3], found[3:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        assert all(a.stride() == b.stride() for a, b in zip(ours, theirs, strict=True) if a.numel())


def test_torchs_own_errors_are_raised():
    q, k, v = qkv()
    found = []
    for on in (False, True):
        with regard.everywhere(on), pytest.raises(RuntimeError) as caught:
            F.scaled_dot_product_attention(q, k[:, :3], v[:, :3])
        found.append(str(caught.value))
    assert found[0] == found[1]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_torchs():
    parts = [of_size(n, 8, 64) for n in (200, 256)]
    q = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    theirs = F.scaled_dot_product_attention(q, q, q)
    with regard.everywhere():
        ours = F.scaled_dot_product_attention(q, q, q)
    assert all(torch.equal(a, b) for a, b in zip(ours.unbind(), theirs.unbind(), strict=True))


def test_autocast_gives_its_dtype():
    inputs = qkv()
    with torch.autocast("cpu", torch.bfloat16):
        theirs = F.scaled_dot_product_attention(*inputs)
        with regard.everywhere() as caught:
            ours = F.scaled_dot_product_attention(*inputs)
    assert ours.dtype == theirs.dtype == torch.bfloat16
    assert caught.rows[0].form.why is None
    torch.testing.assert_close(ours, theirs, atol=0.01, rtol=0.02)


def test_every_thread_is_reached():
    inputs = qkv()

    def run() -> None:
        thread = threading.Thread(target=lambda: F.scaled_dot_product_attention(*inputs))
        thread.start()
        thread.join()

    assert reasons(run) == [None]


def test_the_report_prints_what_was_caught_and_how_much_faster(capsys: pytest.CaptureFixture[str]):
    inputs = qkv()
    with regard.everywhere(report=True) as caught:
        for _ in range(5):
            F.scaled_dot_product_attention(*inputs, is_causal=True)
        F.scaled_dot_product_attention(*inputs, dropout_p=0.5)
    printed = capsys.readouterr().err
    assert printed.startswith("regard.everywhere: 6 calls of attention, 5 run by regard, 1 by torch")
    assert "[2, 8, 256, 64], 256 keys, float32, causal" in printed
    assert decide.DROPOUT in printed
    assert printed.strip() == str(caught)
    assert caught.rows[0].ratio is not None


def test_a_counter_of_flops_counts_no_call_that_is_timed():
    inputs = qkv()
    with regard.everywhere(report=True), FlopCounterMode(display=False) as counter:
        for _ in range(5):
            F.scaled_dot_product_attention(*inputs)
    assert counter.get_total_flops() == 5 * 4 * inputs[0].numel() * 256


def test_the_inner_of_two_reports_leaves_the_outer_one_counting():
    layer, x = nn.MultiheadAttention(128, 4, batch_first=True), of_size(2, 256, 128)
    before = F.multi_head_attention_forward
    with regard.everywhere(report=True) as outer:
        with regard.everywhere(report=True) as inner:
            layer(x, x, x)
        layer(x, x, x)
    assert [sum(row.calls for row in each.rows) for each in (inner, outer)] == [1, 2]
    assert F.multi_head_attention_forward is before


def test_the_report_of_a_block_that_is_entered_twice_counts_until_the_outer_end():
    layer, x = nn.MultiheadAttention(128, 4, batch_first=True), of_size(2, 256, 128)
    before = F.multi_head_attention_forward
    with regard.everywhere(report=True) as caught:
        with caught:
            layer(x, x, x)
        layer(x, x, x)
    assert sum(row.calls for row in caught.rows) == 2
    assert F.multi_head_attention_forward is before


@pytest.mark.exhaustive
def test_caches_of_compiled_code_on_disk_are_kept_apart(tmp_path: Path):
    """The graph that dynamo makes is the same with and without regard, and what torch compiles from it is not."""
    program = (
        "import sys, torch, torch.nn.functional as F\n"
        "if sys.argv[1] == 'on':\n    import regard\n    regard.everywhere()\n"
        "run = torch.compile(lambda q: F.scaled_dot_product_attention(q, q, q) * 2)\n"
        "with torch.profiler.profile() as seen:\n    run(torch.ones(2, 8, 256, 64))\n"
        "print(any('regard' in event.name for event in seen.events()))\n"
    )
    (tmp_path / "program.py").write_text(program)
    found = [
        subprocess.run(
            [sys.executable, str(tmp_path / "program.py"), on],
            env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
            capture_output=True, text=True, check=True,
        ).stdout.split()[-1]
        for on in ("on", "off", "on")
    ]  # fmt: skip
    assert found == ["True", "False", "True"]


def test_the_report_names_weights_that_are_returned_while_gradients_flow():
    layer, x = nn.MultiheadAttention(128, 4, batch_first=True), of_size(2, 256, 128)
    with regard.everywhere(report=True) as caught:
        out, weights = layer(x, x, x)
    assert (out.shape, weights.shape) == ((2, 256, 128), (2, 256, 256))
    assert [(row.form.why, row.form.query) for row in caught.rows] == [(decide.WEIGHTS, (2, 4, 256, 32))]


@pytest.mark.parametrize(
    ("sizes", "dtype", "best", "why"),
    [
        ((1, 8, 1, 128), torch.bfloat16, "avx2", None),
        ((1, 8, 1, 16), torch.bfloat16, "avx2", decide.SMALL),
        ((1, 8, 2, 256), torch.bfloat16, "avx512bf16", None),
        ((1, 8, 3, 100), torch.bfloat16, "avx512bf16", decide.SMALL),
        ((1, 8, 16, 2048), torch.float32, "avx2", None),
        ((1, 8, 16, 2048), torch.float32, "amx", None),
        ((1, 8, 16, 2048), torch.float32, "avx512", decide.FEW_QUERIES),
        ((1, 8, 16, 2048), torch.float32, "avx512bf16", decide.FEW_QUERIES),
        ((1, 8, 32, 2048), torch.float32, "avx512bf16", None),
    ],
)
def test_few_queries_are_run_where_they_are_faster(
    sizes: tuple[int, ...], dtype: torch.dtype, best: str, why: str | None, monkeypatch: pytest.MonkeyPatch
):
    here = native.isas()
    monkeypatch.setattr(decide, "native", SimpleNamespace(isas=lambda: (*here, best)))
    batch, heads, queries, keys = sizes
    q, k = of_size(batch, heads, queries, 64, dtype=dtype), of_size(batch, heads, keys, 64, dtype=dtype)
    with on_threads(1):
        theirs = F.scaled_dot_product_attention(q, k, k)
        assert reasons(lambda: F.scaled_dot_product_attention(q, k, k)) == [why]
        with regard.everywhere():
            ours = F.scaled_dot_product_attention(q, k, k)
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("sizes", "learns", "why"),
    [
        ((16, 12, 1, 64, 400), True, decide.FEW_LEARNED),
        ((16, 12, 3, 64, 400), True, decide.FEW_LEARNED),
        ((16, 12, 3, 64, 400), False, None),
        ((16, 12, 4, 64, 400), True, None),
        ((32, 12, 1, 64, 400), True, None),
    ],
)
def test_training_with_few_queries_is_torchs_unless_there_are_many_keys(
    sizes: tuple[int, ...], learns: bool, why: str | None
):
    batch, heads, queries, dim, keys = sizes
    q = of_size(batch, heads, queries, dim, requires_grad=learns)
    k = of_size(batch, heads, keys, dim, requires_grad=learns)
    with on_threads(1):
        assert reasons(lambda: F.scaled_dot_product_attention(q, k, k)) == [why]


def test_a_small_call_is_decided_anew_when_the_program_chooses_a_kernel_or_other_strides():
    q = of_size(1, 2, 8, 16)
    with regard.everywhere():
        for _ in range(2):
            F.scaled_dot_product_attention(q, q, q)
    assert reasons(lambda: with_math(q, q, q)) == [decide.SMALL]
    columns = of_size(1, 2, 16, 8).transpose(2, 3)
    theirs = F.scaled_dot_product_attention(columns, columns, columns)
    with regard.everywhere():
        for _ in range(2):
            torch.testing.assert_close(F.scaled_dot_product_attention(columns, columns, columns), theirs)


def test_a_known_small_call_with_keys_of_another_device_is_refused_as_by_torch():
    q, k, v = (torch.randn(1, 2, 4, 8) for _ in range(3))
    with regard.everywhere():
        F.scaled_dot_product_attention(q, k, v)
        for keys, values in ((k.to("meta"), v), (k, v.to("meta"))):
            with pytest.raises(RuntimeError, match="same device"):
                F.scaled_dot_product_attention(q, keys, values)


class Intercepting(TorchFunctionMode):
    """Answers each call of attention with zeros."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return torch.zeros_like(args[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("tokens", [5, 256])
def test_a_function_mode_recognises_torchs_attention_by_its_name(tokens: int):
    q, k, v = qkv(2, 8, tokens, 64)
    with regard.everywhere():
        short = F.scaled_dot_product_attention
        with Intercepting():
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        assert F.scaled_dot_product_attention is short
    assert not out.any()
    assert F.scaled_dot_product_attention is OF_TORCH


def test_a_table_of_functions_made_before_finds_torchs_attention():
    table = {F.scaled_dot_product_attention: "found"}
    seen = list[str | None]()

    class Own(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(table.get(func))
            return super().__torch_function__(func, types, args, kwargs)

    q, k, v = qkv()
    with regard.everywhere():
        F.scaled_dot_product_attention(q.as_subclass(Own), k, v)
    assert "found" in seen


def test_a_second_derivative_is_refused_with_the_way_to_have_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(decide.LEAST, torch.float64, 0)
    q, k, v = (t.double().requires_grad_() for t in qkv(2, 256, 16))

    def twice() -> Tensor:
        (first,) = torch.autograd.grad(F.scaled_dot_product_attention(q, k, v).square().sum(), q, create_graph=True)
        return torch.autograd.grad(first.square().sum(), q)[0]

    with sdpa_kernel(SDPBackend.MATH):
        theirs = twice()
    with regard.everywhere():
        with pytest.raises(RefusalError, match=re.escape("sdpa_kernel(torch.nn.attention.SDPBackend.MATH)")):
            twice()
        with sdpa_kernel(SDPBackend.MATH):
            torch.testing.assert_close(twice(), theirs)


def test_several_gradients_at_once_are_refused_with_the_way_to_have_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(decide.LEAST, torch.float32, 0)
    q, k, v = (t.requires_grad_() for t in qkv(1, 4, 64, 64))
    grads = torch.randn(2, 1, 4, 64, 64)

    def batched() -> Tensor:
        return torch.autograd.grad(F.scaled_dot_product_attention(q, k, v), q, grads, is_grads_batched=True)[0]

    with sdpa_kernel(SDPBackend.MATH):
        theirs = batched()
    with regard.everywhere():
        with pytest.raises(RefusalError, match=re.escape("sdpa_kernel(torch.nn.attention.SDPBackend.MATH)")):
            batched()
        with sdpa_kernel(SDPBackend.MATH):
            torch.testing.assert_close(batched(), theirs)
