"""Sinks of models of transformers: a logit per head, or one for every query (Inkling 2)."""

import functools
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from regard import RefusalError, attend_state
from regard.calls import observe_calls, replace_outputs, route_calls
from regard.integrate import sinks as sinks_module
from regard.integrate.attention_function import attention
from regard.integrate.transformers import use_regard
from tests.integrate.zoo import VOCABULARY, close, padding, tokens

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "unpadded_vocab_size": VOCABULARY, "eos_token_id": 2, "pad_token_id": 0,
    "hidden_size": 32, "num_hidden_layers": 3, "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"],
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rel_extent": 7, "d_rel": 4,
    "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16, "sliding_window_size": 5,
    "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
FAMILIES = ["Inkling2", "Inkling2Loop"]


@functools.cache
def model(family: str) -> Any:
    """With sinks that take a share of the weight, each another one."""
    if not hasattr(transformers, f"{family}ForCausalLM"):
        pytest.skip(f"this version of transformers has no {family}")
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}TextConfig")(**SIZES)
    m = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for label, weight in m.named_parameters():
            if weight.ndim > 1:
                weight.normal_(0, 1.0 if "sink" in label else weight.shape[-1] ** -0.5)
    return m


def both(family: str, run: Any) -> tuple[Tensor, Tensor]:
    m = model(family)
    m.set_attn_implementation("eager")
    eager = run(m)
    return eager, run(use_regard(m))


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_with_a_sink_per_query_are_those_of_eager(family: str, side: str | None):
    ids, mask = tokens(), torch.ones(2, 13, dtype=torch.int64) if side is None else padding(side)
    with torch.no_grad():
        eager, ours = both(family, lambda m: m(ids, attention_mask=mask).logits[mask.bool()])
    assert close(ours, eager)


def test_it_writes_with_sinks_per_query_what_eager_writes():
    ids, mask = tokens(), padding("left")
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    eager, ours = both("Inkling2", lambda m: m.generate(ids, attention_mask=mask, **options))
    assert ours.tolist() == eager.tolist()


def test_gradients_reach_the_sinks_of_queries():
    ids = tokens()

    def run(m: Any) -> Tensor:
        m.zero_grad()
        m(ids, labels=ids).loss.backward()
        return torch.cat([layer.self_attn.sink_proj.weight.grad.flatten() for layer in m.model.layers])

    eager, ours = both("Inkling2", run)
    assert eager.abs().max() > 1e-4
    assert torch.allclose(ours, eager, rtol=1e-4, atol=1e-6)


def test_weights_beside_sinks_of_queries_are_those_of_eager():
    ids = tokens()

    def run(m: Any) -> Tensor:
        return torch.stack(m(ids, output_attentions=True).attentions)

    with torch.no_grad():
        eager, ours = both("Inkling2", run)
    assert (eager.sum(-1) < 0.99).any()
    assert close(ours, eager)


def test_a_model_with_sinks_of_queries_may_be_compiled():
    ids, m = tokens(), use_regard(model("Inkling2"))
    with torch.no_grad():
        compiled = torch.compile(m, backend="eager")(ids, use_cache=False).logits
        assert close(compiled, m(ids, use_cache=False).logits)


class Plain(nn.Module):
    """An attention module."""


@pytest.mark.parametrize("shape", [(2, 4, 7, 1), (1, 4, 1, 1), (1, 1, 7, 1)])
def test_a_sink_of_any_axes_is_a_column_of_the_softmax(shape: tuple[int, ...]):
    q, k, v = torch.randn(2, 4, 7, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 5)
    sinks = torch.randn(shape)
    out, weights = attention(Plain(), q, k, v, None, sinks=sinks, is_causal=False, scaling=0.5, output_attentions=True)
    wide = [x.double().repeat_interleave(2, dim=1) for x in (k, v)]
    scores = q.double() @ wide[0].mT * 0.5
    column = sinks.double().expand(2, 4, 7, 1)
    expected = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    assert torch.allclose(out.transpose(1, 2).double(), expected @ wide[1], atol=1e-6)
    assert weights is not None
    assert torch.allclose(weights.double(), expected, atol=1e-6)


def test_dropout_leaves_the_share_of_a_sink_of_a_query(monkeypatch: pytest.MonkeyPatch):
    """Values of 1: the mean of many rows under dropout is the weight that the sink leaves to the keys."""
    q, k, v = torch.randn(1, 1, 4096, 8), torch.randn(1, 1, 64, 8), torch.ones(1, 1, 64, 2)
    sinks, module = torch.full((1, 1, 4096, 1), 5.0), Plain().train()
    rates, attend = list[float](), sinks_module.attend
    without, _ = attention(module, q, k, v, None, sinks=sinks, is_causal=False)
    monkeypatch.setattr(sinks_module, "attend", lambda *a, **b: rates.append(b["dropout"]) or attend(*a, **b))
    dropped, _ = attention(module, q, k, v, None, sinks=sinks, is_causal=False, dropout=0.5)
    assert abs(float(dropped.mean() / without.mean()) - 1) < 0.02
    assert dropped.std() > 1.2 * without.std()
    assert rates == [0.5]


def seen_by(block: AbstractContextManager[Any], shape: tuple[int, ...]) -> Tensor:
    q = torch.ones(2, 4, 7, 8)
    with block:
        return attention(Plain(), q, q, q, None, sinks=torch.zeros(shape), is_causal=False)[0]


BLOCKS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "observed": lambda: observe_calls(lambda call: None),
    "replaced": lambda: replace_outputs(lambda call: 2 * call.out),
    "routed": lambda: route_calls(lambda request: attend_state(request.q, request.k, request.v)),
}


@pytest.mark.parametrize("kind", BLOCKS)
def test_calls_with_sinks_of_queries_are_seen_by_nothing_else(kind: str):
    """An observer would see an output without the sink, and what replaces an output would get the sink's share."""
    block = BLOCKS[kind]()
    with pytest.raises(RefusalError, match=r"sinks of this model are \[2, 4, 7, 1\], one per query.*one process"):
        seen_by(block, (2, 4, 7, 1))
    assert seen_by(BLOCKS[kind](), (4,)).shape == (2, 7, 4, 8)
    assert seen_by(nullcontext(), (2, 4, 7, 1)).shape == (2, 7, 4, 8)


@pytest.mark.parametrize("shape", [(1, 2, 3), (1, 2, 3, 2), (1, 2, 5, 1), (7, 2, 3, 1)])
def test_sinks_of_another_shape_are_refused(shape: tuple[int, ...]):
    q = torch.randn(1, 2, 3, 4)
    with pytest.raises(RefusalError, match=re.escape(f"sinks of this model are {list(shape)}: regard takes a logit")):
        attention(Plain(), q, q, q, None, sinks=torch.zeros(shape))
