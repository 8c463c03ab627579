"""What the processes of `workers.py` run to shard models: each compares its part with one process."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from regard import Causal, Window, attend
from regard.nn import Decoder
from regard.parallel import context_parallel

if __import__("os").environ.get("STUB"): import sys; sys.path.insert(0, "/tmp"); import stub


def llama(**more: Any) -> Any:
    """A small random model of transformers, the same in every process."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=31, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, **more,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def mistral(**more: Any) -> Any:
    """One with a sliding window."""
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=31, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, sliding_window=9, **more,
    )  # fmt: skip
    return MistralForCausalLM(config)


def decoder(**more: Any) -> nn.Module:
    """One of `regard.nn`."""
    torch.manual_seed(0)
    return Decoder(31, 32, layers=2, heads=4, kv_heads=2, **more)


MODELS = {"llama": llama, "mistral": mistral}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradients by name, and none from now on."""
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def check_gradients(model: nn.Module, whole: dict[str, Tensor]) -> None:
    """Their sum over the ranks is that of one process."""
    for name, mine in gradients(model).items():
        dist.all_reduce(mine)
        torch.testing.assert_close(mine, whole[name], atol=2e-6, rtol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


def transformers_model(rank: int, size: int, *, name: str, tokens: int, layout: str, case: str) -> None:
    """Logits, loss and gradients of a model of transformers."""
    model = MODELS[name]()
    generator = torch.Generator().manual_seed(1)
    inputs: dict[str, Tensor] = {"input_ids": torch.randint(31, (2, tokens), generator=generator)}
    labels = inputs["input_ids"].clone()
    keep = torch.ones(2, tokens, dtype=torch.bool)
    if case == "padding on the right":
        keep[1, -tokens // 3 :] = False
    elif case == "padding on the left":
        keep[1, : tokens // 3] = False
        inputs["position_ids"] = (keep.cumsum(1) - 1).clamp(min=0)
    elif case == "packed":
        inputs["position_ids"] = (torch.arange(tokens) % (tokens // 3)).expand(2, -1)
        model.config.use_cache = False  # else transformers looks for no packed sequences
    if "padding" in case:
        inputs["attention_mask"] = keep.long()
        labels[~keep] = -100
    whole = model(**inputs, labels=labels)
    whole.loss.backward()
    expected = gradients(model)
    with context_parallel(layout=layout) as cp:
        out = model(**inputs, labels=labels)
        out.loss.backward()
    torch.testing.assert_close(out.loss, whole.loss, atol=1e-6, rtol=1e-6)
    assert out.logits.shape[1] == cp.shard.layout.counts[rank]
    logits = cp.unshard(out.logits)
    torch.testing.assert_close(logits[keep], whole.logits[keep], atol=1e-5, rtol=1e-4)
    check_gradients(model, expected)
    again = model(**inputs, labels=labels)  # in one process, as before
    assert torch.equal(again.logits, whole.logits)
    assert model.config._attn_implementation == "sdpa"


def regard_model(rank: int, size: int, *, more: dict[str, Any], layout: str, tokens: int) -> None:
    """Logits and gradients of a `Decoder`."""
    model = decoder(**more)
    ids = torch.randint(31, (2, tokens), generator=torch.Generator().manual_seed(1))
    whole = model(ids)
    weights = torch.randn(whole.shape, generator=torch.Generator().manual_seed(2))
    (whole * weights).sum().backward()
    expected = gradients(model)
    with context_parallel(layout=layout) as cp:
        part = model(ids)
        logits = cp.unshard(part)
        (logits * weights).sum().backward()
    torch.testing.assert_close(logits, whole, atol=1e-5, rtol=1e-4)
    for name, mine in gradients(model).items():
        dist.all_reduce(mine)
        torch.testing.assert_close(mine, expected[name], atol=1e-4, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def own_module(rank: int, size: int, *, tokens: int) -> None:
    """A module that calls torch's attention and regard's."""
    q, k, v = torch.randn(3, 2, 4, tokens, 8, generator=torch.Generator().manual_seed(1)).unbind()
    theirs = nn.functional.scaled_dot_product_attention
    whole = theirs(q, k, v, is_causal=True), attend(q, k, v, mask=Causal() & Window(7))
    with context_parallel() as cp, cp.sequence(tokens, mask=Causal()) as shard:
        mine = [shard.shard(t, 2) for t in (q, k, v)]
        found = nn.functional.scaled_dot_product_attention(*mine, is_causal=True), attend(*mine, mask=Causal() & Window(7))
    for one, other in zip(found, whole, strict=True):
        torch.testing.assert_close(shard.unshard(one, 2), other, atol=1e-5, rtol=1e-4)
