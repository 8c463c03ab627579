"""What Triton makes of the GPU kernels, for chips that need not be there: registers, spills, memory, instructions.

    ./bench gpu-kernels [--write]

Every kernel is compiled for each chip and type (`triton.compile` needs no GPU), and the machine code is read:
`cuobjdump --dump-resource-usage`, which comes with Triton, counts registers and bytes of the stack (spilled registers),
and the assembly shows whether products run on tensor cores and copies are asynchronous. For Hopper (sm_90) two faults
are looked for that a GPU showed: products that wait for each other, and warps whose rows are not there.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

PAGE = Path(__file__).parents[1] / "docs" / "performance" / "gpu-kernels.md"

CHIPS: dict[str, tuple[str, str | int, int, int]] = {
    "sm_80": ("cuda", 80, 32, 163 * 1024),
    "sm_89": ("cuda", 89, 32, 99 * 1024),
    "sm_90": ("cuda", 90, 32, 227 * 1024),
    "sm_100": ("cuda", 100, 32, 227 * 1024),
    "gfx942": ("hip", "gfx942", 64, 64 * 1024),
}
"""For each chip: the backend, the architecture and the threads of a warp as Triton names them, and the largest shared
memory of a program in bytes (CUDA C++ Programming Guide, table of technical specifications; CDNA 3 ISA guide)."""

PRODUCTS = {"sm_80": "mma.sync", "sm_89": "mma.sync", "sm_90": "wgmma.mma", "sm_100": "tcgen05.mma", "gfx942": "v_mfma"}
"""The instruction of the tensor cores that products should use."""

COPIES = {"gfx942": "global_load"}
"""The instruction that copies to shared memory while the program computes; cp.async elsewhere."""


WARPED = re.compile(r"nvidia_mma<\{versionMajor = 3, .*?warpsPerCTA = \[(\d+)")
"""The warps along the rows of a product of warp groups; each has 16 rows."""

SERIALIZED = re.compile(r"C75\d\d|wgmma.*serializ", re.IGNORECASE)
"""What ptxas says where it cannot keep products of warp groups apart from what reads their operands."""


class Variant(NamedTuple):
    """A kernel as it is compiled: its name, type, dimensions of a head, and what is beside q, k and v."""

    kernel: str
    dtype: str
    dim: int
    more: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join([self.kernel, self.dtype, str(self.dim), *self.more])


class Compiled(NamedTuple):
    """The resources and instructions of a compiled kernel."""

    registers: int
    stack: int  # bytes of a thread
    shared: int  # bytes of a program
    products: int  # instructions of tensor cores
    copies: int  # asynchronous ones
    rows: int  # of a block
    warped: int  # the most rows that the warps of a product of warp groups have, 0 without one
    serialized: bool  # whether ptxas makes products of warp groups wait for each other


def variants() -> list[Variant]:
    """Every kernel, for half types with heads of 64 and 128, for float32, and with everything that a call may have.

    "LINE" has the biases of ALiBi by slope and offset, "DISTANCE" by a vector. "CAREFUL" is the second start of a
    kernel, which computes what is not finite; "REPAIR" is that of what another kernel computed.
    """
    names = ["forward", "gradient_of_queries", "gradient_of_keys", "gradient_of_values"]
    plain = [Variant(name, "bf16", dim) for name in names for dim in (64, 128)]
    three = names[:3]
    extras = "SOFTCAP", "DISTANCE", "DROPOUT"
    return [v for v in plain if (v.kernel, v.dim) != ("gradient_of_values", 64)] + [
        Variant("forward", "bf16", 128, ("SINK", *extras)),
        Variant("gradient_of_queries", "bf16", 128, extras),
        Variant("gradient_of_keys", "bf16", 64, extras),
        Variant("forward", "bf16", 128, ("BIAS", "MAPS_BATCH", "MAPS_HEADS")),
        Variant("gradient_of_queries", "bf16", 128, ("BIAS", "DBIAS", "DDISTANCE", "DISTANCE")),
        Variant("gradient_of_keys", "bf16", 64, ("BIAS", "MAPS_BATCH", "MAPS_HEADS")),
        *(Variant(name, "fp32", dim) for name in names for dim in (64, 128, 256)),
        *(Variant(name, "bf16", dim, (more,)) for name in three for dim in (64, 128) for more in ("LINE", "SOFTCAP")),
        *(Variant(name, "bf16", 256) for name in names),
        *(Variant(name, "bf16", dim, ("CAREFUL",)) for name in three for dim in (64, 128)),
        Variant("gradient_of_values", "bf16", 128, ("CAREFUL",)),
        *(Variant(name, "bf16", 128, ("REPAIR",)) for name in three),
        *(Variant(name, "fp32", 128, ("CAREFUL",)) for name in three),
        Variant("prepare_rows", "bf16", 128),
        Variant("prepare_rows", "fp32", 256),
        Variant("far_rows", "bf16", 128, ("BIAS",)),
        *(Variant("far_rows", "fp32", dim, ("DISTANCE", "SOFTCAP")) for dim in (64, 128, 256)),
        Variant("sweep", "bf16", 128),
        *(Variant("sweep", "fp32", dim, ("SOFTCAP", "DISTANCE", "BIAS")) for dim in (64, 128, 256)),
        *(Variant("span", "bf16", 128, kind) for kind in ((), ("paged",), ("int8",), ("fp8",), ("int4",))),
        *(Variant("span", "bf16", 128, (kind, "whole")) for kind in ("int8", "fp8", "int4")),
        Variant("span", "bf16", 128, ("steps",)),
        Variant("span", "bf16", 128, ("careful",)),
        Variant("span", "fp32", 128, ("SOFTCAP", "DISTANCE", "BIAS", "MAPS_HEADS")),
        Variant("merge", "bf16", 128, ("SINK",)),
        *(Variant("span", "fp32", dim, ("many_rows",)) for dim in (128, 256)),
        *(Variant("span", "fp32", dim, kind) for dim in (512, 1024) for kind in ((), ("int8",))),
        *(Variant("span", "bf16", 1024, kind) for kind in ((), ("int8",), ("int4",))),
        Variant("span", "fp32", 512, ("latent",)),
        *(Variant("span", "bf16", 512, ("latent", *kind)) for kind in ((), ("paged",), ("int8",), ("fp8",), ("int4",))),
    ]


def compiled(variant: Variant, chip: str) -> Compiled:
    """Compile a variant for a chip.

    Raises:
        RuntimeError: Triton runs its interpreter, which compiles nothing.
    """
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise RuntimeError("TRITON_INTERPRET is set: unset it, as the interpreter compiles nothing.")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, blocks, constants = _cut(variant, chip)
    types = {name: _type(name, variant) for name in kernel.arg_names}
    for name in (name for name in types if name.endswith("_described")):
        if _is_described(chip):
            types[name] = f"tensordesc<{variant.dtype}[1,1,{blocks.tokens},{variant.dim}]>"
        else:
            constants[name] = None
    signature = {name: "constexpr" if name in constants else kind for name, kind in types.items()}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*") or name.endswith(("_batch", "_head", "_token", "_page", "_unit"))
    }
    backend, arch, warp, _ = CHIPS[chip]
    made: Any = triton.compile(
        ASTSource(kernel, signature, constants, aligned),
        target=GPUTarget(backend, arch, warp),
        options={"num_warps": blocks.warps, "num_stages": blocks.stages},
    )
    text = made.asm.get("ptx") or made.asm["amdgcn"]
    registers, stack = _usage(made)
    copies = text.count(COPIES.get(chip, "cp.async"))
    few_rows = blocks.rows < 64 and backend == "cuda"  # too few for those of a warp group
    products = text.count("mma.sync" if few_rows else PRODUCTS[chip])
    warped = 16 * max(map(int, WARPED.findall(made.asm["ttgir"])), default=0)
    serialized = chip == "sm_90" and "wgmma" in text and _is_serialized(text)
    return Compiled(registers, stack, made.metadata.shared, products, copies, blocks.rows, warped, serialized)


def _cut(variant: Variant, chip: str) -> tuple[Any, Any, dict[str, Any]]:
    """The kernel, its blocks, and the constants that it is compiled for."""
    from regard.gpu import launch
    from regard.gpu.far_rows import far_rows
    from regard.gpu.forward import forward
    from regard.gpu.gradient_of_keys import gradient_of_keys
    from regard.gpu.gradient_of_queries import gradient_of_queries
    from regard.gpu.gradients import PREPARED_ROWS, has_one_pass
    from regard.gpu.merge import merge
    from regard.gpu.rows import prepare_rows
    from regard.gpu.totals import far_blocks

    if variant.kernel == "span":
        return _decoding(variant, chip)
    if variant.kernel == "merge":
        sizes = {"V_DIM": variant.dim, "V_DIM_PADDED": variant.dim, "SINK": True}
        return merge, launch.Blocks(1, 1, 1, warps=4, stages=3), sizes
    if variant.kernel == "prepare_rows":
        sizes = {"ROWS": PREPARED_ROWS, "DIM": variant.dim, "DIM_PADDED": variant.dim}
        return prepare_rows, launch.Blocks(PREPARED_ROWS, 1, 1, warps=4, stages=3), sizes
    if variant.kernel == "sweep":
        return _sweep(variant, chip)
    item, dim = 4 if variant.dtype == "fp32" else 2, variant.dim
    kernels = {
        "forward": (forward, launch.forward_blocks),
        "gradient_of_queries": (gradient_of_queries, launch.queries_blocks),
        "gradient_of_keys": (gradient_of_keys, launch.keys_blocks),
        "gradient_of_values": (gradient_of_keys, launch.keys_blocks),
        "far_rows": (far_rows, lambda item, dim, *_, **__: far_blocks(item, dim)),
    }
    kernel, of = kernels[variant.kernel]
    dense = "BIAS" in variant.more
    extra = 4 * ("DISTANCE" in variant.more) + item * dense
    blocks = of(item, dim, extra, CHIPS[chip][3], dense=dense, described=_is_described(chip))
    both = has_one_pass(item, dim, described=_is_described(chip))
    flags = dict.fromkeys(("MAPS_BATCH", "MAPS_HEADS", "SOFTCAP", "DISTANCE", "BIAS", "SINK", "DROPOUT"), False)
    is_careful = "CAREFUL" in variant.more or "REPAIR" in variant.more
    if is_careful:
        blocks = blocks._replace(stages=1, patch_stages=1)
    constants: dict[str, Any] = {
        **flags, "CAREFUL": is_careful, "FLAGS": "REPAIR" not in variant.more,
        "DDISTANCE": "DISTANCE" in variant.more, "DBIAS": False, "TILE": 128,
        "ROWS": blocks.rows, "KEYS": blocks.tokens, "QUERIES": blocks.tokens, "PATCH": blocks.patch,
        "DIM": dim, "DIM_PADDED": dim, "V_DIM": dim, "V_DIM_PADDED": dim,
        "STAGES": blocks.stages, "PATCH_STAGES": blocks.patch_stages,
        "DK": both or variant.kernel == "gradient_of_keys", "DV": both or variant.kernel == "gradient_of_values",
        **_arithmetic(variant, chip),
        **dict.fromkeys(variant.more, True), **_forms(variant),
    }  # fmt: skip
    return kernel, blocks, {name: value for name, value in constants.items() if name in kernel.arg_names}


def _is_described(chip: str) -> bool:
    """Whether the chip copies blocks of tokens by descriptors."""
    from regard.gpu.tokens import OLDEST_CHIP

    backend, arch = CHIPS[chip][:2]
    return backend == "cuda" and int(arch) // 10 >= OLDEST_CHIP


def _arithmetic(variant: Variant, chip: str) -> dict[str, Any]:
    """How products of float32 are computed, as `regard.gpu.launch.precision` chooses."""
    wide = variant.dtype == "fp32"
    return {"WIDE": wide, "PRECISION": "tf32x3" if wide and CHIPS[chip][0] == "cuda" else "ieee"}


def _forms(variant: Variant) -> dict[str, int]:
    """How a bias by distance and a softcap are computed, where that is no flag."""
    line = {"DISTANCE": 2} if "LINE" in variant.more else {}
    return line | ({"SOFTCAP": 2 if variant.dtype == "fp32" else 1} if "SOFTCAP" in variant.more else {})


def _decoding(variant: Variant, chip: str) -> tuple[Any, Any, dict[str, Any]]:
    """The kernel of decoding under a mask: 4 query heads a key head (64 with "many_rows"), or the 128 of a latent.

    A latent has 64 rotated channels beside it.

    "whole" has no mask, "steps" has it in tensors of intervals and lengths, "careful" adds values one by one.
    """
    from regard.gpu.few_rows import SPAN, Tokens, span_blocks
    from regard.gpu.span import span

    kind = next((kind for kind in ("int8", "fp8", "int4") if kind in variant.more), "plain")
    dim, pages, latent, steps = variant.dim, *(name in variant.more for name in ("paged", "latent", "steps"))
    group, rest = (128, 64) if latent else (64 if "many_rows" in variant.more else 4, 0)
    item = 4 if variant.dtype == "fp32" else 2
    cut = span_blocks(item, Tokens(dim, dim, kind, latent, rest), group, CHIPS[chip][3])
    assert cut is not None
    blocks, chunk = cut
    careful = "careful" in variant.more
    constants = {
        "GROUP": group, "ROWS": blocks.rows, "KEYS": blocks.tokens, "SPAN": SPAN, "TILE": 128,
        "DIM": dim, "DIM_PADDED": dim, "V_DIM": dim, "V_DIM_PADDED": dim, "REST": rest, "REST_PADDED": rest,
        "IN_KEYS": latent, "K_KIND": kind, "V_KIND": kind, "K_TABLE": pages, "V_TABLE": pages, "K_PER_TOKEN": False,
        "RAGGED": steps, "MASKED": not (steps or "whole" in variant.more), "MAPS_BATCH": False, "MAPS_HEADS": False,
        "SOFTCAP": False, "DISTANCE": False, "BIAS": False, **_arithmetic(variant, chip),
        "FLAGS": kind == "plain" and not steps and not careful, "CAREFUL": careful,
        "CHUNK": chunk, "UNION": 2 * steps, "SHOWN": steps, "WORDS": blocks.warps == 1,
        "K_PAIRED": True, "V_PAIRED": True, "V_ALIGNED": 16, "V_TOKEN": dim // 2 if kind == "int4" else dim,
        "PTX": 0 if CHIPS[chip][0] == "hip" else 80 if chip == "sm_80" or latent else 89,
    }  # fmt: skip
    return span, blocks, constants | {name: True for name in variant.more if name in constants} | _forms(variant)


def _sweep(variant: Variant, chip: str) -> tuple[Any, Any, dict[str, Any]]:
    """The kernel of inspection, with a picture."""
    from regard.gpu.inspect import sweep_blocks
    from regard.gpu.sweep import sweep

    blocks = sweep_blocks(4 if variant.dtype == "fp32" else 2, variant.dim)
    constants = {
        "MAPS_BATCH": False, "MAPS_HEADS": False, "TILE": 128, "ROWS": blocks.rows, "KEYS": blocks.tokens,
        "DIM": variant.dim, "DIM_PADDED": variant.dim, "BINS": 24, "SOFTCAP": False, "DISTANCE": False, "BIAS": False,
        "PICTURE": True, **_arithmetic(variant, chip), **dict.fromkeys(variant.more, True), **_forms(variant),
    }  # fmt: skip
    return sweep, blocks, constants


FLOATS = {"lse", "parts", "sink", "distance", "total", "totals", "top", "tops", "rest", "delta", "ddistance", "dbias"}
LISTS = {"order", "run_start", "run_tile", "run_length", "patch_start", "patch_tile", "patch_pattern"}
TENSORS = {"q", "k", "v", "out", "bias", "dout", "dq", "dk", "dv"}


def _type(name: str, variant: Variant) -> str:
    """The type of a kernel's argument, as Triton writes it."""
    dtype = variant.dtype
    if variant.kernel == "span":
        codes = "u8" if {"int8", "fp8", "int4"} & set(variant.more) else dtype
        of = {"k": codes, "v": codes, "out": "fp32", "tiles": "i32", "flags": "i32"}
        of |= dict.fromkeys(("k_scale", "k_zero", "v_scale", "v_zero"), "bf16")
        of |= dict.fromkeys(("k_table", "v_table", "begins", "ends", "seen"), "i64") | {"shown": "u8"}
        if name in of:
            return f"*{of[name]}"
    if variant.kernel == "sweep":
        of = {"top_key": "i64", "columns": "fp64", "mean": "fp64", "largest": "i32"}
        of |= dict.fromkeys(("mass", "entropy", "squares", "top", "bins"), "fp32")
        if name in of:
            return f"*{of[name]}"
    if name in TENSORS:
        return f"*{dtype}"
    kinds = {"words": "*i64", "scale": "fp32", "softcap": "fp32", "keep_scale": "fp32"}
    return "*fp32" if name in FLOATS else "*i32" if name in LISTS or name == "flags" else kinds.get(name, "i32")


def _usage(made: Any) -> tuple[int, int]:
    """(registers, bytes of the stack) of a thread."""
    if "cubin" not in made.asm:
        text = made.asm["amdgcn"]
        count, spilled = (int(re.findall(rf"\.{name}: *(\d+)", text)[0]) for name in ("vgpr_count", "vgpr_spill_count"))
        return count, 4 * spilled
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(made.asm["cubin"])
        done = subprocess.run([tool, "--dump-resource-usage", file], capture_output=True, text=True, check=True)
    ((registers, stack),) = re.findall(r"REG:(\d+) STACK:(\d+)", done.stdout)
    return int(registers), int(stack)


def _is_serialized(ptx: str) -> bool:
    """Whether ptxas makes products of warp groups wait for each other."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ptx"
        file.write_text(ptx)
        command = [tool, "-arch=sm_90a", "-v", "-o", Path(folder) / "kernel.cubin", file]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return SERIALIZED.search(done.stdout + done.stderr) is not None


def _rows(chips: list[str]) -> Iterator[tuple[Variant, str, Compiled]]:
    for variant in variants():
        for chip in chips:
            yield variant, chip, compiled(variant, chip)


def main(arguments: list[str] | None = None) -> None:
    """Print the table, as JSON lines for tests, or write the page."""
    parser = argparse.ArgumentParser(prog="./bench gpu-kernels", description="What the GPU kernels compile to.")
    parser.add_argument("--chips", default=",".join(CHIPS), help="such as sm_90,gfx942 (default: all)")
    parser.add_argument("--json", action="store_true", help="one line of JSON for each kernel and chip")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(PAGE.parents[2])}")
    options = parser.parse_args(arguments)
    lines = list[str]()
    for variant, chip, found in _rows(options.chips.split(",")):
        if options.json:
            print(json.dumps({"variant": str(variant), "chip": chip, **found._asdict()}), flush=True)
            continue
        lines.append(
            f"| {variant.kernel} | {variant.dtype} | {variant.dim} | {', '.join(variant.more).lower()} | {chip} | "
            f"{found.registers} | {found.stack} | {found.shared / 1024:.0f} | {found.products} | {found.copies} |"
        )
        print(lines[-1], flush=True)
    if options.write:
        PAGE.write_text(_page(lines))


def _page(lines: list[str]) -> str:
    import triton

    return f"""# What the GPU kernels compile to

Compiled for five chips without any of them (Triton {triton.__version__}, `./bench gpu-kernels --write`). The stack is
where registers are spilled: 0 is the goal for heads of 64 and 128 in bf16. Shared memory is that of one program.
Strides are multiples of 16 elements, as those of most calls are. "line" are the biases of ALiBi by slope and offset;
"careful" and "repair" are the second starts of kernels, for what is not finite. The kernels for sm_90 were run and
timed on an H200; those for the other chips are compiled only.

| kernel | type | dim | with | chip | registers | stack, bytes | shared, KiB | tensor core products | async copies |
|---|---|--:|---|---|--:|--:|--:|--:|--:|
{chr(10).join(lines)}
"""


if __name__ == "__main__":
    main(sys.argv[1:])
