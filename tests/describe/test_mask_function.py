"""`MaskFunction`: the functions that it accepts, when it evaluates them, and its errors for all others."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from regard import Causal, MaskFunction, ProblemError, attend, draw


def test_a_predicate_is_asked_once_for_what_it_does_not_look_at():
    from regard.describe.mask import CallSizes

    sizes = CallSizes(batch=3, heads=5, queries=2, keys=2, offset=0)
    assert MaskFunction(lambda b, h, q, k: q >= k).bind(sizes).broadcast_shape() == (1, 1)
    assert MaskFunction(lambda b, h, q, k: q >= k + b).bind(sizes).broadcast_shape() == (3, 1)
    assert MaskFunction(lambda b, h, q, k: torch.tensor([True, False]).repeat(3)[h] & (q >= k)).bind(
        sizes
    ).broadcast_shape() == (1, 5)


class Ahead:
    def __call__(self, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return k >= q

    def of_two(self, q: Any, k: Any) -> torch.Tensor:
        return k >= q


def from_two(fn: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(fn)
    def of_four(*given: Any) -> torch.Tensor:
        return fn(*given[2:])

    return of_four


PREDICATES = {
    "a default to spare": lambda b, h, q, k, w=0: k >= q + w,
    "any number": lambda *given: given[3] >= given[2],
    "an object": Ahead(),
    "a partial": functools.partial(lambda w, b, h, q, k: k >= q + w, 0),
    "a function in the clothes of another": from_two(lambda q, k: k >= q),
}


@pytest.mark.parametrize("name", PREDICATES)
def test_whatever_takes_four_is_a_predicate(name: str):
    assert draw(MaskFunction(PREDICATES[name]), 3, 3) == draw(~Causal() | MaskFunction(lambda b, h, q, k: q == k), 3, 3)


def test_a_predicate_that_cannot_be_inspected_is_taken_at_its_word():
    with pytest.raises(ValueError, match="signature"):
        inspect.signature(torch.ge)
    assert callable(MaskFunction(torch.ge).fn)


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 5, 5), (2, 0, 5), (2, 5, 0)])
def test_a_predicate_of_tables_is_not_called_for_positions_that_are_not_there(
    batch: int, queries: int, keys: int, backend: str | None
):
    rows, columns = torch.ones(batch, queries, dtype=torch.bool), torch.ones(keys, dtype=torch.bool)
    mask = MaskFunction(lambda b, h, q, k: rows[b, q] & columns[k])
    q, k = torch.randn(batch, 2, queries, 8), torch.randn(batch, 2, keys, 8)
    assert torch.equal(attend(q, k, k, mask=mask, offset=0, backend=backend), torch.zeros_like(q))


def test_a_method_of_two_is_no_predicate():
    with pytest.raises(ProblemError, match=r"of_two\(q: Any, k: Any\)"):
        MaskFunction(Ahead().of_two)


def test_a_predicate_that_is_made_while_torch_traces_is_tabulated():
    def causal(q: torch.Tensor) -> torch.Tensor:
        return attend(q, q, q, mask=MaskFunction(lambda *given: given[2] >= given[3]))

    q = torch.randn(1, 2, 5, 8)
    traced = torch.compile(causal, fullgraph=True, backend="eager")(q)
    assert torch.equal(traced, causal(q))


def branching(b: Any, h: Any, q: Any, k: Any) -> Any:
    if q > k:
        return q >= k
    return q == k


@pytest.mark.parametrize("fn", [branching, lambda b, h, q, k: k > 1 and q >= k], ids=["if", "and"])
def test_a_condition_on_a_tensor_of_positions_is_answered_with_operators(fn: Any):
    q = torch.randn(1, 2, 5, 8)
    for call in (lambda: attend(q, q, q, mask=Causal() & MaskFunction(fn)), lambda: draw(MaskFunction(fn), 3, 3)):
        with pytest.raises(ProblemError, match=r"a condition of `if`.* & \| ~, and .* torch.where\.$") as caught:
            call()
        assert "ambiguous" in str(caught.value.__cause__)


def test_another_error_of_a_function_stays_what_it_is():
    q = torch.randn(1, 2, 5, 8)
    with pytest.raises(RuntimeError, match="size of tensor") as caught:
        attend(q, q, q, mask=MaskFunction(lambda b, h, q, k: torch.ones(2, 3) + torch.ones(5) > q))
    assert not isinstance(caught.value, ProblemError)
