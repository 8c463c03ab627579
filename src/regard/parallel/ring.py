"""Ring attention: each rank has some tokens of a sequence; keys and values travel from rank to rank."""

from torch import Tensor
from torch.distributed import ProcessGroup

from regard.backend.contract import Backend
from regard.describe.bias import Bias
from regard.describe.mask import Mask
from regard.describe.score import Score
from regard.errors import RefusalError
from regard.parallel.layout import Layout
from regard.state import State

TIMEOUT = 300.0
"""Seconds that a rank waits for another."""


def ring_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | None = None,
    bias: Bias | None = None,
    score: Score | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    dropout: float = 0.0,
    layout: Layout | None = None,
    key_layout: Layout | None = None,
    offset: int | None = None,
    group: ProcessGroup | None = None,
    timeout: float = TIMEOUT,
    backend: str | Backend | None = None,
) -> Tensor:
    """This rank's rows of the attention over the whole sequence; every rank of the group calls it.

    The arguments are those of `attend`, and mask, bias, score, sink and offset are those of the whole sequence, the
    same on every rank: positions are positions in the sequence, and the rows and columns of a `TensorMask` are its
    tokens.

    Args:
        q: [batch, heads, tokens of this rank, qk_dim].
        k: [batch, kv_heads, tokens of this rank, qk_dim].
        v: [batch, kv_heads, tokens of this rank, v_dim].
        layout: which tokens each rank has; None: contiguous, as many on each rank as on this one.
        key_layout: which keys each rank has, where they are another sequence than the queries; None: `layout`.
        group: the ranks; None for all. `mesh.get_group("name")` of a `DeviceMesh` dimension is one.
        timeout: seconds to wait for another rank before an error names it.

    Returns:
        [batch, heads, tokens of this rank, v_dim].
    """
    raise RefusalError("ring_attend")


def ring_attend_state(q: Tensor, k: Tensor, v: Tensor, *, layout: Layout | None = None) -> State:
    """`ring_attend` as a `State`, which has the log-sum-exp; the same arguments without sink and dropout."""
    raise RefusalError("ring_attend_state")
