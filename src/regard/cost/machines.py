"""Machines by their names: those of machines.toml, several of one, and the machine at hand."""

import re
from dataclasses import replace
from typing import cast

from regard.cost.machine import Machine
from regard.cost.near_names import unknown_name
from regard.cost.tables import table
from regard.cost.this_machine import read_this_machine
from regard.errors import ProblemError

TERA, GIGA, GIB, KIB = 10**12, 10**9, 2**30, 2**10

THIS = ("this", "this-cpu")
"""Names of the machine at hand, and of its processor alone."""


def machine_names() -> list[str]:
    """The machines of machines.toml."""
    return list(table("machines.toml"))


def find_machine(name: str) -> Machine:
    """A machine by its name; `8xh100` is eight of them that share the work evenly, `this` the machine at hand.

    `this` is the GPU of the machine where it was measured with one, else its processor; `this-cpu` is the processor.

    Raises:
        ProblemError: there is no such machine (near names are listed), or this one was not measured yet.

    >>> find_machine("8xh100").memory // 2**30
    640
    """
    if not isinstance(cast(object, name), str):
        raise ProblemError(f"the name of the machine is {name!r}: expected one such as 'h100'.")
    plain = name.lower().replace("_", "-").replace(" ", "-")
    if plain in THIS:
        return _this_machine(plain)
    several = re.fullmatch(r"([1-9]\d{0,5})x-?(.+)", plain, re.ASCII)
    count, plain = (int(several[1]), several[2]) if several else (1, plain)
    names = {alias: each for each, row in table("machines.toml").items() for alias in (each, *row.get("aliases", ()))}
    if several is None and (zero := re.fullmatch(r"0+x-?(.+)", plain, re.ASCII)) and zero[1] in names:
        raise ProblemError(f"{name!r} is zero machines: expected 1x{zero[1]} or more.")
    if several and plain in THIS:
        raise ProblemError(f"{name!r}: {plain!r} is the machine at hand, one alone: expected {plain!r}.")
    if plain not in names:
        raise unknown_name("machine", plain, machine_names())
    return _times(_machine(names[plain]), count)


def machine_or_none(machine: Machine | str | None) -> Machine | None:
    """The machine that is given as itself or by its name; None for None.

    Raises:
        ProblemError: there is no such machine, or it is of another type.
    """
    if isinstance(machine, str):
        return find_machine(machine)
    if not isinstance(cast(object, machine), Machine | None):
        raise ProblemError(f"machine is {machine!r}: expected a name such as 'h100', a regard.cost.Machine, or None.")
    return machine


def _this_machine(name: str) -> Machine:
    found = read_this_machine(name)
    if found is None:
        raise ProblemError(f"this machine was not measured yet: `regard cost --machine {name}` measures it once.")
    return found


def _machine(name: str) -> Machine:
    row = table("machines.toml")[name]
    return Machine(
        name=name,
        title=row["title"],
        source=row["source"],
        flops={dtype: value * TERA for dtype, value in row["flops"].items()},
        bandwidth=row["bandwidth"] * GIGA,
        memory=row["memory"] * GIB,
        fast_memory=row["fast_memory"] * KIB,
        checked=row.get("checked", ""),
        device=row["device"],
    )


def _times(one: Machine, count: int) -> Machine:
    if count == 1:
        return one
    return replace(
        one,
        name=f"{count}x{one.name}",
        title=f"{count} x {one.title}",
        flops={dtype: count * value for dtype, value in one.flops.items()},
        bandwidth=count * one.bandwidth,
        memory=count * one.memory,
        count=count,
    )
