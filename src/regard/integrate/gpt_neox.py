"""GPT-NeoX checkpoints (Pythia, GPT-NeoX-20B) as other architectures that compute the same and know fewer key heads.

transformers' GPT-NeoX has a key head for every query head, and no name for fewer. Two architectures can hold it:

```
x + attention(LN1 x) + mlp(LN2 x)     use_parallel_residual, the rule: Phi, whose branches share one LayerNorm
y + mlp(LN2 y), y = x + attention(LN1 x)                        else: Nemotron, whose LayerNorm stores its gain less 1
```

For Phi, each LayerNorm is folded into the projections behind it, `W (g * n + b) + a = (W * g) n + (W b + a)`: both
become the same norm n without parameters. The sums are taken in float64 and rounded once; in 16 bits that rounding is
all that differs. RoPE turns the first dims of each head in all three, a quarter by default. In training Nemotron drops
weights of attention alone, GPT-NeoX and Phi what the branches give as well. Black et al. 2022, arXiv:2204.06745, §2.1.
"""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.errors import ProblemError
from regard.integrate.weights import Weights

LAYER = re.compile(
    r"gpt_neox\.layers\.(\d+)\.((?:input_layernorm|post_attention_layernorm|attention\.(?:query_key_value|dense)"
    r"|mlp\.dense_(?:h_to_4h|4h_to_h))\.(?:weight|bias))"
)
BUFFERS = re.compile(r".*\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)")
"""What old versions of transformers wrote and none reads."""
FUSED = "attention.query_key_value"

Share = Callable[[int, str, str, Tensor], Tensor]
"""(layer, "key" or "value", "weight" or "bias", rows of all heads) -> rows of fewer."""


def config_of(said: Any, kv_heads: int) -> dict[str, Any]:
    """The config.json of the result, from transformers' `GPTNeoXConfig`."""
    from transformers import NemotronConfig, PhiConfig

    alike = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "hidden_act")
    alike += ("max_position_embeddings", "initializer_range", "use_cache", "tie_word_embeddings", "rope_parameters")
    alike += ("attention_dropout", "bos_token_id", "eos_token_id", "pad_token_id", "dtype")
    same: dict[str, Any] = {name: getattr(said, name) for name in alike} | {"num_key_value_heads": kv_heads}
    if said.use_parallel_residual:
        made: Any = PhiConfig(
            **same,
            architectures=["PhiForCausalLM"],
            layer_norm_eps=said.layer_norm_eps,
            resid_pdrop=said.hidden_dropout,
            embd_pdrop=said.hidden_dropout,
        )
    else:
        made = NemotronConfig(
            **same,
            architectures=["NemotronForCausalLM"],
            norm_eps=said.layer_norm_eps,
            attention_bias=said.attention_bias,
            mlp_bias=True,
        )
    return made.to_diff_dict()


def check(weights: Weights, layers: int) -> None:
    """Raise `ProblemError` unless these are the weights of a GPT-NeoX language model."""
    needed = [f"gpt_neox.layers.{layer}.{FUSED}.weight" for layer in range(layers)]
    lacking = [name for name in ["gpt_neox.embed_in.weight", *needed] if name not in weights]
    if lacking:
        raise ProblemError(f"the checkpoint lacks {lacking[0]}: expected the weights of a GPTNeoXForCausalLM.")


class Rewriting:
    """Gives for each tensor of GPT-NeoX the tensors of the other architecture.

    Args:
        said: transformers' `GPTNeoXConfig`.
        weights: where the parameters of the norms are read, which may lie in another file.
        share: makes fewer heads of the rows of keys and values.
    """

    def __init__(self, said: Any, weights: Weights, share: Share) -> None:
        self._heads, self._to_phi = said.num_attention_heads, said.use_parallel_residual
        self._weights, self._share = weights, share

    def __call__(self, name: str) -> dict[str, Tensor]:
        """The tensors that this one becomes, by their new names; none for a buffer, or a part of another."""
        if BUFFERS.fullmatch(name):
            return {}
        if found := LAYER.fullmatch(name):
            layer = int(found[1])
            made = (self._phi_layer if self._to_phi else self._nemotron_layer)(layer, found[2], name)
            return {f"model.layers.{layer}.{part}": tensor for part, tensor in made.items()}
        return self._outside(name)

    def _outside(self, name: str) -> dict[str, Tensor]:
        """Embedding, last norm, output."""
        tensor = self._weights.read(name)
        if name == "gpt_neox.embed_in.weight":
            zeros = {"lm_head.bias": tensor.new_zeros(tensor.shape[0])} if self._to_phi else {}
            return {"model.embed_tokens.weight": tensor, **zeros}
        if name in ("embed_out.weight", "lm_head.weight"):
            return {"lm_head.weight": tensor}
        if name.startswith("gpt_neox.final_layer_norm."):
            kind = name.rpartition(".")[2]
            return (
                {f"model.final_layernorm.{kind}": tensor}
                if self._to_phi
                else {f"model.norm.{kind}": _less(tensor, kind)}
            )
        raise ProblemError(f"{name} is no weight of a GPTNeoXForCausalLM.")

    def _phi_layer(self, layer: int, part: str, name: str) -> dict[str, Tensor]:
        module, _, kind = part.rpartition(".")
        if module == "post_attention_layernorm":
            return {}
        if module == "input_layernorm":
            like = self._weights.read(name)
            return {part: torch.ones_like(like) if kind == "weight" else torch.zeros_like(like)}
        if module in ("attention.dense", "mlp.dense_4h_to_h"):
            new = {"attention.dense": "self_attn.dense", "mlp.dense_4h_to_h": "mlp.fc2"}[module]
            weight_only = kind == "weight" and name.removesuffix("weight") + "bias" not in self._weights
            tensor = self._weights.read(name)
            zeros = {f"{new}.bias": tensor.new_zeros(tensor.shape[0])} if weight_only else {}
            return {f"{new}.{kind}": tensor, **zeros}
        if kind == "bias":  # written with the weight
            return {}
        norm = {FUSED: "input_layernorm", "mlp.dense_h_to_4h": "post_attention_layernorm"}[module]
        weight, bias = self._folded(name, f"gpt_neox.layers.{layer}.{norm}")
        if module != FUSED:
            return {"mlp.fc1.weight": weight, "mlp.fc1.bias": bias}
        return self._parted(layer, "weight", weight) | self._parted(layer, "bias", bias)

    def _nemotron_layer(self, layer: int, part: str, name: str) -> dict[str, Tensor]:
        module, _, kind = part.rpartition(".")
        tensor = self._weights.read(name)
        if module in ("input_layernorm", "post_attention_layernorm"):
            return {part: _less(tensor, kind)}
        if module == FUSED:
            return self._parted(layer, kind, tensor)
        new = {
            "attention.dense": "self_attn.o_proj",
            "mlp.dense_h_to_4h": "mlp.up_proj",
            "mlp.dense_4h_to_h": "mlp.down_proj",
        }
        return {f"{new[module]}.{kind}": tensor}

    def _folded(self, name: str, norm: str) -> tuple[Tensor, Tensor]:
        """Weight and bias of a projection with the gain and bias of the LayerNorm before it worked in."""
        stored = self._weights.read(name)
        gain, shift = (self._weights.read(f"{norm}.{kind}").double() for kind in ("weight", "bias"))
        beside = name.removesuffix("weight") + "bias"
        bias = self._weights.read(beside).double() if beside in self._weights else 0.0
        weight = stored.double()
        return (weight * gain).to(stored), (weight @ shift + bias).to(stored)

    def _parted(self, layer: int, kind: str, fused: Tensor) -> dict[str, Tensor]:
        """Query, key and value rows, which lie together per head [heads * 3 * head_dim, ...], each by themselves."""
        parts = fused.unflatten(0, (self._heads, 3, -1))
        q, k, v = (parts[:, i].flatten(0, 1) for i in range(3))
        k, v = self._share(layer, "key", kind, k), self._share(layer, "value", kind, v)
        return {f"self_attn.{letter}_proj.{kind}": rows for letter, rows in zip("qkv", (q, k, v), strict=True)}


def _less(tensor: Tensor, kind: str) -> Tensor:
    """What Nemotron's norm stores: the gain less 1 (exact where it lies in 0.5 to 2), the bias as it is."""
    return (tensor.double() - 1).to(tensor) if kind == "weight" else tensor
