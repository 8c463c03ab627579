"""A rank that ends, hangs or calls something else ends the others by an error that says so, within the timeout."""

import time
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from regard import Causal, KeyLengths, ProblemError, Window
from regard.cache import Int8, Paged
from regard.parallel import Layout, RankError
from regard.parallel.ranks import Message, Ranks
from tests.parallel import cases
from tests.parallel.comparing import N, assert_close, in_one_process, joined, layouts, some
from tests.parallel.workers import Workers, workers

TIMEOUT = 4.0

PATIENCE = 100.0
"""The timeout where no rank is to be found lost: on a busy machine, a rank may come to a call many seconds late."""


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Generator[Workers]:
    """Three processes for all tests after which none is lost."""
    with workers(3, tmp_path_factory.mktemp("trio")) as made:
        made.run(cases.ring, **some(), layout=Layout.zigzag(N, 3), mask=Causal())
        yield made


@pytest.fixture
def three(tmp_path: Path) -> Generator[Workers]:
    with workers(3, tmp_path) as made:
        made.run(cases.ring, **some(), layout=Layout.zigzag(N, 3), mask=Causal())  # imports take seconds
        yield made


@pytest.mark.parametrize(
    "function",
    [cases.ring, *(pytest.param(f, marks=pytest.mark.exhaustive) for f in (cases.ulysses, cases.ring_in_a_loop))],
)
def test_a_rank_that_ends_is_named(three: Workers, function: Any):
    layout = Layout.zigzag(N, 3)
    found = three.failing(function, {1: cases.end}, **some(), layout=layout, mask=Causal(), timeout=TIMEOUT)
    for rank in (0, 2):
        error, seconds = found[rank]
        assert isinstance(error, RankError)
        assert "rank 1 of 3 is lost" in str(error)
        assert error.ranks == (1,)
        assert seconds < 3 * TIMEOUT + 5


@pytest.mark.exhaustive  # it waits for as long as ranks have to answer
def test_a_rank_that_hangs_is_named(three: Workers):
    layout = Layout.zigzag(N, 3)
    found = three.failing(cases.ring, {2: cases.hang}, **some(), layout=layout, mask=Causal(), timeout=TIMEOUT)
    for rank in (0, 1):
        error, seconds = found[rank]
        assert isinstance(error, RankError)
        assert "rank 2 of 3 is lost: it did not answer within 4 s" in str(error)
        assert seconds < 3 * TIMEOUT + 5


@pytest.mark.exhaustive
def test_a_rank_that_is_lost_while_a_cache_decodes_is_named(three: Workers):
    more = {**some(), "prompt": 30, "options": {}}
    del more["dout"]
    found = three.failing(cases.decode_for_ever, {0: cases.decode_and_end}, **more, timeout=TIMEOUT)
    for rank in (1, 2):
        assert "rank 0 of 3 is lost" in str(found[rank][0])


@pytest.mark.exhaustive
def test_a_lost_rank_is_named_again_by_the_next_call(three: Workers):
    more = {**some(), "layout": Layout.zigzag(N, 3), "mask": Causal(), "timeout": TIMEOUT}
    three.failing(cases.ring, {1: cases.end}, **more)
    start = time.monotonic()
    found = three.failing(cases.ring, {}, **more)
    assert "rank 1 of 3 is lost" in str(found[0][0])
    assert time.monotonic() - start < TIMEOUT


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"mask": Window(3)}, "mask Window(left=3)"),
        ({"softcap": 2.0}, "softcap 2.0"),
        ({"layout": Layout.striped(N, 3)}, "layouts"),
    ],
)
def test_ranks_that_call_with_other_arguments_are_reported_on_every_rank(
    trio: Workers, change: dict[str, Any], text: str
):
    more = {**some(1), "layout": Layout.zigzag(N, 3), "mask": Causal(), "timeout": TIMEOUT, "scale": 0.3}
    found = trio.failing(cases.ring_with, {}, change={2: change}, **more)
    for error, seconds in found:
        assert "the ranks of a group make the same call, and these differ" in str(error)
        assert text in str(error)
        assert seconds < TIMEOUT


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"mask": KeyLengths(torch.tensor([40, 50]))}, "mask KeyLengths(lengths=int64[2])"),
        ({"offset": 7}, "offset 7"),
        ({"layout": Layout.striped(N, 3)}, "layout"),
        ({"backend": "reference"}, "backend reference"),
    ],
)
def test_ranks_that_decode_with_other_arguments_are_reported_on_every_rank(
    trio: Workers, change: dict[str, Any], text: str
):
    more = {**some(), "layout": Layout.zigzag(N, 3), "mask": KeyLengths(torch.tensor([50, 50])), "timeout": TIMEOUT}
    del more["dout"]
    found = trio.failing(cases.ring_with, {}, change={2: change}, run=cases.decode, **more)
    for error, seconds in found:
        assert "the ranks of a group make the same call, and these differ" in str(error)
        assert text in str(error)
        assert seconds < TIMEOUT


def test_ranks_whose_caches_have_other_blocks_are_reported_on_every_rank(trio: Workers):
    tensors = some()
    del tensors["dout"]
    for error, seconds in trio.failing(cases.decode_from_other_caches, {}, **tensors, timeout=TIMEOUT):
        assert "ShardedCache.attend: the ranks of a group make the same call, and these differ" in str(error)
        assert seconds < TIMEOUT


@pytest.mark.parametrize("options", [{}, {"layout": Paged(page=8)}, {"layout": Paged(page=32), "codec": Int8()}])
@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"q": torch.randn(2, 4, 1, 16).double()}, "q is torch.float64, k torch.float32 and v torch.float32"),
        ({"q": torch.randn(2, 4, 1, 32)}, "q has 32 dimensions and k 16"),
        ({"q": torch.randn(2, 3, 1, 16)}, "q has 3 heads and k has 2"),
        ({"q": torch.randn(3, 4, 1, 16)}, "q has 3 batch rows, k 2 and v 2"),
        ({"softcap": 3.0, "backend": "sdpa"}, "The backend 'sdpa' cannot run this"),
    ],
)
def test_wrong_arguments_of_decoding_are_reported_on_ranks_without_tokens_too(
    trio: Workers, options: dict[str, Any], change: dict[str, Any], text: str
):
    tensors = some()
    words = {"k": tensors["k"], "v": tensors["v"], "q": tensors["q"][:, :, -1:], "options": options, "timeout": TIMEOUT}
    for error, seconds in trio.failing(cases.decode_wrongly, {}, **(words | change)):
        assert text in str(error)
        assert seconds < TIMEOUT


def test_an_empty_cache_on_one_rank_is_reported_on_every_rank(trio: Workers):
    tensors = some()
    del tensors["dout"]
    for error, seconds in trio.failing(cases.decode_from_empty_cache, {}, **tensors, timeout=TIMEOUT):
        assert "attend over an empty ShardedCache: append tokens first" in str(error)
        assert seconds < TIMEOUT


@pytest.mark.exhaustive
def test_ranks_that_decode_another_step_of_a_form_that_they_know_are_reported(three: Workers):
    words: dict[str, Any] = {**some(), "layout": Layout.zigzag(N, 3), "mask": Causal(), "run": cases.decode}
    del words["dout"]
    three.run(cases.ring_with, change={}, **words)
    for error, seconds in three.failing(cases.ring_with, {}, change={2: {"offset": -1}}, timeout=2.0, **words):
        assert_tells_calls_apart(error)
        assert seconds < 10


OTHER: dict[str, dict[str, Any]] = {
    "mask": {"mask": Window(20)},
    "scale": {"scale": 0.5},
    "batch": {name: t[:1] for name, t in some().items()},
    "type": {name: t.double() for name, t in some().items()},
}


@pytest.mark.parametrize(
    ("run", "change"),
    [
        (cases.ring, "mask"),
        *(
            pytest.param(run, change, marks=pytest.mark.exhaustive)
            for run in (cases.ring, cases.ulysses)
            for change in OTHER
            if (run, change) != (cases.ring, "mask")
        ),
    ],
)
@pytest.mark.parametrize("is_new", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_ranks_that_call_in_different_forms_that_were_seen_before_are_reported(
    three: Workers, run: Any, change: str, is_new: bool
):
    """Whether the other form is new to all or known to all: no message of one call is taken for one of the other."""
    words: dict[str, Any] = {**some(), "layout": Layout.zigzag(N, 3), "mask": Causal(), "run": run}
    three.run(cases.ring_with, change={}, **words)
    if not is_new:
        three.run(cases.ring_with, change={}, **{**words, **OTHER[change]})
    for error, seconds in three.failing(cases.ring_with, {}, change={2: OTHER[change]}, timeout=2.0, **words):
        assert_tells_calls_apart(error)
        assert seconds < 10


def assert_tells_calls_apart(error: Any) -> None:
    assert isinstance(error, ProblemError)
    assert "the ranks of a group make the same call, and these differ" in str(error)
    assert len({line[8:] for line in str(error).splitlines() if "rank 0: " in line or "rank 2: " in line}) == 2
    assert "cannot use the group any more: start all ranks again" in str(error)


@pytest.mark.parametrize("is_known", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_ranks_that_call_different_functions_are_reported(three: Workers, is_known: bool):
    words: dict[str, Any] = {**some(), "layout": Layout.zigzag(N, 3), "mask": Causal()}
    if is_known:
        three.run(cases.ulysses, **words)
        for error, _ in three.failing(cases.ring, {2: cases.ulysses}, timeout=2.0, **words)[:2]:
            assert_tells_calls_apart(error)
    else:
        for error, _ in three.failing(cases.ring, {2: cases.ulysses}, timeout=30.0, **{**words, "scale": 0.5})[:2]:
            assert isinstance(error, ProblemError)
            assert "rank 0: ring_attend: q [" in str(error)
            assert "rank 2: ulysses_attend: q [" in str(error)


@pytest.mark.exhaustive
def test_ranks_that_name_different_backends_are_reported(three: Workers):
    """The form with one backend is new to rank 2 alone."""
    words: dict[str, Any] = {**some(), "layout": Layout.zigzag(N, 3), "mask": Causal(), "timeout": 2.0}
    for error, seconds in three.failing(cases.ring_with, {}, change={2: {"backend": "reference"}}, **words):
        assert_tells_calls_apart(error)
        assert seconds < 10


@pytest.mark.exhaustive
def test_a_rank_that_comes_late_to_a_new_form_is_named(three: Workers):
    words: dict[str, Any] = {**some(), "layout": Layout.zigzag(N, 3), "mask": Window(9), "timeout": 2.0}
    for error, seconds in three.failing(cases.ring_with, {2: cases.ring_late}, change={}, **words)[:2]:
        assert "rank 2 of 3 is lost: it did not make its call 2, of a new form, within 2 s" in str(error)
        assert seconds < 3.8


@pytest.mark.parametrize("run", [cases.ring, pytest.param(cases.ulysses, marks=pytest.mark.exhaustive)])
def test_a_wrong_argument_in_a_form_that_the_others_know_is_reported_on_every_rank(three: Workers, run: Any):
    words: dict[str, Any] = {**some(), "layout": Layout.zigzag(N, 3), "mask": Causal(), "run": run}
    three.run(cases.ring_with, change={}, **words)
    for error, _ in three.failing(cases.ring_with, {}, change={1: {"k": words["k"][..., :4]}}, timeout=2.0, **words):
        assert isinstance(error, ProblemError)
        assert "q has 16 dimensions and k 4" in str(error)


def test_a_wrong_argument_on_one_rank_is_reported_on_every_rank(trio: Workers):
    change = {1: {"layout": Layout.of_counts([N, 0, 0])}}
    more = {**some(1), "layout": Layout.zigzag(N, 3), "mask": Causal(), "timeout": TIMEOUT, "scale": 0.3}
    found = trio.failing(cases.ring_with, {}, change=change, shards=Layout.zigzag(N, 3), **more)
    for error, _ in found:
        assert "q has 18 tokens on rank 1 of the group, and layout gives it 0 of 53" in str(error)


@pytest.mark.parametrize("failing", ["state_of", "gradients_of"])
@pytest.mark.parametrize("name", ["contiguous", "one rank has nothing"])
def test_the_call_after_an_error_is_right(trio: Workers, failing: str, name: str):
    """Messages were under way, in the forward or in the backward pass."""
    tensors, layout = some(tokens=900), layouts(3, 900)[name]
    found = trio.run(cases.ring_after_an_error, failing=failing, **tensors, layout=layout, timeout=PATIENCE)
    out, grads = in_one_process(**tensors)
    whole, whole_grads = joined(found, layout, layout)
    for own, exact in zip([whole, *whole_grads], [out, *grads], strict=True):
        assert_close(own, exact)


@pytest.mark.parametrize(("function", "ranks"), [(cases.ring_tried_again, 3), (cases.ring_of_other_members, 2)])
def test_a_group_that_is_made_again_is_that_of_all_its_ranks(tmp_path: Path, function: Any, ranks: int):
    """Whether or not each of them called in the one before."""
    words: dict[str, Any] = {**some(), "layout": Layout.zigzag(N, ranks), "mask": Causal(), "timeout": PATIENCE}
    with workers(3, tmp_path) as made:
        made.run(function, meet=str(tmp_path / "again"), **words)


def test_a_transfer_that_does_not_start_blames_the_rank_at_its_other_end_alone(monkeypatch: pytest.MonkeyPatch):
    """Others may wait for this rank, and say that they are alive only when their time is over."""
    blamed: list[tuple[int, ...]] = []

    def closed(*_: Any, **__: Any) -> None:
        raise RuntimeError("Connection closed by peer")

    def fail(_: Ranks, peers: Iterable[int], error: RuntimeError) -> None:
        blamed.append(tuple(peers))
        raise error

    monkeypatch.setattr(dist, "isend", closed)
    monkeypatch.setattr(dist, "irecv", lambda *_, **__: object())
    monkeypatch.setattr(Ranks, "_fail", fail)
    ranks = Ranks.alone(1.0, "ring_attend")
    ranks.group = cast(Any, None)
    with pytest.raises(RuntimeError, match="closed"):
        ranks.start([Message(torch.zeros(1), 2, 0, False), Message(torch.zeros(1), 1, 1, True)])
    assert blamed == [(1,)]
