"""Keys and values that a graph joins become the past and present of `Attention`.

A model with a cache joins its past keys with the new ones: Concat, then `Attention`. The operator does both, and
returns the joined keys:

    K = Concat(past_k, new_k)             Y, K, V = Attention(Q, new_k, new_v, attn_mask, past_k, past_v)
    V = Concat(past_v, new_v)       ->
    Y = Attention(Q, K, V, ...)

The operator counts positions from the past: a causal mask in it means that query i is at position past + i. So where a
mask depends on positions, there must be as many queries as new keys.
"""

from importlib import import_module
from typing import Any

from regard.dispatch.onnx_form import AT_END

POSITIONAL = {"is_causal", "left_window_size", "right_window_size"}
"""The attributes of `Attention` that compare positions."""


def join_caches(model: Any) -> None:
    """Rewrite, in place, every `Attention` of an `onnx_ir.Model` whose keys and values were joined for it."""
    passes: Any = import_module("onnx_ir.passes.common")
    for node in list(model.graph):
        if node.op_type == "Attention" and node.domain == "" and (parts := _parts(node)) is not None:
            _join(model.graph, node, *parts)
    model.graph.sort()
    passes.RemoveUnusedNodesPass()(model)


def _parts(node: Any) -> tuple[Any, Any] | None:
    """The Concat nodes of the keys and of the values of an `Attention`, if the operator can do their work."""
    placed = node.metadata_props.get(AT_END)
    joins = [_join_of(node.inputs[i]) for i in (1, 2)]
    if None in joins or len(node.outputs) > 1 or (placed is None and _has(node, 6)):
        return None
    if not all(_is_read_elsewhere(value, node) for value in node.inputs[1:3]):
        return None
    if placed == "mask" or (placed is None and not POSITIONAL.isdisjoint(node.attributes)):
        return None
    if placed is not None and _tokens(node.inputs[0]) != _tokens(joins[0].inputs[1]):
        return None
    return joins[0], joins[1]


def _join(graph: Any, node: Any, keys: Any, values: Any) -> None:
    ir: Any = import_module("onnx_ir")
    placed, attributes = node.metadata_props.get(AT_END), dict(node.attributes)
    attn_mask = node.inputs[3] if _has(node, 3) and placed != "alone" else None
    if placed == "alone":
        attributes["is_causal"] = ir.AttrInt64("is_causal", 1)
    inputs = [node.inputs[0], keys.inputs[1], values.inputs[1], attn_mask, keys.inputs[0], values.inputs[0]]
    made = ir.Node("", "Attention", inputs, attributes.values(), num_outputs=3, version=node.version, name=node.name)
    old = [node.outputs[0], keys.outputs[0], values.outputs[0]]
    ir.convenience.replace_nodes_and_values(graph, node, [node, keys, values], [made], old, made.outputs)


def _is_read_elsewhere(value: Any, node: Any) -> bool:
    """Whether more than this `Attention` reads it: without a present, onnxruntime refuses a past (23 and 24)."""
    return value.is_graph_output() or any(reader is not node for reader, _ in value.uses())


def _join_of(value: Any) -> Any:
    """The Concat of two values along the tokens that gives a value; None if another node does."""
    node = value.producer()
    if node is None or node.op_type != "Concat" or len(node.inputs) != 2:
        return None
    return node if node.attributes["axis"].as_int() in (2, -2) else None


def _has(node: Any, index: int) -> bool:
    return len(node.inputs) > index and node.inputs[index] is not None


def _tokens(value: Any) -> Any:
    """The size of a value's tokens, a number or a name; an object of its own where it is unknown."""
    size = None if value.shape is None else value.shape[2]
    known = getattr(size, "value", size)
    return object() if known is None else known
