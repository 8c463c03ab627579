"""What a report turns into: JSON, a table, and nothing that is lost on the way."""

import csv
import json
import sys
from dataclasses import asdict, replace

import numpy as np
import pytest

from regard.errors import ProblemError, RefusalError
from regard.inspect.surveying.kinds import DEFINITIONS, NONE, Estimate, Head
from tests.inspect.reports import report


def test_a_score_that_a_head_was_not_put_to_is_none():
    head = Head(0, 1, 0, {"sink": Estimate(0.5, 0.1)})
    assert head.score("sink") == (0.5, 0.1, None, None)
    assert head.score("previous") == NONE
    assert (head.value("sink"), head.value("previous")) == (0.5, None)
    assert replace(head, layer=18).name == "18.1"


def test_a_report_is_json_without_its_pictures():
    made = report(close_ups=[(0, 1)])
    output = json.loads(json.dumps(made.to_dict()))
    assert output["run"]["backends"] == ["sdpa"] * 3
    first = made.heads[0]
    assert output["heads"][0]["scores"]["sink"] == first.score("sink")._asdict()
    assert output["heads"][0]["kind"] == first.kind
    assert output["heads"][0]["distances"] == list(made.profiles[first.layer, first.head])
    assert set(output["definitions"]) == set(DEFINITIONS)
    assert output["ablations"] is output["other"] is None
    assert not {"pictures", "close_ups"} & set(output)


def test_ablations_and_what_it_is_compared_with_are_part_of_it():
    made = report(ablated=True, other=report(model="another"))
    output = json.loads(json.dumps(made.to_dict()))
    assert output["other"]["run"]["model"] == "another"
    assert made.ablations is not None
    assert output["ablations"]["deltas"]["1.3"] == made.ablations.deltas[1, 3]
    assert output["ablations"]["how"] == "zero"


def test_a_table_has_a_line_a_head_and_four_columns_a_score():
    made = report()
    header, *lines = csv.reader(made.to_csv().splitlines())
    assert header[:7] == ["model", "layer", "head", "kv_head", "kind", "sure", "remarkable"]
    assert len(lines) == len(made.heads)
    for line, head in zip(lines, made.heads, strict=True):
        cells = dict(zip(header, line, strict=True))
        assert (int(cells["layer"]), int(cells["head"]), cells["kind"]) == (head.layer, head.head, head.kind)
        low, high = float(cells["sink_low"]), float(cells["sink_high"])
        assert (float(cells["sink"]), low, high) == (head.value("sink"), *head.score("sink")[2:])
        assert cells["effective_tokens_low"] == ""


def test_a_table_of_two_models_has_the_heads_of_both_in_the_same_columns():
    there = report(layers=2, heads=6, model="two", ablated=True)
    made = report(model="one", other=there)
    table = list(csv.DictReader(made.to_csv().splitlines()))
    assert [(row["model"], row["layer"], row["head"]) for row in table] == [
        (each.run.model, str(head.layer), str(head.head)) for each in (made, there) for head in each.heads
    ]
    assert [float(row["sink"]) for row in table] == [h.value("sink") for h in (*made.heads, *there.heads)]
    assert {bool(row["delta_loss"]) for row in table if row["model"] == "one"} == {False}
    assert {bool(row["delta_loss"]) for row in table if row["model"] == "two"} == {True}


def test_measures_stand_in_the_order_of_their_definitions():
    made = report(ablated=True)
    assert set(made.measures) == {measure for head in made.heads for measure in head.scores}
    defined = [measure for measure in DEFINITIONS if measure in made.measures]
    assert list(made.measures)[: len(defined)] == defined
    assert made.measures[len(defined) :] == ()


def test_every_measure_and_every_judgement_is_defined():
    own = {"kind", "sure", "remarkable"}
    assert {measure for head in report(ablated=True).heads for measure in head.scores} | own <= set(DEFINITIONS)
    for name, definition in DEFINITIONS.items():
        assert definition.label, name
        assert definition.formula, name
        assert definition.source, name
        assert definition.chance, name


def test_a_close_up_says_what_it_takes():
    close = report(close_ups=[(0, 1)]).close_ups[0]
    arrays = [value for value in asdict(close).values() if isinstance(value, np.ndarray)]
    assert close.bytes == sum(array.nbytes for array in arrays) - 29 * 4 * 29 == 29 * (4 * 29 + 12)


def test_a_notebook_shows_the_most_remarkable_heads_as_a_small_table():
    made = report(model="<b>m</b>")
    shown = made._repr_html_()
    assert "&lt;b&gt;m&lt;/b&gt;: 8 most remarkable of 12 heads" in shown
    assert shown.count("<tr>") == 1 + 8
    first = made.heads[0]
    assert f"<td>{first.name}</td><td>{first.kind}</td><td>{first.value('sink'):.3f}</td>" in shown


class Axes:
    """What `heat_map` draws on, with what it was given."""

    def __init__(self):
        self.figure = self.xaxis = self.yaxis = self
        self.cells = self.names = self.ticks = None

    def imshow(self, cells, **_):
        self.cells = cells

    def set(self, **names):
        self.names = names

    def get_major_locator(self):
        return self

    def set_params(self, integer):
        assert integer

    def set_ticks(self, places, labels):
        self.ticks = list(zip(places, labels, strict=True))

    def colorbar(self, image, ax):
        assert ax is self


def test_a_plot_has_a_row_per_layer_and_a_column_per_head():
    made = report(layers=2, heads=3, kv_heads=1)
    axes = made.plot("entropy", ax=Axes())
    assert axes.names == {"title": "entropy (nats)", "xlabel": "head", "ylabel": "layer"}
    assert axes.ticks == [(0, "0"), (1, "1")]
    assert axes.cells.shape == (2, 3)
    for head in made.heads:
        assert axes.cells[head.layer, head.head] == head.value("entropy")


def test_a_plot_of_what_was_not_measured_is_refused():
    with pytest.raises(ProblemError, match=r"plot\('rare_word'\): the measures of this report are sink, "):
        report().plot("rare_word")


def test_a_plot_without_matplotlib_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(RefusalError, match=r"pip install 'regard\[plot\]'"):
        report().plot("sink")
