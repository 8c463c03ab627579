"""`./bench caches`: what is measured of each cache, what is printed of it, and the part of the page."""

import xml.etree.ElementTree as ET
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from benchmarks import cache_batches, cache_model, cache_pictures, cache_steps, cache_stream, caches
from benchmarks.cache_model import DENSE, DYNAMIC, OURS, Kind
from benchmarks.cache_pictures import Bar, Dot
from benchmarks.cache_steps import BESIDE, LATENTS, PLAIN, WAYS, FilledCaches
from regard.bench.rounds import Effort
from regard.integrate.cache import regard_cache
from regard.storage.codec import Int4, Int8
from regard.storage.stored import Paged, StoredTensor
from tests.integrate.zoo import model, with_cache

ONCE = Effort(seconds=0.0, least=1)


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


# ---- a step ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [*WAYS, *LATENTS], ids=lambda way: way.name)
def test_a_step_attends_to_all_that_the_next_cache_holds(way, monkeypatch):
    seen: list[tuple[int, int]] = []
    attend = cache_steps.attend

    def watched(q: Any, k: Any, v: Any, **words: Any) -> Any:
        seen.append((k.shape[2], k.shape[3]))
        return attend(q, k, v, **words)

    monkeypatch.setattr(cache_steps, "attend", watched)
    filled = FilledCaches.of(replace(way, dim=way.dim if way in LATENTS else 32), tokens=160, cold=400_000)
    assert len(filled.caches) > 1
    first, count, dim = filled.turn, len(filled.caches), 576 if way in LATENTS else 32
    step = filled.stepping()
    for _ in range(2 * count):
        step()
    assert seen == [(162, dim)] * count + [(163, dim)] * count
    assert filled.turn == first
    out = filled.attending(3)()
    assert out.shape == (1, way.heads, 3, 512 if way in LATENTS else 32)
    assert out.dtype == way.dtype


def test_bytes_that_a_step_reads_are_those_of_what_is_stored():
    plain, coded = (next(way for way in WAYS if way.name == name) for name in (BESIDE, "Int8()"))
    assert FilledCaches.of(plain, tokens=159, cold=1).nbytes == 2 * 160 * 8 * 128 * 2
    # 160 tokens: 32 sinks, 32 of the residual, 96 codes; a scale for a channel of 32 keys, and one for each value
    assert FilledCaches.of(coded, tokens=159, cold=1).nbytes == 8 * (
        64 * 2 * 128 * 2 + 96 * 2 * 128 + 3 * 128 * 2 + 96 * 2
    )
    latent = FilledCaches.of(LATENTS[1], tokens=159, cold=1)
    assert latent.nbytes == 160 * 576 * 2  # once: values are a part of keys


def test_pages_of_a_cache_are_scattered_over_the_pool():
    paged = next(way for way in WAYS if way.name == "Paged(16), bf16")
    filled = FilledCaches.of(paged, tokens=160, cold=1_000_000)
    k = filled.found[0][0]
    assert isinstance(k, StoredTensor)
    table = k.parts[0].table
    assert table is not None
    assert (table[0, 1:10].diff() >= len(filled.caches)).all()


def lines(seconds: dict[str, float], limit: float) -> dict[str, Any]:
    """Lines of these ways whose measurements are made up."""
    ways = [way for way in WAYS if way.name in seconds]
    found = {name: time for way in ways for name, time in _times(way.name, seconds)}
    rounds = cache_steps.Rounds([found | {"limit": limit}])
    filled: list[Any] = [SimpleNamespace(way=way, nbytes=1000) for way in ways]
    return {one.way.name: cache_steps._line(one, rounds, BESIDE) for one in filled}


def _times(name: str, seconds: dict[str, float]) -> list[tuple[str, float]]:
    return [(name, seconds[name]), (f"{name}, step", 2 * seconds[name])]


def test_goals_are_shares_of_the_bandwidth_and_times_of_others():
    seconds = {PLAIN: 4.0, BESIDE: 2.0, "Int8()": 1.25, "Int4()": 1.0, "Paged(16), bf16": 2.25}
    found = lines(seconds, limit=310.0)
    assert {name: (line.goal(), line.reached()) for name, line in found.items()} == {
        PLAIN: ("≥ 80 %", "yes"),
        BESIDE: ("≥ 75 %", "yes"),
        "Int8()": ("≥ 1.6x", "yes"),
        "Int4()": ("≥ 2.4x", "**no**"),
        "Paged(16), bf16": (f"≤ 1.10 of {BESIDE}", "**no**"),
    }
    assert lines(seconds, limit=313.0)[PLAIN].reached() == "**no**"
    assert found["Int8()"].step == 2.5
    text = cache_steps.results_table(list(found.values()), BESIDE)
    assert "| Int4() | 0.0 | 1,000 ms | 0 GB/s | 323 % | 2.00x | 2,000 ms | ≥ 2.4x | **no** |" in text


def test_a_few_queries_are_measured_against_each():
    filled = [FilledCaches.of(replace(way, heads=4, kv_heads=2, dim=16), tokens=64, cold=1) for way in WAYS[1:3]]
    text = cache_steps.chunks(filled, BESIDE, ONCE)
    assert text.count("\n") == 3
    assert "64 queries" in text


# ---- batches --------------------------------------------------------------------------------------------------------


def test_ways_to_attend_from_rows_of_their_own_lengths_are_measured(monkeypatch):
    monkeypatch.setattr(cache_batches, "DIM", 16)
    text = cache_batches.ragged((5, 70, 33), ONCE)
    assert text.count("\n") == 1 + 6
    assert "| Paged, bf16, one call |" in text


def test_ways_to_attend_from_a_shared_prefix_are_measured(monkeypatch):
    tables: list[torch.Tensor] = []
    attend_shared = cache_batches.attend_shared

    def watched(q: Any, k: Any, v: Any, **words: Any) -> Any:
        tables.append(k.parts[0].table)
        return attend_shared(q, k, v, **words)

    monkeypatch.setattr(cache_batches, "DIM", 16)
    monkeypatch.setattr(cache_batches, "attend_shared", watched)
    assert cache_batches.shared(3, 64, 5, ONCE).count("\n") == 1 + 3
    assert (tables[0][:, :4] == tables[0][0, :4]).all()  # the prefix, in pages of 16, is there once
    assert len(tables[0][:, 4].unique()) == 3


# ---- a whole model --------------------------------------------------------------------------------------------------


def test_a_token_is_measured_with_each_cache():
    made = model("llama")
    kinds = [*cache_model.theirs(), *OURS]
    found = cache_model.steps(made, kinds, 150, ONCE)
    assert [line.kind.name for line in found][:1] == [DYNAMIC]
    assert len(found) == len(kinds)
    dense = next(line for line in found if line.kind.name == DENSE)
    assert dense.beside == 1.0
    assert all(line.seconds > 0 for line in found)
    text = cache_model.results_table(found)
    assert text.count("\n") == 1 + len(kinds)


def test_a_filled_cache_holds_the_tokens_and_goes_on():
    made = model("llama")
    made.set_attn_implementation("eager")
    cache = cache_model.filled(made.config, Kind("", {}), 21)
    assert cache.get_seq_length() == 21
    made(torch.tensor([[3]]), **with_cache(cache), use_cache=True)
    assert cache.get_seq_length() == 22


def test_attention_is_what_grows_with_the_cache():
    dense = next(kind for kind in OURS if kind.name == DENSE)
    times = {DYNAMIC: 10.0, "sdpa, new": 4.0, DENSE: 5.0, "regard, new": 3.0}
    line = cache_model._line(dense, cache_model.Rounds([times]))
    assert line == cache_model.Line(dense, seconds=5.0, attention=2.0, faster=3.0, beside=1.0)


def test_no_quantised_cache_may_be_slower_than_the_plain_one():
    def line(name: str, **more: float) -> cache_model.Line:
        kind = next(kind for kind in OURS if kind.name == name)
        return cache_model.Line(kind, **{"seconds": 1.0, "attention": 1.0, "faster": 3.0, "beside": 1.0} | more)

    assert line(DENSE).reached() == "yes"
    assert line(DENSE, faster=2.9).reached() == "**no**"
    assert line("regard bf16", faster=1.0, beside=2.0).reached() == ""
    assert line("regard Int8()", faster=1.0).reached() == "yes"
    assert line("regard Int8()", faster=9.0, beside=1.01).reached() == "**no**"


@pytest.mark.parametrize(
    "words",
    [{}, {"codec": torch.bfloat16}, {"codec": Int8()}, {"codec": Int4(group=16, residual=5, sinks=0)},
     {"layout": Paged(16)}, {"layout": Paged(32), "codec": Int8()}, {"codec": Int8(keys="token")}],
    ids=str,
)  # fmt: skip
def test_the_formula_counts_what_is_stored(words):
    config: Any = transformers.LlamaConfig(
        hidden_size=80, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1
    )
    config._attn_implementation = "regard"
    cache = cache_model.filled(config, Kind("", words), 1003)
    assert regard_cache(config, **words).bytes == 0
    assert cache.bytes == pytest.approx(cache_model.formula(config, words, 1003), rel=0.03)


@pytest.mark.exhaustive
def test_memory_is_that_of_the_process():
    plain = cache_model.memory(512, OURS[:1])[DENSE]
    assert plain.formula == plain.stored == 512 * 46_080
    assert plain.resident / plain.allocated == pytest.approx(1.0, abs=0.1)


def test_memory_that_is_more_than_the_formula_is_reported():
    assert "| **no** |" in cache_model.memory_table({"": cache_model.Bytes(100, 106, 0, 0)})
    assert "| yes |" in cache_model.memory_table({"": cache_model.Bytes(100, 105, 0, 0)})


# ---- a stream -------------------------------------------------------------------------------------------------------


def test_a_stream_is_exact_and_holds_the_same_at_every_mark(monkeypatch):
    monkeypatch.setattr(cache_stream, "BLOCK", 100)
    output: list[int] = []
    marks = cache_stream.stream((300, 1000), window=53, tell=output.append)
    assert output == list(range(100, 1001, 100))
    assert [mark.tokens for mark in marks] == [300, 1000]
    assert marks[0].allocated == marks[1].allocated
    assert all(mark.error < 1e-5 for mark in marks)
    assert cache_stream.results_table(marks).count("\n") == 3


def test_a_stream_that_forgot_something_else_would_be_seen(monkeypatch):
    monkeypatch.setattr(cache_stream, "BLOCK", 100)
    rolling = cache_stream.Rolling
    monkeypatch.setattr(cache_stream, "Rolling", lambda window, sinks, rope: rolling(window, sinks + 1, rope))
    assert cache_stream.stream((300,), window=53)[0].error > 1e-3


# ---- pictures -------------------------------------------------------------------------------------------------------


def texts(picture: str) -> list[str]:
    return [text.text or "" for text in ET.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")]


def test_bars_are_as_long_as_their_numbers():
    svg = ET.fromstring(cache_pictures.bars([("Title", [Bar("a < b", 1.0, "1"), Bar("b", 4.0, "4", goal=8.0)])]))
    widths = [float(rect.attrib["width"]) for rect in svg.iter("{http://www.w3.org/2000/svg}rect")]
    assert widths == [cache_pictures.WIDE / 8, cache_pictures.WIDE / 2]
    assert len(list(svg.iter("{http://www.w3.org/2000/svg}line"))) == 1


def test_dots_stand_in_the_order_of_their_numbers():
    rows = [Dot("a", (40.0, 38.0, 43.0)), Dot("b", (80.0, 70.0, 90.0)), Dot("c", (50.0, 50.0, 50.0))]
    picture = cache_pictures.dots(
        [("Perplexity", rows, 39.0, "plain"), ("KL", [Dot("d", (0.001, 1e-9, 0.01))], None, "")]
    )
    places = [float(c.attrib["cx"]) for c in ET.fromstring(picture).iter("{http://www.w3.org/2000/svg}circle")]
    assert places[0] < places[2] < places[1]
    assert "80 (70 to 90)" in texts(picture)
    assert "plain: 39" in texts(picture)


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch, tmp_path):
    """The command with sizes that take no time, and a folder with a page."""
    monkeypatch.setattr(cache_steps, "TOKENS", 80)
    of = FilledCaches.of
    monkeypatch.setattr(FilledCaches, "of", staticmethod(lambda way: of(way, tokens=80, cold=1)))
    monkeypatch.setattr(cache_batches, "LENGTHS", (16, 37))
    monkeypatch.setattr(cache_batches, "PREFIX", 32)
    monkeypatch.setattr(cache_stream, "MARKS", (2000,))
    monkeypatch.setattr(cache_model, "TOKENS", 150)
    memory = {DENSE: cache_model.Bytes(1, 1, 1, 1)}
    monkeypatch.setattr(cache_model, "memory", lambda tokens: memory)
    monkeypatch.setattr(caches, "load", lambda: (model("llama"), None, "Tiny"))
    (tmp_path / "caches.md").write_text("A\n<!-- begin speed -->\n<!-- end speed -->\nZ\n")
    return tmp_path


@pytest.mark.exhaustive
def test_it_writes_its_part_and_the_picture(small):
    assert caches.main(["--seconds", "0.001", "--threads", "1", "--write", str(small)]) == 0
    page = (small / "caches.md").read_text()
    assert page.startswith("A\n<!-- begin speed -->\n\nMeasured by `./bench caches --seconds 0.001` on ")
    assert page.endswith("<!-- end speed -->\nZ\n")
    assert page.count("\n### ") == 8
    for way in WAYS:
        assert f"| {way.name} |" in page
    assert {way.name for way in WAYS} | {kind.name for kind in OURS} <= set(texts((small / "caches.svg").read_text()))


def test_a_part_is_printed_and_nothing_is_written(small, capsys):
    assert caches.main(["--only", "memory"]) == 0
    out = capsys.readouterr().out
    assert out.count("### ") == out.count("### Memory") == 1
    assert [path.name for path in small.iterdir()] == ["caches.md"]


@pytest.mark.parametrize("arguments", [["--seconds", "0"], ["--seconds", "soon"], ["--only", "all"]])
def test_arguments_that_make_no_sense_are_refused_in_one_line(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        caches.main(arguments)
    assert end.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_missing_page_is_reported_before_anything_is_measured(tmp_path, capsys):
    assert caches.main(["--write", str(tmp_path)]) == 2
    assert "there is no" in capsys.readouterr().err
