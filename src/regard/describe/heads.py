"""Heads: query heads, and the key heads that they share."""

from regard.describe.spec import Spec, spec
from regard.describe.whole_number import whole_field
from regard.errors import ProblemError


@spec
class Heads(Spec):
    """Query heads that share key heads in equal, contiguous groups.

    MHA: Vaswani et al. 2017, arXiv:1706.03762, §3.2.2. MQA: Shazeer 2019, arXiv:1911.02150, §3. GQA: Ainslie et al.
    2023, arXiv:2305.13245, §2.2. Query head h uses key head `h // (heads / key_heads)`.

    Args:
        heads: query heads.
        kv_heads: key heads; `heads` is a multiple of it. None: one for each query head.
        qk_dim: dimension of queries and keys.

    Raises:
        ProblemError: a count is not an int of at least 1, or heads that do not divide evenly into groups.

    >>> llama3 = Heads(32, kv_heads=8, qk_dim=128)
    >>> llama3.kind, llama3.key_heads
    ('GQA', 8)
    """

    heads: int
    kv_heads: int | None
    qk_dim: int

    def __post_init__(self) -> None:
        whole_field(self, "heads", "heads", least=1)
        if self.kv_heads is not None:
            whole_field(self, "kv_heads", "heads", least=1)
        whole_field(self, "qk_dim", "dimensions", least=1)
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
    def kind(self) -> str:
        """`"MHA"`, `"GQA"` or `"MQA"`; one head in all is MHA."""
        if self.key_heads == self.heads:
            return "MHA"
        return "MQA" if self.key_heads == 1 else "GQA"
