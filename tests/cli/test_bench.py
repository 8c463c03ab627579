"""`regard bench`: one's own shapes, measured and printed in a few lines."""

import argparse
import json
import re
import sys

import pytest

from regard.bench.rounds import Rounds
from regard.cli import bench, expression
from regard.cli.main import main

TINY = [
    "bench",
    "--queries",
    "37",
    "--query-heads",
    "4",
    "--kv-heads",
    "2",
    "--dim",
    "8",
    "--rounds",
    "1",
    "--threads",
    "1",
]


def test_it_tells_what_ran_how_fast_and_beside_what(capsys):
    assert main([*TINY, "--mask", "Causal() & Window(5)", "--dtype", "bfloat16"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0] == "q [1, 4, 37, 8] · kv [1, 2, 37, 8] bfloat16, mask Causal() & Window(left=5)"
    assert [line.split()[0] for line in lines[1:]] == ["regard", "torch", "limit", "medians"]
    assert "GFLOP/s of 700 pairs, backend" in lines[1]
    assert " mask" in lines[2].partition(", with ")[2]
    assert lines[4] == (
        "  medians of 1 interleaved rounds on 1 thread; the ratio is the median of those within a round"
    )
    assert err == ""


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--keys", "41"], "kv [1, 2, 41, 8] float32"),
        (["--keys", "41", "--v-dim", "3", "--batch", "2"], "kv [2, 2, 41, 8|3] float32"),
        (["--bias", "Alibi(4)"], "bias Alibi(heads=4)"),
        (["--softcap", "5"], "not measured: torch's fused attention has no softcap"),
        (["--softcap", "5"], "kv [1, 2, 37, 8] float32, softcap 5.0"),
        (["--backward"], "GFLOP/s of 5,476 pairs"),
        (["--backward"], "forward + backward, q [1, 4, 37, 8]"),
        (["--backend", "reference"], "backend reference"),
        (["--queries", "1", "--keys", "64", "--mask", "Causal()"], "q [1, 4, 1, 8]"),
    ],
)
def test_what_is_asked_for_is_measured(more, message, capsys):
    assert main([*TINY, *more]) == 0
    assert message in capsys.readouterr().out


def test_json_goes_to_stdout_alone_or_to_a_file(tmp_path, capsys):
    assert main([*TINY, "--json", "-"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert main([*TINY, "--json", str(tmp_path / "found.json")]) == 0
    written = json.loads((tmp_path / "found.json").read_text())
    assert shown.keys() == written.keys()
    assert written["pairs"] == 4 * 37 * 37
    assert written["seconds"] > 0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--mask", "Causal"], "Causal is not understood: expected Causal() with its parentheses."),
        (["--mask", "import os"], "'import os' is no expression"),
        (["--mask", "Window(0)"], "Window(left=0) would hide a token from itself"),
        (["--mask", "KeyLengths([1, 2])"], "sizes for 2 batch rows and the call has 1"),
        (["--bias", "Alibi(3)"], "has slopes for 3 heads and the call has 4"),
        (["--kv-heads", "3"], "--query-heads 4 is no whole multiple of --kv-heads 3"),
        (["--backend", "cuda"], "backend 'cuda' is not known"),
        (["--json", "/nowhere/found.json"], "there is no folder /nowhere"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(more, message, capsys):
    assert main([*TINY, *more]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--queries", "0"], "'0' is no count: expected 1, 2, 3 ..."),
        (["--query-heads", "many"], "'many' is no count"),
        (["--dtype", "int8"], "invalid choice: 'int8'"),
        (["--softcap", "high"], "argument --softcap: 'high': expected a number above 0. See"),
        (["--softcap", "0"], "argument --softcap: '0': expected a number above 0. See"),
        (["--softcap", "nan"], "argument --softcap: 'nan': expected a number above 0. See"),
    ],
)
def test_arguments_that_are_no_numbers_are_refused_by_the_parser(arguments, message, capsys):
    with pytest.raises(SystemExit) as end:
        main(["bench", *arguments])
    assert end.value.code == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert message in err


def test_the_reasons_of_a_backend_are_one_sentence(capsys):
    assert main([*TINY, "--backend", "sdpa", "--softcap", "5"]) == 2
    message = (
        r"cannot run this: q \[.*\] float32 on cpu, .*; sdpa: [^;]*\. Leave --backend out to let regard choose\.\n$"
    )
    assert re.search(message, capsys.readouterr().err)


def test_sizes_may_be_given_in_thousands_of_1024():
    parser = argparse.ArgumentParser()
    bench.add_to(parser.add_subparsers())
    args = parser.parse_args(["bench", "--queries", "1k", "--keys", "2K"])
    assert (args.queries, args.keys) == (1024, 2048)


def test_what_fits_no_memory_is_reported_in_one_line(capsys):
    for queries, batch in (("9999999", "99"), ("99999999999", "99999999999")):
        assert main([*TINY, "--queries", queries, "--batch", batch]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        assert "GiB, and this machine has" in err


def test_an_interruption_shows_what_there_is(monkeypatch, capsys):
    from regard.bench import measure

    monkeypatch.setattr(
        measure, "interleaved", lambda *_: Rounds([{"ours": 0.01, "torch": 0.02, "limit": 1e12}], interrupted=True)
    )
    assert main(TINY) == 130
    out = capsys.readouterr().out
    assert "2.00x" in out
    assert "ended early" in out


def test_without_rich_it_works_as_well(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert main(TINY) == 0
    assert capsys.readouterr().err == ""


def test_help_names_the_specs_that_can_be_written(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    out = capsys.readouterr().out
    assert "Global, Dilated, Blocks, Tree, TensorMask" in out
    assert "Alibi, T5Bias, TensorBias" in out


def test_the_help_names_what_expressions_read():
    assert tuple(mask.__name__ for mask in expression.MASKS) == bench.MASKS
    assert tuple(bias.__name__ for bias in expression.BIASES) == bench.BIASES


def test_a_table_is_a_mask_of_the_queries_and_keys(capsys):
    assert main([*TINY, "--queries", "3", "--mask", "Causal() & TensorMask([[1, 0, 0], [0, 1, 0], [1, 0, 1]])"]) == 0
    assert "GFLOP/s of 16 pairs" in capsys.readouterr().out  # 4 heads of 4
