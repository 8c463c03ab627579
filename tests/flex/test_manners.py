"""What `flex_attention` returns, checks and leaves to torch."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from regard import KVCache, ProblemError, observe_calls
from regard.cache import Paged
from regard.flex import AuxRequest, call, create_block_mask, flex_attention
from tests.flex.definition import attended

TOKENS = 130


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def tensors(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, TOKENS, 16, dtype=dtype, requires_grad=True) for _ in range(3))
    return q, k, v


MASK = create_block_mask(lambda b, h, q, k: (q >= k) & (q != 7), None, None, TOKENS, TOKENS, "cpu")


def test_a_query_that_sees_no_key_gives_0():
    q, k, v = tensors()
    out, aux = flex_attention(q, k, v, block_mask=MASK, return_aux=AuxRequest(lse=True, max_scores=True))
    assert not out[:, :, 7].any()
    assert (aux.lse[:, :, 7] == -torch.inf).all()
    assert (aux.max_scores[:, :, 7] == -torch.inf).all()
    (out.sum() + aux.lse[:, :, 8:].sum()).backward()
    assert q.grad is not None
    assert not q.grad[:, :, 7].any()


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_the_greatest_scores(kv_heads: int):
    q, k, v = tensors()
    mod = lambda s, b, h, q, k: torch.sin(s) + h * 0.1  # noqa: E731
    out, aux = flex_attention(
        q, k[:, :kv_heads], v[:, :kv_heads], mod, MASK, enable_gqa=True, return_aux=AuxRequest(max_scores=True)
    )
    assert aux.lse is None
    scores = torch.sin(q @ k[:, :kv_heads].mT / 4) + torch.arange(2)[:, None, None] * 0.1
    at = torch.meshgrid(torch.arange(TOKENS), torch.arange(TOKENS), indexing="ij")
    scores = torch.where((at[0] >= at[1]) & (at[0] != 7), scores, -torch.inf)
    torch.testing.assert_close(aux.max_scores, scores.amax(dim=3), atol=1e-5, rtol=1e-5)
    assert not aux.max_scores.requires_grad
    assert out.requires_grad


def test_the_forms_of_a_result():
    q, k, v = tensors()
    out = flex_attention(q, k, v)
    assert isinstance(out, Tensor)
    pair = flex_attention(q, k, v, return_lse=True)
    torch.testing.assert_close(pair[0], out)
    assert pair[1].dtype == torch.float32
    assert flex_attention(q, k, v, return_aux=AuxRequest())[1] == (None, None)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_types(dtype: torch.dtype):
    q, k, v = tensors(dtype)
    per_head = torch.tensor([0.5, 1.5], dtype=dtype, requires_grad=True)
    out = flex_attention(q, k, v, lambda s, b, h, q, k: s * per_head[h] - (q - k).abs() * 0.01, MASK)
    assert out.dtype == dtype
    exact = per_head.detach().double().requires_grad_()  # so that its gradient is not summed in half precision
    expected, _ = attended(
        q, k, v, lambda s, b, h, q, k: s * exact[h] - (q - k).abs() * 0.01, lambda b, h, q, k: (q >= k) & (q != 7)
    )
    fine = {torch.float64: 1e-12, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(out.double(), expected, atol=fine, rtol=fine)
    weight = torch.randn_like(expected).to(dtype).double()
    (grad,) = torch.autograd.grad((out.double() * weight).sum(), [per_head])
    (want,) = torch.autograd.grad((expected * weight).sum(), [exact])
    torch.testing.assert_close(grad.double(), want, atol=fine, rtol=fine)


def test_autocast_is_followed():
    q, k, v = tensors()
    wide = q.double(), k.double(), v.double()
    exact = flex_attention(*wide)
    with torch.autocast("cpu", torch.bfloat16):
        assert flex_attention(q, k, v).dtype == torch.bfloat16
        torch.testing.assert_close(flex_attention(*wide), exact)  # float64 stays, as in torch's own


def test_a_bias_of_every_pair_is_computed_in_pieces(monkeypatch: pytest.MonkeyPatch):
    q, k, v = tensors()
    learned = torch.rand(TOKENS, requires_grad=True)
    mod = lambda s, b, h, q, k: s + learned[q] * learned[k] + 0.1 * h  # noqa: E731
    whole = flex_attention(q, k, v, mod, MASK, return_lse=True)
    monkeypatch.setattr(call, "MOST_BIAS", 2 * 20 * TOKENS)
    sizes: list[int] = []
    with observe_calls(lambda each: sizes.append(each.q.shape[2])):
        pieces = flex_attention(q, k, v, mod, MASK, return_lse=True)
    assert max(sizes) <= 40
    assert sum(sizes) == TOKENS
    for one, other in zip(whole, pieces, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    inputs = [q, k, v, learned]
    for one, other in zip(
        torch.autograd.grad(whole[0].square().sum(), inputs),
        torch.autograd.grad(pieces[0].square().sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("side", ["of keys", "of pairs"])
def test_a_mask_that_reads_a_learned_tensor_is_computed_in_pieces(side: str, monkeypatch: pytest.MonkeyPatch):
    q, k, v = tensors()
    gate = torch.rand(TOKENS, requires_grad=True)

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        kept = gate[k] > 0.3 if side == "of keys" else gate[k] + gate[q] > 0.8
        return torch.where(kept, s + gate[q] * gate[k], -torch.inf)

    whole = flex_attention(q, k, v, mod)
    monkeypatch.setattr(call, "MOST_BIAS", 20 * TOKENS)
    pieces = flex_attention(q, k, v, mod)
    torch.testing.assert_close(pieces, whole, atol=1e-5, rtol=1e-5)
    for one, other in zip(
        *(torch.autograd.grad(out.square().sum(), [q, k, v, gate]) for out in (whole, pieces)), strict=True
    ):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_a_table_beside_a_computed_bias_is_taken_by_rows_in_pieces(monkeypatch: pytest.MonkeyPatch):
    q, k, v = tensors()
    table, position = torch.randn(TOKENS, TOKENS, requires_grad=True), torch.rand(TOKENS)
    mod = lambda s, b, h, q, k: s + table[q, k] - position[q] * position[k]  # noqa: E731
    whole = flex_attention(q, k, v, mod, MASK)
    monkeypatch.setattr(call, "MOST_BIAS", 20 * TOKENS)
    pieces = flex_attention(q, k, v, mod, MASK)
    torch.testing.assert_close(pieces, whole, atol=1e-5, rtol=1e-5)
    for one, other in zip(
        *(torch.autograd.grad(out.square().sum(), [q, k, v, table]) for out in (whole, pieces)), strict=True
    ):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("which", ["computed", "table", "mask"])
def test_what_a_piece_reads_again_must_not_be_written_to_before_the_backward_pass(
    which: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(call, "MOST_BIAS", 20 * TOKENS)
    q, k, v = tensors()
    read = {
        "computed": torch.rand(TOKENS), "table": torch.randn(TOKENS, TOKENS), "mask": torch.arange(TOKENS) // 40,
    }  # fmt: skip
    mask = create_block_mask(
        lambda b, h, q, k: read["mask"][q] == read["mask"][k], None, None, TOKENS, TOKENS, "cpu", BLOCK_SIZE=32
    )
    out = flex_attention(q, k, v, lambda s, b, h, q, k: s + read["table"][q, k] + read["computed"][q] * k.sin(), mask)
    read[which].mul_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_the_output_is_laid_out_as_the_query():
    x = torch.randn(2, TOKENS, 2, 16)
    q = x.transpose(1, 2)
    assert flex_attention(q, q, q).stride() == q.stride()


def test_operations_are_counted_whatever_the_function():
    q, k, v = tensors()
    for score_mod in (None, lambda s, b, h, q, k: s * s, lambda s, b, h, q, k: torch.stack([s, s]).sum()):
        with FlopCounterMode(display=False) as counter:
            flex_attention(q, k, v, score_mod, MASK).sum().backward()
        assert counter.get_total_flops() > 2 * 2 * 2 * 16 * TOKENS**2 // 2


class Model(nn.Module):
    """Attention with a learned bias by distance."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 16)
        self.slope = nn.Parameter(torch.rand(2))

    def forward(self, x: Tensor, mask: Any) -> Tensor:
        def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return score - self.slope[h] * (q - k)

        y = self.project(x)
        return flex_attention(y, y, y, score_mod, mask).relu()


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute:UserWarning")  # of torch's own
def test_a_compiled_model_and_a_compiled_function_give_the_same():
    torch.compiler.reset()
    torch.manual_seed(0)
    model, x = Model(), tensors()[0]
    expected = model(x, MASK)
    grads = torch.autograd.grad(expected.sum(), list(model.parameters()))
    compiled: Any = torch.compile(model, backend="aot_eager")
    out = compiled(x, MASK)
    torch.testing.assert_close(out, expected)
    for one, other in zip(torch.autograd.grad(out.sum(), list(model.parameters())), grads, strict=True):
        torch.testing.assert_close(one, other)
    function: Any = torch.compile(flex_attention, dynamic=False)
    torch.testing.assert_close(function(x, x, x, block_mask=MASK), flex_attention(x, x, x, block_mask=MASK))


def test_kernel_options_are_checked_and_change_nothing():
    q, k, v = tensors()
    torch.testing.assert_close(
        flex_attention(q, k, v, kernel_options={"BLOCK_M": 64, "BACKEND": "TRITON"}), flex_attention(q, k, v)
    )
    with pytest.raises(ValueError, match="Invalid BACKEND"):
        flex_attention(q, k, v, kernel_options={"BACKEND": "FAST"})
    with pytest.raises(RuntimeError, match="BACKEND cannot be combined"):
        flex_attention(q, k, v, kernel_options={"BACKEND": "AUTO", "FORCE_USE_FLEX_ATTENTION": True})


def test_calls_that_make_no_sense_raise_what_torch_raises():
    q, k, v = tensors()
    with pytest.raises(ValueError, match=r"query has 2 heads and key 1: expected as many, or enable_gqa=True"):
        flex_attention(q, k[:, :1], v[:, :1])
    with pytest.raises(ValueError, match=r"query has 2 batch rows and key 1"):
        flex_attention(q, k[:1], v[:1])
    with pytest.raises(ValueError, match=r"block_mask was created for 130 queries and 130 keys, and the call has 129"):
        flex_attention(q[:, :, 1:], k, v, block_mask=MASK)
    with pytest.raises(ValueError, match="return_lse and return_aux"):
        flex_attention(q, k, v, return_lse=True, return_aux=AuxRequest(lse=True))
    with pytest.raises(NotImplementedError, match=r"expected \[batch, heads, tokens, dim\]"):
        flex_attention(q[0], k[0], v[0])


def test_an_index_out_of_range_is_an_error():
    q, k, v = tensors()
    short = torch.rand(TOKENS - 1)
    with pytest.raises(IndexError):
        flex_attention(q, k, v, lambda s, b, h, q, k: s + short[k])


def test_an_index_out_of_range_in_a_hidden_block_is_no_error():
    q, k, v = tensors()
    short = torch.rand(128, requires_grad=True)
    mask = create_block_mask(lambda b, h, q, k: k < 128, None, None, TOKENS, TOKENS, "cpu")
    out = flex_attention(q, k, v, lambda s, b, h, q, k: s + short[k], mask)
    expected = flex_attention(q, k[:, :, :128], v[:, :, :128], lambda s, b, h, q, k: s + short[k])
    torch.testing.assert_close(out, expected)
    for one, other in zip(*(torch.autograd.grad(t.square().sum(), [q, short]) for t in (out, expected)), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


MODS = {
    "distance": lambda s, b, h, i, j: s - (i - j).abs(),
    "pairs": lambda s, b, h, i, j: s + 0.1 * (i * j % 3),
    "a factor": lambda s, b, h, i, j: s * (1 + i % 2),
    "a function of the score": lambda s, b, h, i, j: s * s,
}


@pytest.mark.parametrize("name", MODS)
def test_a_default_device_changes_nothing(name: str):
    def function(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & (i % 7 != j % 5)

    def call() -> Tensor:
        block_mask = create_block_mask(function, None, None, 37, 37, device="cpu", BLOCK_SIZE=16)
        return flex_attention(q, q, q, MODS[name], block_mask)

    q = torch.randn(1, 2, 37, 8)
    expected = call()
    with torch.device("meta"):
        assert torch.equal(call(), expected)


def test_handles_of_a_cache_are_answered_with_dense():
    q = torch.randn(1, 2, 5, 8)
    k, v = KVCache(Paged(4)).append(q, q)
    with pytest.raises(ProblemError, match=r"key is StoredTensor: expected a tensor .*; key\.dense\(\) is one"):
        flex_attention(q, k, v)
