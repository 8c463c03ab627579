"""Reports of one head over many random tokens, with its pictures and its close-up, made without its n x n weights."""

import numpy as np

from regard.inspect.surveying.kinds import ranked
from regard.inspect.surveying.report import CloseUp, Picture, Report, RunInfo
from tests.inspect.reports import coded, head

QUERIES = 61
"""Distinct queries of a long report: the scores [QUERIES, tokens] give every weight, without n x n of them."""


def random_close(tokens, dim, seed=0, spread=1.2) -> CloseUp:
    """A causal head of random queries and keys."""
    rng = np.random.default_rng(seed)
    q, k = (rng.normal(0, spread, (tokens, dim)).astype(np.float32) for _ in "qk")
    odds = np.tril(np.exp(q.astype(np.float64) @ k.T))
    return _causal(q, k, odds.sum(1))


def long_report(tokens, dim, cells=192) -> Report:
    """One causal head over random tokens; every query is one of `QUERIES` random vectors."""
    rng = np.random.default_rng(0)
    few, k = (rng.normal(0, 1.2, (count, dim)).astype(np.float32) for count in (QUERIES, tokens))
    which = rng.integers(QUERIES, size=tokens)
    odds = np.exp(few.astype(np.float64) @ k.T)  # [QUERIES, tokens]
    total = odds.cumsum(1)[which, np.arange(tokens)]  # row i sees the keys up to i
    words = tuple(f" w{n}" for n in np.random.default_rng(1).integers(0, 49152, tokens))
    run = RunInfo("m", 1, 1, 1, dim, 1, ("native",), 1.0, None, 1.0, tokens, None, "a machine", {}, {})
    made = ranked([head(0, 0, 1, np.arange(1, tokens + 1))])
    picture = _picture(odds, which, total, -(-tokens // cells))
    return Report(run, "", words, tokens, "", made, (picture,), close_ups=(_causal(few[which], k, total),))


def _causal(q, k, total) -> CloseUp:
    ends = np.arange(1, len(q) + 1, dtype=np.int32)
    return CloseUp(0, 0, q, k, np.log(total).astype(np.float32), 1.0, None, np.zeros(len(q), np.int32), ends)


def _picture(odds, which, total, pooled) -> Picture:
    """The mean and the greatest weight of each cell; weight [i, j] is odds[which[i], j] / total[i]."""
    tokens = len(which)
    starts = np.arange(0, tokens, pooled)
    lengths, size = np.minimum(pooled, tokens - starts), len(starts)
    summed, least = np.zeros((size, QUERIES)), np.zeros((size, QUERIES))  # of 1 / total, by cell and query
    place = np.arange(tokens) // pooled, which
    np.add.at(summed, place, 1 / total)
    np.maximum.at(least, place, 1 / total)
    means = summed @ np.add.reduceat(odds, starts, axis=1)
    largest = (least[:, :, None] * np.maximum.reduceat(odds, starts, axis=1)).max(1)
    for n, start in enumerate(starts):  # where some pairs are hidden
        own = slice(start, start + pooled)
        weights = np.tril(odds[which[own], own] / total[own, None])
        means[n, n], largest[n, n] = weights.sum(), weights.max()
    return Picture(
        0, 0, size, pooled, *(coded(np.tril(each)) for each in (means / np.outer(lengths, lengths), largest))
    )
