"""The sweep's part of the C interface: the fields, and a struct that makes no sense gives its status and no more."""

import ctypes
from typing import Any

import pytest
import torch

from regard import native, native_calls
from regard.inspect.sweep import BINS
from tests.native.test_interface import (
    DONE,
    HEADER,
    HUGE,
    ISA,
    ISAS,
    LONG,
    POINTER,
    SCHEDULE,
    SIZE,
    WORKSPACE,
    Struct,
    fields,
)

OUTPUTS = ("entropy", "squares", "mass", "top", "top_key", "bins", "columns", "along", "mean", "largest")


def test_python_and_the_header_name_the_same_fields():
    assert list(native_calls.SWEEP) == fields("regard_sweep")
    assert f"REGARD_BINS = {BINS};" in HEADER


class Sweep(Struct):
    """A whole sweep: 2 x 4 heads on 2, 70 queries, 90 keys, two vectors, cells of 13 x 13."""

    def __init__(self, isa: int = -1) -> None:
        super().__init__(isa=isa)
        rows, cells = (2, 4, 70), (2, 4, 6, 7)
        sizes = [rows, rows, rows, rows, rows, (*rows, BINS), (2, 4, 90), (*rows, 2), cells, cells]
        self.gathered = {name: torch.full(size, -7.0) for name, size in zip(OUTPUTS, sizes, strict=True)}
        self.gathered["top_key"] = self.gathered["top_key"].to(torch.int64)
        self.vectors, self.lse[:] = torch.randn(2, 90, 2), 2.0
        new = (name for name in native_calls.SWEEP if name not in native_calls.CALL)
        self.field |= dict.fromkeys(new, 0) | {name: t.data_ptr() for name, t in self.gathered.items()}
        self.field |= {"v_dim": 0, "cell": 13, "offset": 20, "lse": self.lse.data_ptr()}
        self.field |= {"vectors": self.vectors.data_ptr(), "vector_count": 2, "vector_batch": 180}
        self.field |= {"v.data": 0, "out.data": 0}

    def gather(self) -> int:
        return self.statuses("regard_gather", native_calls.SWEEP)[-1]

    @property
    def untouched(self) -> bool:
        return all(bool((t == -7).all()) for t in self.gathered.values())


BAD: dict[str, tuple[dict[str, Any], int]] = {
    "a struct of another size": ({"bytes": 8 * len(native_calls.CALL)}, SIZE),
    "an instruction set too many": ({"isa": 17}, ISA),
    "a type that is none": ({"dtype": 4}, SIZE),
    "no threads": ({"threads": 0}, SIZE),
    "values": ({"v_dim": 16}, SIZE),
    "keys in parts": ({"k_parts": 64, "k_count": 1}, SIZE),
    "dropout": ({"dropout": 0.5}, SIZE),
    "a scale that is no number": ({"scale": float("nan")}, SIZE),
    "no q": ({"q.data": 0}, POINTER),
    "no k": ({"k.data": 0}, POINTER),
    "no lse": ({"lse": 0}, POINTER),
    "a position beyond any memory": ({"offset": HUGE}, SIZE),
    "a position far below 0": ({"offset": -HUGE}, SIZE),
    "more keys than a lane can count": ({"keys": LONG, "k.token": 0, "k.batch": 0, "k.head": 0}, SIZE),
    "fewer than no vectors": ({"vector_count": -1}, SIZE),
    "vectors that lie backwards": ({"vector_batch": -180}, SIZE),
    "vectors beyond 64 bits": ({"vector_batch": HUGE}, SIZE),
    "no vectors": ({"vectors": 0}, POINTER),
    "nowhere for sums along vectors": ({"along": 0}, POINTER),
    "cells below 0": ({"cell": -1}, SIZE),
    "a picture without cells": ({"cell": 0}, SIZE),
    "half a picture": ({"mean": 0}, POINTER),
    "the other half": ({"largest": 0}, POINTER),
    "no rows of the schedule": ({"by_query.rows": 3}, SCHEDULE),
    "no runs": ({"by_query.run_start": 0}, POINTER),
    "no workspace": ({"workspace": 0}, POINTER),
    "a workspace that is crooked": ({"workspace": 8}, WORKSPACE),
    "a workspace that is too small": ({"workspace_bytes": 64}, WORKSPACE),
    **{
        f"no {name}": ({name: 0}, POINTER)
        for name in ("entropy", "squares", "mass", "top", "top_key", "bins", "columns")
    },
}


@pytest.mark.parametrize("isa", ISAS)
def test_a_whole_struct_is_gathered(isa: int):
    made = Sweep(isa)
    assert made.gather() == DONE
    assert not any(bool((t == -7).any()) for t in made.gathered.values())


@pytest.mark.parametrize("name", BAD)
def test_a_struct_that_makes_no_sense_gives_its_status_and_touches_nothing(name: str):
    changes, expected = BAD[name]
    for isa in ISAS:
        made = Sweep(isa)
        made.field |= changes
        assert made.gather() == expected
        assert made.untouched


def test_no_struct_at_all_gives_its_status():
    gather = ctypes.CDLL(native._find()).regard_gather
    gather.restype, gather.argtypes = ctypes.c_int64, (ctypes.c_void_p,)
    assert gather(None) == POINTER
