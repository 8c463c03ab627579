"""All measures of a call at once, by the keys of `DEFINITIONS`."""

from collections.abc import Mapping

from torch import Tensor

from regard.inspect.measures.breadth import breadth, evenness, inverse_squares
from regard.inspect.measures.columns import column_mass
from regard.inspect.measures.distance import local_mass, mean_distance
from regard.inspect.measures.induction import best, induction_scan
from regard.inspect.measures.largest import confidence, positional
from regard.inspect.measures.means import Tokens
from regard.inspect.measures.offset import OFFSETS, offset_scan
from regard.inspect.measures.rare import rare_word
from regard.inspect.measures.score import HeadScores
from regard.inspect.measures.sink import sink, sinks
from regard.inspect.measures.uniform import looks_ahead, uniform
from regard.inspect.measures.value_weighted import value_weighted
from regard.inspect.measures.vectors import Vectors
from regard.inspect.sweep import Sweep, sweep
from regard.inspect.weights.lazy import Weights


def all_pair_measures(
    weights: Weights, tokens: Tokens | None = None, rows: Tensor | None = None
) -> dict[str, HeadScores]:
    """Every measure that is a sum over O(n) pairs, with no sweep.

    previous, current, best_offset (of 1 to 8), sink, alpha; and with tokens duplicate and induction. On plain text
    induction also counts what is merely frequent: give the weights and tokens of a stimulus for the measure proper, and
    scan its shifts there. Which offset best_offset is of, its `HeadScores.at` says; see `places`.

    Args:
        tokens: integer [batch, keys]; None leaves out what asks about tokens.
        rows: bool [batch, queries], the rows to count; None counts all that see a key.

    >>> import torch
    >>> from regard import Causal
    >>> q = k = torch.zeros(1, 1, 3, 2)  # uniform attention: row i gives 1 / (i + 1) to each
    >>> weights = Weights(q, k, torch.tensor([[[1.0, 2, 3]]]).log(), Causal())
    >>> list(all_pair_measures(weights, torch.tensor([[7, 8, 7]])))
    ['previous', 'current', 'best_offset', 'sink', 'alpha', 'duplicate', 'induction']
    """
    scan = offset_scan(weights, OFFSETS, rows)
    found = {
        "previous": scan[1],
        "current": scan[0],
        "best_offset": best({offset: scan[offset] for offset in OFFSETS if offset > 0}).score,
        "sink": sink(weights, rows=rows),
        "alpha": sinks(weights, rows=rows).alpha,
    }
    if tokens is not None:
        scan = induction_scan(weights, tokens, (0, 1), rows)
        found |= {"duplicate": scan[0], "induction": scan[1]}
    return found


def all_sweep_measures(
    swept: Sweep,
    weights: Weights,
    vectors: Vectors | None = None,
    even: Sweep | None = None,
    rows: Tensor | None = None,
) -> dict[str, HeadScores]:
    """Every measure that takes a sweep, all from the same one.

    entropy, effective_tokens, inverse_squares, evenness, largest, positional, local_mass, column; with vectors
    rare_word and value_weighted where these have what it takes, and mean_distance where no row looks ahead.

    Args:
        swept: of the weights, with `along=vectors.stacked(weights)` if there are vectors.
        even: `even_sweep(weights, vectors)`, which layers with the same mask and the same vectors may share; None makes
            it.

    >>> import torch
    >>> from regard import Causal
    >>> q = k = torch.zeros(1, 1, 3, 2)  # uniform attention: row i gives 1 / (i + 1) to each
    >>> weights = Weights(q, k, torch.tensor([[[1.0, 2, 3]]]).log(), Causal())
    >>> found = all_sweep_measures(sweep(weights), weights)
    >>> sorted(found)
    ['column', 'effective_tokens', 'entropy', 'evenness', 'inverse_squares', 'largest', 'local_mass', 'positional']
    """
    even = even_sweep(weights, vectors) if even is None else even
    wide = breadth(weights, rows, swept)
    found = {
        "entropy": wide.entropy,
        "effective_tokens": wide.effective_tokens,
        "inverse_squares": inverse_squares(weights, swept, rows),
        "evenness": evenness(weights, swept, rows),
        "largest": confidence(weights, swept, rows),
        "positional": positional(weights, swept, rows).share,
        "local_mass": local_mass(weights, swept, even, rows=rows),
        "column": column_mass(weights, swept, even).largest,
    }
    if vectors is None:
        return found
    if not looks_ahead(weights):
        where = vectors.positions(swept), vectors.positions(even)
        found["mean_distance"] = mean_distance(weights, swept, even, *where, rows)
    if vectors.rarity is not None:
        found["rare_word"] = rare_word(weights, swept, vectors.rare(swept), vectors.rare(even), rows)
    if vectors.norms is not None:
        sums = vectors.by_norm(swept), vectors.by_norm(even)
        found["value_weighted"] = value_weighted(weights, vectors.norms, *sums, rows=rows)
    return found


def places(found: Mapping[str, HeadScores]) -> dict[str, Tensor]:
    """Where the scores are that are the best of several, int64 [batch, heads] each: best_offset_at, positional_at ...

    Of `all_pair_measures` best_offset_at, tokens back; of `all_sweep_measures` positional_at, tokens back, and
    column_at, the position of a key.

    >>> import torch
    >>> from regard import Causal
    >>> q = k = torch.zeros(1, 1, 3, 2)  # uniform attention: row i gives 1 / (i + 1) to each
    >>> found = all_pair_measures(Weights(q, k, torch.tensor([[[1.0, 2, 3]]]).log(), Causal()))
    >>> places(found)  # no offset stands out: the first
    {'best_offset_at': tensor([[1]])}
    """
    return {f"{name}_at": score.at for name, score in found.items() if score.at is not None}


def even_sweep(weights: Weights, vectors: Vectors | None = None) -> Sweep:
    """The sweep of uniform attention over the same mask, from which chance values are.

    >>> import torch
    >>> from regard import Causal
    >>> q, k = 50 * torch.eye(3)[[0, 0, 1]], torch.eye(3)  # row i looks at the i-th of these, and at no other
    >>> weights = Weights(q[None, None], k[None, None], torch.full((1, 1, 3), 50.0), Causal())
    >>> even_sweep(weights).columns  # 1 + 1/2 + 1/3, 1/2 + 1/3, 1/3
    tensor([[[1.8333, 0.8333, 0.3333]]])
    """
    along = None if vectors is None else vectors.stacked(weights)
    return sweep(uniform(weights, whole_batch=along is not None and along.shape[0] > 1), along=along)
