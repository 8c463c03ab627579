"""Heads: their counts and dimensions, and the resulting counts of parameters and cached elements.

MHA has one query head per key head, MQA one key head for all query heads, GQA is in between. Latent heads (MLA) cache
one short vector per token, from which keys and values are computed. The formulas are those of the papers, and the
modules of `regard.nn` have as many parameters, besides gates, norms of heads and sinks.
"""

from regard.describe.spec import Spec, spec
from regard.describe.whole_number import whole_field
from regard.errors import ProblemError


@spec
class Heads(Spec):
    """Query heads that share key heads in equal, contiguous groups.

    MHA: Vaswani et al. 2017, arXiv:1706.03762, §3.2.2. MQA: Shazeer 2019, arXiv:1911.02150, §3. GQA: Ainslie et al.
    2023, arXiv:2305.13245, §2.2. Query head h uses key head `h // group`.

    Args:
        heads: query heads, h.
        kv_heads: key heads, g; h is a multiple of it. None: h.
        qk_dim: dimension of queries and keys; required.
        v_dim: dimension of values; None: qk_dim.

    Raises:
        ProblemError: a count is not an int of at least 1, or heads that do not divide evenly into groups.

    >>> llama3 = Heads(32, kv_heads=8, qk_dim=128)
    >>> llama3.kind, llama3.group, llama3.parameters(4096), llama3.cache_elements()
    ('GQA', 4, 41943040, 2048)
    """

    heads: int
    kv_heads: int | None = None
    qk_dim: int = 0  # required: no default is right for all models
    v_dim: int | None = None

    def __post_init__(self) -> None:
        _check_counts(self, optional=("kv_heads", "v_dim"))
        if self.heads % self.key_heads:
            raise ProblemError(
                f"Heads(heads={self.heads}, kv_heads={self.kv_heads}): heads must be a whole multiple of kv_heads, so "
                f"that each key head serves as many query heads; {self.heads} / {self.kv_heads} is not whole."
            )

    @property
    def key_heads(self) -> int:
        """Key heads, also if `kv_heads` is None."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def value_dim(self) -> int:
        """Dimension of values, also if `v_dim` is None."""
        return self.qk_dim if self.v_dim is None else self.v_dim

    @property
    def kind(self) -> str:
        """`"MHA"`, `"GQA"` or `"MQA"`; one head in all is MHA."""
        if self.key_heads == self.heads:
            return "MHA"
        return "MQA" if self.key_heads == 1 else "GQA"

    @property
    def group(self) -> int:
        """How many query heads share a key head."""
        return self.heads // self.key_heads

    def parameters(
        self, d_model: int, qkv_bias: bool = False, out_bias: bool = False, context_dim: int | None = None
    ) -> int:
        """Parameters of the four projections: `d h qk + c g qk + c g v + h v d`, and their biases.

        With `h qk = h v = d` this is `4 d²` for MHA (`+ 4 d` with all biases) and `2 d² + 2 d qk` for MQA.

        Args:
            d_model: d, the width of the input of queries, and of the output.
            qkv_bias: whether the three projections into the heads have biases.
            out_bias: whether the projection out of them has one.
            context_dim: c, the width of the input of keys and values; None: d.

        >>> Heads(8, qk_dim=64).parameters(512) == 4 * 512**2
        True
        >>> Heads(8, qk_dim=64).parameters(512, qkv_bias=True, out_bias=True) - 4 * 512**2 == 4 * 512
        True
        >>> Heads(8, kv_heads=1, qk_dim=64).parameters(512) == 2 * 512**2 + 2 * 512 * 64
        True
        """
        context = d_model if context_dim is None else context_dim
        q, k, v = self.heads * self.qk_dim, self.key_heads * self.qk_dim, self.key_heads * self.value_dim
        weights = d_model * q + context * (k + v) + self.heads * self.value_dim * d_model
        return weights + qkv_bias * (q + k + v) + out_bias * d_model

    def cache_elements(self, tokens: int = 1) -> int:
        """Elements in the cache of `tokens` tokens, per layer and batch row: `tokens g (qk + v)`."""
        return tokens * self.key_heads * (self.qk_dim + self.value_dim)


@spec
class LatentHeads(Spec):
    """Heads with keys and values computed from one latent vector per token. DeepSeek-AI 2024, arXiv:2405.04434, §2.1.

    Each token has a latent [kv_rank] and one rotated key part [rope_dim], which all heads share. The key of a head is
    [nope_dim] computed from the latent, followed by the shared part; its value is [v_dim] computed from the latent. In
    the paper: n_h = heads, d_c = kv_rank, d_c' = q_rank, d_h = nope_dim = v_dim, d_h^R = rope_dim.

    Args:
        heads: query heads, h.
        q_rank: size of the latent of queries; None: queries are computed from the token itself.
        kv_rank: size of the latent of keys and values.
        nope_dim: dimension of the part of a query or key without position.
        rope_dim: dimension of the rotated part of a query, and of the shared key part.
        v_dim: dimension of values.

    Raises:
        ProblemError: a count is not an int of at least 1.

    >>> deepseek_v3 = LatentHeads(128, q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128)
    >>> deepseek_v3.parameters(7168), deepseek_v3.cache_elements()
    (187107328, 576)
    """

    heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int

    def __post_init__(self) -> None:
        _check_counts(self, optional=("q_rank",))

    @property
    def kind(self) -> str:
        """`"MLA"`."""
        return "MLA"

    @property
    def group(self) -> int:
        """How many query heads share a latent: all of them."""
        return self.heads

    @property
    def qk_dim(self) -> int:
        """Dimension of queries and keys: the part without position and the rotated part."""
        return self.nope_dim + self.rope_dim

    def parameters(self, d_model: int, qkv_bias: bool = False, out_bias: bool = False, norms: bool = True) -> int:
        """Parameters of all projections, of the norms of the latents, and of biases.

        `d r + r h (nope + rope)` for queries (`d h (nope + rope)` without a latent), `d (c + rope)` down to the latent
        and the shared key part, `c h (nope + v)` up to keys and values, `h v d` out; r = q_rank, c = kv_rank.

        Args:
            d_model: d, the width of a token.
            qkv_bias: whether the projections down to the latents have biases.
            out_bias: whether the projection out of the heads has one.
            norms: whether the weights of the norms count (§3.1.2; the formulas of §2.1 omit them).
        """
        down, up = self.kv_rank + self.rope_dim, self.heads * self.qk_dim
        queries = d_model * up if self.q_rank is None else self.q_rank * (d_model + up)
        values = d_model * down + self.kv_rank * self.heads * (self.nope_dim + self.v_dim)
        biases = qkv_bias * (down + (self.q_rank or 0)) + out_bias * d_model
        return (
            queries + values + self.heads * self.v_dim * d_model + biases + norms * (self.kv_rank + (self.q_rank or 0))
        )

    def cache_elements(self, tokens: int = 1) -> int:
        """Elements in the cache of `tokens` tokens, per layer and batch row: `tokens (kv_rank + rope_dim)`."""
        return tokens * (self.kv_rank + self.rope_dim)


def _check_counts(owner: Heads | LatentHeads, optional: tuple[str, ...]) -> None:
    """Make every field an int of at least 1; optional ones may be None."""
    for name in owner._fields:  # pyright: ignore[reportPrivateUsage]
        if name not in optional or getattr(owner, name) is not None:
            whole_field(owner, name, "heads" if name.endswith("heads") else "dimensions", least=1)
