"""Keys of a cache pass through a model's code without being made dense, and become tensors where the code computes."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from regard import Causal, ProblemError, RefusalError, TensorMask, Window, attend
from regard.describe.mask import And
from regard.extend import spec
from regard.integrate.cache import regard_cache
from regard.integrate.layer_mask import LayerMask, mask_over_kept
from regard.integrate.lazy import LazyTensor, opened
from regard.integrate.transformers import use_regard
from regard.storage.codec import Int8
from regard.storage.stored import Paged
from tests.integrate.writing import on_regard, prompt, written
from tests.integrate.zoo import VOCABULARY, padding, with_cache

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

# ---- models ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["llama", "mistral", "qwen3", "gemma3", "gpt_oss", "gpt2", "gpt_neox", "phi3", "cohere", "opt", "t5", "bart"],
)
def test_most_models_pass_their_keys_on(name: str):
    m = on_regard(name)
    cache = regard_cache(m, codec=torch.bfloat16)
    written(m, prompt(), cache)
    layers = getattr(cache, "self_attention_cache", cache).layers
    assert [layer.first_use for layer in layers] == [None, None]


def test_latents_reach_attention_unexpanded():
    m = on_regard("deepseek_v3")
    cache = regard_cache(m)
    written(m, prompt(), cache)
    assert [layer.first_use for layer in cache.layers] == [None, None]


COMPUTING: dict[str, tuple[str, dict[str, Any], str]] = {
    "diffllama": ("DiffLlama", {"num_key_value_heads": 2}, "torch.chunk(value_states, 2, dim=1)"),
    "jetmoe": (
        "JetMoe",
        {"num_key_value_heads": 4, "kv_channels": 8, "num_local_experts": 2, "num_experts_per_tok": 2},
        "key_states = key_states.repeat(1, self.top_k, 1, 1)",
    ),
    "doge": ("Doge", {"num_key_value_heads": 2, "keep_window_size": 6}, "value_states.transpose(1, 2)"),
}


@functools.cache
def computing(name: str) -> Any:
    """A tiny model that computes with the keys or values of its cache before attention does."""
    kind, more, _ = COMPUTING[name]
    torch.manual_seed(0)
    m = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**SIZES | more)).eval()
    use_regard(m)
    return m


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedily", "with beams"])
@pytest.mark.parametrize("name", COMPUTING)
def test_models_that_compute_with_keys_get_tensors_to_the_bit(name: str, options: dict[str, Any]):
    m, ids, mask = computing(name), prompt(), padding("left")
    stock, scores = written(m, ids, None, attention_mask=mask, **options)
    cache = regard_cache(m, layout=Paged(3))
    ours, our_scores = written(m, ids, cache, attention_mask=mask, **options)
    assert ours == stock
    assert torch.equal(our_scores, scores)
    assert "a dense copy at each step, for the model computes with keys or values: " in cache.explain()
    assert COMPUTING[name][2] in cache.explain()
    assert f"({COMPUTING[name][0]}Attention)" in cache.explain()


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["llama", "doge"])
def test_a_model_with_a_quantised_cache_may_be_compiled(name: str):
    """Its graphs break at the cache; dense copies are made inside them."""
    m = on_regard(name) if name == "llama" else computing(name)
    compiled = torch.compile(m, backend="aot_eager")
    found: list[Tensor] = []
    with torch.no_grad():
        for run in (m, compiled):
            cache = regard_cache(m, codec=Int8(group=16, residual=0))
            found.append(torch.cat([run(ids, **with_cache(cache)).logits for ids in prompt(2, 21).split(7, 1)], 1))
    assert torch.allclose(*found, atol=1e-5)


# ---- the lazy tensor ------------------------------------------------------------------------------------------------


@pytest.fixture
def lazy() -> Any:
    torch.manual_seed(0)
    dense, made = torch.randn(2, 3, 5, 4), list[str]()

    def make() -> Tensor:
        made.append("made")
        return dense

    t: Any = LazyTensor("stored", dense.shape, dense, make, made.append)
    t.expected, t.made = dense, made
    return t


def test_its_form_is_known_without_the_data(lazy: Any):
    found = lazy.shape, lazy.dtype, lazy.device, lazy.ndim, lazy.dim(), lazy.size(), lazy.size(-1), len(lazy)
    assert found == ((2, 3, 5, 4), torch.float32, torch.device("cpu"), 4, 4, (2, 3, 5, 4), 4, 2)
    assert not lazy.made
    assert opened(lazy, lazy) == ("stored", "stored")


USES: dict[str, Callable[[Any], Any]] = {
    "a method": lambda t: t.repeat(1, 2, 1, 1),
    "a cast": lambda t: t.to(torch.float64),
    "a slice": lambda t: t[..., 1:3],
    "a function": lambda t: torch.chunk(t, 3, dim=1)[1],
    "a list of tensors": lambda t: torch.cat([t, torch.ones(2, 3, 1, 4)], dim=2),
    "a keyword": lambda t: torch.matmul(torch.ones(4, 5), other=t),
    "an operator": lambda t: t * 2 + 1,
    "an operator of another tensor": lambda t: torch.ones(2, 3, 4, 5) @ t,
    "an operator of a number": lambda t: 1 - t,
    "a comparison": lambda t: torch.zeros(4) == t,
    "a norm": nn.LayerNorm(4),
    "a projection": lambda t: nn.functional.linear(t, torch.ones(6, 4)),
    "an attribute": lambda t: t.mT,
    "torch's attention": lambda t: nn.functional.scaled_dot_product_attention(torch.ones(2, 3, 1, 4), t, t),
}


@pytest.mark.parametrize("use", USES)
def test_code_that_computes_with_it_gets_the_tensor(use: str, lazy: Any):
    assert torch.equal(USES[use](lazy), USES[use](lazy.expected))


def test_the_tensor_is_made_once_and_the_first_use_is_reported(lazy: Any):
    doubled = lazy * 2
    assert torch.equal(lazy * 3, doubled * 1.5)
    assert lazy.made == ["made", "doubled = lazy * 2"]


def test_a_method_of_a_module_is_reported_with_its_class(lazy: Any):
    class Scaled(nn.Module):
        def forward(self, t: Any) -> Tensor:
            return t * 4

    Scaled()(lazy)
    assert lazy.made[1] == "return t * 4 (Scaled)"


def test_what_is_written_into_it_reaches_attention(lazy: Any):
    other: Any = LazyTensor("stored too", lazy.shape, lazy, lambda: lazy.expected + 1)
    lazy[:, :, 0] = 7.0
    lazy.mul_(2)
    key, value = opened(lazy, other)
    assert torch.equal(key[:, :, 0], torch.full((2, 3, 4), 14.0))
    assert torch.equal(value, lazy.expected + 1)


def test_it_is_a_key_of_dicts_by_identity(lazy: Any):
    assert {lazy: 1}[lazy] == 1


def test_every_comparison_is_that_of_the_tensor(lazy: Any):
    assert torch.equal(lazy == 1, lazy.expected == 1)
    assert torch.equal(lazy != 1, lazy.expected != 1)
    assert (lazy.expected[0, 0, 0, 0].item() in lazy) is True
    mask: Any = LayerMask(Causal(), (1, 1, 3, 3), 0, "cpu")
    assert torch.equal(mask == 0, mask.dense() == 0)
    assert torch.equal(mask != 0, mask.dense() != 0)


@pytest.mark.parametrize("offset", [2, torch.tensor(2)], ids=["int", "tensor"])
def test_the_last_queries_of_a_mask_have_a_mask_by_rule(offset: Any):
    keep = Causal() & (Window(3) | TensorMask(torch.arange(7)[None, None, None] < 2))
    mask: Any = LayerMask(keep, (1, 1, 5, 7), offset, "cpu")
    last = mask[:, :, -2:, :]
    assert type(last) is LayerMask
    assert last.shape == (1, 1, 2, 7)
    assert torch.equal(last.dense(), mask.dense()[:, :, -2:])
    assert mask[:, :, 0:, :] is mask


@spec
class Odd(Causal):
    """A token sees itself and the tokens of odd numbers before it."""

    def keep(self, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return super().keep(b, h, q, k) & ((q == k) | (k % 2 == 1))


@spec
class EvenAnd(And):
    """Kept by both, of keys of even numbers."""

    def keep(self, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return super().keep(b, h, q, k) & (k % 2 == 0)


@spec
class Early(TensorMask):
    """A table without the last three keys."""

    def keep(self, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return super().keep(b, h, q, k) & (k < 4)


def test_a_subclass_of_a_mask_is_what_its_own_keep_says():
    q, k, table = torch.arange(2, 7)[:, None], torch.arange(7), torch.rand(5, 7) > 0.3
    for own, kept in (
        (EvenAnd(Causal(), Window(4)), (q >= k) & (q - k < 4) & (k % 2 == 0)),
        (Early(table), table & (k < 4)),
        (~Odd(), ~((q >= k) & ((q == k) | (k % 2 == 1)))),
    ):
        assert torch.equal(LayerMask(own, (1, 1, 5, 7), 2, "cpu").dense()[0, 0], kept)
    rows: Any = LayerMask(EvenAnd(Causal(), TensorMask(table)), (1, 1, 5, 7), 2, "cpu")
    last = rows[:, :, -2:, :]  # a table has a row for each query, so these are no mask by rule
    assert torch.equal(last[0, 0], ((q >= k) & table & (k % 2 == 0))[-2:])


def test_a_subclass_of_a_causal_mask_may_hide_earlier_tokens():
    for own in (Odd(), EvenAnd(Causal(), Causal())):
        with pytest.raises(RefusalError, match="which drops tokens"):
            mask_over_kept(LayerMask(own, (1, 1, 2, 9), 7, "cpu"), 4, slice(None), 0, "a cache")


def test_other_parts_of_a_mask_are_tensors():
    mask: Any = LayerMask(Causal(), (1, 1, 5, 7), 2, "cpu")
    table: Any = LayerMask(TensorMask(torch.rand(1, 1, 5, 7) > 0.5), (1, 1, 5, 7), 0, "cpu")
    for one, index in (
        (mask, (..., slice(1, 3), slice(None))),
        (mask, 0),
        (mask, (*[slice(None)] * 2, slice(2, 0), slice(None))),
        (mask, (*[slice(None)] * 2, slice(1, None, 2), slice(None))),
        (table, (*[slice(None)] * 2, slice(3, None))),
    ):
        assert torch.equal(one[index], one.dense()[index])


def test_attend_answers_a_lazy_tensor_with_its_dense_tensor():
    q = torch.randn(1, 2, 3, 8)
    lazy: Any = LazyTensor("stored", q.shape, q, lambda: q)
    with pytest.raises(ProblemError, match=r"^k is LazyTensor: expected a tensor .*; k.dense\(\) is one\.$"):
        attend(q, lazy, lazy)
    assert torch.equal(attend(q, lazy.dense(), lazy.dense()), attend(q, q, q))
