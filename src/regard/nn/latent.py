"""`LatentAttention`: multi-head latent attention (MLA), which caches one short vector per token for all heads.

DeepSeek-AI 2024, arXiv:2405.04434, §2.1; DeepSeek-AI 2024, arXiv:2412.19437, §2.1.1. In the papers' letters: h = x,
c^KV = latent, W^DKV = kv_down, W^UK = k_up, W^UV = v_up, W^KR = k_rope, W^DQ = q_down, W^UQ and W^QR = q_up (or
q_proj).
"""

from operator import and_
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.attention import attend
from regard.backend.contract import Backend
from regard.cache import KVCache
from regard.cache.store import CachedTensor, leading_channels
from regard.calls import after_dropped, are_outputs_replaced
from regard.describe.mask import Mask
from regard.describe.position import Position, Rope
from regard.describe.position_table import check_positions
from regard.describe.suggestions import suggest_keywords
from regard.errors import ProblemError
from regard.nn.call_arguments import both, length_of, observed_mask
from regard.nn.checks import check_flags, check_input, check_observer
from regard.nn.latent_checks import beyond_weights, check_absorbed, check_latent_cache, check_sizes
from regard.nn.norm import RMSNorm
from regard.nn.projections import compute_tensors
from regard.nn.rollback import RollbackOnFailure
from regard.nn.rope_pairs import RopePairs
from regard.nn.sinks import SinkModule, make_sinks
from regard.nn.spec_attributes import SpecAttributes
from regard.nn.spec_module import SpecModule, spec_of
from regard.nn.token_positions import token_positions
from regard.plan.checks import check_numbers, check_specs
from regard.storage.stored import Latent, StoredTensor


class Flops(NamedTuple):
    """FLOPs of one call in each form, without those that both forms share; a multiply-add is 2."""

    expanded: int
    absorbed: int


class LatentAttention(SinkModule, SpecAttributes):
    """Attention over latents: keys and values of all heads are projections of one vector per token.

    ```
    x -- kv_down -- kv_norm -- latent [kv_rank] --+-- k_up --> the part of each key without position [nope_dim]
                                                  +-- v_up --> each value [v_dim]
    x -- k_rope -- rotate -- [rope_heads * rope_dim], the part of each key with position, shared by heads
    x -- q_proj, or q_down -- q_norm -- q_up --> each query [nope_dim + rope_dim], its last part rotated
    ```

    The cache stores the latent and the rotated key of each token, `kv_rank + rope_heads * rope_dim` elements. Two forms
    compute the same output:

    - **expanded**: all latents are projected to keys and values, and attention is computed as usual.
    - **absorbed**: `q . (W_uk c) = (W_uk^T q) . c`, so queries are projected instead, and the latents are both keys and
      values, shared by all heads (multi-query attention); `W_uv` is applied to the result. §2.1.2, last paragraph.

    With n queries on m keys, h query heads, g key heads, c = kv_rank, R = rope_heads * rope_dim:

        expanded  2 m c g (nope + v)   + 2 h n m (nope + rope + v)
        absorbed  2 n c h (nope + v)   + 2 h n m (2 c + R)          (c + R in place of 2 c + R if nope = 0)

    The cheaper form runs. For DeepSeek-V3 (h = g = 128, c = 512, nope = v = 128, R = rope = 64) and one query on 4,096
    keys the absorbed form takes 1/117 of the expanded one; for a prompt of 4,096 tokens the expanded one takes 1/3.2 of
    the absorbed one. The absorbed form reads the weights of k_up and v_up. If these do not say what k_up and v_up
    compute (adapters, biases, forward hooks, quantised modules), the expanded form runs. With absorbed=True, and a
    cache that evicts, hooks on these two do not act.

    Args:
        d_model: the width of x and of the output.
        heads: query heads.
        kv_rank: dimensions of the latent of keys and values.
        nope_dim: dimensions of a query and key without position; may be 0 if rope_dim is not.
        rope_dim: dimensions of a query and key with position; may be 0 if nope_dim is not.
        v_dim: dimensions of a value.
        q_rank: dimensions of the latent of queries; None: queries are projections of x.
        kv_heads: key and value heads, of which heads is a whole multiple; None: heads, as in the paper.
        rope_heads: heads of the key part with position, of which kv_heads is a whole multiple; 1 in the paper.
        position: rotates the parts with position: a `Rope` of rope_dim (DeepSeek's is interleaved), or `RopePairs`.
        norm: whether the latents are RMS-normalised (`RMSNorm`; §3.1.2).
        qkv_bias: whether the projections down to the latents, and to the shared keys, have biases.
        q_bias: whether the projection into the queries' heads has one.
        out_bias: whether the projection out of the heads has one.
        mask: which query may see which key, in every call; None for all.
        scale: None for `(nope_dim + rope_dim) ** -0.5`.
        softcap: the cap of the scores; None for none.
        sink: whether each head has a learned logit that takes weight and gives no value.
        dropout: the probability that a weight is dropped, in training only.
        backend: as in `attend`.
        device: the device of the weights.
        dtype: the type of the weights.

    Raises:
        ProblemError: the sizes and the position do not fit together, or the mask is of another class.

    >>> import torch
    >>> from regard import Causal
    >>> from regard.cache import KVCache
    >>> attention = LatentAttention(64, heads=8, kv_rank=16, nope_dim=8, rope_dim=4, v_dim=8, mask=Causal())
    >>> x, cache = torch.randn(1, 10, 64), KVCache()
    >>> with torch.no_grad():
    ...     whole = attention(x)
    ...     steps = [attention(x[:, i : i + 1], cache=cache) for i in range(10)]
    >>> torch.allclose(torch.cat(steps, dim=1), whole, atol=1e-5), cache.bytes // cache.tokens // 4
    (True, 20)
    """

    position: SpecModule[Position] | None
    mask: SpecModule[Mask] | None
    _spec_names = ("position", "mask")

    @suggest_keywords
    def __init__(
        self,
        d_model: int,
        heads: int,
        *,
        kv_rank: int,
        nope_dim: int,
        rope_dim: int,
        v_dim: int,
        q_rank: int | None = None,
        kv_heads: int | None = None,
        rope_heads: int = 1,
        position: Position | SpecModule[Position] | None = None,
        norm: bool = True,
        qkv_bias: bool = False,
        q_bias: bool = False,
        out_bias: bool = False,
        mask: Mask | SpecModule[Mask] | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sink: bool = False,
        dropout: float = 0.0,
        backend: str | Backend | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.d_model, self.heads, self.kv_heads = d_model, heads, heads if kv_heads is None else kv_heads
        self.kv_rank, self.q_rank, self.rope_heads = kv_rank, q_rank, rope_heads
        self.nope_dim, self.rope_dim, self.v_dim = nope_dim, rope_dim, v_dim
        check_flags(norm=norm, qkv_bias=qkv_bias, q_bias=q_bias, out_bias=out_bias, sink=sink)
        check_numbers(scale, softcap, dropout)
        self.scale, self.softcap, self.dropout, self.backend = scale, softcap, dropout, backend
        check_sizes(self._sizes)
        for name, spec in {"mask": mask, "position": position}.items():
            setattr(self, name, spec)

        def linear(wide: int, narrow: int, bias: bool = False) -> nn.Linear | None:
            return nn.Linear(wide, narrow, bias, device, dtype) if narrow else None

        def rms(dim: int) -> RMSNorm | None:
            return RMSNorm(dim, device=device, dtype=dtype) if norm else None

        queries = heads * (nope_dim + rope_dim)
        self.q_proj = linear(d_model, queries, q_bias) if q_rank is None else None
        self.q_down = None if q_rank is None else linear(d_model, q_rank, qkv_bias)
        self.q_norm = None if q_rank is None else rms(q_rank)
        self.q_up = None if q_rank is None else linear(q_rank, queries, q_bias)
        self.kv_down = nn.Linear(d_model, kv_rank, qkv_bias, device, dtype)
        self.kv_norm = rms(kv_rank)
        self.k_rope = linear(d_model, rope_heads * rope_dim, qkv_bias)
        self.k_up = linear(kv_rank, self.kv_heads * nope_dim)
        self.v_up = nn.Linear(kv_rank, self.kv_heads * v_dim, False, device, dtype)
        self.o_proj = nn.Linear(heads * v_dim, d_model, out_bias, device, dtype)
        self.sinks = make_sinks(heads, device, dtype) if sink else None

    @suggest_keywords
    def forward(
        self,
        x: Float[Tensor, "batch tokens d_model"],
        *,
        mask: Mask | None = None,
        positions: int | Int[Tensor, "..."] | None = None,
        cache: KVCache | None = None,
        absorbed: bool | None = None,
    ) -> Float[Tensor, "batch tokens d_model"]:
        """The output of attention for each token of x, over the tokens of the cache and of x.

        Args:
            x: [batch, tokens, d_model].
            mask: which query may see which key, cached keys included; combined with the module's own mask by `&`.
            positions: the positions of queries and keys for RoPE: that of the first token, or all as [tokens] or
                [batch, tokens]; None: from the end of the cache.
            cache: stores `kv_rank + rope_heads * rope_dim` elements of each token as keys of one head, with the layout
                `Latent(kv_rank)` or any other, but `Paged` with `Int8`, `Int4` or `Fp8` is refused, as its values have
                no channels here. The absorbed form reads the elements without a copy.
            absorbed: the form; None: the one with fewer FLOPs, or the expanded one if k_up or v_up computes more than
                the product with its weight (an adapter, a bias), has a forward hook, or is quantised, or within
                `replace_outputs`, where an output is that of a head and no latent.

        Raises:
            ProblemError: sizes that do not fit, positions without a use, absorbed=True or a cache that evicts where
                k_up or v_up has an adapter or a bias or is quantised, a cache whose policy counts attention weights
                where the module has a softcap, or a `Rolling` cache with a rope: a `Rope` rotates the first dimensions
                of a key, and here these are the latent.
        """
        self._check(x)
        positions = check_positions(positions, x, rank=3)
        self._check_use(positions)
        check_latent_cache(cache, self.kv_rank, self.position is not None)
        k_up, v_up = self.k_up, self.v_up
        check_absorbed(absorbed, cache, k_up, v_up)
        check_observer(cache, softcap=self.softcap)
        q, entries = self._queries(x), self._entries(x)
        q_nope, q_rope = q.split([self.nope_dim, self.rope_dim], -1)
        if self.position is not None:
            q_rope, entries = self._rotate(q_rope, entries, positions, cache)
        keys = values = entries.unsqueeze(1)
        visible = both("mask", and_, self.mask, mask)
        with RollbackOnFailure(cache):
            if cache is not None:  # a latent is both key and value
                keys, values = cache.append(keys, None if isinstance(cache.layout, Latent) else keys[..., :0])
            if absorbed is None:
                is_less = self._absorbed_is_less(q.shape[2], keys.shape[2])
                is_possible = beyond_weights(k_up, v_up, with_hooks=True) is None and not are_outputs_replaced()
                absorbed = is_less and is_possible
            if absorbed:
                compute_tensors(k_up, v_up)
            form = self._absorbed if absorbed else self._expanded
            dropped = 0 if cache is None else cache.tokens_seen - keys.shape[2]
            with after_dropped(dropped, cache is not None and cache.has_gaps):
                out = form(q_nope, q_rope, keys, values, visible)
            if cache is not None and cache.evict is not None:
                cache.observe(self._to_latents(q_nope, q_rope), observed_mask(visible, q, keys), self._scale)
            return self.o_proj(out.transpose(1, 2).flatten(2))

    def _rotate(
        self, q_rope: Tensor, entries: Tensor, positions: int | Tensor | None, cache: KVCache | None
    ) -> tuple[Tensor, Tensor]:
        """Queries [batch, heads, tokens, rope_dim], and the keys of entries, rotated to their positions."""
        shard, stored = token_positions(), 0 if cache is None else cache.tokens_seen
        first = positions if positions is not None else stored if shard is None else shard.positions
        rope, tokens = self._rope(), entries.shape[1]
        length = length_of(rope.rope if isinstance(rope, RopePairs) else rope, first, tokens, tokens, cache)
        length = length if shard is None else shard.length
        latent, k_rope = entries.split([self.kv_rank, self.rope_heads * self.rope_dim], -1)
        k_rope = k_rope.unflatten(2, (self.rope_heads, self.rope_dim)).transpose(1, 2)
        k_rope = rope.rotate(k_rope, first, length).transpose(1, 2).flatten(2)
        return rope.rotate(q_rope, first, length), torch.cat([latent, k_rope], -1)

    def flops(self, queries: int, keys: int) -> Flops:
        """The FLOPs of each form per batch row, without those of both, if every query sees every key.

        >>> with torch.device("meta"):
        ...     v3 = LatentAttention(7168, 128, kv_rank=512, q_rank=1536, nope_dim=128, rope_dim=64, v_dim=128)
        >>> step, prompt = v3.flops(1, 4096), v3.flops(4096, 4096)
        >>> round(step.expanded / step.absorbed), round(prompt.absorbed / prompt.expanded, 1)
        (117, 3.2)
        """
        pairs, up = 2 * self.heads * queries * keys, 2 * self.kv_rank * (self.nope_dim + self.v_dim)
        scored = (self.kv_rank if self.nope_dim else 0) + self.rope_heads * self.rope_dim
        return Flops(
            up * self.kv_heads * keys + pairs * (self.nope_dim + self.rope_dim + self.v_dim),
            up * self.heads * queries + pairs * (scored + self.kv_rank),
        )

    def _absorbed_is_less(self, queries: int, keys: int) -> bool:
        """Whether the absorbed form has fewer FLOPs: of a shard, over the whole sequence, so ranks have one form."""
        if (shard := token_positions()) is not None:
            queries = keys = shard.length
        flops = self.flops(queries, keys)
        return flops.absorbed < flops.expanded

    def extra_repr(self) -> str:
        """The sizes."""
        values = self._sizes | {"scale": self.scale, "softcap": self.softcap}
        return ", ".join(f"{name}={value!r}" for name, value in values.items() if value is not None)

    @property
    def _sizes(self) -> dict[str, Any]:
        names = ("d_model", "heads", "kv_heads", "q_rank", "kv_rank", "nope_dim", "rope_dim", "rope_heads", "v_dim")
        return {name: getattr(self, name) for name in names}

    def _queries(self, x: Tensor) -> Tensor:
        """[batch, heads, tokens, nope_dim + rope_dim], before RoPE."""
        if self.q_proj is not None:
            q = self.q_proj(x)
        else:
            assert self.q_down is not None
            assert self.q_up is not None
            q = self.q_down(x)
            q = self.q_up(q if self.q_norm is None else self.q_norm(q))
        return _split(q, self.nope_dim + self.rope_dim)

    def _entries(self, x: Tensor) -> Tensor:
        """The cache entry of each token before RoPE: [batch, tokens, kv_rank + rope_heads * rope_dim]."""
        latent = self.kv_down(x)
        latent = latent if self.kv_norm is None else self.kv_norm(latent)
        return latent if self.k_rope is None else torch.cat([latent, self.k_rope(x)], -1)

    def _expanded(
        self, q_nope: Tensor, q_rope: Tensor, keys: CachedTensor, _values: CachedTensor, mask: Mask | None
    ) -> Tensor:  # fmt: skip
        entries = keys if isinstance(keys, Tensor) else keys.dense()
        latent, k_rope = entries[:, 0].split([self.kv_rank, self.rope_heads * self.rope_dim], -1)
        v = _split(self.v_up(latent), self.v_dim)
        self._check_heads(q_nope.shape[1], v.shape[1], "v_up")
        parts: list[Tensor] = []
        if self.k_up is not None:
            parts.append(_split(self.k_up(latent), self.nope_dim))
        if self.rope_dim:
            shared = k_rope.unflatten(2, (self.rope_heads, 1, self.rope_dim))
            shared = shared.expand(-1, -1, -1, v.shape[1] // self.rope_heads, -1)
            parts.append(shared.flatten(2, 3).transpose(1, 2))
        return self._attend(torch.cat([q_nope, q_rope], -1), torch.cat(parts, -1), v, mask)

    def _absorbed(
        self, q_nope: Tensor, q_rope: Tensor, keys: CachedTensor, values: CachedTensor, mask: Mask | None
    ) -> Tensor:  # fmt: skip
        q = self._to_latents(q_nope, q_rope)
        if isinstance(keys, StoredTensor) and (keys.rotated or self.k_up is None):
            keys = keys.dense()
        if values.shape[3] != self.kv_rank or isinstance(keys, Tensor):
            values = leading_channels(keys, self.kv_rank)
        if self.k_up is None and isinstance(keys, Tensor):
            q, keys = q[..., self.kv_rank :], keys[..., self.kv_rank :]
        out = self._attend(q, keys, values, mask)
        up = self.v_up.weight.unflatten(0, (-1, self.v_dim))  # [kv_heads, v_dim, kv_rank]
        self._check_heads(out.shape[1], len(up), "v_up")
        return torch.einsum("bgrnc,gdc->bgrnd", out.unflatten(1, (len(up), -1)), up).flatten(1, 2)

    def _to_latents(self, q_nope: Tensor, q_rope: Tensor) -> Tensor:
        """Queries for cache entries, [batch, heads, tokens, kv_rank + rope_heads * rope_dim]."""
        if self.k_up is None:
            latent = q_rope.new_zeros((*q_rope.shape[:3], self.kv_rank))
        else:
            up = self.k_up.weight.unflatten(0, (-1, self.nope_dim))  # [kv_heads, nope_dim, kv_rank]
            self._check_heads(q_nope.shape[1], len(up), "k_up")
            grouped = q_nope.unflatten(1, (len(up), -1))
            latent = torch.einsum("bgrnd,gdc->bgrnc", grouped, up).flatten(1, 2)
        if not self.rope_dim:
            return latent
        return torch.cat([latent, q_rope if self.rope_heads == 1 else self._placed(q_rope)], -1)

    def _check_heads(self, heads: int, kv_heads: int, up: str) -> None:
        """Raise `ProblemError` unless there are all heads, or those of a rank whose projections are `ColwiseParallel`.

        Args:
            heads: of the queries.
            kv_heads: that the projection `up` gives.
        """
        if heads * self.kv_heads != kv_heads * self.heads:
            raise ProblemError(
                f"q_proj or q_up gives {heads} of {self.heads} query heads, and {up} {kv_heads} of {self.kv_heads} key "
                "heads: expected the same share of both, as where all three are ColwiseParallel."
            )
        if self.rope_heads > 1 and heads != self.heads:
            raise ProblemError(
                f"{heads} of {self.heads} query heads, and {self.rope_heads} heads of the key part with position, "
                "which are not cut by rank: expected all heads, or rope_heads=1."
            )

    def _placed(self, q_rope: Tensor) -> Tensor:
        """Queries [batch, heads, tokens, rope_dim] in the dimensions of their rope head, 0 in all others."""
        grouped = q_rope.unflatten(1, (self.rope_heads, -1))
        place = torch.eye(self.rope_heads, dtype=q_rope.dtype, device=q_rope.device)
        return (grouped[..., None, :] * place[:, None, None, :, None]).flatten(-2).flatten(1, 2)

    @property
    def _scale(self) -> float:
        return (self.nope_dim + self.rope_dim) ** -0.5 if self.scale is None else self.scale

    def _attend(self, q: Tensor, k: CachedTensor, v: CachedTensor, mask: Mask | None) -> Tensor:
        return attend(
            q, k, v, mask=mask, scale=self._scale, softcap=self.softcap, sink=self.sinks,
            dropout=self.dropout if self.training else 0.0, backend=self.backend,
        )  # fmt: skip

    def _rope(self) -> Rope | RopePairs:
        position = spec_of("position", self.position)
        assert isinstance(position, Rope | RopePairs)
        return position

    def _check(self, x: Tensor) -> None:
        check_input("x", x, f"[batch, tokens, {self.d_model}]")
        if x.ndim != 3 or x.shape[2] != self.d_model:
            raise ProblemError(f"x has shape {list(x.shape)}: expected [batch, tokens, {self.d_model}].")

    def _check_use(self, positions: int | Tensor | None) -> None:
        if positions is not None and self.position is None:
            raise ProblemError(
                "positions= needs a module with a position, and this one has none: leave positions= out, or create the "
                f"module with position=Rope({self.rope_dim})."
            )

    def _check_spec(self, name: str, spec: object) -> None:
        if name == "mask" or spec is None:
            check_specs(spec, None, None)
            return
        if not (isinstance(spec, Rope | RopePairs) and spec.dim == self.rope_dim):
            expected = f"Rope({self.rope_dim}), as rope_dim={self.rope_dim}" if self.rope_dim else "none, as rope_dim=0"
            raise ProblemError(f"position={spec!r}: expected {expected}.")
        if isinstance(spec, RopePairs) and len(spec.pairs) not in (1, self.rope_heads):
            raise ProblemError(f"{spec!r} chooses pairs for {len(spec.pairs)} heads, and rope_heads={self.rope_heads}.")


def _split(x: Tensor, dim: int) -> Tensor:
    """[batch, tokens, heads * dim] as [batch, heads, tokens, dim]: all heads, or those of a rank."""
    return x.unflatten(2, (-1, dim)).transpose(1, 2)
