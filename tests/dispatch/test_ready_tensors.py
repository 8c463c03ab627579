"""Ready calls with a bias, a sink, or a mask with tensors: the short way only where nothing that matters differs."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from regard import (
    Alibi,
    Causal,
    Dilated,
    Documents,
    KeyLengths,
    Mask,
    MaskFunction,
    Prefix,
    ProblemError,
    T5Bias,
    TensorBias,
    TensorMask,
    Window,
    attend,
)
from regard.dispatch import ready, ready_tensors

pytestmark = pytest.mark.usefixtures("no_plans")

BATCH, HEADS, KV_HEADS, QUERIES, KEYS, DIM = 2, 4, 2, 3, 37, 16


def _tensors(queries: int = QUERIES, keys: int = KEYS, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    sizes = (HEADS, queries), (KV_HEADS, keys), (KV_HEADS, keys)
    return tuple(torch.randn(BATCH, h, n, DIM, dtype=dtype) for h, n in sizes)


def _ready(q: Tensor, k: Tensor, v: Tensor, **words: Any) -> Tensor | None:
    names = ("mask", "scale", "softcap", "offset", "backend", "bias", "sink")
    return ready.run(q, k, v, *(words.get(name) for name in names))[1]


def _reference(q: Tensor, k: Tensor, v: Tensor, **words: Any) -> Tensor:
    return attend(q.double(), k.double(), v.double(), backend="reference", **words)


def _check(q: Tensor, k: Tensor, v: Tensor, **words: Any) -> None:
    """The call is ready and right."""
    found = _ready(q, k, v, **words)
    assert found is not None
    error = (found.double() - _reference(q, k, v, **words)).abs().max()
    assert error < (2e-2 if q.dtype == torch.bfloat16 else 1e-5)


def _hidden(*sizes: int) -> Tensor:
    keeps = torch.rand(sizes) < 0.7
    keeps[..., 0] = True
    return keeps


WORDS: dict[str, Callable[[], dict[str, Any]]] = {
    "a bias": lambda: {"bias": TensorBias(torch.randn(BATCH, HEADS, QUERIES, KEYS))},
    "a bias of two axes": lambda: {"bias": TensorBias(torch.randn(QUERIES, KEYS))},
    "a bias of keys": lambda: {"bias": TensorBias(torch.randn(BATCH, 1, 1, KEYS)), "mask": Causal()},
    "a bias of queries": lambda: {"bias": TensorBias(torch.randn(1, HEADS, QUERIES, 1)), "mask": Causal() & Window(9)},
    "an expanded bias": lambda: {"bias": TensorBias(torch.randn(1, 1, 1, KEYS).expand(BATCH, HEADS, QUERIES, KEYS))},
    "a transposed bias": lambda: {"bias": TensorBias(torch.randn(KEYS, QUERIES).mT), "softcap": 5.0},
    "a bias of bf16": lambda: {"bias": TensorBias(torch.randn(HEADS, 1, KEYS, dtype=torch.bfloat16)), "offset": 7},
    "ALiBi": lambda: {"bias": Alibi(HEADS), "mask": Causal()},
    "ALiBi with an offset": lambda: {"bias": Alibi(HEADS), "mask": Causal(), "offset": 11},
    "slopes": lambda: {"bias": Alibi(slopes=torch.rand(HEADS)), "mask": Causal()},
    "slopes of bf16": lambda: {"bias": Alibi(slopes=torch.rand(HEADS, dtype=torch.bfloat16))},
    "T5": lambda: {"bias": T5Bias(torch.randn(32, HEADS)), "offset": 3},
    "T5 of one direction": lambda: {
        "bias": T5Bias(torch.randn(16, HEADS, dtype=torch.float64), bidirectional=False, max_distance=20),
        "mask": Causal(),
    },
    "ALiBi and a bias": lambda: {"bias": Alibi(HEADS) + TensorBias(torch.randn(QUERIES, KEYS)), "mask": Causal()},
    "three biases": lambda: {
        "bias": T5Bias(torch.randn(32, HEADS)) + TensorBias(torch.randn(BATCH, 1, 1, KEYS)) + Alibi(HEADS),
        "mask": TensorMask(_hidden(QUERIES, KEYS)),
    },
    "ALiBi and slopes": lambda: {"bias": Alibi(HEADS) + Alibi(slopes=torch.rand(HEADS)), "sink": torch.randn(HEADS)},
    "a sink": lambda: {"sink": torch.randn(HEADS), "mask": Causal()},
    "a sink of float64": lambda: {"sink": torch.randn(HEADS, dtype=torch.float64)},
    "padding": lambda: {"mask": TensorMask(_hidden(BATCH, 1, 1, KEYS))},
    "a mask of all pairs": lambda: {"mask": TensorMask(_hidden(BATCH, HEADS, QUERIES, KEYS)), "scale": 0.3},
    "causal and padding": lambda: {"mask": Causal() & TensorMask(_hidden(BATCH, 1, 1, KEYS))},
    "two tensors and more": lambda: {
        "mask": TensorMask(_hidden(BATCH, 1, 1, KEYS)) & Causal() & TensorMask(_hidden(QUERIES, KEYS)) & Window(20)
    },
    "an expanded mask": lambda: {"mask": TensorMask(_hidden(1, 1, 1, KEYS).expand(BATCH, HEADS, QUERIES, KEYS))},
    "a transposed mask": lambda: {"mask": (Window(30) | Prefix(2)) & TensorMask(_hidden(KEYS, QUERIES).mT)},
    "a mask of queries": lambda: {"mask": TensorMask(_hidden(QUERIES, 1)), "sink": torch.randn(HEADS)},
    "a mask and every second key": lambda: {"mask": Dilated(2) & TensorMask(_hidden(BATCH, 1, 1, KEYS))},
    "lengths": lambda: {"mask": Causal() & KeyLengths(torch.tensor([9, 36]))},
    "documents": lambda: {"mask": Causal() & Documents(torch.arange(KEYS) // 8)},
    "a function": lambda: {"mask": MaskFunction(lambda b, h, q, k: (q - k) % 3 != 1)},
    "all": lambda: {
        "mask": TensorMask(_hidden(BATCH, 1, QUERIES, KEYS)),
        "bias": TensorBias(torch.randn(HEADS, QUERIES, KEYS)),
        "sink": torch.randn(HEADS),
    },
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", WORDS)
def test_a_repeated_call_is_ready_and_gives_the_same_bits(name: str, dtype: torch.dtype) -> None:
    (q, k, v), words = _tensors(dtype=dtype), WORDS[name]()
    first = attend(q, k, v, **words)
    _check(q, k, v, **words)
    assert torch.equal(attend(q, k, v, **words), first)
    by_token = tuple(t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
    assert torch.equal(attend(*by_token, **words), first)


@pytest.mark.parametrize("name", WORDS)
def test_elements_that_change_are_read_anew(name: str) -> None:
    (q, k, v), words = _tensors(), WORDS[name]()
    attend(q, k, v, **words)
    other = WORDS[name]()
    for t in (q, k, v):
        t.mul_(0.5)
    assert torch.allclose(attend(q, k, v, **other).double(), _reference(q, k, v, **other), atol=1e-5)


@pytest.mark.parametrize("name", ["padding", "causal and padding", "a mask of all pairs"])
def test_a_table_that_was_written_to_is_read_anew(name: str) -> None:
    (q, k, v), words = _tensors(), WORDS[name]()
    attend(q, k, v, **words)
    _check(q, k, v, **words)
    (tensor,) = words["mask"].tensors()
    tensor[..., 1:20] = False
    _check(q, k, v, **words)


@pytest.mark.parametrize("name", ["lengths", "documents", "a mask and every second key"])
def test_masks_that_are_known_by_their_content_and_were_written_to_are_others(name: str) -> None:
    (q, k, v), words = _tensors(), WORDS[name]()
    attend(q, k, v, **words)
    _check(q, k, v, **words)
    (tensor,) = words["mask"].tensors()
    tensor[1:] = 5
    assert _ready(q, k, v, **words) is None
    assert torch.allclose(attend(q, k, v, **words).double(), _reference(q, k, v, **words), atol=1e-5)
    _check(q, k, v, **words)


def test_a_bias_that_was_written_to_is_read_anew() -> None:
    (q, k, v), table, sink = _tensors(), torch.randn(QUERIES, KEYS), torch.randn(HEADS)
    words: dict[str, Any] = {"bias": TensorBias(table), "sink": sink}
    attend(q, k, v, **words)
    table.neg_()
    sink.add_(3)
    _check(q, k, v, **words)


@pytest.mark.parametrize(
    "write",
    [torch.Tensor.neg_, lambda t: t.data.zero_(), lambda t: t.numpy().__setitem__(3, 9)],
    ids=["by torch", "by .data", "by NumPy"],
)
def test_tables_and_slopes_that_were_written_to_are_read_anew(write: Callable[[Tensor], object]) -> None:
    (q, k, v), table, slopes = _tensors(), torch.randn(32, HEADS), torch.rand(HEADS)
    words: dict[str, Any] = {"bias": T5Bias(table) + Alibi(slopes=slopes) + TensorBias(torch.randn(1, KEYS))}
    attend(q, k, v, **words)
    _check(q, k, v, **words)
    write(table)
    _check(q, k, v, **words)
    slopes.neg_()
    _check(q, k, v, **words)


@pytest.mark.parametrize("shape", [(1, 1, QUERIES, KEYS), (BATCH, 1, 1, 1), (HEADS, 1, KEYS), (KEYS,), ()])
def test_a_bias_that_broadcasts_otherwise_is_another_call(shape: tuple[int, ...]) -> None:
    q, k, v = _tensors()
    attend(q, k, v, bias=TensorBias(torch.randn(BATCH, HEADS, QUERIES, KEYS)))
    words: dict[str, Any] = {"bias": TensorBias(torch.randn(shape))}
    assert _ready(q, k, v, **words) is None
    attend(q, k, v, **words)
    _check(q, k, v, **words)


def test_steps_of_decoding_are_ready() -> None:
    for keys in range(30, 34):
        q, k, v = _tensors(1, keys)
        for words in (
            {"bias": TensorBias(torch.randn(BATCH, 1, 1, keys)), "mask": Causal()},
            {"bias": Alibi(HEADS), "mask": Causal()},
            {"bias": T5Bias(torch.randn(32, HEADS), bidirectional=False), "mask": Causal()},
            {"bias": Alibi(HEADS) + TensorBias(torch.randn(BATCH, 1, 1, keys)), "mask": Causal()},
            {"sink": torch.randn(HEADS), "mask": Causal()},
        ):
            if keys > 30:
                _check(q, k, v, **words)
            attend(q, k, v, **words)


@pytest.mark.parametrize(
    "of_lengths", [KeyLengths, lambda lengths: ~KeyLengths(lengths), Prefix], ids=["lengths", "starts", "prefixes"]
)
def test_lengths_are_ready_for_any_number_of_keys_and_any_offset(of_lengths: Callable[[Tensor], Mask]) -> None:
    """So decoding under padding does."""
    (q, k, v), lengths = _tensors(), torch.tensor([5, 34])
    attend(q, k, v, mask=Causal() & of_lengths(lengths))
    for keys, offset in ((30, None), (31, None), (31, 20), (31, 12), (300, None), (3, None)):
        q, k, v = _tensors(QUERIES, keys)
        _check(q, k, v, mask=Causal() & of_lengths(lengths.clone()), offset=offset)
    others = of_lengths(lengths - 1)
    assert _ready(q, k, v, mask=Causal() & others) is None
    attend(q, k, v, mask=Causal() & others)
    _check(q, k, v, mask=Causal() & others)
    _check(q, k, v, mask=Causal() & of_lengths(lengths))
    lengths.sub_(1)
    _check(q, k, v, mask=Causal() & of_lengths(lengths))


@pytest.mark.parametrize("rest", [None, Causal(), ~Window(9) | Prefix(2)], ids=str)
def test_a_table_is_ready_with_any_elements_any_number_of_keys_and_any_offset(rest: Mask | None) -> None:
    q, k, v = _tensors()
    table = TensorMask(_hidden(BATCH, 1, 1, KEYS))
    attend(q, k, v, mask=table if rest is None else table & rest)
    for keys, offset in ((30, None), (31, 20), (64, 3), (300, None)):
        q, k, v = _tensors(QUERIES, keys)
        for keeps in (
            _hidden(BATCH, 1, 1, keys),
            torch.zeros(BATCH, 1, 1, keys) > 0,
            torch.ones(BATCH, 1, 1, keys) > 0,
        ):
            mask = TensorMask(keeps) if rest is None else rest & TensorMask(keeps)
            _check(q, k, v, mask=mask, offset=offset)


@pytest.mark.parametrize("shape", [(BATCH, 1, QUERIES, KEYS), (1, HEADS, 1, KEYS), (KEYS,), (QUERIES, 1), ()])
def test_a_table_that_broadcasts_otherwise_is_another_call(shape: tuple[int, ...]) -> None:
    q, k, v = _tensors()
    attend(q, k, v, mask=TensorMask(_hidden(BATCH, 1, 1, KEYS)))
    mask = TensorMask(_hidden(*shape) if shape else torch.tensor(True))
    assert _ready(q, k, v, mask=mask) is None
    attend(q, k, v, mask=mask)
    _check(q, k, v, mask=mask)


@pytest.mark.parametrize("shape", [(BATCH, 1, 1, KEYS + 1), (3, 1, 1, KEYS), (1, 3, 1, KEYS), (QUERIES + 1, KEYS)])
def test_a_table_that_does_not_fit_is_refused_as_ever(shape: tuple[int, ...]) -> None:
    q, k, v = _tensors()
    attend(q, k, v, mask=TensorMask(_hidden(BATCH, 1, 1, KEYS)))
    with pytest.raises(ProblemError, match="TensorMask"):
        attend(q, k, v, mask=Causal() & TensorMask(_hidden(*shape)))


def test_bools_may_have_any_byte_but_zero() -> None:
    """Where they are a view of other integers."""
    (q, k, v), bits = _tensors(), torch.arange(KEYS, dtype=torch.uint8) * 37
    for _ in range(2):
        found = attend(q, k, v, mask=TensorMask(bits.view(torch.bool)))
        assert torch.equal(found, attend(q, k, v, mask=TensorMask(bits != 0)))


def test_a_table_whose_memory_was_freed_goes_the_long_way() -> None:
    q, k, v = _tensors()
    attend(q, k, v, mask=TensorMask(_hidden(KEYS)))
    freed = _hidden(KEYS)
    freed.untyped_storage().resize_(0)
    assert _ready(q, k, v, mask=TensorMask(freed)) is None


def test_a_table_of_more_rows_than_the_library_lists_goes_the_long_way() -> None:
    q, (k, v) = torch.randn(257, 257, 1, 8), (torch.randn(257, 1, 3, 8) for _ in range(2))
    for _ in range(2):
        keep = _hidden(257, 257, 1, 3)
        expected = attend(q, k, v, mask=TensorMask(keep), backend="reference")
        assert torch.allclose(attend(q, k, v, mask=TensorMask(keep)), expected, atol=1e-5)


@pytest.mark.parametrize(
    "mask_of",
    [
        lambda keys: Causal() & Documents(torch.arange(KEYS) // 8),
        lambda keys: MaskFunction(lambda b, h, q, k: (q - k) % 3 != 1),
    ],
    ids=["documents", "a function"],
)
def test_other_masks_are_kept_by_the_number_of_keys_and_the_offset(mask_of: Callable[[int], Mask]) -> None:
    for keys, offset in ((KEYS, None), (KEYS, 20), (KEYS - 1, None), (KEYS - 1, 12)):
        (q, k, v), mask = _tensors(QUERIES, keys), mask_of(keys)
        assert _ready(q, k, v, mask=mask, offset=offset) is None
        attend(q, k, v, mask=mask, offset=offset)
        _check(q, k, v, mask=mask, offset=offset)


@pytest.mark.parametrize("name", ["bias", "sink"])
def test_zeros_without_memory_go_the_long_way(name: str) -> None:
    """Forward-mode differentiation makes such tensors, whose address is 0."""
    (q, k, v), zeros = _tensors(), cast(Any, torch)._efficientzerotensor
    stored: dict[str, Any] = {"bias": TensorBias(torch.randn(QUERIES, KEYS)), "sink": torch.randn(HEADS)}
    lazy: dict[str, Any] = {"bias": TensorBias(zeros((QUERIES, KEYS))), "sink": zeros((HEADS,))}
    none: dict[str, Any] = {"bias": None, "sink": torch.zeros(HEADS)}
    attend(q, k, v, **{name: stored[name]})
    _check(q, k, v, **{name: stored[name]})
    assert _ready(q, k, v, **{name: lazy[name]}) is None
    torch.testing.assert_close(attend(q, k, v, **{name: lazy[name]}), attend(q, k, v, **{name: none[name]}))


def test_gradients_go_the_long_way() -> None:
    (q, k, v), table, sink = _tensors(), torch.randn(QUERIES, KEYS), torch.randn(HEADS)
    words: dict[str, Any] = {"bias": TensorBias(table), "sink": sink}
    attend(q, k, v, **words)
    for t in (q, k, v, table, sink):
        t.requires_grad_()
        assert _ready(q, k, v, **words) is None
        with torch.no_grad():
            _check(q, k, v, **words)
        (found,) = torch.autograd.grad(attend(q, k, v, **words).sum(), t)
        (expected,) = torch.autograd.grad(_reference(q, k, v, **words).sum(), t)
        assert torch.allclose(found, expected.to(found.dtype), atol=1e-4)
        t.requires_grad_(False)


@pytest.mark.parametrize(
    "words",
    [
        {"bias": TensorBias(torch.randn(QUERIES + 1, KEYS))},
        {"bias": TensorBias(torch.randn(HEADS + 1, QUERIES, KEYS))},
        {"bias": T5Bias(torch.randn(32, HEADS + 1))},
        {"bias": Alibi(slopes=torch.rand(HEADS + 1))},
        {"bias": Alibi(HEADS + 1) + TensorBias(torch.randn(QUERIES, KEYS))},
        {"bias": T5Bias(torch.randn(32, HEADS)) + TensorBias(torch.randn(QUERIES + 1, KEYS))},
        {"sink": torch.randn(HEADS + 1)},
        {"sink": [0.0] * HEADS},
        {"mask": TensorMask(torch.ones(QUERIES, KEYS + 1, dtype=torch.bool))},
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_as_ever(words: dict[str, Any]) -> None:
    q, k, v = _tensors()
    attend(q, k, v, bias=TensorBias(torch.randn(QUERIES, KEYS)))
    attend(q, k, v, bias=T5Bias(torch.randn(32, HEADS)) + TensorBias(torch.randn(QUERIES, KEYS)))
    for bias in (T5Bias(torch.randn(32, HEADS)), Alibi(slopes=torch.rand(HEADS))):
        attend(q, k, v, bias=bias)
    attend(q, k, v, sink=torch.randn(HEADS))
    attend(q, k, v, mask=TensorMask(_hidden(QUERIES, KEYS)))
    with pytest.raises(ProblemError):
        attend(q, k, v, **words)


@pytest.mark.parametrize(
    "words",
    [
        {"bias": TensorBias(torch.randn(QUERIES, KEYS)) + TensorBias(torch.randn(1, KEYS))},
        {"bias": Alibi(HEADS) + TensorBias(torch.randn(QUERIES + 2, KEYS), offset=KEYS - QUERIES - 1)},
        {"bias": T5Bias(torch.randn(32, HEADS).neg()), "dropout": 0.5},
        {"bias": TensorBias(torch.randn(QUERIES + 2, KEYS), offset=KEYS - QUERIES - 1)},
        {"bias": TensorBias(torch.randn(QUERIES, KEYS)), "backend": "reference"},
        {"bias": TensorBias(torch.randn(QUERIES, KEYS).neg()), "dropout": 0.5},
    ],
    ids=str,
)
def test_other_calls_are_not_kept(words: dict[str, Any]) -> None:
    q, k, v = _tensors()
    attend(q, k, v, **words)
    assert not ready_tensors._ready  # pyright: ignore[reportPrivateUsage]


def test_dispatch_modes_and_transforms_go_the_long_way() -> None:
    (q, k, v), table = _tensors(), torch.randn(QUERIES, KEYS)
    expected = attend(q, k, v, bias=TensorBias(table))
    many = torch.func.vmap(lambda t: attend(q, k, v, bias=TensorBias(t)))(table[None])
    assert torch.allclose(many[0], expected, atol=1e-6)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(table, torch.ones_like(table))
        out = attend(q, k, v, bias=TensorBias(dual))
        assert torch.autograd.forward_ad.unpack_dual(out).tangent is not None


def test_few_are_kept() -> None:
    q, k, v = _tensors()
    for offset in range(ready_tensors.KEPT + 3):
        attend(q, k, v, mask=KeyLengths(torch.tensor([9, 30])), offset=offset)
    (alike,) = ready_tensors._ready.values()  # pyright: ignore[reportPrivateUsage]
    assert 0 < len(alike) <= ready_tensors.KEPT


def test_a_mask_with_large_lists_of_tiles_is_not_kept() -> None:
    q, k, v = (torch.randn(1, heads, 300, 16) for heads in (HEADS, KV_HEADS, KV_HEADS))
    some = _hidden(1, HEADS, 300, 300)
    words: dict[str, Any] = {"mask": MaskFunction(lambda b, h, q, k: some[b, h, q, k])}
    attend(q, k, v, **words)
    assert _ready(q, k, v, **words) is None
    assert not ready_tensors._ready  # pyright: ignore[reportPrivateUsage]


def test_a_table_of_very_many_pairs_is_known_by_its_content(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ready_tensors, "PAIRS", QUERIES * KEYS)
    q, k, v = _tensors()
    for shape, is_read in (((QUERIES, KEYS), True), ((BATCH, 1, 1, KEYS), False)):
        attend(q, k, v, mask=TensorMask(_hidden(*shape)))
        assert (_ready(q, k, v, mask=TensorMask(_hidden(*shape))) is not None) == is_read


def test_a_new_mask_of_a_kept_call_forgets_no_other_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ready_tensors, "KEPT", 2)
    q, k, v = _tensors()
    sink: dict[str, Any] = {"sink": torch.randn(HEADS)}
    attend(q, k, v, **sink)
    for _ in range(2):
        attend(q, k, v, mask=TensorMask(_hidden(BATCH, 1, 1, KEYS)))
    _check(q, k, v, **sink)


def test_a_sink_whose_memory_was_freed_is_no_missing_sink() -> None:
    q, k, v = _tensors()
    for _ in range(2):
        attend(q, k, v, sink=torch.randn(HEADS))
    freed = torch.randn(HEADS)
    freed.untyped_storage().resize_(0)
    with pytest.raises(ProblemError, match="has no memory"):
        attend(q, k, v, sink=freed)


def test_a_parameter_of_zeros_without_memory_is_a_sink() -> None:
    q, k, v = _tensors()
    lazy = torch.nn.Parameter(cast(Any, torch)._efficientzerotensor((HEADS,)), requires_grad=False)
    for _ in range(2):
        assert torch.equal(attend(q, k, v, sink=lazy), attend(q, k, v, sink=torch.zeros(HEADS)))
