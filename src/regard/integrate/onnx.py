"""regard and ONNX: models that call regard as ONNX files, and the operator `Attention` computed by regard.

`torch.onnx.export(model, args, dynamo=True)` takes models that call regard as it is. `export` writes the same model
with as much as the standard allows in the operator `Attention`: softcap, lengths, windows, caches.

Two ways lead from a call to an ONNX node, both in `dispatch/onnx_form.py`: the call itself while torch reads a model
for ONNX, and `decompositions` for a model that `torch.export.export` has read before.
"""

from collections.abc import Callable
from importlib.util import find_spec
from os import PathLike
from typing import Any, NoReturn

import torch
from torch import Tensor

from regard.dispatch.onnx_form import exporting_to
from regard.dispatch.operator import attend_in_onnx
from regard.errors import ProblemError, RefusalError
from regard.integrate.onnx_cache import join_caches
from regard.integrate.onnx_operator import attention

__all__ = ["attention", "decompositions", "export"]

NEWEST = 25
"""The newest version of the operator set whose `Attention` was read and tried."""


def decompositions() -> dict[Any, Callable[..., tuple[Tensor, Tensor]]]:
    """Decompositions of regard's operator for ONNX, for `program.run_decompositions` of an exported program.

    `torch.onnx.export(program.run_decompositions(decompositions()))` then knows every operator of the program.
    """
    return {torch.ops.regard.attend.default: attend_in_onnx}


def export(
    model: torch.nn.Module | torch.export.ExportedProgram,
    args: tuple[Any, ...] = (),
    f: str | PathLike[str] | None = None,
    *,
    kwargs: dict[str, Any] | None = None,
    opset_version: int = NEWEST,
    dynamic_shapes: dict[str, Any] | tuple[Any, ...] | list[Any] | None = None,
    external_data: bool = True,
    **options: Any,
) -> Any:
    """`torch.onnx.export(..., dynamo=True)` of a model that calls regard, with the standard operator `Attention`.

    In the operator: scale, causal masks, `KeyLengths` (from 24), `Window` (from 25), every other mask and bias as an
    `attn_mask` that the graph computes from positions, GQA, softcap, and `past_key`, `past_value`, `present_key` and
    `present_value` where the model joins keys and values by `torch.cat`. A sink, `attend_state` and scores that are
    no dot product become primitive operators. `backend=` has no meaning in a file and is ignored.

    Args:
        model: a module, or what `torch.export.export` returned.
        args, kwargs: example inputs; not needed for an exported program.
        f: a path to write to; None: only return the program.
        opset_version: 23, 24 or 25. onnxruntime 1.32 computes all three; older versions of it take 23.
        dynamic_shapes: as in `torch.onnx.export`. A size of 1 in an example is always constant.
        external_data: write weights to a file beside `f`.
        options: more options of `torch.onnx.export`, such as `input_names`.

    Returns:
        `torch.onnx.ONNXProgram`.

    Raises:
        ProblemError: another version of the operator set; `torch.onnx.export(..., dynamo=True)` takes versions from 18.
        RefusalError: a call with dropout, which `model.eval()` turns off; onnx or onnxscript is not installed.

    ```
    import torch
    from regard import MultiHeadAttention, Causal
    from regard.integrate import onnx

    attention = MultiHeadAttention(64, heads=4, mask=Causal()).eval()
    onnx.export(attention, (torch.randn(1, 10, 64),), "attention.onnx", dynamic_shapes=({1: "tokens"},))
    ```

    Sources: https://onnx.ai/onnx/operators/onnx__Attention.html.
    """
    if not 23 <= opset_version <= NEWEST:
        raise ProblemError(
            f"opset_version is {opset_version}: expected 23, 24 or 25, which have the operator Attention. For older "
            "versions, torch.onnx.export(model, args, dynamo=True) writes primitive operators."
        )
    if missing := [name for name in ("onnx", "onnxscript") if find_spec(name) is None]:
        raise RefusalError(f"torch exports with {' and '.join(missing)}, not installed: pip install 'regard[onnx]'.")
    table = {torch.ops.regard.attend.default: _unread} | (options.pop("custom_translation_table", None) or {})
    with exporting_to(opset_version):
        if isinstance(model, torch.export.ExportedProgram):
            model = model.run_decompositions(decompositions())
        program = torch.onnx.export(
            model, args, None, kwargs=kwargs, opset_version=opset_version, dynamic_shapes=dynamic_shapes, dynamo=True,
            custom_translation_table=table, **options,
        )  # fmt: skip
    assert program is not None
    join_caches(program.model)
    if f is not None:
        program.save(f, external_data=external_data)
    return program


def _unread(*arguments: Any) -> NoReturn:
    """What the exporter calls for a call of regard that it read by compiling the model, its last resort."""
    raise RefusalError(
        "torch could not read the model without compiling it, and a compiled call of regard has no form in ONNX. "
        "torch.export.export(model, args, dynamic_shapes=...) shows the reason: a size that cannot be dynamic, or code "
        "that depends on data; a call with dropout needs model.eval() before the export."
    )
