"""The measures of the library as values with formula, source and chance value: `MEASURES`."""

from collections.abc import Iterable

from regard.errors import ProblemError
from regard.inspect.measures.copying import Circuit, Vocabulary, copying, copying_eigenvalues
from regard.inspect.measures.distance import local_mass, mean_distance
from regard.inspect.measures.induction import best
from regard.inspect.measures.measure import Definition, Inputs, Measure, Need, required
from regard.inspect.measures.offset import OFFSETS
from regard.inspect.measures.rare import rare_word, rarest_hits
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
from regard.inspect.measures.values import first_value, sink_output, value_weighted

ONE_IN = "mean of 1 / (number of keys that row i sees)"
ONE_IN_SEEN = f"{ONE_IN}, 0 for rows that the mask hides that key from"
OLSSON = "Olsson et al. 2022, In-context learning and induction heads, appendix (head activation evaluators)"
VOITA = "Voita et al. 2019, arXiv:1905.09418"
GU = "Gu et al. 2024, arXiv:2410.10781, §3"
CLARK = "Clark et al. 2019, arXiv:1906.04341"

SWEEP: frozenset[Need] = frozenset({"sweep"})


def _circuit(inputs: Inputs) -> tuple[Circuit, Vocabulary]:
    return required(inputs.circuit, "circuit"), required(inputs.vocabulary, "vocabulary")


MEASURES: tuple[Measure, ...] = (
    Measure(
        "sink",
        "sink",
        "mass",
        "mean over rows i >= 1 of A[i,0]: the mass put on the first token",
        f"{GU}; Xiao et al. 2023, arXiv:2309.17453",
        ONE_IN_SEEN,
        lambda x: sink(x.weights, rows=x.rows),
    ),
    Measure(
        "alpha",
        "alpha",
        "mass",
        "mean over all rows of A[i,0], the first row with them; a head has a sink where it is above 0.3, or above 0.8",
        f"{GU} (0.3); Barbero et al. 2025, arXiv:2504.02732 (0.8)",
        ONE_IN_SEEN,
        lambda x: alpha(x.weights, rows=x.rows),
    ),
    Measure(
        "previous",
        "previous token",
        "mass",
        "mean over rows i >= 1 of A[i,i-1]: the mass put on the token just before",
        OLSSON,
        ONE_IN_SEEN,
        lambda x: x.offsets[1],
    ),
    Measure(
        "current",
        "current token",
        "mass",
        "mean over rows of A[i,i]: the mass that a token puts on itself",
        CLARK + ", §3.1",
        ONE_IN_SEEN,
        lambda x: x.offsets[0],
    ),
    Measure(
        "best_offset",
        "best offset",
        "mass",
        "mean over rows of A[i,i-o] at the o of 1 to 8 where it is furthest above chance: the largest of eight",
        f"{OLSSON}; the scan is ours",
        f"{ONE_IN_SEEN}, at the same o",
        lambda x: best({offset: x.offsets[offset] for offset in OFFSETS[1:]}),
        at=Definition(
            "distance of the best offset",
            "tokens",
            "the o of 1 to 8 that the score best_offset is of: how many tokens back the head looks",
            f"{OLSSON}; the scan is ours",
            "none",
        ),
    ),
    Measure(
        "duplicate",
        "duplicate token",
        "mass",
        "on random tokens repeated four times: mean over the rows i whose token occurred before of "
        "sum_j A[i,j] over j < i with x[j] = x[i]",
        "Wang et al. 2023, arXiv:2211.00593",
        "mean of (number of such j) / (number of keys that row i sees)",
        lambda x: x.matches[0],
        needs=frozenset({"tokens", "causal"}),
        on="repeats",
    ),
    Measure(
        "induction",
        "induction",
        "mass",
        "on random tokens repeated four times: mean over the rows i in which something repeats of sum_j A[i,j] over j "
        "with x[j-1] = x[i], j-1 < i: the mass put on the tokens after an earlier occurrence",
        OLSSON,
        "mean of (number of such j) / (number of keys that row i sees)",
        lambda x: x.matches[1],
        needs=frozenset({"tokens", "causal"}),
        on="repeats",
    ),
    Measure(
        "induction_jittered",
        "induction, jittered",
        "mass",
        "the same on random tokens repeated at distances drawn from 15 to 35, where a head that only counts back a "
        "fixed distance scores about chance",
        f"{OLSSON}; the stimulus is ours",
        "mean of (number of such j) / (number of keys that row i sees)",
        lambda x: x.shifted_matches[1],
        needs=frozenset({"tokens", "causal"}),
        on="jittered repeats",
    ),
    Measure(
        "best_shift",
        "induction, shifted",
        "mass",
        "on random tokens repeated at distances that vary: induction with x[j-s] = x[i] at the s of 1 to 8 where it is "
        "furthest above chance: the largest of eight",
        f"{OLSSON}; the scan is ours",
        "mean of (number of such j) / (number of keys that row i sees), at the same s",
        lambda x: best(x.shifted_matches),
        needs=frozenset({"tokens", "causal"}),
        on="jittered repeats",
        at=Definition(
            "shift of induction",
            "tokens",
            "the s of 1 to 8 that the score best_shift is of: how far after an earlier occurrence the head looks",
            "a rule of this report",
            "none",
        ),
    ),
    Measure(
        "entropy",
        "entropy",
        "nats",
        "mean over rows i of H_i = -sum_j A[i,j] ln A[i,j]; a learned sink is one more j",
        f"{CLARK}, §3.3",
        "mean of ln(number of keys that row i sees)",
        entropy,
        needs=SWEEP,
    ),
    Measure(
        "effective_tokens",
        "effective tokens",
        "tokens",
        "mean over rows i of exp(H_i), with H_i of entropy: the number of tokens in a uniform row of the same entropy",
        f"{CLARK}, §3.3, as a perplexity",
        "mean number of keys that row i sees",
        effective_tokens,
        needs=SWEEP,
    ),
    Measure(
        "inverse_squares",
        "effective tokens, by squares",
        "tokens",
        "mean over rows i of 1 / sum_j A[i,j]^2, a learned sink is one more j: never above effective tokens, large "
        "weights count more",
        "the inverse participation ratio",
        "mean number of keys that row i sees",
        inverse_squares,
        needs=SWEEP,
    ),
    Measure(
        "evenness",
        "evenness",
        "share",
        "mean over rows i that see n_i >= 2 keys of H_i / ln n_i: entropy as a share of its maximum, without a learned "
        "sink",
        f"{CLARK}, §3.3, normalised",
        "1",
        evenness,
        needs=SWEEP,
    ),
    Measure(
        "largest",
        "largest weight",
        "mass",
        "mean over rows of max_j A[i,j]: the confidence of a head; every token counts, sinks too",
        f"{VOITA}, §4",
        ONE_IN,
        largest_weight,
        needs=SWEEP,
    ),
    Measure(
        "positional",
        "positional",
        "share",
        "share of rows whose largest weight is at the most frequent distance; positional from 0.9 on",
        f"{VOITA}, §5.1",
        f"{ONE_IN}, 0 for rows that cannot see that far",
        positional,
        needs=SWEEP,
        at=Definition(
            "usual distance",
            "tokens",
            "the distance i - j at which most rows have their largest weight, which the score positional is of",
            f"{VOITA}, §5.1",
            "none",
        ),
    ),
    Measure(
        "local_mass",
        "local mass",
        "mass",
        "mean over rows of sum_j A[i,j] over |i-j| < 8: the mass on the nearest tokens",
        f"{CLARK}, §3.1, in one number",
        "the same of uniform attention",
        local_mass,
        needs=SWEEP,
    ),
    Measure(
        "mean_distance",
        "mean distance",
        "tokens",
        "mean over rows of sum_j A[i,j] (i-j) / sum_j A[i,j]: how far back the head looks",
        "Vig and Belinkov 2019, arXiv:1906.04284",
        "the same of uniform attention",
        mean_distance,
        needs=frozenset({"sweep", "causal"}),
    ),
    Measure(
        "column",
        "largest column",
        "share",
        "max_j c_j / sum_j c_j with c_j = sum_i A[i,j]: the share of all mass that one key receives",
        "Zhang et al. 2023, arXiv:2306.14048, §3.2",
        "the same of uniform attention",
        largest_column,
        needs=SWEEP,
        at=Definition(
            "key of the largest column",
            "position",
            "the j at which c_j is largest, which the score column is of",
            "Zhang et al. 2023, arXiv:2306.14048",
            "none",
        ),
    ),
    Measure(
        "rare_word",
        "rare words",
        "nats",
        "mean over rows of (sum_j A[i,j] r_j / sum_j A[i,j] - mean of r_j over what row i sees), r_j = -ln p(x_j) "
        "with p by Zipf's law, an id being the rank of its token: r_j = ln(1 + x_j)",
        f"{VOITA}, §5.3, in a soft form of ours",
        "0",
        rare_word,
        needs=frozenset({"sweep", "tokens"}),
    ),
    Measure(
        "value_weighted",
        "sink, by values",
        "share",
        "mean over rows i >= 1 of A[i,0] |v_0 W_O| / sum_j A[i,j] |v_j W_O|: the sink's share of all that is moved",
        "Kobayashi et al. 2020, arXiv:2004.10102, §4",
        "the same of uniform attention",
        value_weighted,
        needs=frozenset({"sweep", "projection"}),
    ),
    Measure(
        "sink_value",
        "value of the first token",
        "ratio",
        "|v_0| / mean over j of |v_j|, the norms of the head's values: far below 1, its mass on token 0 moves little",
        "Gu et al. 2024, arXiv:2410.10781; Guo et al. 2024, arXiv:2410.13835",
        "1, the mean token",
        first_value,
        needs=frozenset({"values"}),
    ),
    Measure(
        "copying",
        "copying",
        "share",
        "mean over 25 random tokens x of r[x,x] / sum_y r[x,y], r = ReLU(U W_O W_V E, less its mean over y): how "
        "much of what is raised is the token looked at",
        f"{OLSSON}, which rescales it to 4 score - 1; here by weights alone",
        "1/25",
        lambda x: copying(*_circuit(x)),
        needs=frozenset({"circuit"}),
    ),
    Measure(
        "copying_eigenvalues",
        "copying, eigenvalues",
        "share",
        "sum of lambda / sum of |lambda| over the eigenvalues of U W_O W_V E, from -1 to 1",
        "Elhage et al. 2021, A mathematical framework for transformer circuits",
        "0, the mean of random weights",
        lambda x: copying_eigenvalues(*_circuit(x)),
        needs=frozenset({"circuit"}),
    ),
    Measure(
        "sink_output",
        "sink, in the output",
        "ratio",
        "mean over rows i >= 1 of |A[i,0] v_0 W_O| / |z_i W_O|, z_i the head's output: near 0, the sink does nothing",
        "after Gu et al. 2024, arXiv:2410.10781; the ratio is ours",
        "the same of uniform attention",
        sink_output,
        needs=frozenset({"projection"}),
        on_demand=True,
    ),
    Measure(
        "rarest_hits",
        "rarest word",
        "share",
        "share of rows whose largest weight is on the rarest token that they see, by r_j of rare_word",
        f"{VOITA}, §5.3",
        "mean share of such tokens among those that row i sees",
        rarest_hits,
        needs=frozenset({"sweep", "tokens"}),
        on_demand=True,
    ),
)
"""Every measure that a survey can make, in the order of reports."""

BY_KEY: dict[str, Measure] = {measure.key: measure for measure in MEASURES}

DEFINITIONS: dict[str, Definition] = {measure.key: measure.definition for measure in MEASURES} | {
    f"{measure.key}_at": measure.at for measure in MEASURES if measure.at is not None
}
"""The definitions of all values of measures: the score, and under `key_at` the offset, shift or key of the score."""


def measures_named(names: Iterable[str | Measure]) -> tuple[Measure, ...]:
    """Measures by their keys; a `Measure` is taken as it is.

    Raises:
        ProblemError: a name that is no key of a measure.

    >>> measures_named(["sink", "induction"])
    (Measure(key='sink', unit='mass'), Measure(key='induction', unit='mass'))
    """
    return tuple(name if isinstance(name, Measure) else _measure_of(name) for name in names)


def _measure_of(name: object) -> Measure:
    if isinstance(name, str) and name in BY_KEY:
        return BY_KEY[name]
    raise ProblemError(f"measures has {name!r}: expected some of {', '.join(BY_KEY)}, or a Measure of your own.")
