"""Starting the GPU kernels: sizes of blocks, strides, and how many programs run."""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from triton import JITFunction

from regard.gpu.call import Call, Inputs
from regard.gpu.forward import forward
from regard.gpu.starts import Start, Starts, form, kept
from regard.gpu.tables import by_query
from regard.gpu.tokens import descriptor, is_described
from regard.plan.schedule import Schedule

CACHE = 24 << 20
"""Bytes of keys and values that programs which run at the same time read: half the L2 cache of an H100."""

IS_INTERPRETED = not isinstance(cast(Any, forward), JITFunction)
"""Whether Triton's interpreter runs the kernels, on whichever device tensors are; decided when they are imported."""


LARGE_SOFTCAP = 1000
"""Above this an error of 2e-7 of tanh would be seen in outputs of half types."""


class Blocks(NamedTuple):
    """How a kernel is cut; PARTIAL tiles have smaller blocks, since their bits need registers, too."""

    rows: int  # of a program
    tokens: int  # that meet them at once, in FULL tiles
    patch: int  # and in PARTIAL ones, at most 64
    warps: int
    stages: int  # blocks of tokens in flight, in FULL tiles
    patch_stages: int = 1  # and in PARTIAL ones


INTERPRETED = Blocks(128, 64, 64, warps=1, stages=1)
"""The blocks of the interpreter, which takes its time for each operation and not for each element."""


LARGE_FLOAT32 = Blocks(16, 16, 16, warps=4, stages=1)
"""The blocks of float32 with heads of 256. With more rows, registers would spill 1,000 to 7,000 bytes instead of 180 to
650, and the shared memory of sm_89 would not hold them, for gradients not even that of sm_90."""


def forward_blocks(item: int, dim: int, extra: int, shared: int, *, dense: bool, described: bool = False) -> Blocks:
    """The blocks of the forward kernel, whose programs have rows of queries.

    Args:
        item: bytes of an element of q, k and v.
        dim: padded dimensions of a head.
        extra: bytes of biases per pair.
        shared: bytes of shared memory that a program may have.
        dense: whether a bias is a tensor: the addresses of its elements need registers.
        described: whether blocks of tokens are copied by descriptors (`tokens.py`), which leaves registers: these were
            chosen by their times on an H200, the others by what they compile to.
    """
    if item == 4:
        is_small = described and dim <= 64
        blocks = Blocks(128, 64, 64, warps=8, stages=2) if is_small else float32_blocks(dim, 32, described)
    elif dense and not (described and dim <= 128):
        blocks = Blocks(64, 32, 32, warps=8, stages=2)
    elif dim > 128:
        blocks = Blocks(64, 32, 32, warps=4 if described else 8, stages=2)
    elif described and extra:
        blocks = Blocks(64, 64, 64, warps=4, stages=2)
    elif described:
        blocks = Blocks(128, 64, 64, *((4, 4, 2) if dim <= 64 else (8, 3, 1)))
    else:
        blocks = Blocks(128, 128 if dim <= 64 else 64, 32, warps=8, stages=3)
    return fitting(blocks, dim * item, 2 * dim * item, extra, shared)


def queries_blocks(item: int, dim: int, extra: int, shared: int, *, dense: bool, described: bool = False) -> Blocks:
    """The blocks of the gradient of queries, whose programs have rows of queries; arguments as in `forward_blocks`."""
    if item == 4:
        blocks = float32_blocks(dim, 16, described)
    elif described and (extra or dim > 128):
        blocks = Blocks(64, 32, 32, warps=4, stages=2)
    elif dim > 128:
        blocks = Blocks(64, 16, 16, warps=8, stages=2)
    elif dense:
        blocks = Blocks(128, 16, 16, warps=8, stages=2)
    elif described and dim <= 64:
        blocks = Blocks(64, 64, 64, warps=4, stages=3, patch_stages=2)
    elif described:
        blocks = Blocks(128, 64, 64, warps=8, stages=3)
    else:
        blocks = Blocks(128, 64 if dim <= 64 else 32, 16, warps=8, stages=2)
    return fitting(blocks, 2 * dim * item, 2 * dim * item, extra, shared)


def keys_blocks(item: int, dim: int, extra: int, shared: int, *, dense: bool, described: bool = False) -> Blocks:
    """The blocks of the gradients of keys and values, whose programs have rows of keys."""
    if item == 4:
        blocks = float32_blocks(dim, 16, described)
    elif described and dim <= 64 and not extra:
        blocks = Blocks(64, 64, 64, warps=4, stages=3)
    elif described:
        blocks = Blocks(64, 32, 32, warps=4, stages=3, patch_stages=1 if dim > 128 else 2)
    else:
        rows, tokens = (64, 16) if dim > 128 else (128, 16) if extra else (128, 32)
        blocks = Blocks(rows, tokens, 16, warps=8, stages=2)
    return fitting(blocks, 2 * dim * item, 2 * dim * item, extra, shared)


def float32_blocks(dim: int, tokens: int, described: bool) -> Blocks:
    """The blocks for float32, whose products are three of TF32.

    With 64 rows, heads of 128 would spill 550 to 1,630 bytes instead of 40 to 210. Products of 32 rows are not those of
    a warp group (sm_90, sm_100), but by count the spilled bytes alone would take longer. 64 rows have four warps, one
    warp group: with eight, Triton (3.6, 3.7) gives the second one rows that are not there, and its products of float32
    read beyond shared memory.

    Args:
        dim: padded dimensions of a head.
        tokens: the tokens of a block with heads of at most 128, by address.
        described: as in `forward_blocks`.
    """
    if dim > 128:
        return LARGE_FLOAT32
    if described and dim <= 64:
        return Blocks(64, 64, 32, warps=4, stages=2)
    return Blocks(64 if dim <= 64 else 32, tokens, 16, warps=4, stages=2)


def fitting(blocks: Blocks, row: int, token: int, pair: int, shared: int) -> Blocks:
    """The blocks with so few stages that shared memory holds them; sizes are bytes of a row, a token and a pair."""
    stage = blocks.tokens * (token + blocks.rows * pair)
    stages = max(1, min(blocks.stages, (shared - blocks.rows * row) // stage))
    return blocks._replace(stages=stages, patch_stages=min(blocks.patch_stages, stages))


def blocks_of(of: Callable[..., Blocks], i: Inputs, *, is_line: bool) -> Blocks:
    """How a kernel is cut for these inputs; `of` is a function such as `forward_blocks`."""
    if i.q.device.type == "cpu":
        return INTERPRETED
    extra = 4 * (i.distance is not None and not is_line) + (0 if i.bias is None else i.bias.element_size())
    dim = padded(max(i.q.shape[3], i.v.shape[3]))
    described = is_described(i.q) and is_described(i.k) and is_described(i.v)
    shared = shared_memory(i.q.device)
    return of(i.q.element_size(), dim, extra, shared, dense=i.bias is not None, described=described)


def shared_memory(device: torch.device) -> int:
    """Bytes that a program may have on a GPU."""
    properties = _properties(device)
    return int(
        getattr(properties, "shared_memory_per_block_optin", 0) or properties.shared_memory_per_block
    )  # HIP: one


@cache
def _properties(device: torch.device) -> Any:
    return torch.cuda.get_device_properties(device)


def padded(dim: int) -> int:
    """The dimensions of a head as a block has them: a power of two, 16 or more."""
    return max(16, 1 << (dim - 1).bit_length())


def run(call: Call, i: Inputs, found: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """(out, lse) of a call.

    Args:
        found: those of another kernel, lse contiguous: rows in which something is not finite are computed in place.
    """
    s, (batch, heads, queries, _) = call.schedule, i.q.shape
    kv_heads, keys, v_dim = i.v.shape[1:]
    if found is None:
        out = empty_output(i.q, v_dim)
        lse = torch.empty(batch, heads, queries, dtype=torch.float32, device=i.q.device)
    else:
        out, lse = found
    q, scale = i.q, call.scale
    if scale <= 0 and call.softcap is None and i.distance is None and i.bias is None:
        q, scale = (-q, -scale) if scale < 0 else (q * 0, 1.0)
    blocks = blocks_of(forward_blocks, i, is_line=call.is_line)

    def make() -> Starts:
        return starts_of(
            forward, batch * heads * s.query_tiles * s.tile // blocks.rows, blocks, s, found is not None, i.q.device,
            (
                *(stride for t in (q, i.k, i.v, out) for stride in t.stride()[:3]),
                *steps_of_biases(i), *by_query(s, i.q.device),
                *(batch, heads, heads // kv_heads, queries, keys, section(i), scale, call.softcap or 0.0),
                *call.drops[2:],
            ),
            constants(call, i, blocks) | {"KEYS": blocks.tokens, "SINK": i.sink is not None},
        )  # fmt: skip

    starts = kept(
        s, ("forward", found is None, *call.form, *map(form, (q, i.k, i.v, i.sink, i.distance, i.bias, out))), make
    )
    starts.run(
        (q, i.k, i.v, out, lse, lse if i.sink is None else i.sink), biases_or(i, lse),
        descriptors(blocks, i.k, i.v), call.drops[:2],
    )  # fmt: skip
    return out.to(i.q.dtype), lse


def empty_output(q: Tensor, v_dim: int) -> Tensor:
    """The memory of an output [batch, heads, queries, v_dim], token by token if q is, else head by head.

    It has the type `computed_in(q)`, for torch to round.
    """
    batch, heads, queries, _ = q.shape
    by_token = q.stride(1) < q.stride(2) and queries > 1
    shape = (batch, queries, heads, v_dim) if by_token else (batch, heads, queries, v_dim)
    out = torch.empty(shape, dtype=computed_in(q), device=q.device)
    return out.transpose(1, 2) if by_token else out


def starts_of(
    kernel: Any, programs: int, blocks: Blocks, s: Schedule, is_there: bool, device: torch.device,
    rest: tuple[Any, ...], constants: dict[str, Any],
) -> Starts:  # fmt: skip
    """The starts of a kernel: the first, and again with care for what is not finite.

    Args:
        s: without PARTIAL tiles nothing is hidden where it could reach a row.
        is_there: whether another kernel has computed the results, so that only the second is started.
        rest, constants: the arguments behind those of `Starts.run`, and the constants besides those of blocks.
    """
    flagged, each = len(s.patch_tile) > 0 and not is_there, list[tuple[Start, bool]]()
    for careful in (False, True) if flagged else (is_there,):
        few = blocks._replace(stages=1, patch_stages=1) if careful else blocks
        more = {"STAGES": few.stages, "PATCH_STAGES": few.patch_stages, "CAREFUL": careful, "FLAGS": flagged}
        all_constants = constants | more | warps_and_stages(few, device)
        each.append((Start(kernel, programs, rest, all_constants, device), careful))
    return Starts(tuple(each), programs if flagged else 0)


def launch(kernel: Any, units: int, blocks: Blocks, device: torch.device, *arguments: Any, **constants: Any) -> None:
    """Run a kernel with a program for each unit, on the device and the stream of its tensors."""
    Start(kernel, units, arguments, constants | warps_and_stages(blocks, device), device)()


def descriptors(blocks: Blocks, *tensors: Tensor) -> list[Any]:
    """Those of blocks of tokens of these tensors, as the kernels take them."""
    return [descriptor(t, blocks.tokens, padded(t.shape[3])) for t in tensors]


def warps_and_stages(blocks: Blocks, device: torch.device) -> dict[str, int]:
    """How a kernel is compiled; the interpreter does not compile."""
    return {} if device.type == "cpu" else {"num_warps": blocks.warps, "num_stages": blocks.stages}


def constants(call: Call, i: Inputs, blocks: Blocks) -> dict[str, Any]:
    """What all kernels are compiled for."""
    dim, v_dim, maps = i.q.shape[3], i.v.shape[3], call.schedule.maps
    return {
        "MAPS_BATCH": maps[0] > 1, "MAPS_HEADS": maps[1] > 1, "TILE": call.schedule.tile,
        "ROWS": blocks.rows, "PATCH": blocks.patch, "STAGES": blocks.stages,
        "DIM": dim, "DIM_PADDED": padded(dim), "V_DIM": v_dim, "V_DIM_PADDED": padded(v_dim),
        "SOFTCAP": softcap_form(call.softcap, i.q), "DISTANCE": 0 if i.distance is None else 2 if call.is_line else 1,
        "BIAS": i.bias is not None,
        "DROPOUT": call.dropout > 0, "WIDE": is_wide(i.q), "PRECISION": precision(i.q),
    }  # fmt: skip


def softcap_form(softcap: float | None, q: Tensor) -> int:
    """How scores are capped, as `scores.capped` names it: exactly in float32, and with large caps as well."""
    return 0 if softcap is None else 2 if is_wide(q) or softcap > LARGE_SOFTCAP else 1


def computed_in(q: Tensor) -> torch.dtype:
    """The type of operands of products and of results in memory: that of q.

    The interpreter has no products of bfloat16, and truncates float32 to bfloat16, so there it is float32.
    """
    return torch.float32 if IS_INTERPRETED else q.dtype


def is_wide(q: Tensor) -> bool:
    """Whether products take float32 operands."""
    return computed_in(q) == torch.float32


def precision(q: Tensor) -> str:
    """How products of float32 are computed: by three of tensor cores where NVIDIA's have them, nearly as exact."""
    return "tf32x3" if q.dtype == torch.float32 and torch.version.hip is None else "ieee"


def biases(i: Inputs, nothing: Tensor) -> tuple[Any, ...]:
    """The addresses and strides of the biases; `nothing` where there is none."""
    distance = (nothing, 0) if i.distance is None else (i.distance, i.distance.stride(0))
    return *distance, *((nothing, 0, 0, 0, 0) if i.bias is None else placed(i.bias))


def biases_or(i: Inputs, nothing: Tensor) -> tuple[Tensor, Tensor]:
    """The biases by distance and by pair; `nothing` where there is none."""
    return nothing if i.distance is None else i.distance, nothing if i.bias is None else i.bias


def steps_of_biases(i: Inputs) -> tuple[int, ...]:
    """Their strides."""
    steps = (0, 0, 0, 0) if i.bias is None else placed(i.bias)[1:]
    return 0 if i.distance is None else i.distance.stride(0), *steps


def placed(t: Tensor) -> tuple[Tensor, int, int, int, int]:
    """A tensor of four axes and its strides, 0 along the axes that have one element."""
    batch, heads, rows, columns = (0 if size == 1 else stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return t, batch, heads, rows, columns


def section(i: Inputs) -> int:
    """How many (batch row, head) are computed together, so that their keys and values stay in the L2 cache."""
    kv_heads, keys = i.k.shape[1:3]
    nbytes = keys * (i.k.shape[3] + i.v.shape[3]) * i.k.element_size()
    group, pairs = i.q.shape[1] // kv_heads, i.q.shape[0] * i.q.shape[1]
    return min(pairs, max(1, CACHE // max(nbytes, 1)) * group)
