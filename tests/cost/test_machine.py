"""Machines: their figures are complete and consistent, and errors list what there is."""

import tomllib
from pathlib import Path

import pytest
import torch

import regard.cost.machine
from regard import explain
from regard.cost.machine import Efficiency, Machine
from regard.cost.machines import find_machine, machine_names
from regard.errors import ProblemError

ROWS = tomllib.loads((Path(regard.cost.machine.__file__).parent / "machines.toml").read_text())


def test_the_machines_that_engineers_choose_from_are_there():
    assert {"a100", "h100", "h200", "b200", "mi300x", "m4-max", "epyc-9654", "xeon-8480"} <= {*machine_names()}


@pytest.mark.parametrize("name", ROWS)
def test_every_machine_has_its_figures_and_their_source(name):
    row, machine = ROWS[name], find_machine(name)
    assert row["source"]
    assert machine.checked == row.get("checked", "")
    assert machine.device == ("cpu" if "cores" in row["title"] else "mps" if "Apple" in row["title"] else "cuda")
    assert {"float32", "float16"} & machine.flops.keys() or "bfloat16" in machine.flops
    assert machine.peak("bfloat16") >= machine.peak("float32")
    assert 2**10 < machine.fast_memory < machine.memory


@pytest.mark.parametrize(
    "name", [name for name in ROWS if "cores" in ROWS[name]["title"] and "Hz" in ROWS[name]["source"]]
)
def test_products_of_cpus_are_whole_flops_a_cycle(name):
    """Cores times clock times 32 or 64 FLOP a cycle in float32: the figure is computed as its source says."""
    import re

    row = ROWS[name]
    cores, clock = int(re.search(r"(\d+) cores", row["title"])[1]), float(re.search(r"([\d.]+) GHz", row["source"])[1])
    per_cycle = row["flops"]["float32"] * 1e12 / (cores * clock * 1e9)
    assert min(abs(per_cycle / each - 1) for each in (32, 64)) < 0.01


@pytest.mark.parametrize("dtype", ["bf16", "torch.bfloat16", torch.bfloat16])
def test_a_type_has_the_limits_of_each_of_its_names(dtype):
    h100 = find_machine("h100")
    assert h100.peak(dtype) == h100.peak("bfloat16") == 989.4e12
    assert h100.balance(dtype) == h100.balance("bfloat16")
    assert h100.seconds(1e15, 0, dtype) == h100.seconds(1e15, 0, "bfloat16")
    with pytest.raises(ProblemError, match="no published FLOP/s of bfloat61: expected one of"):
        h100.peak("bfloat61")


def test_the_figures_are_dense_and_not_sparse():
    assert find_machine("h100").peak("bfloat16") == pytest.approx(989.4e12)
    assert find_machine("a100").peak("float16") == pytest.approx(312e12)
    assert find_machine("b200").peak("fp8") == pytest.approx(4500e12)


def test_several_machines_share_the_work():
    one, eight = find_machine("h100"), find_machine("8xH100")
    assert eight.seconds(1e15, 1e12, "bfloat16") == pytest.approx(one.seconds(1e15, 1e12, "bfloat16") / 8)
    assert (eight.memory, eight.fast_memory) == (8 * one.memory, one.fast_memory)


def test_unknown_machines_and_types_list_what_there_is():
    with pytest.raises(ProblemError, match=r"unknown machine 'h300'. Near: h200, h100"):
        find_machine("h300")
    with pytest.raises(ProblemError, match=r"^'8xthis': 'this' is the machine at hand, one alone: expected 'this'.$"):
        find_machine("8xthis")
    with pytest.raises(ProblemError, match=r"V100.* has no published FLOP/s of int8: expected one of float16"):
        find_machine("v100").peak("int8")
    with pytest.raises(ProblemError, match=r"^the name of the machine is None: expected one such as 'h100'"):
        find_machine(None)


LIMITS = {"name": "mine", "title": "Mine", "source": "me", "bandwidth": 1e11, "memory": 2**34, "fast_memory": 2**20}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"flops": {}}, r"^machine mine: flops is {}: expected FLOP/s by type, such as {'float32': 1e12}.$"),
        ({"flops": 1e12}, "^machine mine: flops is 1000000000000.0: expected FLOP/s by type"),
        ({"flops": {"bf16": 1e12}}, "^machine mine: flops has 'bf16': expected names of float64, float32, .* int8.$"),
        ({"flops": {"float32": "1e12"}}, "^machine mine: float32 is '1e12': expected a number above 0.$"),
        ({"flops": {"float32": float("nan")}}, "^machine mine: float32 is nan: expected a number above 0.$"),
        ({"memory": 0}, "^machine mine: memory is 0: expected a number above 0.$"),
        ({"bandwidth": None}, "^machine mine: bandwidth is None: expected a number above 0.$"),
        ({"count": 0}, "^machine mine: count is 0: expected a whole number from 1 on.$"),
        ({"count": 1.5}, "^machine mine: count is 1.5: expected a whole number from 1 on.$"),
        (
            {"efficiency": {"float32": 0.5}},
            "^machine mine: efficiency is {'float32': 0.5}: expected a regard.cost.mach",
        ),
        (
            {"efficiency": 0.5},
            "^machine mine: efficiency is 0.5: expected a regard.cost.machine.Efficiency by type, or ",
        ),
        (
            {"efficiency": {"bf16": Efficiency(0.5, 1.0, 0.1)}},
            "^machine mine: efficiency has 'bf16': expected names of",
        ),
    ],
)
def test_a_machine_of_your_own_has_numbers_by_known_types(changes, message):
    with pytest.raises(ProblemError, match=message):
        Machine(**{**LIMITS, "flops": {"float32": 1e12}, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"share": -1}, "^share of an Efficiency is -1: expected a number above 0.$"),
        ({"few_share": None}, "^few_share of an Efficiency is None: expected a number above 0.$"),
        ({"wide_share": "0.5"}, "^wide_share of an Efficiency is '0.5': expected a number above 0.$"),
    ],
)
def test_an_efficiency_of_your_own_has_numbers(changes, message):
    with pytest.raises(ProblemError, match=message):
        Efficiency(**{"share": 0.5, "partial_cost": 1.0, "few_share": 0.1, **changes})


def test_an_explained_call_of_a_type_without_a_figure_has_no_least_time():
    q = torch.empty(1, 4, 512, 64, device="meta")
    explained = [str(explain(*[q.to(dtype)] * 3, device="cuda:l4")) for dtype in (torch.float64, torch.float32)]
    last = [text.splitlines()[-1] for text in explained]
    assert last[0] == "on NVIDIA L4 no least time: no figure for float64"
    assert last[1].startswith("on NVIDIA L4 at least ")
