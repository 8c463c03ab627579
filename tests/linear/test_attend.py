"""Linear attention against its definitions: every rule, form, chunk and split."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.linear import linear_attend
from tests.linear.calls import FORMS, KINDS, expected, numbers, whole, words


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_form_gives_what_the_definition_gives(kind: str, form: str):
    n = numbers(kind, tokens=19, group=3)
    out, right_state, z = expected(kind, n)
    found = linear_attend(n.q, n.k, n.v, **words(kind, n), form=form, chunk=4)
    torch.testing.assert_close(found.out, out, atol=1e-10, rtol=1e-10)
    found_state, found_z = whole(found.state)
    if kind == "taylor":  # products of two entries stand once in ours and twice in the definition's
        assert found_state.shape[2] == 1 + 5 + 15
        found_state, right_state = found_state[:, :, :6], right_state[:, :, :6]
        found_z, z = found_z[..., :6], z[..., :6]
    torch.testing.assert_close(found_state, right_state, atol=1e-10, rtol=1e-10)
    assert (found_z is None) == (KINDS[kind][0] == "none")
    if found_z is not None:
        torch.testing.assert_close(found_z, z, atol=1e-10, rtol=1e-10)


@settings(max_examples=60)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    tokens=st.integers(0, 37),
    chunk=st.integers(1, 41),
    group=st.sampled_from([1, 2]),
    cut=st.integers(0, 37),
    forms=st.tuples(st.sampled_from(FORMS), st.sampled_from(FORMS)),
    seed=st.integers(0, 99),
)
def test_a_sequence_may_be_split_anywhere_and_done_in_any_form(
    kind: str, tokens: int, chunk: int, group: int, cut: int, forms: tuple[str, str], seed: int
):
    torch.manual_seed(seed)
    n, cut = numbers(kind, tokens, batch=1, group=group), min(cut, tokens)
    once = linear_attend(n.q, n.k, n.v, **words(kind, n), form="recurrent")
    a, b = n.cut(0, cut), n.cut(cut, None)
    first = linear_attend(a.q, a.k, a.v, **words(kind, a), form=forms[0], chunk=chunk)
    second = linear_attend(b.q, b.k, b.v, **words(kind, b), form=forms[1], chunk=chunk, state=first.state)
    torch.testing.assert_close(torch.cat([first.out, second.out], 2), once.out, atol=1e-10, rtol=1e-10)
    for found, right in zip(whole(second.state), whole(once.state), strict=True):
        torch.testing.assert_close(found, right, atol=1e-10, rtol=1e-10)
