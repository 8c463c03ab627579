"""What each measure is, in a line: its formula, its unit, where it comes from, what uniform attention would score.

The functions in `measures/` say the same at length, and where a name or a number differs from its source's.
"""

from typing import NamedTuple


class Definition(NamedTuple):
    """What a measure of a head means: a label, its unit, its formula, its source, its chance value."""

    label: str
    unit: str
    formula: str
    source: str
    chance: str


ONE_IN = "mean of 1 / (number of keys that row i sees)"
ONE_IN_SEEN = f"{ONE_IN}, 0 for rows that the mask hides that key from"
OLSSON = "Olsson et al. 2022, In-context learning and induction heads, appendix (head activation evaluators)"
VOITA = "Voita et al. 2019, arXiv:1905.09418"
GU = "Gu et al. 2024, arXiv:2410.10781, §3"
CLARK = "Clark et al. 2019, arXiv:1906.04341"

PAIRS: dict[str, Definition] = {
    "sink": Definition(
        "sink",
        "mass",
        "mean over rows i >= 1 of A[i,0]: the mass put on the first token",
        f"{GU}; Xiao et al. 2023, arXiv:2309.17453",
        ONE_IN_SEEN,
    ),
    "alpha": Definition(
        "alpha",
        "mass",
        "mean over all rows of A[i,0], the first row with them; a head has a sink where it is above 0.3, or above 0.8",
        f"{GU} (0.3); Barbero et al. 2025, arXiv:2504.02732 (0.8)",
        ONE_IN_SEEN,
    ),
    "previous": Definition(
        "previous token",
        "mass",
        "mean over rows i >= 1 of A[i,i-1]: the mass put on the token just before",
        OLSSON,
        ONE_IN_SEEN,
    ),
    "current": Definition(
        "current token",
        "mass",
        "mean over rows of A[i,i]: the mass that a token puts on itself",
        CLARK + ", §3.1",
        ONE_IN_SEEN,
    ),
    "best_offset": Definition(
        "best offset",
        "mass",
        "mean over rows of A[i,i-o] at the o of 1 to 8 where it is furthest above chance: the largest of eight numbers",
        f"{OLSSON}; the scan is ours",
        f"{ONE_IN_SEEN}, at the same o",
    ),
    "duplicate": Definition(
        "duplicate token",
        "mass",
        "on random tokens repeated four times: mean over the rows i whose token stood before of "
        "sum_j A[i,j] over j < i with x[j] = x[i]",
        "Wang et al. 2023, arXiv:2211.00593",
        "mean of (number of such j) / (number of keys that row i sees)",
    ),
    "induction": Definition(
        "induction",
        "mass",
        "on random tokens repeated four times: mean over the rows i in which something repeats of sum_j A[i,j] over j "
        "with x[j-1] = x[i], j-1 < i: the mass put on what followed an earlier occurrence",
        OLSSON,
        "mean of (number of such j) / (number of keys that row i sees)",
    ),
    "induction_jittered": Definition(
        "induction, jittered",
        "mass",
        "the same on random tokens repeated at distances drawn from 15 to 35, where a head that only counts back a "
        "fixed distance scores about chance",
        f"{OLSSON}; the stimulus is ours",
        "mean of (number of such j) / (number of keys that row i sees)",
    ),
    "best_shift": Definition(
        "induction, shifted",
        "mass",
        "on random tokens repeated at distances that vary: induction with x[j-s] = x[i] at the s of 1 to 8 where it is "
        "furthest above chance: the largest of eight",
        f"{OLSSON}; the scan is ours",
        "mean of (number of such j) / (number of keys that row i sees), at the same s",
    ),
}
"""Sums over O(n) pairs: of `all_pair_measures`, and of scans and stimuli."""

SWEPT: dict[str, Definition] = {
    "entropy": Definition(
        "entropy",
        "nats",
        "mean over rows i of H_i = -sum_j A[i,j] ln A[i,j]",
        f"{CLARK}, §3.3",
        "mean of ln(number of keys that row i sees)",
    ),
    "effective_tokens": Definition(
        "effective tokens",
        "tokens",
        "mean over rows i of exp(H_i): the number of tokens that an even spread of the same entropy would cover",
        f"{CLARK}, §3.3, as a perplexity",
        "mean number of keys that row i sees",
    ),
    "inverse_squares": Definition(
        "effective tokens, by squares",
        "tokens",
        "mean over rows i of 1 / sum_j A[i,j]^2: never above effective tokens, large weights count more",
        "the inverse participation ratio",
        "mean number of keys that row i sees",
    ),
    "evenness": Definition(
        "evenness",
        "share",
        "mean over rows i that see n_i >= 2 keys of H_i / ln n_i: entropy as a share of the most there could be",
        f"{CLARK}, §3.3, normalised",
        "1",
    ),
    "largest": Definition(
        "largest weight",
        "mass",
        "mean over rows of max_j A[i,j]: the confidence of a head; every token counts, sinks too",
        f"{VOITA}, §4",
        ONE_IN,
    ),
    "positional": Definition(
        "positional",
        "share",
        "share of rows whose largest weight is at the distance where most rows have theirs; positional from 0.9 on",
        f"{VOITA}, §5.1",
        f"{ONE_IN}, 0 for rows that cannot see that far",
    ),
    "local_mass": Definition(
        "local mass",
        "mass",
        "mean over rows of sum_j A[i,j] over |i-j| < 8: the mass on the nearest tokens",
        f"{CLARK}, §3.1, in one number",
        "the same of uniform attention",
    ),
    "mean_distance": Definition(
        "mean distance",
        "tokens",
        "mean over rows of sum_j A[i,j] (i-j) / sum_j A[i,j]: how far back the head looks",
        "Vig and Belinkov 2019, arXiv:1906.04284",
        "the same of uniform attention",
    ),
    "column": Definition(
        "largest column",
        "share",
        "max_j c_j / sum_j c_j with c_j = sum_i A[i,j]: the share of all mass that one key receives",
        "Zhang et al. 2023, arXiv:2306.14048, §3.2",
        "the same of uniform attention",
    ),
    "rare_word": Definition(
        "rare words",
        "nats",
        "mean over rows of (sum_j A[i,j] r_j / sum_j A[i,j] - mean of r_j over what row i sees), r_j = -ln p(x_j)",
        f"{VOITA}, §5.3, in a soft form of ours",
        "0",
    ),
    "value_weighted": Definition(
        "sink, by values",
        "share",
        "mean over rows i >= 1 of A[i,0] |v_0 W_O| / sum_j A[i,j] |v_j W_O|: what the sink is of all that is moved",
        "Kobayashi et al. 2020, arXiv:2004.10102, §4",
        "the same of uniform attention",
    ),
}
"""From one sweep over all weights: of `all_sweep_measures`."""

OTHERS: dict[str, Definition] = {
    "sink_output": Definition(
        "sink, in the output",
        "ratio",
        "mean over rows i >= 1 of |A[i,0] v_0 W_O| / |z_i W_O|, z_i the head's output: near 0, the sink does nothing",
        "after Gu et al. 2024, arXiv:2410.10781; the ratio is ours",
        "the same of uniform attention",
    ),
    "rarest_hits": Definition(
        "rarest word",
        "share",
        "share of rows whose largest weight is on the rarest token that they see",
        f"{VOITA}, §5.3",
        "mean share of such tokens among those that row i sees",
    ),
    "syntactic": Definition(
        "syntactic",
        "share",
        "share of the pairs (i, j) of a relation with j = argmax A[i,.]; follows it from the best distance + 0.1 on",
        f"{VOITA}, §5.2",
        ONE_IN,
    ),
    "retrieval": Definition(
        "retrieval",
        "share",
        "share of a needle's tokens that the head looked at most when the model wrote them",
        "Wu et al. 2024, arXiv:2404.15574, §2",
        "the same with the token looked at drawn evenly",
    ),
    "copying": Definition(
        "copying",
        "share",
        "mean over 25 random tokens x of r[x,x] / sum_y r[x,y], r = ReLU(U W_O W_V E, less its mean over y): how "
        "much of what is raised is the token looked at",
        f"{OLSSON}, which rescales it to 4 score - 1; here by weights alone",
        "1/25",
    ),
    "copying_eigenvalues": Definition(
        "copying, eigenvalues",
        "share",
        "sum of lambda / sum of |lambda| over the eigenvalues of U W_O W_V E, from -1 to 1",
        "Elhage et al. 2021, A mathematical framework for transformer circuits",
        "0, the mean of random weights",
    ),
}
"""Of named rows, values, or weights of the model."""

PLACES: dict[str, Definition] = {
    "best_offset_at": Definition(
        "distance of the best offset",
        "tokens",
        "the o of 1 to 8 that the score best_offset is of: how many tokens back the head looks",
        f"{OLSSON}; the scan is ours",
        "none",
    ),
    "positional_at": Definition(
        "usual distance",
        "tokens",
        "the distance i - j at which most rows have their largest weight, which the score positional is of",
        f"{VOITA}, §5.1",
        "none",
    ),
    "column_at": Definition(
        "key of the largest column",
        "position",
        "the j at which c_j is largest, which the score column is of",
        "Zhang et al. 2023, arXiv:2306.14048",
        "none",
    ),
}
"""Where scores that are the best of several are taken: of `places`."""

DEFINITIONS: dict[str, Definition] = PAIRS | SWEPT | OTHERS | PLACES
"""Every measure by its key."""
