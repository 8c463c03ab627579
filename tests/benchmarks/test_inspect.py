"""`./bench inspect`: what looking inside costs, and how exact it is."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from benchmarks import inspect, inspect_exact, inspect_page
from benchmarks.inspect_cost import reached
from tests.inspect.reports import report


@pytest.mark.exhaustive
def test_a_quick_run_prints_a_sweep_beside_its_attention(capsys: pytest.CaptureFixture[str]):
    assert inspect.main(["--quick", "--threads", "1"]) == 0
    message = capsys.readouterr().out
    assert re.search(r"\| 1,024 \| [\d.]+ \| [\d.]+ \| [\d.]+ \| (\d+ %)? ?\|", message)
    assert re.search(r"One head, 4,096 tokens: [\d.]+ s, \d+ MiB", message)
    exact = message.partition("### Exactness")[2]
    assert exact.count("| yes |") == 4
    assert "**no**" not in exact


def test_a_measure_that_is_off_is_reported(monkeypatch: pytest.MonkeyPatch):
    dense = inspect_exact._dense
    monkeypatch.setattr(inspect_exact, "_dense", lambda q, k: dense(q * (1 + 1e-4), k))
    assert inspect_exact.agreement(64).count("**no**") >= 2


def test_goals_are_reached_up_to_the_most():
    assert [reached(found, 2.0) for found in (1.0, 2.0, 2.01, None)] == ["yes", "yes", "**no**", "**no**"]


def test_the_page_says_its_size_and_what_was_not_measured(monkeypatch: pytest.MonkeyPatch, tmp_path):
    monkeypatch.setattr(inspect_page, "survey", lambda *_, **__: report())
    monkeypatch.setattr(inspect_page, "CHROMIUM", tmp_path / "chromium")
    message = inspect_page.page(None, None, 12)
    assert re.search(r"heads, \d+ tokens: 0\.\d MB \(goal: less than 15; reached: yes\)\. There is no", message)


@pytest.mark.exhaustive
@pytest.mark.browser
@pytest.mark.skipif(not inspect_page.CHROMIUM.exists(), reason="no Chromium at /usr/bin/chromium")
def test_the_page_is_opened_and_timed(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("playwright")
    monkeypatch.setattr(inspect_page, "survey", lambda *_, **__: report())
    with (
        ThreadPoolExecutor() as thread
    ):  # playwright wants a thread without another of its loops: tests of the page have one
        text = thread.submit(inspect_page.page, None, None, 12, times=1).result()
    assert re.search(r"first picture \d+\.\d\d s .*, all \d+\.\d\d s", text)


def test_a_missing_page_is_reported_before_anything_is_measured(tmp_path, capsys: pytest.CaptureFixture[str]):
    assert inspect.main(["--write", str(tmp_path)]) == 2
    assert "there is no" in capsys.readouterr().err


def test_a_whole_run_writes_its_part(monkeypatch: pytest.MonkeyPatch, tmp_path):
    page = tmp_path / "inspect.md"
    page.write_text("A\n<!-- begin cost -->\nold\n<!-- end cost -->\nZ\n")
    monkeypatch.setattr(inspect, "TOKENS", (128,))
    monkeypatch.setattr(inspect, "EXACT_TOKENS", 64)
    monkeypatch.setattr(inspect, "load", lambda: (torch.nn.Identity(), None, "M"))
    for name in ("long_sweep", "use_regard", "pair_measures", "page"):
        monkeypatch.setattr(inspect, name, lambda *_, name=name: name)
    assert inspect.main(["--seconds", "0.05", "--write", str(tmp_path)]) == 0
    message = page.read_text()
    assert message.startswith("A\n")
    assert "pair_measures\n\n### The page" in message
    assert "old" not in message
