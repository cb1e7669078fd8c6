"""Which activations share a scale: those that hold the same values, moved or joined."""

from __future__ import annotations

import operator

from torch import fx

from fxkit.ir.op import Call, resolve
from fxkit.ir.types import TensorType, type_of

_MOVES = frozenset(
    f"aten.{name}"
    for name in (
        "view", "reshape", "flatten", "unflatten", "transpose", "permute", "t", "movedim",
        "squeeze", "unsqueeze", "expand", "contiguous", "clone", "dropout", "select", "slice",
        "narrow", "chunk", "split", "unbind", "flip", "roll", "index_select", "index", "gather",
        "repeat", "repeat_interleave", "tile", "detach", "alias",
        "max_pool1d", "max_pool2d", "max_pool3d", "adaptive_max_pool2d",
    )
)  # fmt: skip
_JOINS = frozenset(("aten.cat", "aten.stack", "aten.hstack", "aten.vstack"))
_WRITES = {
    "aten.index_copy": ("self", "source"),
    "aten.index_put": ("self", "values"),
    "aten.masked_scatter": ("self", "source"),
    "aten.scatter": ("self", "src"),
    "aten.select_scatter": ("self", "src"),
    "aten.slice_scatter": ("self", "src"),
    "aten.where": ("self", "other"),
}
"""Operators whose result has some values of one operand in places of another's, and which."""


def origins(gm: fx.GraphModule) -> dict[str, str]:
    """Return for each node the first one of those that hold its values, moved or joined.

    Views, copies, parts and maximum pooling move values, `cat` and `stack` join them, and so do
    writes into a part, such as `index_copy` and `slice_scatter`. What computes new values, as an
    addition does, begins a group of its own. Cost: nearly linear.
    """
    first: dict[str, str] = {}

    def find(name: str) -> str:
        while first[name] != name:
            first[name] = first[first[name]]
            name = first[name]
        return name

    for node in gm.graph.nodes:
        first[node.name] = node.name
        for operand in carried(node):
            ours, theirs = find(node.name), find(operand.name)
            first[ours] = theirs
    return {name: find(name) for name in first}


def carried(node: fx.Node) -> list[fx.Node]:
    """Return the operands whose values a node holds; none where it computes new ones."""
    if node.target is operator.getitem:
        (source, *_) = node.args
        if not isinstance(source, fx.Node):
            return []
        is_part = isinstance(type_of(source), TensorType) or bool(carried(source))
        return [source] if is_part else []
    call = resolve(node)
    if call is None:
        return []
    if call.name in _JOINS:
        tensors = call.arguments.get("tensors")
        parts = tensors if isinstance(tensors, (list, tuple)) else ()
        return [one for one in parts if isinstance(one, fx.Node)]
    if call.name in _WRITES:
        return _written(call, _WRITES[call.name])
    if call.name not in _MOVES:
        return []
    return [one for one in call.arguments.values() if isinstance(one, fx.Node)][:1]


def _written(call: Call, names: tuple[str, str]) -> list[fx.Node]:
    """Return the tensors of a write; none where it writes a number, or adds to what was there."""
    computes = call.arguments.get("accumulate") or call.arguments.get("reduce")
    operands = [call.arguments.get(name) for name in names]
    tensors = [one for one in operands if isinstance(one, fx.Node)]
    return [] if computes or len(tensors) < len(names) else tensors


def makers(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that compute what a node holds: where sharing stops; in graph order."""
    found: dict[fx.Node, None] = {}
    seen: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        one = waiting.pop()
        if one in seen:
            continue
        seen.add(one)
        operands = carried(one)
        if not operands:
            found[one] = None
        waiting += operands
    return sorted(found)
