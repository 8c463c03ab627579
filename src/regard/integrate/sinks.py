"""Attention with the sinks that models of transformers pass: a logit per head, or one for every query of a head.

Each is a column of the softmax that takes a share of the weight and adds nothing (`State.with_sink`). gpt-oss learns a
logit per head, Inkling 2 computes one from the hidden state of every token.
"""

from typing import Any

from torch import Tensor
from torch.compiler import is_compiling

from regard.attention import attend, attend_state
from regard.calls import active_observers, current_route
from regard.describe.mask import broadcasts
from regard.errors import RefusalError
from regard.state import State, fold_sink


def sink_of(logits: Tensor | None) -> Tensor | None:
    """The logits of sinks, one per head. Raises `RefusalError` for logits of another shape."""
    if logits is not None and logits.ndim != 1:
        raise RefusalError(
            f"the sinks of this model are {list(logits.shape)}: regard takes a logit per head, [heads], or per query, "
            "[batch, heads, queries, 1], and the latter not in continuous batching, in latent attention (MLA) or for a "
            'padded batch over a cache that drops tokens. Use attn_implementation="eager" for it.'
        )
    return logits


def attend_with_sink(q: Tensor, k: Any, v: Any, *, sink: Tensor | None, dropout: float = 0.0, **options: Any) -> Tensor:
    """`attend` whose sink may be a logit for each query, [batch, heads, queries, 1].

    Dropout leaves the log-sum-exp as it is, so the share of the sink is that of a call without it.

    Raises:
        RefusalError: logits of another shape, or one for each query where calls are observed or sharded.
    """
    if sink is None or not _is_by_query(sink, q):
        return attend(q, k, v, sink=sink_of(sink), dropout=dropout, **options)
    _check_seen_by_none(sink)
    state = attend_state(q, k, v, **options)
    if dropout:
        state = State(attend(q, k, v, dropout=dropout, **options), state.lse)
    return fold_sink(state, sink[..., 0].to(state.lse.dtype))


def _check_seen_by_none(sink: Tensor) -> None:
    """Raise `RefusalError` where something else gets the calls: it would see an output that lacks the sink."""
    if is_compiling() or not (active_observers() or current_route.get()):
        return
    raise RefusalError(
        f"the sinks of this model are {list(sink.shape)}, one per query: its calls cannot be observed (observe_calls, "
        "regard.inspect), have their outputs replaced (replace_outputs), or be sharded over ranks (context_parallel), "
        "as a call has one sink per head. Run the model outside of these blocks and in one process; its weights are "
        "those of output_attentions=True."
    )


def _is_by_query(sink: Tensor, q: Tensor) -> bool:
    sizes = *q.shape[:3], 1
    return sink.ndim == 4 and all(map(broadcasts, sink.shape, sizes))
