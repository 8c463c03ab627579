"""Calls in `context_parallel` that one rank shows: what is refused by name, positions, empty batches."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint
from transformers import MobileBertConfig, MobileBertForMaskedLM, XLMConfig, XLMWithLMHeadModel

from regard import (
    Bias,
    Causal,
    Documents,
    KeyLengths,
    Mask,
    Prefix,
    ProblemError,
    RefusalError,
    T5Bias,
    TensorBias,
    TensorMask,
    attend,
)
from regard.integrate.mask_function import mask, sharded_masks
from regard.integrate.sharded_inputs import has_causal_loss
from regard.linear import linear_attend
from regard.nn import Decoder
from regard.parallel import context_parallel, ring_attend, ulysses_attend
from tests.integrate.writing import on_regard
from tests.integrate.zoo import tokens

pytestmark = pytest.mark.usefixtures("alone")


def several(x: Tensor, is_training: bool) -> Tensor:
    return nn.MultiheadAttention(16, 2, batch_first=True).train(is_training)(x, x, x)[0]


def layer(x: Tensor, is_training: bool) -> Tensor:
    return nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).train(is_training)(x)


def flex(x: Tensor, is_training: bool) -> Any:
    return flex_attention(x[None], x[None], x[None])


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("with_gradients", [True, False])
@pytest.mark.parametrize("call", [several, layer, flex])
def test_attention_of_torch_that_is_no_ring_is_refused_by_name(
    call: Callable[[Tensor, bool], Any], is_training: bool, with_gradients: bool
):
    with (
        context_parallel() as cp,
        cp.sequence(9),
        torch.set_grad_enabled(with_gradients),
        pytest.raises(RefusalError, match="in context_parallel: it would attend to this rank's tokens alone"),
    ):
        call(torch.randn(1, 9, 16), is_training)


def test_linear_attention_is_refused_by_name():
    q = torch.randn(1, 2, 9, 8)
    refused = pytest.raises(RefusalError, match="linear_attend in context_parallel: it would attend to this rank's")
    with context_parallel() as cp, cp.sequence(9), refused:
        linear_attend(q, q, q)


def test_reentrant_checkpoints_are_refused_and_others_give_the_gradients_of_one_process():
    x = torch.randn(1, 2, 9, 8, requires_grad=True)

    def own(x: Tensor) -> Tensor:
        return attend(x, x, x)

    own(x).square().sum().backward()
    expected, x.grad = x.grad, None
    with context_parallel() as cp, cp.sequence(9):
        with pytest.raises(RefusalError, match=r"use_reentrant=True.* in context_parallel"):
            checkpoint(own, x, use_reentrant=True)
        with torch.no_grad():
            own(x)
        checkpoint(own, x, use_reentrant=False).square().sum().backward()
    torch.testing.assert_close(x.grad, expected)


def test_tokens_without_a_batch_are_named():
    with context_parallel() as cp:
        with pytest.raises(ProblemError, match=r"Decoder\(\[5\]\) in context_parallel: expected \[batch, tokens"):
            Decoder(19, 32, layers=1, heads=4)(torch.arange(5))
        with cp.sequence(5):
            pass


@pytest.mark.parametrize("function", [ring_attend, ulysses_attend])
@pytest.mark.parametrize(
    "mask",
    [
        Prefix(torch.zeros(0, dtype=torch.long)),
        KeyLengths(torch.zeros(0, dtype=torch.long)),
        Documents(torch.zeros(0, 6, dtype=torch.long)),
        TensorMask(torch.ones(0, 1, 6, 6, dtype=torch.bool)),
    ],
)
def test_an_empty_batch_with_a_mask_per_row_gives_the_empty_output_and_gradients(
    function: Callable[..., Tensor], mask: Mask
):
    q = torch.randn(0, 2, 6, 8, requires_grad=True)
    out = function(q, q, q, mask=mask)
    assert out.shape == attend(q, q, q, mask=mask).shape
    out.sum().backward()
    assert q.grad is not None


@pytest.mark.parametrize("name", ["doge", "deepseek_v4"])
def test_a_model_that_computes_with_its_mask_is_refused_by_name(name: str):
    """Its mask chooses among the keys of all tokens; on one rank it saw later tokens, without an error."""
    m = on_regard(name)
    why = f"{type(m).__name__} in context_parallel: it computes with its mask"
    with pytest.raises(RefusalError, match=why), context_parallel():
        m(tokens())

    def make(*args: Any) -> Any:
        pytest.fail("a mask of the whole sequence is made")

    with sharded_masks(make), pytest.raises(RefusalError, match=f"a {name} model in context_parallel"):
        mask(1, 3, 3, config=m.config)


def test_a_loss_of_the_model_s_own_is_refused_by_name(monkeypatch: pytest.MonkeyPatch):
    config = XLMConfig(vocab_size=31, emb_dim=32, n_layers=1, n_heads=4)
    assert [has_causal_loss(kind) for kind in (XLMWithLMHeadModel(config), on_regard("bert"))] == [False, False]
    assert has_causal_loss(on_regard("gpt2"))
    m = on_regard("gpt2")
    monkeypatch.setattr(m, "_loss_function", lambda **_: torch.zeros(()), raising=False)
    with pytest.raises(RefusalError, match="labels: the loss of a causal language model is known"), context_parallel():
        m(tokens(), labels=tokens())


@pytest.mark.parametrize("bias", [T5Bias(torch.randn(32, 4)), TensorBias(torch.randn(1, 4, 1, 13))])
def test_tables_and_biases_of_all_keys_are_no_dense_ones_of_a_rank(monkeypatch: pytest.MonkeyPatch, bias: Bias):
    def forward(hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        heads = hidden_states.unflatten(-1, (4, -1)).transpose(1, 2)
        return attend(heads, heads, heads, mask=Causal(), bias=bias).transpose(1, 2).flatten(2), None

    m, ids = on_regard("llama"), tokens()
    for block in m.model.layers:
        monkeypatch.setattr(block.self_attn, "forward", forward)
    expected = m(ids).logits
    with context_parallel() as cp:
        torch.testing.assert_close(cp.unshard(m(ids).logits), expected)


def test_a_model_whose_embeddings_join_neighbours_is_refused_by_name():
    config = MobileBertConfig(
        vocab_size=31, hidden_size=32, embedding_size=16, num_hidden_layers=1, intermediate_size=48,
        intra_bottleneck_size=32, num_attention_heads=4,
    )  # fmt: skip
    with (
        pytest.raises(RefusalError, match="MobileBertForMaskedLM in context_parallel: trigram_input"),
        context_parallel(),
    ):
        MobileBertForMaskedLM(config)(tokens())


def test_the_loss_leaves_out_the_label_that_the_call_ignores():
    m, ids = on_regard("llama"), tokens()
    ignored = int(ids[0, 1])
    expected = m(ids, labels=ids, ignore_index=ignored).loss
    with context_parallel():
        found = m(ids, labels=ids, ignore_index=ignored).loss
    torch.testing.assert_close(found, expected)
    assert not torch.isclose(found, m(ids, labels=ids).loss)
