"""Compiled models: how many graphs torch.compile makes, and that they give what the model gives without it."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CompileConfig, DynamicCache, EncoderDecoderCache, StaticCache

from regard.cache import Contiguous
from regard.integrate.cache import regard_cache
from tests.integrate.writing import on_regard, prompt, written
from tests.integrate.zoo import close, padding, tokens, with_cache

LONG = pytest.mark.exhaustive
"""Each model compiles for seconds: the default run has one of each kind."""


def compiling(dynamic: bool | None = None) -> CompileConfig:
    """What makes `generate` compile the decode step on a CPU, too."""
    options = CompileConfig(backend="aot_eager", fullgraph=True, dynamic=dynamic, mode=None)  # type: ignore[arg-type]
    vars(options)["_compile_all_devices"] = True  # it compiles on accelerators alone by default
    return options


def graphs() -> int:
    """Graphs that torch.compile has made since `torch._dynamo.reset`."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def forget_graphs() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


@pytest.mark.parametrize(
    ("name", "dynamic"),
    [
        ("llama", None),
        *(pytest.param(name, False, marks=LONG) for name in ("deepseek_v3", "llama", "gpt2", "bart")),
    ],
)
def test_one_graph_serves_every_step_that_generate_compiles(name: str, dynamic: bool | None):
    m, ids = on_regard(name), prompt()
    plain, logits = written(m, ids, None)
    forget_graphs()
    found, compiled = written(m, ids, None, cache_implementation="static", compile_config=compiling(dynamic))
    assert graphs() == 1
    assert found == plain
    assert close(compiled, logits)


@pytest.mark.exhaustive
def test_windows_need_no_more_graphs_than_with_transformers_own_attention():
    """transformers counts the tokens of a sliding layer in Python, and compiles again when the window is full."""
    m, ids, made = on_regard("phi3"), prompt(length=3), list[int]()
    plain, logits = written(m, ids, None)
    for implementation in ("regard", "eager"):
        m.set_attn_implementation(implementation)
        forget_graphs()
        found, compiled = written(m, ids, None, cache_implementation="static", compile_config=compiling())
        made.append(graphs())
        assert found == plain
        assert close(compiled, logits)
    assert made[0] == made[1]


@pytest.mark.exhaustive
@pytest.mark.parametrize("side", ["left", "hole"])
def test_one_graph_serves_every_step_of_a_padded_batch(side: str):
    m, ids, mask = on_regard("llama"), prompt(), padding(side)
    plain, _ = written(m, ids, None, attention_mask=mask)
    forget_graphs()
    cache = regard_cache(m, layout=Contiguous(capacity=24))
    found, _ = written(m, ids, cache, attention_mask=mask, compile_config=compiling(dynamic=False))
    assert graphs() == 1
    assert found == plain


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["llama", *(pytest.param(name, marks=LONG) for name in ("gemma3", "bart"))])
@torch.no_grad()
def test_a_model_that_is_compiled_whole_has_a_graph_for_the_prompt_and_one_for_all_steps(name: str):
    m, parts = on_regard(name), [prompt(), *tokens(2, 5).split(1, dim=1)]
    encoded = m.get_encoder()(parts[0]) if m.config.is_encoder_decoder else None
    plain = decoded(m, m, parts, encoded)
    forget_graphs()
    compiled = torch.compile(m, backend="aot_eager", fullgraph=True)
    assert close(decoded(compiled, m, parts, encoded), plain)
    assert graphs() == 2


def decoded(run: Any, m: Any, parts: list[Tensor], encoded: Any) -> Tensor:
    """The logits of a prompt and of the steps after it, on a static cache, [batch, tokens, vocabulary]."""
    cache, found = StaticCache(m.config, max_cache_len=32), list[Tensor]()
    paired = EncoderDecoderCache(cache, DynamicCache())
    for new in parts:
        given: dict[str, Any] = {"input_ids": new, **with_cache(cache)}
        if encoded is not None:
            given = {"decoder_input_ids": new, **with_cache(paired), "encoder_outputs": encoded}
        found.append(run(**given).logits)
    return torch.cat(found, 1)
