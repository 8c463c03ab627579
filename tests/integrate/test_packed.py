"""Packed sequences that a call names by their lengths do not see each other, whatever model and mask they come to."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DataCollatorWithFlattening

from regard import Causal, ProblemError, RefusalError
from regard.integrate import packed as packing
from regard.integrate.attention_function import attention
from regard.integrate.layer_mask import LayerMask
from regard.integrate.packed import ids_of
from regard.integrate.transformers import use_regard
from tests.integrate.zoo import VOCABULARY, both, close, model

LENGTHS = (7, 2, 4)
ENDS = torch.tensor([0, 7, 9, 13], dtype=torch.int32)
PARTS = torch.randint(3, VOCABULARY, (13,), generator=torch.Generator().manual_seed(0)).split(LENGTHS)


def packed() -> dict[str, Any]:
    """One row of 13 tokens, as transformers' collator makes it for flash-attn."""
    rows = [{"input_ids": part.tolist()} for part in PARTS]
    batch = DataCollatorWithFlattening(return_flash_attn_kwargs=True)(rows)
    return {name: value for name, value in batch.items() if name != "labels"}


def each_alone(m: Any) -> Tensor:
    return torch.cat([m(part[None]).logits for part in PARTS], dim=1)


# opt, gpt_oss and modernbert give their masks no positions
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt2", "opt", "gpt_oss", "deepseek_v3", "modernbert"])
@pytest.mark.parametrize("more", ["nothing", "no cache", "attention_mask"])
def test_logits_are_those_of_each_sequence_alone(name: str, more: str):
    if more == "no cache" and name == "modernbert":
        pytest.skip("an encoder has no cache")
    words = {"no cache": {"use_cache": False}, "attention_mask": {"attention_mask": torch.ones(1, 13).long()}}
    with torch.no_grad():
        alone, _ = both(name, each_alone)
        ours = use_regard(model(name))(**packed(), **words.get(more, {})).logits
    assert close(ours, alone)


def test_gradients_are_those_of_each_sequence_alone():
    m = use_regard(model("opt"))
    parameters = [p for p in m.parameters() if p.requires_grad]
    ours = torch.autograd.grad(m(**packed()).logits.sin().sum(), parameters)
    alone = torch.autograd.grad(each_alone(m).sin().sum(), parameters)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(ours, alone, strict=True))


def test_the_layers_of_a_pass_share_one_mask():
    given = LayerMask(Causal(), (1, 1, 13, 13), 0, "cpu")
    first, second = (given.within(torch.tensor([[0] * 7 + [1] * 6])) for _ in range(2))
    assert first is second
    assert first.within(torch.tensor([[0] * 7 + [1] * 6])) is first
    assert given.within(torch.tensor([[0] * 6 + [1] * 7])) is not first


def test_the_numbers_are_read_once_for_all_layers_of_a_pass_and_again_once_they_changed(
    monkeypatch: pytest.MonkeyPatch,
):
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(packing, "ids_of", lambda *given: (calls.append(given), ids_of(*given))[1])
    m = use_regard(model("opt"))
    assert m.config.num_hidden_layers > 1
    with torch.no_grad():
        m(**packed())
    assert len(calls) == 1
    q, mask, ends = torch.randn(1, 2, 13, 8), LayerMask(Causal(), (1, 1, 13, 13), 0, "cpu"), ENDS.clone()
    first, again = (attention(Plain(), q, q, q, mask, cu_seq_lens_q=ends, cu_seq_lens_k=ends)[0] for _ in range(2))
    ends[1] = 5
    other, _ = attention(Plain(), q, q, q, mask, cu_seq_lens_q=ends, cu_seq_lens_k=ends)
    assert len(calls) == 3
    assert torch.equal(first, again)
    assert torch.equal(other[:, :5], first[:, :5])
    assert not torch.equal(other[:, 5:7], first[:, 5:7])


class Plain(nn.Module):
    """An attention module that says nothing of itself."""


def reference(q: Tensor, causal: bool, added: Tensor | None = None) -> Tensor:
    """Each sequence by itself, in float64; [batch, tokens, heads, dim]."""
    starts = torch.repeat_interleave(torch.arange(3), torch.tensor(LENGTHS)).reshape(q.shape[0], q.shape[2])
    kept = starts[:, None, :, None] == starts[:, None, None, :]
    if causal:
        kept = kept & torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
    scores = q.double() @ q.double().mT / q.shape[3] ** 0.5
    scores = (scores if added is None else scores + added).masked_fill(~kept, float("-inf"))
    return (scores.softmax(-1) @ q.double()).transpose(1, 2)


@pytest.mark.parametrize("kind", ["none", "none, causal", "bool", "float"])
def test_a_mask_of_any_kind_also_hides_the_other_sequences(kind: str):
    q = torch.randn(1, 2, 13, 8)
    added = torch.randn(1, 1, 13, 13) if kind == "float" else None
    mask = torch.ones(1, 1, 13, 13, dtype=torch.bool) if kind == "bool" else added
    out, _ = attention(Plain(), q, q, q, mask, is_causal=kind == "none, causal", cu_seq_lens_q=ENDS, cu_seq_lens_k=ENDS)
    torch.testing.assert_close(out.double(), reference(q, kind == "none, causal", added), atol=1e-5, rtol=1e-5)


def test_the_rows_of_a_batch_are_counted_one_after_another():
    q = torch.randn(2, 2, 5, 8)
    ends = torch.tensor([0, 3, 5, 9, 10])
    out, _ = attention(Plain(), q, q, q, None, is_causal=False, cu_seq_lens_q=ends, cu_seq_lens_k=ends)
    for row, part in ((0, slice(0, 3)), (0, slice(3, 5)), (1, slice(0, 4)), (1, slice(4, 5))):
        alone = q[row : row + 1, :, part]
        expected, _ = attention(Plain(), alone, alone, alone, None, is_causal=False)
        assert torch.allclose(out[row : row + 1, part], expected, atol=1e-6)


def test_weights_of_other_sequences_are_zero():
    q = torch.randn(1, 2, 13, 8)
    words = {"cu_seq_lens_q": ENDS, "cu_seq_lens_k": ENDS}
    _, weights = attention(Plain(), q, q, q, None, is_causal=True, output_attentions=True, **words)
    assert weights is not None
    assert not weights[..., 7:, :7].any()
    assert torch.allclose(weights.sum(-1), torch.ones(1, 2, 13))


@pytest.mark.parametrize("ends", [[0, 7, 9, 12], [1, 7, 13], [0, 9, 7, 13]], ids=str)
def test_numbers_that_are_not_of_these_tokens_are_a_problem(ends: list[int]):
    q, given = torch.randn(1, 2, 13, 8), torch.tensor(ends)
    message = re.escape(f"cu_seq_lens_q is {ends} and the call has 1 x 13 tokens")
    with pytest.raises(ProblemError, match=message):
        attention(Plain(), q, q, q, None, cu_seq_lens_q=given, cu_seq_lens_k=given)


@pytest.mark.parametrize("given", [[0, 7, 13], torch.tensor(13), torch.tensor([[0, 13]]), ENDS.float()], ids=str)
def test_numbers_that_are_no_list_of_integers_in_a_tensor_are_a_problem(given: Any):
    q = torch.randn(1, 2, 13, 8)
    with pytest.raises(ProblemError, match=r"cu_seq_lens_q is .* expected a tensor of int32 or int64"):
        attention(Plain(), q, q, q, None, cu_seq_lens_q=given, cu_seq_lens_k=given)


def test_a_mask_of_integers_is_refused_as_without_packed_sequences():
    q, mask = torch.randn(1, 2, 13, 8), torch.ones(1, 1, 13, 13, dtype=torch.int64)
    with pytest.raises(ProblemError, match=r"attention_mask is torch\.int64"):
        attention(Plain(), q, q, q, mask, cu_seq_lens_q=ENDS, cu_seq_lens_k=ENDS)


def test_keys_of_other_tokens_are_refused():
    q, k = torch.randn(1, 2, 13, 8), torch.randn(1, 2, 17, 8)
    with pytest.raises(RefusalError, match="cu_seq_lens_k with 13 queries and 17 keys"):
        attention(Plain(), q, k, k, None, cu_seq_lens_q=ENDS, cu_seq_lens_k=torch.tensor([0, 17]))
    with pytest.raises(RefusalError, match="pass the same numbers for both"):
        attention(Plain(), q, q, q, None, cu_seq_lens_q=ENDS, cu_seq_lens_k=torch.tensor([0, 13]))


@pytest.mark.exhaustive
def test_a_compiled_model_is_one_graph():
    m = use_regard(model("opt"))
    torch.compiler.reset()
    compiled = torch.compile(m, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert close(compiled(**packed(), use_cache=False).logits, each_alone(m))
