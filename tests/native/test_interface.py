"""The C interface: both sides name the same fields, and a struct that makes no sense gives its status and no more."""

import ctypes
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from regard import RegardError, attend, native, native_calls
from regard.plan.tiling import schedule

HEADER = (Path(__file__).parents[2] / "native" / "abi.h").read_text()
DONE, MORE, SIZE, POINTER, SCHEDULE, WORKSPACE, ISA = 0, 1, -1, -2, -3, -4, -5


def fields(name: str) -> list[str]:
    """The fields of a struct of abi.h, in order, those of structs in it with a dot."""
    text = re.sub(r"//[^\n]*", "", HEADER)
    body = re.search(rf"struct {name} \{{(.*?)\}};", text, re.DOTALL)
    assert body is not None
    found: list[str] = []
    for declaration in body.group(1).split(";"):
        kind, _, names = declaration.replace("const ", "").strip().partition(" ")
        for one in filter(None, (n.strip(" \n") for n in names.split(","))):
            array = re.fullmatch(r"(\w+)\[(\d+)\]", one)
            if one.startswith("*"):
                found.append(one.strip(" *\n"))
                continue
            inner = fields(kind) if kind.startswith("regard_") and f"struct {kind} " in text else []
            if array:
                found += [f"{array.group(1)}.{i}" for i in range(int(array.group(2)))]
            elif kind == "regard_call":
                found += inner
            else:
                found += [f"{one}.{field}" for field in inner] or [one]
    return found


def doubles(name: str) -> set[str]:
    text = re.sub(r"//[^\n]*", "", HEADER)
    return set(re.findall(r"double (\w+);", text[text.index(f"struct {name} ") :].split("};")[0]))


def test_python_and_the_header_name_the_same_fields():
    assert list(native_calls.CALL) == fields("regard_call")
    assert list(native_calls.GRADIENT) == fields("regard_gradient")
    assert list(native_calls.PART) == fields("regard_part")
    assert list(native_calls.LINEAR) == fields("regard_linear")
    assert set(native_calls.NUMBERS) == doubles("regard_call") | doubles("regard_gradient") | doubles("regard_linear")


class Struct:
    """A whole call with gradients: 2 x 4 heads on 2, 70 queries, 90 keys. Its fields can be changed."""

    def __init__(self, dtype: torch.dtype = torch.float32, isa: int = -1) -> None:
        g = torch.Generator().manual_seed(0)
        self.q, self.k, self.v = (
            torch.randn(2, h, n, 16, generator=g).to(dtype) for h, n in ((4, 70), (2, 90), (2, 90))
        )
        self.tiles = schedule(None, batch=2, heads=4, queries=70, keys=90, offset=20, tile=64)
        self.out, self.dq = torch.full((2, 4, 70, 16), 7.0, dtype=dtype), torch.full((2, 4, 70, 16), 7.0, dtype=dtype)
        self.lse, self.delta = torch.full((2, 4, 70), 7.0), torch.full((2, 4, 70), 7.0)
        self.dk, self.dv = torch.full((2, 2, 90, 16), 7.0, dtype=dtype), torch.full((2, 2, 90, 16), 7.0, dtype=dtype)
        self.memory = torch.empty(1 << 20, dtype=torch.uint8)
        self.arrays: list[np.ndarray] = []
        self.field: dict[str, Any] = dict.fromkeys(native_calls.GRADIENT, 0)
        sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "queries": 70, "keys": 90, "qk_dim": 16, "v_dim": 16}
        self.field |= sizes | {"isa": isa, "dtype": native_calls.DTYPES[dtype], "threads": 1, "scale": 0.25}
        for name, t in {"q": self.q, "k": self.k, "v": self.v, "out": self.out, "dout": self.out}.items():
            self._place(name, t)
        for name, t in {"dq": self.dq, "dk": self.dk, "dv": self.dv}.items():
            self._place(name, t)
        self.field |= {"lse": self.lse.data_ptr(), "delta": self.delta.data_ptr(), "maps_batch": 1, "maps_head": 1}
        self._list("by_query", self.tiles)
        self.field |= {"workspace": self.memory.data_ptr(), "workspace_bytes": self.memory.nbytes}

    def _place(self, name: str, t: Tensor) -> None:
        self.field |= zip(
            (f"{name}.{x}" for x in ("data", "batch", "head", "token")), (t.data_ptr(), *t.stride()[:3]), strict=True
        )

    def _list(self, name: str, tiles: Any) -> None:
        self.field[f"{name}.rows"] = tiles.query_tiles
        for field in ("run_start", "run_tile", "run_length", "patch_start", "patch_tile", "patch_pattern"):
            self.arrays.append(np.array(getattr(tiles, field), dtype=np.int64))
            self.field[f"{name}.{field}"] = self.arrays[-1].ctypes.data

    def in_parts(self, k: list[dict[str, int]], v: list[dict[str, int]]) -> None:
        """Keys and values from parts with these fields."""
        for name, parts in (("k", k), ("v", v)):
            self.arrays.append(np.array([[p.get(f, 0) for f in native_calls.PART] for p in parts], dtype=np.int64))
            self.field |= {f"{name}_parts": self.arrays[-1].ctypes.data, f"{name}_count": len(parts)}

    def array(self, name: str, values: list[int]) -> int:
        self.arrays.append(np.array(values, dtype=np.int64))
        return self.arrays[-1].ctypes.data

    def statuses(self, function: str, names: tuple[str, ...]) -> list[int]:
        """What the function returns, called until it is done."""
        kinds = "".join("d" if name in native_calls.NUMBERS else "q" for name in names)
        size = self.field["bytes"] or 8 * len(names)
        packed = bytearray(struct.pack("=" + kinds, *({**self.field, "bytes": size}[name] for name in names)))
        entry = getattr(ctypes.CDLL(native._find()), function)
        entry.restype, entry.argtypes = ctypes.c_int64, (ctypes.c_void_p,)
        found = [MORE]
        while found[-1] == MORE:
            found.append(entry((ctypes.c_char * len(packed)).from_buffer(packed)))
        return found[1:]

    def forward(self) -> int:
        return self.statuses("regard_forward", native_calls.CALL)[-1]

    def backward(self) -> int:
        return self.statuses("regard_backward", native_calls.GRADIENT)[-1]

    @property
    def untouched(self) -> bool:
        written = (self.out, self.lse, self.delta, self.dq, self.dk, self.dv)
        return all(bool((t == 7).all()) for t in written)


ISAS = range(-1, len(native.isas()))
HUGE, LONG = 1 << 62, 1 << 33
BAD: dict[str, tuple[dict[str, Any], int]] = {
    "a struct of another size": ({"bytes": 8}, SIZE),
    "an instruction set too many": ({"isa": 17}, ISA),
    "an instruction set below all": ({"isa": -2}, ISA),
    "a type that is none": ({"dtype": 4}, SIZE),
    "no threads": ({"threads": 0}, SIZE),
    "fewer than no queries": ({"queries": -1}, SIZE),
    "heads that are no multiple": ({"kv_heads": 3}, SIZE),
    "no key heads": ({"kv_heads": 0}, SIZE),
    "a dim beyond any memory": ({"qk_dim": HUGE}, SIZE),
    "rows beyond 64 bits": ({"batch": LONG, "queries": LONG}, SIZE),
    "a stride that overflows": ({"k.token": HUGE}, SIZE),
    "strides that overflow together": ({"k.batch": HUGE // 2, "k.head": HUGE // 2}, SIZE),
    "a stride below 0": ({"v.head": -16}, SIZE),
    "no q": ({"q.data": 0}, POINTER),
    "no k": ({"k.data": 0}, POINTER),
    "no v": ({"v.data": 0}, POINTER),
    "no out": ({"out.data": 0}, POINTER),
    "no lse": ({"lse": 0}, POINTER),
    "a scale that is no number": ({"scale": float("nan")}, SIZE),
    "a scale without end": ({"scale": float("inf")}, SIZE),
    "a cap below 0": ({"softcap": -1.0}, SIZE),
    "a dropout of all": ({"dropout": 1.0}, SIZE),
    "a dropout below 0": ({"dropout": -0.1}, SIZE),
    "time that is no number": ({"seconds": float("nan")}, SIZE),
    "a start below 0": ({"next": -1}, SIZE),
    "a distance vector that is too short": ({"distance": 64, "distance_head": 100}, SIZE),
    "a bias of no type": ({"bias": 64, "bias_dtype": 9}, SIZE),
    "a bias that overflows": ({"bias": 64, "bias_dtype": 1, "bias_row": HUGE}, SIZE),
    "rows that are not the queries'": ({"by_query.rows": 3}, SCHEDULE),
    "maps that are neither one nor all": ({"maps_batch": 3}, SCHEDULE),
    "no runs": ({"by_query.run_start": 0}, POINTER),
    "no tiles of runs": ({"by_query.run_tile": 0}, POINTER),
    "fewer than no patterns": ({"by_query.pattern_count": -1}, SCHEDULE),
    "no workspace": ({"workspace": 0}, WORKSPACE),
    "a workspace that is crooked": ({"workspace": 8}, WORKSPACE),
    "a workspace that is too small": ({"workspace_bytes": 64}, WORKSPACE),
}


@pytest.mark.parametrize("isa", ISAS)
def test_a_whole_struct_is_computed(isa: int):
    made = Struct(isa=isa)
    assert made.forward() == DONE
    assert torch.allclose(made.out, attend(made.q, made.k, made.v, scale=0.25, backend="reference"), atol=1e-5)
    assert made.backward() == DONE


@pytest.mark.parametrize("name", BAD)
def test_a_struct_that_makes_no_sense_gives_its_status_and_touches_nothing(name: str):
    changes, expected = BAD[name]
    for isa in ISAS:
        made = Struct(isa=isa)
        made.field |= changes
        if expected == WORKSPACE and changes.get("workspace") == 0:
            expected = POINTER
        assert (made.forward(), made.backward()) == (expected, expected)
        assert made.untouched


@pytest.mark.parametrize(
    "changes",
    [{"dout.data": 0}, {"dq.data": 0}, {"dk.data": 0}, {"dv.data": 0}, {"delta": 0}, {"ddistance": 64}, {"dbias": 64}],
    ids=str,
)
def test_a_gradient_that_lacks_a_tensor_gives_its_status_and_touches_nothing(changes: dict[str, int]):
    made = Struct()
    made.field |= changes
    assert made.backward() == POINTER
    assert made.untouched


BAD_LISTS: dict[str, dict[str, list[int]]] = {
    "a run beyond the keys": {"run_tile": [0, 1]},
    "a run before the keys": {"run_tile": [-1, 0]},
    "a run too long": {"run_length": [2, 3]},
    "a run of nothing": {"run_length": [0, 2]},
    "rows that end before they begin": {"run_start": [0, 2, 1]},
    "rows that begin late": {"run_start": [1, 1, 2]},
    "fewer than no runs": {"run_start": [0, -1, -1]},
    "a patch beyond the keys": {"patch_start": [0, 1, 1], "patch_tile": [2], "patch_pattern": [0]},
    "a patch before the keys": {"patch_start": [0, 1, 1], "patch_tile": [-1], "patch_pattern": [0]},
    "a pattern that is none": {
        "patch_start": [0, 1, 1],
        "patch_tile": [0],
        "patch_pattern": [1],
        "run_start": [0, 0, 0],
    },
    "a pattern below all": {"patch_start": [0, 1, 1], "patch_tile": [0], "patch_pattern": [-1], "run_start": [0, 0, 0]},
}


@pytest.mark.exhaustive(per="test")
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", BAD_LISTS)
def test_a_schedule_that_leaves_the_call_is_noticed(name: str, isa: int):
    made = Struct(isa=isa)
    for field, values in BAD_LISTS[name].items():
        made.field[f"by_query.{field}"] = made.array(field, values)
    pattern = made.array("patterns", [-1] * 64)
    made.field |= {"by_query.patterns": pattern, "by_query.pattern_count": 1}
    assert made.forward() == SCHEDULE


@pytest.mark.parametrize("isa", ISAS)
def test_a_call_whose_time_is_up_is_finished_by_calling_again(isa: int):
    whole, parted = Struct(isa=isa), Struct(isa=isa)
    parted.field["seconds"] = 1e-9
    for made in (whole, parted):
        made.field["dout.data"] = made.q.data_ptr()
    for function, names in (("regard_forward", native_calls.CALL), ("regard_backward", native_calls.GRADIENT)):
        assert whole.statuses(function, names) == [DONE]
        assert len(parted.statuses(function, names)) > 1 or isa == -1
    assert torch.equal(parted.out, whole.out)
    for name in ("dq", "dk", "dv", "delta", "lse"):
        assert torch.equal(getattr(parted, name), getattr(whole, name))


class InParts:
    """The call of `Struct` on codes: int4 keys and int8 values in pages of 32, 6 of which there are."""

    def __init__(self, isa: int = -1) -> None:
        g = torch.Generator().manual_seed(1)
        self.k, self.v = (
            torch.randint(0, 256, sizes, generator=g).to(torch.uint8) for sizes in ((6, 2, 2, 8, 16), (6, 2, 32, 16))
        )
        self.scales = [torch.rand(sizes, generator=g).bfloat16() for sizes in ((6, 2, 2, 16), (6, 2, 32, 1))]
        self.table, self.rows = torch.tensor([[5, 0, 1], [2, 3, 4]]), torch.zeros(6, 2, 32, 16)
        self.made = Struct(isa=isa)
        common = {"page": 32, "pages": 6, "table": self.table.data_ptr(), "table_pages": 3, "table_row": 3, "group": 16}
        self.key, self.value = (
            {
                **common, "form": form, "end": 90, "data": t.data_ptr(), "scale": s.data_ptr(), "tiled": tiled,
                **dict(zip(("data_page", "data_head", "data_step"), t.stride(), strict=False)),
                **dict(zip(("scale_page", "scale_head", "scale_step"), s.stride(), strict=False)),
            }
            for form, t, s, tiled in ((5, self.k, self.scales[0], 1), (4, self.v, self.scales[1], 0))
        )  # fmt: skip

    def forward(self) -> int:
        self.made.in_parts([self.key], [self.value])
        return self.made.forward()

    def array(self, values: list[int]) -> int:
        return self.made.array("part", values)


@pytest.mark.parametrize("isa", ISAS)
def test_a_whole_struct_in_parts_is_computed(isa: int):
    parts = InParts(isa)
    assert parts.forward() == DONE
    assert not parts.made.untouched
    assert parts.made.backward() == SIZE


BAD_PARTS: dict[str, tuple[dict[str, Any], int]] = {
    "a form that is none": ({"form": 7}, SIZE),
    "a form below all": ({"form": -1}, SIZE),
    "an end beyond the keys": ({"end": 91}, SIZE),
    "an end before the begin": ({"end": -1}, SIZE),
    "slots beyond the pages": ({"skip": 7}, SIZE),
    "fewer than no slots to skip": ({"skip": -1}, SIZE),
    "slots without end": ({"skip": HUGE}, SIZE),
    "no slots in a page": ({"page": 0}, SIZE),
    "pages that are no tiles": ({"page": 31}, SIZE),
    "fewer than no pages": ({"pages": -1}, SIZE),
    "fewer pages than the table names": ({"pages": 5}, SIZE),
    "a table that is too short": ({"table_pages": 2}, SIZE),
    "rows of a table that overlap": ({"table_row": 2}, SIZE),
    "a table that overflows": ({"table_row": HUGE}, SIZE),
    "one page for all tokens": ({"table": 0}, SIZE),
    "a stride that overflows": ({"data_page": HUGE}, SIZE),
    "a stride below 0": ({"data_head": -1}, SIZE),
    "strides of scales that overflow": ({"scale_page": HUGE}, SIZE),
    "a stride of scales below 0": ({"scale_step": -1}, SIZE),
    "a group of none": ({"group": 0}, SIZE),
    "a group that is no tile": ({"group": 8}, SIZE),
    "a group beyond the page": ({"group": 64}, SIZE),
    "no data": ({"data": 0}, POINTER),
    "no scales": ({"scale": 0}, POINTER),
    "plain tiles": ({"form": 1}, SIZE),
}


@pytest.mark.parametrize("name", BAD_PARTS)
def test_a_part_that_makes_no_sense_gives_its_status_and_touches_nothing(name: str):
    changes, expected = BAD_PARTS[name]
    for isa in ISAS:
        parts = InParts(isa)
        parts.key |= changes
        assert parts.forward() == expected
        assert parts.made.untouched


@pytest.mark.parametrize("pages", [[5, 0, 6, 2, 3, 4], [5, 0, 1, 2, -1, 4]], ids=str)
def test_a_table_that_names_no_page_is_noticed(pages: list[int]):
    parts = InParts()
    parts.value["table"] = parts.array(pages)
    assert parts.forward() == SIZE
    assert parts.made.untouched


@pytest.mark.parametrize(("ends", "expected"), [([90, 31], DONE), ([90, 91], SIZE), ([-1, 90], SIZE)], ids=str)
def test_ends_of_rows_are_looked_at(ends: list[int], expected: int):
    parts = InParts()
    parts.value["ends"] = parts.array(ends)
    assert parts.forward() == expected


def test_parts_that_end_before_they_begin_are_noticed():
    parts = InParts()
    parts.made.in_parts([{**parts.key, "end": 40}, {**parts.key, "end": 39}], [parts.value])
    assert parts.made.forward() == SIZE
    parts.made.field |= {"k_count": -1}
    assert parts.made.forward() == SIZE
    parts.made.field |= {"k_count": 2, "k_parts": 0}
    assert parts.made.forward() == POINTER


def test_what_the_library_does_not_take_is_an_error_that_says_so():
    entry = native_calls.Entry("regard_forward", native_calls.CALL)
    with pytest.raises(RegardError, match=r"a size makes no sense .status -1"):
        entry(entry.opened(entry.packed({"bytes": 8})))
    with pytest.raises(RegardError, match="report it"):
        entry.workspace(entry.opened(entry.packed({"threads": -1})))
