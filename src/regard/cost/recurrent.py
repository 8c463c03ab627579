"""Layers without attention: a state of fixed size per batch row instead of keys and values of every token.

| kind | layer | source |
|---|---|---|
| mamba | selective state space, a state for each channel | Gu & Dao 2023, arXiv:2312.00752, §3.5 |
| mamba2 | the same with one decay for each head | Dao & Gu 2024, arXiv:2405.21060, §7 |
| delta | gated delta rule, a matrix for each value head | Yang et al. 2024, arXiv:2412.06464, §3 |
| kimi_delta | the same with a decay for each channel, of low rank | Kimi Team 2025, arXiv:2510.26692, §3 |
| lightning | linear attention with a fixed decay and an output gate | MiniMax 2025, arXiv:2501.08313, §2.2 |
| convolution | a gated convolution over the last tokens, no state beside them | the `lfm2` models of transformers |

FLOPs of a token are counted in the recurrent form: 2 for each element of the state and each product with it (the update
and the output; the delta rule reads the state once more), and 2 for each weight of the convolution. Kernels that
compute a prompt in chunks take more.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from regard.errors import ProblemError


@dataclass(frozen=True)
class Recurrent:
    """A layer without attention.

    Attributes:
        kind: the name of its rule.
        weights: elements of its weight matrices; a token multiplies with each.
        other: its other parameters: of the convolution, decays, biases and norms.
        width: outputs of its projections for a token, in elements.
        state: elements of the state of a batch row.
        conv: elements of the inputs that the convolution keeps of a batch row.
        flops: of a token beside the projections.
    """

    kind: str
    weights: int
    other: int
    width: int
    state: int
    conv: int
    flops: int

    def bytes(self, item: int) -> int:
        """Bytes that are kept of a batch row: the state in float32 or wider, inputs in the type of the model."""
        return self.state * max(item, STATE_ITEM) + self.conv * item


STATE_ITEM = 4
"""Bytes of an element of a state: transformers keeps it in float32 in models of 2 bytes an element."""


FLAGS = ("bias", "out_bias", "conv_bias", "norms", "without_norm")
"""Sizes that are 0 or 1."""


def recurrent_layer(kind: str, d_model: int, sizes: Mapping[str, int]) -> Recurrent:
    """A layer from the sizes of its kind.

    Raises:
        ProblemError: a size is missing, or the kind is not known.

    >>> recurrent_layer("lightning", 64, {"heads": 4, "dim": 16}).state
    1024
    """
    makers = {
        "mamba": _mamba,
        "mamba2": _mamba2,
        "delta": _delta,
        "kimi_delta": _kimi_delta,
        "lightning": _lightning,
        "convolution": _convolution,
    }
    if kind not in makers:
        raise ProblemError(f"recurrent layers of {kind!r}: expected one of {', '.join(makers)}.")
    if empty := [name for name, size in sizes.items() if size < 1 and name not in FLAGS]:
        raise ProblemError(f"recurrent layers of {kind!r} have a {empty[0]} of {sizes[empty[0]]}: expected 1 or more.")
    try:
        return makers[kind](kind, d_model, sizes)
    except KeyError as error:
        raise ProblemError(f"recurrent layers of {kind!r} have no {error.args[0]}.") from None


def _mamba(kind: str, d: int, s: Mapping[str, int]) -> Recurrent:
    inner, state, rank, kernel = s["inner"], s["state"], s["rank"], s["kernel"]
    projected = (2 * inner, rank + 2 * state, inner, d)  # in, x, dt, out
    weights = 2 * inner * d + (rank + 2 * state) * inner + rank * inner + inner * d
    norms = (rank + 2 * state) * bool(s.get("norms"))
    biases = (2 * inner + d) * bool(s.get("bias")) + inner * bool(s.get("conv_bias"))
    other = inner * state + inner + inner + inner * kernel + norms + biases  # decays, skip, bias of dt, convolution
    return Recurrent(
        kind, weights, other, sum(projected), inner * state, inner * kernel, 4 * inner * state + 2 * inner * kernel
    )


def _mamba2(kind: str, d: int, s: Mapping[str, int]) -> Recurrent:
    heads, dim, groups, state, kernel = s["heads"], s["dim"], s["groups"], s["state"], s["kernel"]
    inner = heads * dim
    mixed = inner + 2 * groups * state  # channels of the convolution
    projected = inner + mixed + heads
    biases = (
        projected * bool(s.get("bias")) + d * bool(s.get("out_bias", s.get("bias"))) + mixed * bool(s.get("conv_bias"))
    )
    other = 3 * heads + mixed * kernel + inner * (not s.get("without_norm")) + biases
    flops = 4 * inner * state + 2 * mixed * kernel
    return Recurrent(kind, projected * d + inner * d, other, projected + d, inner * state, mixed * kernel, flops)


def _delta(kind: str, d: int, s: Mapping[str, int]) -> Recurrent:
    heads, kernel, value_dim = s["value_heads"], s["kernel"], s["value_dim"]
    keys, values = s["key_heads"] * s["key_dim"], heads * value_dim
    projected, mixed, state = 2 * keys + 2 * values + 2 * heads, 2 * keys + values, heads * s["key_dim"] * value_dim
    other = 2 * heads + mixed * kernel + value_dim
    flops = 6 * state + 2 * mixed * kernel
    return Recurrent(kind, (projected + values) * d, other, projected + d, state, mixed * kernel, flops)


def _kimi_delta(kind: str, d: int, s: Mapping[str, int]) -> Recurrent:
    heads, dim, kernel = s["heads"], s["dim"], s["kernel"]
    width = heads * dim
    weights = 4 * width * d + 2 * (dim * d + width * dim) + heads * d  # q, k, v, out; decay and gate; beta
    other = 3 * width * kernel + width + heads + dim
    state = width * dim
    flops = 6 * state + 2 * 3 * width * kernel
    return Recurrent(kind, weights, other, 5 * width + 2 * dim + heads + d, state, 3 * width * kernel, flops)


def _lightning(kind: str, d: int, s: Mapping[str, int]) -> Recurrent:
    width = s["heads"] * s["dim"]
    state = width * s["dim"]
    return Recurrent(kind, 5 * width * d, width, 4 * width + d, state, 0, 4 * state)


def _convolution(kind: str, d: int, s: Mapping[str, int]) -> Recurrent:
    kernel, biases = s["kernel"], 5 * d * bool(s.get("bias"))
    return Recurrent(kind, 4 * d * d, d * kernel + biases, 4 * d, 0, d * kernel, 2 * d * kernel)
