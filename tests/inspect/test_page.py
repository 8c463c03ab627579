"""The page as a file: what is in it, what it may do, and that its pictures come back."""

import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.inspect.page import as_json, is_causal, pack, page, unpack, write_page, write_whole
from tests.inspect.reports import report, weights

NASTY = (
    "</script><script>window.ran = 1</script>",
    "<!--<script>",
    "<img src=x onerror='window.ran = 1'>",
    "]]>&amp;",
    "\u2028\ud800",
)


class Parsed(HTMLParser):
    """The elements of a page: their attributes, and what stands inside scripts and styles."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.elements, self.inside = [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.inside.append("")

    def handle_data(self, data):
        if self.cdata_elem:  # inside a script or a style
            self.inside[-1] += data

    def all(self, tag):
        return [(attrs, text) for (name, attrs), text in zip(self.elements, self.inside, strict=True) if name == tag]


def scripts(parsed, kind):
    return [(attrs, text) for attrs, text in parsed.all("script") if attrs.get("type") == kind]


def content(parsed):
    [(_, text)] = scripts(parsed, "application/json")
    return json.loads(text)


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
    made = report(tokens=NASTY, model="<b>m</b>")
    parsed = Parsed(page(made))
    assert content(parsed)["tokens"] == list(NASTY)
    assert len(parsed.all("script")) == 2 + made.run.layers  # the JSON, a block a layer, the script
    assert not parsed.all("img")
    assert not parsed.all("b")


def test_the_same_report_gives_the_same_bytes():
    first, second = report(), report()
    assert page(first) == page(replace(second, pictures=second.pictures[::-1]))


def test_scores_that_are_none_or_no_number_are_null():
    made = report()
    odd = replace(made.heads[0], induction=None, induction_chance=None, entropy=float("nan"))
    heads = content(Parsed(page(replace(made, heads=(odd,)))))["heads"]
    row = dict(zip(heads["columns"], heads["rows"][0], strict=True))
    assert row["induction"] is row["induction_chance"] is row["entropy"] is None


def test_every_measure_is_defined_and_most_have_a_chance():
    told = content(Parsed(page(report())))
    keys = [measure["key"] for measure in told["measures"]]
    assert keys == ["entropy", "effective_tokens", "sink", "previous", "induction", "remarkable"]
    assert set(keys) <= set(told["definitions"])
    assert {m["key"] for m in told["measures"] if m["chance"]} == {"entropy", "sink", "previous", "induction"}


def test_the_page_is_written_over_what_was_there(tmp_path):
    path = tmp_path / "page.html"
    path.write_text("x" * 10_000_000)
    assert write_page(report(), path) == path.stat().st_size < 1_000_000
    with pytest.raises(OSError, match="directory"):
        write_page(report(), tmp_path)


@given(st.text())
def test_json_in_a_script_says_the_same_and_cannot_end_it(text):
    told = as_json([text])
    assert json.loads(told) == [text]
    assert told.isascii()
    assert not set("<>&") & set(told)


# ---- the pictures ---------------------------------------------------------------------------------------------------


def test_a_weight_read_back_is_within_half_a_step_of_its_root():
    made = report(layers=2, tokens=[f" {n}" for n in range(101)])
    parsed = Parsed(page(made))
    told, packed = content(parsed)["pictures"], {attrs["id"]: text for attrs, text in scripts(parsed, "text/plain")}
    seen = 0
    for block in told["blocks"]:
        pictures = unpack(packed[block["id"]], [p["size"] for p in block["pictures"]], told["causal"])
        for caption, codes in zip(block["pictures"], pictures, strict=True):
            layer, number = map(int, caption["head"].split("."))
            assert np.abs(codes / 255 - np.sqrt(weights(layer, number, 101))).max() <= 0.5 / 255 + 1e-12
            seen += 1
    assert seen == 8


@pytest.mark.parametrize("causal", [True, False])
def test_pictures_come_back_as_they_were(causal):
    pictures = report(causal=causal).pictures
    assert is_causal(pictures) == causal
    back = unpack(pack(pictures, causal), [p.size for p in pictures], causal)
    assert all(np.array_equal(a, b.weights) for a, b in zip(back, pictures, strict=True))


def test_a_causal_picture_stores_its_lower_half():
    rows = unpack(pack(report(causal=False).pictures[:1], causal=True), [29], causal=True)[0]
    assert not np.triu(rows, 1).any()
    assert np.array_equal(np.tril(rows), np.tril(report(causal=False).pictures[0].weights))


def test_one_look_ahead_makes_all_pictures_whole():
    ahead = np.eye(29, k=1, dtype=np.uint8)
    assert not is_causal([*report().pictures, replace(report().pictures[0], weights=ahead)])


def test_what_is_the_same_in_every_page_is_small():
    text = page(report())
    data = [text for _, text in scripts(Parsed(text), "text/plain") + scripts(Parsed(text), "application/json")]
    assert len(text.encode()) - sum(map(len, data)) < 62 * 1024


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
