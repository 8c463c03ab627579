"""Retrieval heads: heads that attend to a token of a long context at the step that copies it."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from regard.describe.not_a_spec import received
from regard.errors import ProblemError
from regard.inspect.measures.blocks import rows_at_once, whole_rows
from regard.inspect.measures.means import Tokens, check_positions, token_ids
from regard.inspect.measures.received import check_received
from regard.inspect.measures.score import HeadScores
from regard.inspect.weights.index import index_of
from regard.inspect.weights.lazy import Weights


def retrieval(calls: Weights | Sequence[Weights], tokens: Tokens, needle: Tensor, since: int) -> HeadScores:
    """The share of a needle that each head attended to at a step that generated it.

        steps: rows i that wrote a token, p_i + 1 >= since;  t_i = argmax_j A[i, j]
        score = |{t_i : t_i in needle and x[t_i] = x[p_i + 1]}| / |needle|

    A token of the needle counts once, however often the model copies it.

    Wu et al. 2024, arXiv:2404.15574, §2. Their score is the mean over trials in which the model answered rightly: have
    a trial per sequence and leave out those in which it did not (0.1 makes a retrieval head there). The rows of a whole
    text that was written by the model are those of its decoding: one call over prompt and answer will do as well as one
    call per step.

    Chance: the mean of the same with t_i drawn uniformly from the keys that row i sees.

    Args:
        calls: the call of one layer, or its calls in decoding, a step each.
        tokens: integer [batch, tokens], prompt and answer.
        needle: bool [batch, tokens], the tokens to be copied, in the prompt.
        since: the position of the first token that the model wrote.

    Raises:
        ProblemError: tokens and needle that do not fit the calls, a needle without tokens, no generated token,
            or a cache dropped tokens of the text.

    >>> from regard import Causal
    >>> q, k = 50 * torch.eye(5)[[0, 0, 0, 1, 2]], torch.eye(5)  # row i looks at the i-th of these, and at no other
    >>> weights = Weights(q[None, None], k[None, None], torch.full((1, 1, 5), 50.0), Causal())
    >>> tokens = torch.tensor([[5, 7, 8, 6, 7, 8]])  # a needle 7 8 in the prompt; the last two are generated
    >>> needle = torch.tensor([[False, True, True, False, False, False]])
    >>> retrieval(weights, tokens, needle, since=4).value  # row 3 generated the 7 and looked at it, row 4 the 8
    tensor([[1.]])
    """
    calls = list(calls) if isinstance(calls, Iterable) else [calls]
    tokens, needle = token_ids(tokens), torch.as_tensor(needle)
    if index_of(since) is None:
        raise ProblemError(f"since is {received(since)}: expected the position of the first token that was generated.")
    _check(calls, tokens, needle)
    batch, heads = calls[0].shape[:2]
    device, dtype = calls[0].q.device, calls[0].dtype
    tokens, needle = tokens.to(device), needle.to(device)
    copied = torch.zeros(batch, heads, tokens.shape[1], dtype=torch.bool, device=device)
    missed = torch.ones(batch, heads, tokens.shape[1], dtype=dtype, device=device)  # the probability, by uniform draws
    steps = [0] * batch
    for call in calls:
        for b in range(batch):
            one = call.only(b)
            at = one.positions[0, 0] + 1
            writing = ((at >= since) & (at < tokens.shape[1])).nonzero()[:, 0]
            steps[b] += len(writing)
            for rows in writing.split(rows_at_once(call)):
                found = whole_rows(one, rows)
                wrote = tokens[b, at[rows]]
                keys = found.weights.shape[-1]
                copies = needle[b, :keys] & (tokens[b, :keys] == wrote[:, None])  # [rows, keys]
                top = found.top_key[..., None] == torch.arange(keys, device=device)  # [heads, rows, keys]
                copied[b, :, :keys] |= (top & copies & found.attends[..., None]).any(1)
                visible = found.visible[0].expand(-1, len(rows), keys)
                drawn = (visible & copies) / visible.sum(-1, keepdim=True).clamp(min=1).to(dtype)
                missed[b, :, :keys] *= (1 - drawn).prod(1)
    if not all(steps):
        raise ProblemError(
            f"no row generated a token at position {since} or later in sequence {steps.index(0)}: pass the calls of "
            "the answer."
        )
    of = needle.sum(-1)[:, None]
    return HeadScores(copied.sum(-1) / of, (1 - missed).sum(-1) / of)


def _check(calls: list[Weights], tokens: Tensor, needle: Tensor) -> None:
    if not calls:
        raise ProblemError("calls is empty: pass the weights of the layer, of one call or of every step.")
    for call in calls:
        check_received(call, Weights, "retrieval", "calls")
        check_positions(call, "retrieval")
    batch, keys = calls[0].shape[0], max(call.shape[3] for call in calls)
    if tokens.shape != needle.shape or tokens.shape[0] != batch or tokens.shape[1] < keys or needle.dtype != torch.bool:
        raise ProblemError(
            f"tokens is {list(tokens.shape)} and needle {list(needle.shape)} {needle.dtype}: expected prompt and "
            f"answer, [{batch}, {keys} or more], and which of them are the needle, bool of the same shape."
        )
    if not bool(needle.any(-1).all()):
        raise ProblemError("a needle has no tokens: mark the tokens to copy in every sequence.")
