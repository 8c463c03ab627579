"""Measures of heads: what each head looks at, as numbers with their chance value.

Every measure is exact, and is a `HeadScores`: a value for each sequence and head, with its *chance* value (what uniform
attention over the same mask would score, without which no score means anything: on 5 tokens, uniform causal attention
gives token 0 a mass of 0.32) and an interval.

    pairs      sums over O(n) weights, which are computed and no others      offset  sink  induction  duplicate
    sweep      from what one pass over all weights gathers                   breadth  largest  distance  columns  rare
    rows       the few rows that you name, in full                           syntactic  retrieval
    weights    of the model; no text                                         copying

Means are over the rows that see any key, and over those in `rows` where the caller names them (padding is no text).
Heads are query heads; A[i, j] is the weight of key j in row i, p_i the position of row i.
"""

from regard.inspect.measures.breadth import Breadth, breadth, evenness, inverse_squares
from regard.inspect.measures.circuits import circuit_of, circuits
from regard.inspect.measures.columns import ColumnMass, column_mass, sink_profile
from regard.inspect.measures.copying import Circuit, Vocabulary, copying, copying_eigenvalues
from regard.inspect.measures.distance import Profile, distance_profile, local_mass, mean_distance
from regard.inspect.measures.induction import Best, best, duplicate, induction, induction_scan
from regard.inspect.measures.largest import Positional, confidence, positional
from regard.inspect.measures.occurrences import matches
from regard.inspect.measures.offset import offset_scan, offset_score, previous_token
from regard.inspect.measures.rare import rare_word, rarest_hits, rarity
from regard.inspect.measures.retrieval import retrieval
from regard.inspect.measures.score import HeadScores, Interval
from regard.inspect.measures.sink import Sinks, sink, sinks
from regard.inspect.measures.syntactic import Syntactic, syntactic
from regard.inspect.measures.together import all_pair_measures, all_sweep_measures, even_sweep, places
from regard.inspect.measures.uniform import looks_ahead, uniform
from regard.inspect.measures.value_weighted import of_heads, output_norms, sink_output, value_norms, value_weighted
from regard.inspect.measures.vectors import Vectors

__all__ = [
    "Best",
    "Breadth",
    "Circuit",
    "ColumnMass",
    "HeadScores",
    "Interval",
    "Positional",
    "Profile",
    "Sinks",
    "Syntactic",
    "Vectors",
    "Vocabulary",
    "all_pair_measures",
    "all_sweep_measures",
    "best",
    "breadth",
    "circuit_of",
    "circuits",
    "column_mass",
    "confidence",
    "copying",
    "copying_eigenvalues",
    "distance_profile",
    "duplicate",
    "even_sweep",
    "evenness",
    "induction",
    "induction_scan",
    "inverse_squares",
    "local_mass",
    "looks_ahead",
    "matches",
    "mean_distance",
    "of_heads",
    "offset_scan",
    "offset_score",
    "output_norms",
    "places",
    "positional",
    "previous_token",
    "rare_word",
    "rarest_hits",
    "rarity",
    "retrieval",
    "sink",
    "sink_output",
    "sink_profile",
    "sinks",
    "syntactic",
    "uniform",
    "value_norms",
    "value_weighted",
]
