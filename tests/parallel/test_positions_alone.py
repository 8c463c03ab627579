"""Models of transformers that count positions, or look for packed sequences, in a way of their own: on one rank."""

import inspect
from typing import Any

import pytest
import torch

from regard import RefusalError
from regard.integrate import use_regard
from regard.parallel import context_parallel

transformers: Any = pytest.importorskip("transformers")

LAYERS: dict[str, Any] = {
    "vocab_size": 67, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 99, "pad_token_id": 1, "mask_token_id": 3,
}  # fmt: skip
OF_DISTILBERT = {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4}
OF_GPT_OSS = {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}


pytestmark = pytest.mark.usefixtures("alone")


def make(name: str, config: str, **more: Any) -> Any:
    torch.manual_seed(0)
    return getattr(transformers, name)(getattr(transformers, config)(**LAYERS | more)).eval()


def assert_equals_one_process(model: Any, **inputs: torch.Tensor) -> None:
    more = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    with torch.no_grad():
        whole = model(**inputs, **more).logits
        with context_parallel() as cp:
            found = cp.unshard(model(**inputs, **more).logits)
    keep = inputs.get("attention_mask", torch.ones(whole.shape[:2])).bool()
    torch.testing.assert_close(found[keep], whole[keep], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("RobertaForMaskedLM", "RobertaConfig"),
        ("XLMRobertaForMaskedLM", "XLMRobertaConfig"),
        ("CamembertForMaskedLM", "CamembertConfig"),
        ("Data2VecTextForMaskedLM", "Data2VecTextConfig"),
        ("EsmForMaskedLM", "EsmConfig"),
        ("OPTForCausalLM", "OPTConfig"),
    ],
)
def test_positions_are_counted_as_the_model_counts_them(name: str, config: str, padding: str):
    more = {"ffn_dim": 48, "word_embed_proj_dim": 32} if name.startswith("OPT") else {}
    model = make(name, config, **more)
    ids = torch.randint(4, 67, (2, 13), generator=torch.Generator().manual_seed(1))
    keep = torch.ones(2, 13, dtype=torch.long)
    if padding != "none":
        keep[0, : 4 if padding == "left" else None][-4:] = 0
        ids[keep == 0] = 1
    assert_equals_one_process(model, input_ids=ids, attention_mask=keep)
    embeds = torch.randn(2, 13, 32, generator=torch.Generator().manual_seed(2))
    assert_equals_one_process(model, inputs_embeds=embeds, attention_mask=keep)


@pytest.mark.parametrize(
    ("name", "config", "more"),
    [
        ("LlamaForCausalLM", "LlamaConfig", {}),
        ("OPTForCausalLM", "OPTConfig", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
        ("BioGptForCausalLM", "BioGptConfig", {}),
        ("GptOssForCausalLM", "GptOssConfig", OF_GPT_OSS),
        ("ModernBertForMaskedLM", "ModernBertConfig", {"local_attention": 8}),
        ("DistilBertForMaskedLM", "DistilBertConfig", OF_DISTILBERT),
        ("AlbertForMaskedLM", "AlbertConfig", {"embedding_size": 16}),
    ],
)
def test_positions_that_jump_mean_packed_sequences_only_where_the_model_takes_them_so(
    name: str, config: str, more: dict[str, Any]
):
    positions = torch.cat([torch.arange(10), torch.arange(20)])[None]
    ids = torch.randint(4, 67, (1, 30), generator=torch.Generator().manual_seed(1))
    assert_equals_one_process(make(name, config, **more), input_ids=ids, position_ids=positions)


def test_packed_sequences_of_chunks_are_refused():
    more = {"head_dim": 8, "intermediate_size_mlp": 48, "attention_chunk_size": 16, "num_local_experts": 2}
    model = make("Llama4ForCausalLM", "Llama4TextConfig", **more, num_key_value_heads=2)
    positions = torch.cat([torch.arange(10), torch.arange(20)])[None]
    with context_parallel() as cp:
        with pytest.raises(RefusalError, match="Llama4ForCausalLM in context_parallel: packed sequences: its chunks"):
            model(torch.zeros(1, 30, dtype=torch.long), position_ids=positions, use_cache=False)
        with cp.sequence(30):
            pass


def test_embeddings_scaled_by_the_share_of_masked_tokens_are_refused():
    model = make("EsmForMaskedLM", "EsmConfig", token_dropout=True)
    with context_parallel() as cp:
        with pytest.raises(RefusalError, match="EsmForMaskedLM in context_parallel: token_dropout"):
            model(torch.full((1, 9), 5))
        with cp.sequence(9):
            pass


@pytest.mark.parametrize("attention", ["sdpa", "regard"])
def test_packed_sequences_named_by_their_lengths_do_not_see_each_other(attention: str):
    model = make("OPTForCausalLM", "OPTConfig", ffn_dim=48, word_embed_proj_dim=32)
    parts = torch.randint(4, 67, (1, 30), generator=torch.Generator().manual_seed(1)).split((10, 20), dim=1)
    ends = torch.tensor([0, 10, 30], dtype=torch.int32)
    words: dict[str, Any] = {"position_ids": torch.cat([torch.arange(10), torch.arange(20)])[None]}
    words |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 20, "max_length_k": 20}
    if attention == "regard":
        use_regard(model)
    with torch.no_grad():
        alone = torch.cat([model(part).logits for part in parts], dim=1)
        with context_parallel() as cp:
            found = cp.unshard(model(input_ids=torch.cat(parts, dim=1), **words).logits)
    torch.testing.assert_close(found, alone, atol=1e-5, rtol=1e-4)
