"""Put the operators of a recording into a graph."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from fxkit.analysis.effects import effects_of
from fxkit.ir.session import EditSession
from fxkit.ir.types import TensorType, requires_grad, set_type, type_of
from fxkit.passes.decomposition.recording import (
    OperatorRecording,
    RecordedConstant,
    RecordedValue,
)
from fxkit.passes.decomposition.size_nodes import SizeNodes
from fxkit.torch_adapters import pytree
from fxkit.torch_adapters.fx_nodes import order_key


def replay(
    edit: EditSession,
    recording: OperatorRecording,
    operands: Sequence[fx.Node],
    before: fx.Node,
) -> Any:
    """Insert a recording's operators, and return its result as nodes and constants.

    Operators without effect whose result nobody takes are left out. Sizes that are expressions are
    computed by nodes.

    Args:
        edit: The session.
        recording: What to insert.
        operands: A node for each operand of the recording.
        before: Where to insert.

    Raises:
        Unrecordable: When nodes can't compute a size.
    """
    made: list[fx.Node] = []
    fields: dict[RecordedValue, fx.Node] = {}
    follows = any(requires_grad(operand) for operand in operands)

    def node_of(value: Any) -> Any:
        if isinstance(value, RecordedConstant):
            return edit.add_attribute("_constant", value.tensor.detach().clone(), before=before)
        if value.step is None:
            return operands[value.index]
        if value.index is None:
            return made[value.step]
        if value not in fields:
            parent = made[value.step]
            fields[value] = edit.call(operator.getitem, parent, value.index, before=before)
            set_type(fields[value], type_of(parent)[value.index])
        return fields[value]

    sizes = SizeNodes(edit, operands, before)

    def nodes_in(value: Any) -> Any:
        return sizes.in_place(
            pytree.tree_map_only((RecordedValue, RecordedConstant), node_of, value)
        )

    sizes.check([(step.args, step.kwargs) for step in recording.steps])
    for step in recording.steps:
        node = edit.call(
            step.overload, *nodes_in(step.args), before=before, **nodes_in(step.kwargs)
        )
        set_type(node, _followed(step.result_type) if follows else step.result_type)
        made.append(node)
    result = nodes_in(recording.result)
    _drop_unused(edit, [*made, *fields.values()], result)
    return result


def _drop_unused(edit: EditSession, made: list[fx.Node], result: Any) -> None:
    kept = {leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, fx.Node)}
    for node in sorted(made, key=order_key, reverse=True):
        if not node.users and node not in kept and effects_of(node).is_pure:
            edit.erase(node)


def _followed(known: Any) -> Any:
    """Return a type as it is where autograd follows what it is made from."""

    def follow(leaf: Any) -> Any:
        is_tensor = isinstance(leaf, TensorType)
        differentiable = is_tensor and (leaf.dtype.is_floating_point or leaf.dtype.is_complex)
        return replace(leaf, requires_grad=True) if differentiable else leaf

    return pytree.tree_map(follow, known, is_leaf=lambda leaf: isinstance(leaf, TensorType))
