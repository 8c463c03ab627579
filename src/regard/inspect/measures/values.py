"""Weights times value vectors: a head may put all of its mass on a token whose value is almost zero."""

from typing import cast

import torch
from torch import Tensor

from regard.errors import ProblemError
from regard.inspect.brief import shown
from regard.inspect.measures.means import check_positions, selected_rows, uniform
from regard.inspect.measures.measure import Inputs, required
from regard.inspect.measures.received import checked
from regard.inspect.measures.score import HeadScores
from regard.inspect.measures.sink import Token, column_of, first_tokens, text_keys
from regard.inspect.sweep import sweep
from regard.inspect.weights.index import index_of
from regard.inspect.weights.lazy import Weights
from regard.wide import wide_of


def value_norms(v: Tensor) -> Tensor:
    """The norm of the values of a token, relative to the mean token: ||v_k|| / mean_j ||v_j||.

    Gu et al. 2024, arXiv:2410.10781, and Guo et al. 2024, arXiv:2410.13835 (value-state drain): small at sinks.

    Args:
        v: [batch, kv_heads, keys, v_dim].

    Returns:
        [batch, kv_heads, keys].

    >>> value_norms(torch.tensor([[[[3.0, 4.0], [0.0, 5.0], [0.0, 20.0]]]]))  # 5, 5 and 20, of a mean of 10
    tensor([[[0.5000, 0.5000, 2.0000]]])
    """
    norms = _norms_of(v)
    return norms / norms.mean(-1, keepdim=True)


def _norms_of(v: Tensor) -> Tensor:
    """||v_k||, [batch, kv_heads, keys]."""
    return torch.linalg.vector_norm(v.detach().float() if v.dtype != torch.float64 else v.detach(), dim=-1)


@checked
def first_value(inputs: Inputs) -> HeadScores:
    """The norm of the first token's value in each query head, relative to the mean token: `value_norms` at that token.

    The first token of each sequence, also behind padding, and the mean over its keys, as `first_tokens` and `text_keys`
    tell them from padding. Chance: 1, the mean token.

    >>> weights = Weights(torch.zeros(1, 2, 2, 3), torch.zeros(1, 1, 2, 3), torch.zeros(1, 2, 2))
    >>> first_value(Inputs(weights, v=torch.tensor([[[[1.0], [3.0]]]])))
    HeadScores(value=tensor([[0.5000, 0.5000]]), chance=tensor([[1., 1.]]))
    """
    v = required(inputs.v, "v")
    weights = inputs.weights
    check_positions(weights, "first_value")
    _check_values(weights, v)
    norms, text = _norms_of(v), text_keys(weights)[:, None]
    mean = norms.masked_fill(~text, 0).sum(-1) / text.sum(-1)
    first = norms[torch.arange(len(norms), device=v.device), :, first_tokens(weights)]  # [batch, kv_heads]
    value = (first / mean).repeat_interleave(weights.shape[1] // v.shape[1], dim=1)
    return HeadScores(value, torch.ones_like(value))


def _check_values(weights: Weights, v: Tensor) -> None:
    """Raise `ProblemError` for values that are not those of the keys of a call."""
    batch, _, _, keys = weights.shape
    kv_heads = weights.k.shape[1]
    if not isinstance(cast(object, v), Tensor) or v.ndim != 4 or tuple(v.shape[:3]) != (batch, kv_heads, keys):
        came = list(v.shape) if isinstance(cast(object, v), Tensor) else shown(v)
        raise ProblemError(f"v is {came}: expected the values of the call, [{batch}, {kv_heads}, {keys}, v_dim].")


def output_norms(v: Tensor, w_o: Tensor) -> Tensor:
    """Norms of the tokens' contributions to the residual stream through each head: ||v_j W_O^h||, [batch, heads, keys].

    Kobayashi et al. 2020, arXiv:2004.10102, §3, without the bias of the values' projection, which v contains.

    Args:
        v: [batch, kv_heads, keys, v_dim].
        w_o: [heads, v_dim, d_model], each head's part of the output projection; see `split_heads`.

    Raises:
        ProblemError: heads or widths do not match.

    >>> v, w_o = torch.tensor([[[[3.0, 4.0], [1.0, 0.0]]]]), 2 * torch.eye(2)[None]
    >>> output_norms(v, w_o)
    tensor([[[10.,  2.]]])
    """
    _check_output(v, w_o)
    return _norms(v.repeat_interleave(w_o.shape[0] // v.shape[1], dim=1), w_o)


def split_heads(weight: Tensor, heads: int) -> Tensor:
    """The weight of an output projection, [d_model, heads * v_dim], head by head: [heads, v_dim, d_model].

    Raises:
        ProblemError: its width is no multiple of the heads.

    >>> split_heads(torch.arange(8.0).view(2, 4), heads=2)[1]  # the second head's two columns, as rows
    tensor([[2., 6.],
            [3., 7.]])
    """
    count = index_of(heads)
    if weight.ndim != 2 or count is None or count < 1 or weight.shape[1] % count:
        raise ProblemError(f"the output projection is {list(weight.shape)}: expected [d_model, {heads} heads * v_dim].")
    return weight.detach().unflatten(1, (count, -1)).permute(1, 2, 0)


@checked
def value_weighted(inputs: Inputs, token: Token = None) -> HeadScores:
    """The share of a token in the output of a head, by norms of weight times value: sinks are small by this measure.

        mean over rows with p_i > token of  A[i, token] nu_token / sum_j A[i, j] nu_j,      nu_j = ||v_j W_O||

    Kobayashi et al. 2020, arXiv:2004.10102, §4, who compare these norms by kind of token. Token and rows as in
    `sink`. Reads `Inputs.norms`, from `output_norms`. Chance: the same share in uniform attention.

    Raises:
        ProblemError: there is no such token, the norms are of other heads or keys, or a cache dropped tokens.

    >>> from regard import Causal
    >>> q = k = torch.zeros(1, 1, 3, 2)  # uniform attention: row i gives 1 / (i + 1) to each
    >>> weights = Weights(q, k, torch.tensor([[[1.0, 2, 3]]]).log(), Causal())
    >>> value_weighted(Inputs(weights, norms=torch.tensor([[[0.0, 1.0, 1.0]]]))).value  # token 0 has a zero value
    tensor([[0.]])
    """
    weights, norms = inputs.weights, required(inputs.norms, "norms")
    column = column_of(weights, token, "value_weighted")
    sums, even_sums = inputs.mean_norm(inputs.swept), inputs.mean_norm(inputs.even)
    own, least = norms[torch.arange(len(norms), device=norms.device), :, column.key, None], torch.finfo(sums.dtype).tiny
    value = column.mass * own / sums.clamp(min=least)
    chance = column.even * own / even_sums.clamp(min=least)
    return HeadScores.of_rows(value, chance, selected_rows(weights, inputs.rows) & column.later)


@checked
def sink_output(inputs: Inputs, token: Token = None) -> HeadScores:
    """A token's contribution relative to the output of the head: mean of ||A[i, k] v_k W_O|| / ||z_i W_O||.

    Over rows with p_i > k, z_i the head's output; token and rows as in `sink`. Near 0 the mass on k does nothing;
    contributions may cancel, so that it may exceed 1. Gu et al. 2024, arXiv:2410.10781, on why sinks are harmless; the
    ratio is ours. Reads `Inputs.v`, `out` and `w_o`. Chance: the same of uniform attention, whose outputs take a sweep:
    O(queries x keys x v_dim).

    Raises:
        ProblemError: there is no such token, heads, tokens or widths do not match, or a cache dropped tokens.

    >>> from regard import Causal
    >>> q, k = 50 * torch.eye(3)[[0, 0, 0]], torch.eye(3)  # row i looks at the i-th of these, and at no other
    >>> weights = Weights(q[None, None], k[None, None], torch.full((1, 1, 3), 50.0), Causal())
    >>> v, w_o = torch.tensor([[[[2.0], [8.0], [8.0]]]]), torch.ones(1, 1, 1)
    >>> out = v[:, :, [0, 0, 0]]  # all of the head's output is from token 0
    >>> sink_output(Inputs(weights, v=v, out=out, w_o=w_o))  # chance: 1/2 * 2 / 5 and 1/3 * 2 / 6
    HeadScores(value=tensor([[1.]]), chance=tensor([[0.1556]]))
    """
    weights = inputs.weights
    v, out, w_o = (required(getattr(inputs, name), name) for name in ("v", "out", "w_o"))
    column = column_of(weights, token, "sink_output")
    _check_output(v, w_o)
    _check_call(weights, v, out, w_o)
    group, dtype = weights.shape[1] // v.shape[1], weights.dtype
    v, out, w_o = (t.detach().to(dtype) for t in (v, out, w_o))
    own = v[torch.arange(len(v), device=v.device), :, column.key][:, :, None]  # [batch, kv_heads, 1, v_dim]
    own = _norms(own.repeat_interleave(group, dim=1), w_o)  # [batch, heads, 1]
    least = torch.finfo(dtype).tiny
    value = column.mass * own / _norms(out, w_o).clamp(min=least)
    chance = column.even * own / _norms(_even_outputs(weights, v), w_o).clamp(min=least)
    return HeadScores.of_rows(value, chance, selected_rows(weights, inputs.rows) & column.later)


def _even_outputs(weights: Weights, v: Tensor) -> Tensor:
    """The outputs of uniform attention over the same mask, [batch, heads, queries, v_dim]."""
    means = sweep(uniform(weights, whole_batch=True), along=v.transpose(2, 3).flatten(1, 2)).along
    assert means is not None  # [batch, heads or 1, queries, kv_heads * v_dim]
    by_key_head = means.unflatten(-1, (v.shape[1], -1)).movedim(-2, 1)  # [batch, kv_heads, heads or 1, queries, v_dim]
    every = by_key_head.repeat_interleave(weights.shape[1] // v.shape[1], dim=1)
    if every.shape[2] == 1:
        return every[:, :, 0]
    return every.diagonal(dim1=1, dim2=2).movedim(-1, 1)  # the mask differs by head


def _check_output(v: Tensor, w_o: Tensor) -> None:
    fits = v.ndim == 4 and w_o.ndim == 3 and w_o.shape[1] == v.shape[3] and w_o.shape[0] % max(1, v.shape[1]) == 0
    if not fits:
        raise ProblemError(
            f"v is {list(v.shape)} and w_o {list(w_o.shape)}: expected [batch, kv_heads, keys, v_dim] and "
            "[heads, v_dim, d_model], with heads a whole multiple of kv_heads; see split_heads."
        )


def _check_call(weights: Weights, v: Tensor, out: Tensor, w_o: Tensor) -> None:
    batch, heads, queries, keys = weights.shape
    came = tuple(v.shape[:3]), tuple(out.shape), w_o.shape[0]
    if came != ((batch, weights.k.shape[1], keys), (batch, heads, queries, v.shape[3]), heads):
        raise ProblemError(
            f"v is {list(v.shape)}, out {list(out.shape)} and w_o {list(w_o.shape)}, of a call with batch {batch}, "
            f"{heads} heads on {weights.k.shape[1]} key heads, {queries} queries and {keys} keys: expected v and out "
            "as the call has them, and an output projection of as many heads."
        )


def _norms(x: Tensor, w_o: Tensor) -> Tensor:
    """||x W_O|| of [batch, heads, tokens, v_dim], by the products of W_O's rows: nothing of width d_model is built."""
    w = w_o.detach().to(torch.float64)
    gram = w @ w.mT  # [heads, v_dim, v_dim]
    x = x.detach().to(torch.float64)
    return ((x @ gram) * x).sum(-1).clamp(min=0).sqrt().to(wide_of(w_o.dtype))
