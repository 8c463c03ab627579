"""Continuous batching with regard's attention writes what each prompt gets by itself."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    ContinuousBatchingConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GenerationConfig,
)

from regard import ProblemError, RefusalError
from regard.attention import attend
from regard.integrate import continuous
from regard.integrate.continuous import continuous_batching, paged_attention
from tests.integrate.writing import on_regard
from tests.integrate.zoo import BY_THEMSELVES, VOCABULARY, model


@pytest.fixture(autouse=True)
def quiet():
    """It says at every start that psutil is not installed, and what it makes of that."""
    logger = logging.getLogger("ContinuousBatchingLogger")
    before, logger.disabled = logger.disabled, True
    yield
    logger.disabled = before


def prompts() -> list[list[int]]:
    """Of different lengths; the longest does not fit into one batch of tokens."""
    torch.manual_seed(0)
    return [torch.randint(3, VOCABULARY, (length,)).tolist() for length in (5, 13, 2, 21, 9)]


def one_by_one(m: Any) -> list[list[int]]:
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return [m.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist() for ids in prompts()]


def together(m: Any) -> list[list[int]]:
    settings = GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=-1, pad_token_id=0, bos_token_id=1)
    room = ContinuousBatchingConfig(page_size=4, num_blocks=64, max_batch_tokens=16)
    out = m.generate_batch(prompts(), generation_config=settings, continuous_batching_config=room, warmup=False)
    return [request.generated_tokens for request in out.values()]


@pytest.mark.filterwarnings("ignore")  # of transformers, about its own settings
@pytest.mark.parametrize(
    "name",
    ["llama", "gemma3n", *(pytest.param(n, marks=pytest.mark.exhaustive) for n in ("gemma2", "gemma3", "gpt_oss"))],
)
def test_requests_in_one_batch_write_what_they_write_alone(name: str, monkeypatch: pytest.MonkeyPatch):
    """Long prompts in pieces, windows, softcap, sinks, layers that read the keys of others."""
    m, calls = on_regard(name), []

    def counted(*args: Any, **words: Any) -> Tensor:
        calls.append(words["mask"])
        return attend(*args, **words)

    monkeypatch.setattr(continuous, "attend", counted)
    alone = one_by_one(m)
    with continuous_batching(m):
        assert together(m) == alone
    assert len(calls) > 2 * 5 * 12
    assert ("Window" in repr(calls)) == (name != "llama")
    assert m.config._attn_implementation == "regard"


def test_afterwards_everything_is_as_before():
    stock, m = AttentionInterface()[continuous.NAME], on_regard("llama")
    with continuous_batching(m), continuous_batching(m):
        assert AttentionInterface()[continuous.NAME] is paged_attention
    with pytest.raises(ZeroDivisionError), continuous_batching(m):
        raise ZeroDivisionError
    assert AttentionInterface()[continuous.NAME] is stock
    assert m.config._attn_implementation == "regard"


def test_called_by_itself_it_says_where_it_belongs():
    m, ids = on_regard("llama"), torch.tensor([[3, 4, 5]])
    with continuous_batching(m), pytest.raises(ProblemError, match="without the cache of continuous batching"):
        m(ids)


@pytest.mark.parametrize("name", BY_THEMSELVES)
def test_a_model_that_attends_by_itself_is_refused(name: str):
    with pytest.raises(ProblemError, match="never asks"), continuous_batching(model(name)):
        pass


def test_keys_and_values_of_two_sizes_and_latents_are_refused(monkeypatch: pytest.MonkeyPatch):
    m = on_regard("llama")
    with pytest.raises(RefusalError, match="its cache keeps latents"), continuous_batching(on_regard("deepseek_v3")):
        pass
    monkeypatch.setattr(m.config, "v_head_dim", 12, raising=False)
    with pytest.raises(RefusalError, match="keys have 8 elements and its values 12"), continuous_batching(m):
        pass
    assert m.config._attn_implementation == "regard"
    monkeypatch.setattr(m.config, "v_head_dim", 8)
    with continuous_batching(m):
        pass


def test_layers_whose_keys_are_of_two_sizes_are_refused():
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    heads = {"num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16, "hidden_size_per_layer_input": 8}
    words = {"vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY, "num_kv_shared_layers": 0}
    config = Gemma4TextConfig(**sizes, **heads, **words, layer_types=["sliding_attention", "full_attention"])
    if not getattr(config, "is_heterogeneous", False):
        pytest.skip("this version of transformers has one config for all layers")
    with pytest.raises(RefusalError, match="its layers have keys of different sizes"):
        continuous_batching(Gemma4ForCausalLM(config)).__enter__()


def test_a_model_that_computes_with_its_mask_is_refused():
    """It gets none there: the tokens of Doge were others, without an error."""
    m = on_regard("doge")
    with pytest.raises(RefusalError, match="it computes with its mask before attention does"), continuous_batching(m):
        pass
    assert m.config._attn_implementation == "regard"


def test_layers_that_are_not_known_there_are_refused():
    module, q = nn.Module(), torch.randn(1, 2, 3, 4)
    module.layer_idx = 0  # type: ignore[assignment]
    module.config = SimpleNamespace(layer_types=["chunked_attention"])  # type: ignore[assignment]
    with pytest.raises(RefusalError, match="layers of chunked_attention"):
        paged_attention(module, q, q, q, None, cu_seq_lens_q=torch.tensor([0, 3]))
