"""Measures of heads: where each head attends, with chance values.

Every measure is exact and gives `HeadScores`: a value for each sequence and head, its *chance* value (what uniform
attention over the same mask scores, without which no score means anything: on 5 tokens, uniform causal attention
gives token 0 a mass of 0.32) and an interval. `MEASURES` in `catalogue.py` has them as values, with definitions.

    pairs      sums over O(n) weights, which are computed and no others     offset.py  sink.py  induction.py  pattern.py
    sweep      from what one pass over all weights gathers                  spread.py  distance.py  rare.py  values.py
    rows       the few rows that you name, in full                          syntactic.py  retrieval.py
    weights    of the model; no text                                        copying.py  circuits.py

Means are over the rows that see any key, and over those in `rows` where the caller names them (to exclude padding).
Heads are query heads; A[i, j] is the weight of key j in row i, p_i the position of row i.

`score.py` has `HeadScores`, `measure.py` a measure as a value, `stimulus.py` random tokens that repeat. Measures share
`means.py` (which rows count, and chance), `blocks.py` (pairs and rows in blocks) and `received.py` (checks).
"""

from regard.inspect.measures.circuits import circuit_of, circuits
from regard.inspect.measures.copying import Circuit, Vocabulary, copying, copying_eigenvalues
from regard.inspect.measures.distance import Profile, distance_profile, local_mass, mean_distance
from regard.inspect.measures.induction import best, duplicate, induction, induction_scan, matches
from regard.inspect.measures.measure import Inputs, Measure, compute
from regard.inspect.measures.offset import offset_scan, offset_score, previous_token
from regard.inspect.measures.rare import rare_word, rarest_hits, rarity
from regard.inspect.measures.retrieval import retrieval
from regard.inspect.measures.score import HeadScores, Interval
from regard.inspect.measures.sink import alpha, sink
from regard.inspect.measures.spread import (
    effective_tokens,
    entropy,
    evenness,
    inverse_squares,
    largest_column,
    largest_weight,
    positional,
)
from regard.inspect.measures.stimulus import Jittered, Repeats, Walks, plain_tokens
from regard.inspect.measures.syntactic import Syntactic, syntactic
from regard.inspect.measures.values import output_norms, sink_output, split_heads, value_norms, value_weighted

__all__ = [
    "Circuit", "HeadScores", "Inputs", "Interval", "Jittered", "Measure", "Profile", "Repeats", "Syntactic",
    "Vocabulary", "Walks", "alpha", "best", "circuit_of", "circuits", "compute", "copying", "copying_eigenvalues",
    "distance_profile", "duplicate", "effective_tokens", "entropy", "evenness", "induction", "induction_scan",
    "inverse_squares", "largest_column", "largest_weight", "local_mass", "matches", "mean_distance", "offset_scan",
    "offset_score", "output_norms", "plain_tokens", "positional", "previous_token", "rare_word", "rarest_hits",
    "rarity", "retrieval", "sink", "sink_output", "split_heads", "syntactic", "value_norms", "value_weighted",
]  # fmt: skip
