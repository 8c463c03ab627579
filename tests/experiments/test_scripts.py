"""The small version of each experiment comes to the verdict of its record; the page is made of the records."""

import json
import math
from pathlib import Path

import pytest

from regard.errors import ProblemError
from tests.experiments.conftest import FOLDER, SHARED

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in SHARED)


TEXTS = {name: (FOLDER / f"{name}.py").read_text() for name in NAMES}
SECONDS = ("online_softmax", "performer", "temperature", "worked_examples")
"""Small versions that take about a second; the others, most of which train, run with `--all`."""


def marks(name):
    """Scripts that load the model run in one process of the tests."""
    of_model = [pytest.mark.model] if "regard.integrate" in TEXTS[name] else []
    return of_model if name in SECONDS else [*of_model, pytest.mark.exhaustive]


DECIDED = {
    "quantised_cache": ("KL divergence",),
    "lost_in_the_middle": ("control", "at the first less the middle"),
    "score_functions": ("outperforms", "torch operators"),
    "sinks": ("perplexity", "mean of all heads"),
}
"""Checks that the small version of an experiment decides like the whole: beside the verdict, or instead of it."""

QUICK_CHECKS = {
    "heads": {
        "parameters of the layer, most heads less fewest": True,
        "2 look-ups, one head: accuracy": True,
        "2 look-ups, two heads: accuracy": True,
    },
    "shared_heads": {
        "cache of MHA by that of GQA": True,
        "cache of MHA by that of MQA": True,
        "cache of MHA by that of MLA": True,
        "MHA to GQA, at once: loss by first less that by mean": True,
        "MHA to GQA, at once: loss by random less that by first": True,
    },
    "length_generalisation": {
        "ALiBi, 8 times: rise": True,
        "NTK, 4 times, not tuned: share of RoPE's rise that is left": True,
        "YaRN, 4 times, not tuned: share of RoPE's rise that is left": True,
        "RoPE: greatest score beyond the training length by that within ('blows up')": False,
    },
}
"""Checks of the small versions that come out alike at any size and speed of the machine, where most others do not."""

BY_SIZE = {
    "attention_weights": ("accuracy, least", "greatest between seeds"),
    "head_redundancy": ("20 % removed: the least rise",),
    "online_softmax": ("d 64, FlashAttention-2",),
}
"""Checks that a small version may decide otherwise than the whole; it decides all others like the whole."""


def stored(name):
    return json.loads((DOCS / "experiments" / f"{name}.json").read_text())


def outcomes(checks):
    """Whether each check holds, by its text; a text that was there before is marked."""
    found = {}
    for check in checks:
        what = check["what"]
        while what in found:
            what += ", again"
        found[what] = check["holds"]
    return found


def decided(name, found):
    """Which of the checks that were found must hold as in the record, or as `QUICK_CHECKS` has them."""
    if name in QUICK_CHECKS:
        return QUICK_CHECKS[name]
    whole = outcomes(stored(name)["checks"])
    by_size = BY_SIZE.get(name, ())
    return {what: whole[what] for what in found if what in whole and not any(part in what for part in by_size)}


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in NAMES])
def test_the_small_version_comes_to_the_verdict_of_the_record(name, load):
    experiment = load(name)["EXPERIMENT"]
    try:
        record = experiment.run(seed=0, quick=True)
    except ProblemError as error:
        if "npm" not in str(error):
            raise
        pytest.skip(f"Moby-Dick is not stored here: {error}")
    assert all(math.isfinite(check["measured"]) for check in record["checks"])
    assert json.loads(json.dumps(record))["name"] == name
    found = outcomes(record["checks"])
    if experiment.quick_decides:
        assert found == {**found, **decided(name, found)}, record["checks"]
        failed = [check for check in record["checks"] if not check["holds"]]
        assert record["verdict"] == stored(name)["verdict"], failed
    for ours, theirs in zip(record["checks"], stored(name)["checks"], strict=False):
        if any(part in ours["what"] for part in DECIDED.get(name, ())):
            assert ours["holds"] == theirs["holds"], ours


@pytest.mark.parametrize("name", NAMES)
def test_the_record_states_what_the_script_does(name, load):
    experiment, record = load(name)["EXPERIMENT"], stored(name)
    for text in ("name", "title", "claim", "source", "expected"):
        assert record[text] == getattr(experiment, text)
    assert not record["quick"]
    assert (DOCS / "experiments" / f"{name}.svg").read_text().rstrip().endswith("</svg>")


def test_the_page_is_made_of_the_records(load):
    page = load("page")
    records = [stored(name) for name in page["scripts"]()]
    assert (DOCS / "experiments.md").read_text() == page["page"](records)


@pytest.mark.parametrize("name", ["temperature", "induction_heads"])
def test_a_figure_has_the_same_bytes_again(load, name):
    pytest.importorskip("matplotlib", reason="figures need matplotlib: pip install 'regard[plot]'")
    experiment, record = load(name)["EXPERIMENT"], stored(name)
    assert len({experiment.figure(record) for _ in range(3)}) == 1


def test_a_script_prints_its_verdict_and_writes_only_when_asked(load, monkeypatch, tmp_path, capsys):
    experiment = load("temperature")["EXPERIMENT"]
    experiment.main(["--quick", "--seed", "1"])
    printed = capsys.readouterr().out
    assert "verdict   holds\n" in printed
    assert "seed 1, " in printed
    assert "written" not in printed
    pytest.importorskip("matplotlib", reason="figures need matplotlib: pip install 'regard[plot]'")
    experiment.main(["--quick", "--write", str(tmp_path)])
    assert sorted(path.name for path in tmp_path.rglob("*.*")) == ["temperature.json", "temperature.svg"]
