"""The page as a file: what is in it, and what it may do."""

import base64
import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.atomic_write import write_whole
from regard.errors import ProblemError
from regard.inspect.page import as_json, file, framed, page, write_page
from regard.inspect.surveying.kinds import Estimate
from tests.inspect.page.parsed import Parsed, content, scripts
from tests.inspect.reports import report

NASTY = (
    "</script><script>window.ran = 1</script>",
    "<!--<script>",
    "<img src=x onerror='window.ran = 1'>",
    "]]>&amp;",
    "\u2028\ud800",
)


# ---- the file -------------------------------------------------------------------------------------------------------


def test_the_page_is_one_file_that_refers_to_nothing_outside():
    text = page(report())
    parsed = Parsed(text)
    addresses = [
        attrs[name]
        for _, attrs in parsed.elements
        for name in ("src", "href", "action", "data", "poster")
        if name in attrs
    ]
    assert all(address.startswith(("data:", "#")) for address in addresses)
    own = re.sub(r'<script type="text/plain".*?</script>|base64,[^"]*', "", text)  # base64 may hold //
    assert not re.search(r"https?:|//|@import|url\(", own)


def test_ids_are_unique_and_what_the_script_asks_for_is_there():
    parsed = Parsed(page(report()))
    ids = [attrs["id"] for _, attrs in parsed.elements if "id" in attrs]
    assert len(ids) == len(set(ids))
    [(_, script)] = scripts(parsed, None)
    assert set(re.findall(r'\$\("([\w-]+)"\)', script)) <= set(ids)


def test_the_policy_allows_its_own_script_and_style_and_nothing_else():
    parsed = Parsed(page(report()))
    [policy] = [
        attrs["content"] for attrs, _ in parsed.all("meta") if attrs.get("http-equiv") == "Content-Security-Policy"
    ]
    allowed = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    [(_, script)], [(_, style)] = scripts(parsed, None), parsed.all("style")
    sha = {
        name: f"'sha256-{base64.b64encode(hashlib.sha256(x.encode()).digest()).decode()}'"
        for name, x in {"script-src": script, "style-src": style}.items()
    }
    assert allowed == {"default-src": "'none'", "img-src": "data:", "base-uri": "'none'", "form-action": "'none'"} | sha
    assert not any(name.startswith("on") or name == "style" for _, attrs in parsed.elements for name in attrs)


def test_a_prompt_full_of_markup_is_text():
    made = report(tokens=NASTY, model="<b>m</b>", close_ups=[(0, 1)])
    parsed = Parsed(page(made))
    assert content(parsed)["tokens"] == list(NASTY)
    assert len(parsed.all("script")) == 2 + made.run.layers + 2  # the JSON, a block a layer, the script, a close-up
    assert not parsed.all("img")
    assert not parsed.all("b")


def test_the_same_report_gives_the_same_bytes():
    first, second = report(), report()
    assert page(first) == page(replace(second, pictures=second.pictures[::-1]))


def test_scores_that_are_none_or_no_number_are_null():
    made = report()
    head = replace(made.heads[0], scores={"induction": Estimate(None), "entropy": Estimate(float("nan"), 1.5)})
    [output] = content(Parsed(page(replace(made, heads=(head,)))))["heads"]
    assert {name: output["scores"][name] for name in head.scores} == {"induction": [], "entropy": [None, 1.5]}


def test_scores_come_with_their_chance_and_their_interval():
    made = report()
    output = content(Parsed(page(made)))["heads"]
    for head, message in zip(made.heads, output, strict=True):
        for measure, score in head.scores.items():
            padded = [*message["scores"][measure], None, None][:4]
            assert padded == [x if x is None else pytest.approx(x, rel=1e-5) for x in score]


def test_every_measure_is_defined_with_its_source():
    output = content(Parsed(page(report(ablated=True))))
    keys = ["entropy", "effective_tokens", "sink", "previous", "induction", "delta_loss", "sure", "remarkable"]
    keys += ["alpha", "sink_value"]
    assert sorted(output["measures"]) == sorted(keys)
    assert set(output["definitions"]) == {"kind", "sink_shares", *keys}
    assert all(definition["formula"] and definition["source"] for definition in output["definitions"].values())


def test_the_page_is_written_over_what_was_there(tmp_path):
    path = tmp_path / "page.html"
    path.write_text("x" * 10_000_000)
    assert write_page(report(), path) == path.stat().st_size < 1_000_000


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("nowhere/page.html", "nowhere/page.html cannot be written: there is no folder .*nowhere"),
        (".", "is a folder: name the file"),
        (None, "the output is None: expected the name of a file"),
    ],
)
def test_a_place_that_cannot_be_written_is_found_before_the_page_is_made(tmp_path, monkeypatch, place, message):
    monkeypatch.setattr(file, "page", lambda *_: pytest.fail("the page is made"))
    with pytest.raises(ProblemError, match=message):
        write_page(report(), place if place is None else tmp_path / place)


def test_what_is_no_report_is_refused(tmp_path):
    with pytest.raises(ProblemError, match="the report is dict: expected what `survey` returns"):
        write_page(report().to_dict(), tmp_path / "page.html")  # pyright: ignore[reportArgumentType]
    assert not (tmp_path / "page.html").exists()


@given(st.text())
def test_json_in_a_script_says_the_same_and_cannot_end_it(text):
    output = as_json([text])
    assert json.loads(output) == [text]
    assert output.isascii()
    assert not set("<>&") & set(output)


# ---- size and writing -----------------------------------------------------------------------------------------------


def test_what_is_the_same_in_every_page_is_small():
    text = page(report())
    parsed = Parsed(text)
    [(_, script)] = scripts(parsed, None)
    data = [text for _, text in scripts(parsed, "text/plain") + scripts(parsed, "application/json")]
    assert len(script.encode()) <= 100 * 1024
    assert len(text.encode()) - sum(map(len, data)) < 128 * 1024


def test_a_frame_for_notebooks_holds_the_page_and_may_do_nothing_but_run_its_script():
    [(frame, _)] = Parsed(framed(report(tokens=NASTY))).all("iframe")
    assert frame["sandbox"] == "allow-scripts allow-downloads"
    inside = Parsed(frame["srcdoc"])
    assert content(inside)["tokens"] == list(NASTY)
    assert len(Parsed(framed(report(tokens=NASTY))).elements) == 1


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "page.html"
    write_whole(path, b"before")

    def full(self: Path, data: bytes) -> int:
        self.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(path, b"after")
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]
