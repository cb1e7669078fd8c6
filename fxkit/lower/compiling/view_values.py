"""Views that kernels read through their own addressing, so that none is materialised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fxkit.ir.types import TensorType, type_of
from fxkit.lower.fusion.view_map import is_alias
from fxkit.torch_adapters.tensors import base_of_view


def views_for_kernels(
    graph: fx.Graph, is_kernel: Callable[[fx.Node], bool]
) -> dict[fx.Node, fx.Node]:
    """Return the views that only kernels read, each with the node whose memory it begins at.

    A kernel was made for the strides of the view; all it needs of it is where it begins.

    Args:
        graph: A graph whose nodes have their types.
        is_kernel: Tells whether a node calls a kernel.
    """
    found: dict[fx.Node, fx.Node] = {}
    for node in reversed(graph.nodes):
        if node.users and all(user in found or is_kernel(user) for user in node.users):
            source = _source(node)
            if source is not None:
                found[node] = source
    return {node: _end(node, found) for node in found}


def _end(node: fx.Node, sources: dict[fx.Node, fx.Node]) -> fx.Node:
    while node in sources:
        node = sources[node]
    return node


def _source(node: fx.Node) -> fx.Node | None:
    """Return what a node is a view of that begins where it does; None where it may be none."""
    if node.op not in ("call_function", "call_method") or not is_alias(node):
        return None
    (source,) = node.all_input_nodes
    known, result = type_of(source), type_of(node)
    if source.op == "get_attr" or not _is_strided(known) or not _is_strided(result):
        return None
    base = torch.empty_strided(known.shape, known.stride, dtype=known.dtype, device="meta")
    try:
        view = _applied(node, source, base)
    except NotImplementedError:  # moves to a device, on which it is already
        return None
    if not isinstance(view, torch.Tensor) or (view is not base and base_of_view(view) is not base):
        return None
    is_same = (view.shape, view.stride(), view.dtype) == (result.shape, result.stride, result.dtype)
    return source if is_same and view.storage_offset() == 0 else None


def _is_strided(known: Any) -> bool:
    return isinstance(known, TensorType) and not known.is_symbolic and known.stride is not None


def _applied(node: fx.Node, source: fx.Node, base: torch.Tensor) -> Any:
    """Return what a node makes of a tensor without memory."""

    def given(operand: fx.Node) -> Any:
        return base if operand is source else operand

    args, kwargs = fx.map_arg((node.args, node.kwargs), given)
    with torch.no_grad():
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        return node.target(*args, **kwargs)  # type: ignore[operator]
