"""Casts as nodes: insert one, and give results back the dtypes that they had."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from fxkit.ir.session import EditSession
from fxkit.ir.types import TensorType, set_type, type_of
from fxkit.passes.decomposition.fake_runs import type_under, without_autocast


def insert_cast(
    edit: EditSession, node: fx.Node, dtype: torch.dtype, *, before: fx.Node
) -> fx.Node:
    """Insert a cast of a tensor whose type is known, and record its type.

    Args:
        edit: The session.
        node: The tensor.
        dtype: What to cast it to.
        before: The node to insert the cast before.
    """
    known = type_of(node)
    cast = edit.call(".to", node, dtype, before=before, name=f"{node.name}_cast")
    set_type(cast, type_under(cast, without_autocast()) or replace(known, dtype=dtype))
    return cast


def result_types(edit: EditSession) -> list[Any]:
    """Return the types of what the graph returns, for `cast_results_back`."""
    return [type_of(node) for node in edit.graph.output_node().all_input_nodes]


def cast_results_back(edit: EditSession, wanted: Sequence[Any]) -> None:
    """Return results in the dtypes that they had.

    Args:
        edit: The session.
        wanted: What `result_types` told before the results got other dtypes.
    """
    output = edit.graph.output_node()
    casts: dict[fx.Node, fx.Node] = {}
    for node, before in zip(output.all_input_nodes, wanted, strict=True):
        now = type_of(node)
        if not isinstance(now, TensorType) or not isinstance(before, TensorType):
            continue
        if now.dtype != before.dtype:
            with edit.on_behalf_of([node], edit.by):
                casts[node] = insert_cast(edit, node, before.dtype, before=output)
    if casts:
        edit.set_output(map_arg(output.args[0], lambda node: casts.get(node, node)))
