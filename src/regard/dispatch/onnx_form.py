"""A call in operators that ONNX has, while `torch.onnx.export(..., dynamo=True)` reads a model.

`regard::attend` is unknown to ONNX. While a model is exported, a call is traced as one of three forms, the first that
has the same meaning:

- the operator `Attention` of the standard, if the version of the operator set is known (`exporting_to`): 23 has masks,
  biases, softcap and grouped heads, 24 `nonpad_kv_seqlen`, 25 windows;
- torch's `scaled_dot_product_attention` if it is not known: the exporter writes `Attention` from version 23 on, and
  primitive operators before;
- primitive operators: for a sink, the log-sum-exp, a score that is no dot
  product, and a softcap where the version is not known.

Masks and biases that an attribute cannot express are computed in the graph from positions, by the `keep` and `value`
that define them, so token counts may be dynamic.

`Attention` aligns causal masks and windows by the number of keys in front of the queries: the length of `past_key`,
else `nonpad_kv_seqlen` - queries, else 0 (https://onnx.ai/onnx/operators/onnx__Attention.html). So a call whose last
query is at its last key gets `nonpad_kv_seqlen` with the number of its keys.
"""

import sys
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from regard.describe.bias import Bias, TensorBias
from regard.describe.mask import And, CallSizes, Mask, kept_pairs
from regard.describe.mask_by_rule import Causal, Dilated, KeyLengths, Window
from regard.describe.mask_by_table import Documents, TensorMask
from regard.describe.score import Dot, Score, compare_pairs
from regard.describe.spec import bound_to
from regard.errors import RefusalError
from regard.plan.request import Request
from regard.state import State
from regard.wide import wide_of

_opset: ContextVar[int | None] = ContextVar("opset", default=None)

ATTENTION, LENGTHS, WINDOWS = 23, 24, 25
"""The first versions of the operator set with `Attention`, with its lengths, and with its windows."""

AT_END = "regard.at_end"
"""A note on an `Attention` whose last query is at its last key, so that keys joined from a past and new ones may become
`past_key` and `K`: "lengths" where `nonpad_kv_seqlen` is all keys, "alone" where the causal mask is all of `attn_mask`,
"mask" where `attn_mask` has it with others."""


@contextmanager
def exporting_to(opset: int) -> Generator[None]:
    """Inside, calls are traced for this version of the operator set."""
    token = _opset.set(opset)
    try:
        yield
    finally:
        _opset.reset(token)


def is_exporting_to_onnx() -> bool:
    """Whether torch is reading a model for ONNX."""
    module = sys.modules.get("torch.onnx")
    return module is not None and module.is_in_onnx_export()


@dataclass(frozen=True)
class _Call:
    """A call with sizes that may be symbolic, and the parts of its mask."""

    q: Tensor
    k: Tensor
    v: Tensor
    masks: tuple[Mask, ...]  # a pair is kept where all of them keep it; bound to the sizes
    bias: Bias | None
    scale: float
    softcap: float | None
    offset: Any  # int, SymInt or Tensor
    sizes: CallSizes  # its offset is an int or SymInt, that of the end where `offset` is a tensor

    def positions(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Batch rows, heads, positions of queries and of keys, which broadcast to [batch, heads, queries, keys]."""
        b, h, i, j = (torch.arange(size, device=self.q.device) for size in self.sizes[:4])
        b, h, i, offset = b[:, None, None, None], h[:, None, None], i[:, None], self.offset
        per_row = isinstance(offset, Tensor) and offset.ndim == 1 and offset.shape[0] != 1
        return b, h, i + (offset[:, None, None, None] if per_row else offset), j


def in_onnx(request: Request) -> State:
    """The state of a call whose arguments were checked; its `lse` is zeros unless the request wants it.

    Raises:
        RefusalError: a call with dropout.
    """
    if request.dropout:
        raise RefusalError(
            f"a call with dropout={request.dropout} cannot be exported to ONNX: call model.eval() before the export, "
            "so that modules pass no dropout."
        )
    score = request.score or Dot()
    scale = score.default_scale(request.q.shape[3]) if request.scale is None else request.scale
    q, k, left = score.bind(request.q.shape[1], request.k.shape[1]).prepare(request.q, request.k)
    left = None if type(left) is Dot else left
    if left is None and scale <= 0:  # ONNX multiplies q and k by the root of a scale
        q, scale = (-q, -scale) if scale < 0 else (q * 0, 1.0)
    opset = _opset.get()
    call = _call(request._replace(q=q, k=k, scale=scale))
    if left is not None or request.sink is not None or request.lse or (request.softcap and opset is None):
        return _by_primitives(call, left, request.sink)
    out = _by_torch(call) if opset is None or opset < ATTENTION else _by_operator(call, opset)
    return State(out, torch.zeros(q.shape[:3], device=q.device))


def _call(request: Request) -> _Call:
    q, k, v, mask, bias, _, scale, softcap, *_ = request
    (batch, heads, queries), keys = q.shape[:3], k.shape[2]
    offset = keys - queries if request.offset is None else request.offset
    bound_at = keys - queries if isinstance(offset, Tensor) else offset  # `bind` compares ints
    sizes = CallSizes(batch, heads, queries, keys, bound_at)
    bound = () if mask is None else tuple(_conjuncts(bound_to(mask, sizes)))
    return _Call(q, k, v, bound, None if bias is None else bound_to(bias, sizes), scale or 0.0, softcap, offset, sizes)


def _conjuncts(mask: Mask) -> Iterable[Mask]:
    return [part for side in (mask.a, mask.b) for part in _conjuncts(side)] if type(mask) is And else [mask]


def _by_torch(call: _Call) -> Tensor:
    """The output by torch's own function, of which the exporter knows forms for every version."""
    causal = call.bias is None and len(call.masks) == 1 and type(call.masks[0]) is Causal and _at_start(call)
    attn_mask = None if causal else _attn_mask(call)
    out = torch.nn.functional.scaled_dot_product_attention(
        call.q, call.k, call.v, attn_mask, is_causal=causal, scale=call.scale,
        enable_gqa=call.q.shape[1] != call.k.shape[1],
    )  # fmt: skip
    if attn_mask is None or _sees_itself(call):
        return out
    sees = attn_mask if attn_mask.dtype == torch.bool else attn_mask > -torch.inf
    return torch.where(sees.any(dim=-1, keepdim=True), out, 0.0)  # the exporter's form gives such a row the mean of v


def _by_operator(call: _Call, opset: int) -> Tensor:
    """The output by the operator `Attention`."""
    placed = [mask for mask in call.masks if _is_placed(mask, opset)]
    others = [mask for mask in call.masks if not _is_placed(mask, opset)]
    aligned, note, lengths = bool(placed) and _at_start(call), {}, None
    if placed and not aligned and _at_end(call):
        note = {AT_END: "mask" if others or call.bias is not None else "alone"}
        if opset >= LENGTHS:
            aligned, note = True, {AT_END: "lengths"}
            lengths = torch.full((call.sizes.batch,), call.sizes.keys, device=call.q.device, dtype=torch.int64)
    own = [] if placed or opset < LENGTHS else [mask for mask in others if type(mask) is KeyLengths][:1]
    if own:
        others = [mask for mask in others if mask is not own[0]]
        lengths = own[0].lengths.to(call.q.device, torch.int64).clamp(max=call.sizes.keys)
    attributes: dict[str, Any] = {"scale": float(call.scale)}
    if call.softcap is not None:
        attributes["softcap"] = float(call.softcap)
    if aligned:
        attributes |= _attributes(placed)
    attn_mask = _attn_mask(replace(call, masks=tuple(others if aligned or own else call.masks)))
    inputs = [call.q, call.k, call.v, attn_mask, *([] if lengths is None else [None, None, lengths])]
    while inputs[-1] is None:
        inputs.pop()
    (out,) = torch.onnx.ops.symbolic_multi_out(
        "Attention", inputs, attributes, dtypes=(call.q.dtype,), shapes=((*call.q.shape[:3], call.v.shape[3]),),
        version=min(opset, WINDOWS), metadata_props=note,
    )  # fmt: skip
    return out


def _is_placed(mask: Mask, opset: int) -> bool:
    """Whether attributes of the operator say this mask, which is relative to the position of the query.

    An attribute is a constant, so a window of a dynamic size is no attribute.
    """
    if type(mask) is Window:
        return opset >= WINDOWS and not any(isinstance(edge, torch.SymInt) for edge in (mask.left, mask.right))
    return type(mask) is Causal


def _attributes(masks: list[Mask]) -> dict[str, int]:
    """The attributes that say these masks. `Window` counts the query itself, ONNX the other keys."""
    windows = [mask for mask in masks if type(mask) is Window]
    left = [mask.left - 1 for mask in windows if mask.left is not None]
    right = [mask.right - 1 for mask in windows if mask.right is not None]
    return (
        ({"is_causal": 1} if len(windows) < len(masks) else {})
        | ({"left_window_size": min(left)} if left else {})
        | ({"right_window_size": min(right)} if right else {})
    )


def _is_known(condition: Any) -> bool:
    """Whether a condition on sizes holds whatever the dynamic sizes are."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # loads sympy

    return statically_known_true(condition)


def _at_start(call: _Call) -> bool:
    """Whether the first query is known to be at position 0."""
    return not isinstance(call.offset, Tensor) and _is_known(call.offset == 0)


def _at_end(call: _Call) -> bool:
    """Whether the last query is known to be at the last key."""
    end = call.sizes.keys - call.sizes.queries
    return not isinstance(call.offset, Tensor) and _is_known(call.offset == end)


def _sees_itself(call: _Call) -> bool:
    """Whether every query is known to be at the position of a key, and to see that key."""
    inside = not isinstance(call.offset, Tensor) and (
        _is_known(call.offset >= 0) and _is_known(call.sizes.positions <= call.sizes.keys)
    )
    finite = call.bias is None or all(term.per_distance() for term in call.bias.terms())
    return inside and finite and all(type(mask) in (Causal, Window, Documents, Dilated) for mask in call.masks)


def _attn_mask(call: _Call) -> Tensor | None:
    """What masks and bias say of each pair: bools where there is no bias, else what is added; None for nothing."""
    at = call.positions()
    kept: Tensor | None = None
    for mask in call.masks:
        keep = _rows(mask, mask.mask, call) if type(mask) is TensorMask else kept_pairs(mask, *at)
        kept = keep if kept is None else kept & keep
    if call.bias is None:
        return None if kept is None else _whole_rows(kept, call)
    wide = wide_of(call.q.dtype)
    added = sum(
        (_rows(term, term.tensor, call) if type(term) is TensorBias else term.value(*at)).to(wide)
        for term in call.bias.terms()
    )
    assert isinstance(added, Tensor)
    added = added if kept is None else torch.where(kept, added, -torch.inf)
    return _whole_rows(added.to(call.q.dtype), call)


def _whole_rows(pairs: Tensor, call: _Call) -> Tensor:
    """Values of pairs with every query and every key: onnxruntime does not broadcast these two axes."""
    return pairs.expand(*pairs.shape[:-2], call.sizes.queries, call.sizes.keys)


def _rows(spec: TensorMask | TensorBias, table: Tensor, call: _Call) -> Tensor:
    """The rows of a table for the queries of a call, by whose offset the table is placed; of 2 axes or more."""
    table = table[(None,) * max(0, 2 - table.ndim)]
    if spec.offset is call.sizes.offset or table.shape[-2] == 1:
        return table
    return table.narrow(-2, call.offset - spec.offset, call.sizes.queries)


def _by_primitives(call: _Call, score: Score | None, sink: Tensor | None) -> State:
    """The state by the definition (`backend/definition.py`), in float32 or float64."""
    wide = wide_of(call.q.dtype)
    kv_heads, group = call.k.shape[1], call.q.shape[1] // call.k.shape[1]
    q, k = call.q.to(wide).unflatten(1, (kv_heads, group)), call.k.to(wide)[:, :, None]
    s = (q @ k.mT if score is None else compare_pairs(score, q, k)).flatten(1, 2) * call.scale
    if call.softcap is not None:
        cap = float(call.softcap)
        s = cap * torch.tanh(s / cap)
    pairs = _attn_mask(replace(call, q=call.q.to(wide)))
    if pairs is not None:
        s = s.masked_fill(~pairs, -torch.inf) if pairs.dtype == torch.bool else s + pairs
    sees = (s > -torch.inf).any(dim=3, keepdim=True)
    s = torch.where(sees, s, 0.0)
    column = [] if sink is None else [sink.to(wide)[:, None, None].expand(*s.shape[:3], 1)]
    w = torch.softmax(torch.cat([s, *column], dim=3), dim=3)[..., : call.sizes.keys]
    out = torch.where(sees, w, 0.0).unflatten(1, (kv_heads, group)) @ call.v.to(wide)[:, :, None]
    lse = torch.logsumexp(s, dim=3).masked_fill(~sees[..., 0], -torch.inf)
    return State(out.flatten(1, 2).to(call.q.dtype), lse)
