"""Models whose queries go to the keys that an indexer chose for them: DeepSeek sparse attention."""

import functools
from typing import Any

import pytest
import torch
import transformers
from transformers import StaticCache

from regard import RefusalError, observe_calls
from regard.integrate.transformers import use_regard
from tests.integrate.test_cache_latent import SIZES
from tests.integrate.test_compiled import compiling, forget_graphs, graphs
from tests.integrate.writing import prompt, written
from tests.integrate.zoo import close, padding

INDEXED = {"index_topk": 5, "index_head_dim": 16, "index_n_heads": 3}
FAMILIES = {
    "deepseek_v32": "DeepseekV32",
    "glm_moe_dsa": "GlmMoeDsa",
    "axk2": "AXK2",
    "hy_v4": "HYV4",
}


@functools.cache
def indexed(name: str) -> Any:
    torch.manual_seed(0)
    made = f"{FAMILIES[name]}ForCausalLM"
    if not hasattr(transformers, made):
        pytest.skip(f"this version of transformers has no {made}")
    config = getattr(transformers, f"{FAMILIES[name]}Config")(**SIZES | INDEXED)
    m = getattr(transformers, made)(config).eval()
    with torch.no_grad():
        for weight in m.parameters():
            if weight.ndim > 1:
                weight.mul_(3)
    return m


@pytest.mark.exhaustive(per="test")
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("static", [False, True])
def test_a_query_sees_the_keys_that_were_chosen(name: str, static: bool):
    m, ids, mask = indexed(name), prompt(), padding("left")
    found: list[Any] = []
    for implementation in ("eager", "regard"):
        use_regard(m) if implementation == "regard" else m.set_attn_implementation(implementation)
        cache = StaticCache(m.config, max_cache_len=24) if static else None
        found.append(written(m, ids, cache, attention_mask=mask))
    (stock, scores), (ours, our_scores) = found
    assert ours == stock
    assert close(our_scores, scores)


def test_no_more_keys_are_seen_than_were_chosen():
    m, seen = indexed("deepseek_v32"), []
    use_regard(m)
    with torch.no_grad(), observe_calls(lambda call: seen.append(call.plan.schedule.pairs)):
        m(prompt(1, 13))
    assert seen == [4 * (1 + 2 + 3 + 4 + 9 * 5)] * 2  # heads, the first queries see fewer than 5


@pytest.mark.exhaustive
@pytest.mark.parametrize("side", ["left", "hole"])
def test_one_graph_serves_every_step_though_the_indexer_computes_with_the_mask(side: str):
    m, ids, mask = indexed("deepseek_v32"), prompt(), padding(side)
    use_regard(m)
    plain, _ = written(m, ids, None, attention_mask=mask)
    forget_graphs()
    how = {"cache_implementation": "static", "compile_config": compiling(dynamic=False)}
    found, _ = written(m, ids, None, attention_mask=mask, **how)
    assert found == plain
    assert graphs() == 1


def test_a_model_that_chooses_blocks_of_keys_is_refused_at_once():
    pytest.importorskip("transformers.models.minimax_m3_vl")
    sizes = {name: SIZES[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    config = transformers.MiniMaxM3VLTextConfig(
        **sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=8, rotary_dim=4, num_local_experts=4
    )
    m = transformers.MiniMaxM3VLForCausalLM(config)
    with pytest.raises(RefusalError, match=r"MiniMaxM3VLAttention passes block_indices= to its attention"):
        use_regard(m)
    assert m.config._attn_implementation != "regard"
