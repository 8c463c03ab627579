"""Random descriptions for the laws: masks, biases, shapes. Sizes are small primes, so that no two axes agree."""

import torch
from hypothesis import strategies as st

from regard import (
    Alibi,
    Bias,
    Blocks,
    Causal,
    Dilated,
    Documents,
    Global,
    KeyLengths,
    Mask,
    MaskFunction,
    Prefix,
    T5Bias,
    TensorBias,
    TensorMask,
    Tree,
    Window,
)

BATCH, HEADS = 2, 6


def _random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@st.composite
def words(draw: st.DrawFn, queries: int, keys: int) -> Mask:
    """One mask word, for a call with its queries at the end of its keys or at 0."""
    tokens = max(queries, keys)
    g = _random(draw(st.integers(0, 999)))
    size = draw(st.integers(1, tokens + 2))
    rows = draw(st.sampled_from([(), (1, 1), (BATCH, 1), (1, HEADS), (BATCH, HEADS)]))
    layout = torch.rand(*rows[1:], -(-tokens // 4), -(-tokens // 4), generator=g) > 0.5
    return draw(
        st.sampled_from(
            [
                Causal(),
                Window(size),
                Window(None, size),
                Window(size, draw(st.integers(1, tokens))),
                Prefix(size - 1),
                Prefix(torch.randint(0, keys + 1, (BATCH,), generator=g)),
                KeyLengths(torch.randint(0, keys + 1, (BATCH,), generator=g)),
                Documents(torch.randint(0, 3, (tokens,), generator=g)),
                Documents(torch.randint(0, 3, (BATCH, tokens), generator=g).sort().values),
                Global(draw(st.lists(st.integers(0, tokens - 1), max_size=3))),
                Dilated(draw(st.integers(1, 5))),
                Blocks(layout, 4),
                Tree([int(torch.randint(-1, i, (), generator=g)) if i else -1 for i in range(tokens)], start=0),
                TensorMask(torch.rand(*rows, queries, keys, generator=g) > 0.5),
                TensorMask(torch.rand(1, keys, generator=g) > 0.5),
                MaskFunction(lambda b, h, q, k: (q + 2 * k + b) % 3 != 0),
            ]
        )
    )


def masks(queries: int, keys: int) -> st.SearchStrategy[Mask]:
    """Expressions of up to six words under & | ~."""

    def combined(inner: st.SearchStrategy[Mask]) -> st.SearchStrategy[Mask]:
        pair = st.tuples(inner, inner)
        return st.one_of(pair.map(lambda p: p[0] & p[1]), pair.map(lambda p: p[0] | p[1]), inner.map(lambda m: ~m))

    return st.recursive(words(queries, keys), combined, max_leaves=6)


@st.composite
def biases(draw: st.DrawFn, queries: int, keys: int) -> Bias | None:
    """A bias, a sum of two, or none."""
    g = _random(draw(st.integers(0, 999)))
    rows = draw(st.sampled_from([(), (1, 1), (BATCH, 1), (1, HEADS), (BATCH, HEADS)]))
    choices: list[Bias] = [
        Alibi(HEADS),
        T5Bias(torch.randn(16, HEADS, generator=g), bidirectional=draw(st.booleans()), max_distance=32),
        TensorBias(torch.randn(*rows, queries, keys, generator=g)),
    ]
    first, second = draw(st.sampled_from([None, *choices])), draw(st.sampled_from([None, *choices]))
    return first + second if first is not None and second is not None else first
