"""`MultiHeadAttention`: the four projections around `attend`.

Self- and cross-attention, MHA, GQA and MQA (by the number of key heads), RoPE, any mask, bias and score.
Vaswani et al. 2017, arXiv:1706.03762, §3.2.2; Ainslie et al. 2023, arXiv:2305.13245.
"""

from operator import add, and_
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.attention import attend
from regard.backend.contract import Backend
from regard.cache import KVCache
from regard.calls import after_dropped
from regard.describe.bias import Bias
from regard.describe.heads import Heads
from regard.describe.mask import Mask
from regard.describe.position import Absolute, Position, Rope
from regard.describe.position_table import check_positions
from regard.describe.score import Score
from regard.describe.suggestions import suggest_keywords
from regard.describe.whole_number import whole
from regard.errors import ProblemError
from regard.nn.call_arguments import both, length_of, observed_mask
from regard.nn.checks import check_cache, check_flags, check_input, check_observer, check_rolling
from regard.nn.norm import RMSNorm
from regard.nn.rollback import RollbackOnFailure
from regard.nn.sinks import SinkModule, make_sinks
from regard.nn.spec_attributes import SpecAttributes
from regard.nn.spec_module import SpecModule, spec_of
from regard.nn.token_positions import token_positions
from regard.plan.checks import check_numbers, check_specs


class MultiHeadAttention(SinkModule, SpecAttributes):
    """Multi-head attention with its weights.

    ```
    x ── q_proj ── q_norm ── rotate ──┐
    x ── k_proj ── k_norm ── rotate ── cache ── attend ── (* sigmoid(gate_proj x)) ── o_proj ── out
    x ── v_proj ───────────────────── cache ──┘
    ```

    With a context, keys and values are computed from it (cross-attention). Weights are `[out, in]`, and the rows of a
    head are contiguous, as in checkpoints of transformers: q_proj [heads * head_dim, d_model], k_proj and v_proj
    [kv_heads * head_dim, context_dim], o_proj [d_model, heads * head_dim].

    Args:
        d_model: the width of x and of the output.
        heads: query heads.
        kv_heads: key heads, of which heads is a whole multiple; None: heads. 1 is multi-query attention.
        head_dim: dimensions of a query, key and value; None: d_model / heads.
        context_dim: the width of the context of keys and values; None: d_model.
        qk_norm: whether each head of queries and keys is RMS-normalised (`RMSNorm`, one weight for all heads) before
            RoPE. Henry et al. 2020, arXiv:2010.04245; in this form Yang et al. 2025, arXiv:2505.09388, §2.
        qkv_bias: whether q_proj, k_proj, v_proj and gate_proj have biases.
        out_bias: whether o_proj has one.
        gate: whether the output of each head is multiplied elementwise with a sigmoid of a projection of x. Qiu et al.
            2025, arXiv:2505.06708, §2.2 (there G1, elementwise).
        position: a `Rope` of head_dim that rotates queries and keys; None for none.
        mask: which query may see which key, in every call; None for all.
        bias: added to the scores; a tensor in it that requires gradients is trained.
        score: how queries and keys are compared; None for their dot product.
        scale: None for the score's own; `head_dim ** -0.5` for the dot product.
        softcap: the cap of the scores; None for none.
        sink: whether each head has a learned logit, initially 0, that takes weight and gives no value: the softmax
            with `exp(logit)` added to its denominator. Agarwal et al. 2025, arXiv:2508.10925, §2.2.
        dropout: the probability that a weight is dropped, in training only.
        backend: as in `attend`.
        device: the device of the weights.
        dtype: the type of the weights.

    Raises:
        ProblemError: the sizes and the position do not fit together, or a mask, bias or score is of another class. Each
            call checks whether these three fit the heads and the tokens.

    `position`, `mask`, `bias` and `score` may be a `SpecModule`, so that layers share their tensors. They may be
    assigned later as well, `attention.bias = Alibi(8)`.

    >>> import torch
    >>> from regard import Causal
    >>> attention = MultiHeadAttention(64, heads=8, kv_heads=2, mask=Causal())
    >>> attention(torch.randn(1, 10, 64)).shape
    torch.Size([1, 10, 64])
    """

    position: SpecModule[Position] | None
    mask: SpecModule[Mask] | None
    bias: SpecModule[Bias] | None
    score: SpecModule[Score] | None

    @suggest_keywords
    def __init__(
        self,
        d_model: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        context_dim: int | None = None,
        qk_norm: bool = False,
        qkv_bias: bool = False,
        out_bias: bool = False,
        gate: bool = False,
        position: Position | SpecModule[Position] | None = None,
        mask: Mask | SpecModule[Mask] | None = None,
        bias: Bias | SpecModule[Bias] | None = None,
        score: Score | SpecModule[Score] | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sink: bool = False,
        dropout: float = 0.0,
        backend: str | Backend | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        d_model, heads = whole(d_model, "d_model", "dimensions", least=1), whole(heads, "heads", "heads", least=1)
        context_dim = d_model if context_dim is None else whole(context_dim, "context_dim", "dimensions", least=1)
        self.sizes = Heads(heads, kv_heads, _head_dim(d_model, heads, head_dim))
        self.d_model, self.context_dim = d_model, context_dim
        self.heads, self.kv_heads, self.head_dim = heads, self.sizes.key_heads, self.sizes.qk_dim
        if isinstance(cast(object, bias), bool):
            raise ProblemError(
                f"bias={bias} is no Bias, which is added to scores: projections have biases by qkv_bias= and out_bias=."
            )
        check_flags(qk_norm=qk_norm, qkv_bias=qkv_bias, out_bias=out_bias, gate=gate, sink=sink)
        check_numbers(scale, softcap, dropout)
        self.scale, self.softcap, self.dropout, self.backend = scale, softcap, dropout, backend
        for name, spec in {"mask": mask, "bias": bias, "score": score, "position": position}.items():
            setattr(self, name, spec)

        inner, shared = heads * self.head_dim, self.kv_heads * self.head_dim
        self.q_proj = nn.Linear(d_model, inner, qkv_bias, device, dtype)
        self.k_proj = nn.Linear(self.context_dim, shared, qkv_bias, device, dtype)
        self.v_proj = nn.Linear(self.context_dim, shared, qkv_bias, device, dtype)
        self.o_proj = nn.Linear(inner, d_model, out_bias, device, dtype)
        self.gate_proj = nn.Linear(d_model, inner, qkv_bias, device, dtype) if gate else None
        self.q_norm = RMSNorm(self.head_dim, device=device, dtype=dtype) if qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, device=device, dtype=dtype) if qk_norm else None
        self.sinks = make_sinks(heads, device, dtype) if sink else None

    @suggest_keywords
    def forward(
        self,
        x: Float[Tensor, "batch tokens d_model"],
        context: Float[Tensor, "batch context_tokens context_dim"] | None = None,
        *,
        mask: Mask | None = None,
        bias: Bias | None = None,
        positions: int | Int[Tensor, "..."] | None = None,
        cache: KVCache | None = None,
    ) -> Float[Tensor, "batch tokens d_model"]:
        """The output of attention for each token of x, over the tokens of x or of the context.

        Masks and biases count keys from the first key in the cache. Queries of self-attention are aligned with the last
        keys; those of cross-attention start at 0, or at `positions` if that is an int.

        Args:
            x: [batch, tokens, d_model].
            context: [batch, context_tokens, context_dim]; None: x. The positions of its keys start at 0, or at the end
                of the cache.
            mask: which query may see which key; combined with the module's own mask by `&`.
            bias: added to the scores, in addition to the module's own bias.
            positions: the positions of the queries, and without a context of the keys, for RoPE: that of the first
                token, or all as [tokens] or [batch, tokens]; None: from 0, or in self-attention from the end of the
                cache.
            cache: the KV cache. The call appends its keys and values and attends to all cached ones; once the cache
                contains the whole context, pass `context[:, :0]`. A call that raises leaves the cache unchanged.

        Raises:
            ProblemError: sizes that do not fit, positions without a use, a `Rolling` cache whose rope is not the
                module's, or a cache whose policy counts attention weights where the module has a bias, a softcap or a
                score other than `Dot`.
        """
        self._check(x, context)
        positions = check_positions(positions, x, rank=3)
        self._check_use(positions, context)
        check_cache(cache)
        check_rolling(cache, spec_of("position", self.position))
        score = spec_of("score", self.score)
        check_observer(cache, score=score, bias=self.bias or bias, softcap=self.softcap)
        stored = 0 if cache is None else cache.tokens_seen
        source = x if context is None else context
        q = self._split(self.q_proj(x), self.q_norm)
        k = self._split(self.k_proj(source), self.k_norm)
        v = self._split(self.v_proj(source), None)
        shard = token_positions() if context is None else None
        first = positions if positions is not None else stored if context is None else 0
        first = shard.positions if shard is not None and positions is None else first
        if self.position is not None:
            rope = cast(Rope, spec_of("position", self.position))
            tokens = length_of(rope, first, q.shape[2], k.shape[2], cache) if shard is None else shard.length
            q = rope.rotate(q, first, tokens)
            k = rope.rotate(k, first if context is None else stored, tokens)
        visible = both("mask", and_, self.mask, mask)
        with RollbackOnFailure(cache):
            if cache is not None:
                k, v = cache.append(k, v)
            dropped = 0 if cache is None or context is not None else cache.tokens_seen - k.shape[2]
            with after_dropped(dropped, cache is not None and cache.has_gaps):
                out = attend(
                    q, k, v,
                    mask=visible,
                    bias=both("bias", add, self.bias, bias),
                    score=score,
                    scale=self.scale, softcap=self.softcap, sink=self.sinks,
                    dropout=self.dropout if self.training else 0.0,
                    offset=None if context is None else 0 if isinstance(first, Tensor) else first,
                    backend=self.backend,
                )  # fmt: skip
            if cache is not None and cache.evict is not None:
                cache.observe(q, observed_mask(visible, q, k), self.scale)
            out = out.transpose(1, 2).flatten(2)
            if self.gate_proj is not None:
                out = out * torch.sigmoid(self.gate_proj(x))
            return self.o_proj(out)

    def extra_repr(self) -> str:
        """The sizes, and the options that differ from their defaults."""
        parts = [f"d_model={self.d_model}", f"heads={self.heads}", f"kv_heads={self.kv_heads} ({self.sizes.kind})"]
        parts.append(f"head_dim={self.head_dim}")
        parts += [f"context_dim={self.context_dim}"] * (self.context_dim != self.d_model)
        options = {"scale": self.scale, "softcap": self.softcap, "dropout": self.dropout or None}
        parts += [f"{name}={value!r}" for name, value in options.items() if value is not None]
        parts += ["sink=True"] * (self.sinks is not None)
        return ", ".join(parts + ([] if self.backend is None else [f"backend={self.backend!r}"]))

    def _check_spec(self, name: str, spec: object) -> None:
        if name == "position":
            _check_rope(spec, self.head_dim)
        else:
            check_specs(*(spec if each == name else None for each in ("mask", "bias", "score")))

    def _split(self, x: Tensor, norm: nn.Module | None) -> Tensor:
        """[batch, tokens, heads * head_dim] as [batch, heads, tokens, head_dim], normalised; without a norm a view."""
        x = x.unflatten(2, (-1, self.head_dim))
        return (x if norm is None else norm(x)).transpose(1, 2)

    def _check(self, x: Tensor, context: Tensor | None) -> None:
        check_input("x", x, f"[batch, tokens, {self.d_model}]")
        if context is not None:
            check_input("context", context, f"[batch, context_tokens, {self.context_dim}]")
        if x.ndim != 3 or x.shape[2] != self.d_model:
            raise ProblemError(f"x has shape {list(x.shape)}: expected [batch, tokens, {self.d_model}].")
        if context is None and self.context_dim != self.d_model:
            raise ProblemError(f"keys and values need a context of width {self.context_dim}: pass context=.")
        if context is not None and (context.ndim != 3 or context.shape[::2] != (x.shape[0], self.context_dim)):
            raise ProblemError(
                f"context has shape {list(context.shape)}: expected [{x.shape[0]}, context_tokens, {self.context_dim}]."
            )

    def _check_use(self, positions: int | Tensor | None, context: Tensor | None) -> None:
        if positions is not None and self.position is None and (context is None or isinstance(positions, Tensor)):
            raise ProblemError(
                "positions= needs a module with a position, and this one has none: leave positions= out, or create the "
                f"module with position=Rope({self.head_dim}). Masks and biases do not use positions=."
            )


def _head_dim(d_model: int, heads: int, head_dim: int | None) -> int:
    if head_dim is None and d_model % heads:
        raise ProblemError(
            f"d_model={d_model} is no whole multiple of heads={heads}: set the width of a head with head_dim=."
        )
    return head_dim if head_dim is not None else d_model // heads


def _check_rope(position: object, head_dim: int) -> None:
    if position is None or (isinstance(position, Rope) and position.dim == head_dim):
        return
    if isinstance(position, Rope):
        raise ProblemError(
            f"{position!r} rotates heads of {position.dim} dimensions, and these have {head_dim}: "
            f"position=Rope({head_dim}); to rotate a part of them, Rope({head_dim}, fraction=...)."
        )
    hint = {
        Absolute: "it is added to embeddings, before attention: x = position.add(x)",
        Bias: "it is added to scores: bias=",
    }
    note = next((f" ({text})" for kind, text in hint.items() if isinstance(position, kind)), "")
    raise ProblemError(f"position is {position!r}: expected a Rope({head_dim}){note}.")
