"""Fake tensors in `node.meta["val"]`, where passes written for torch.export look for them."""

from __future__ import annotations

from typing import Any

from torch import fx

from fxkit.analysis.type_inference.fake_tensors import fake_mode
from fxkit.analysis.type_inference.type_facts import fake_value, symbols_in
from fxkit.ir.graph_arguments import graph_module_of
from fxkit.ir.program_changes import GraphProgram
from fxkit.ir.types import type_of

VAL = "val"


def fill_fake_values(gm: fx.GraphModule | GraphProgram) -> int:
    """Write a fake tensor of each node's known type into `node.meta["val"]`, as torch.export does.

    fxkit keeps types under a key of its own, which edits keep true; what is written here is true of
    the graph as it is now. Nodes of unknown type are left alone, and so are those with symbolic
    sizes that belong to no `ShapeEnv` of torch.

    Args:
        gm: A graph module with types, as captures and `propagate_types` leave it; or a captured
            program.

    Returns:
        How many nodes were given a value.

    Raises:
        UnsupportedError: It is no graph module.

    Example:
        >>> import torch, fxkit
        >>> gm = fxkit.capture(lambda x: x @ x.T, (torch.ones(2, 3),)).graph_module
        >>> fxkit.fill_fake_values(gm)
        3
        >>> gm.graph.output_node().args[0].meta["val"].shape
        torch.Size([2, 2])
    """
    gm = graph_module_of(gm)
    known = {node: type_of(node) for node in gm.graph.nodes}
    known = {node: value for node, value in known.items() if value is not None}
    symbols = [symbol for value in known.values() for symbol in symbols_in(value)]
    environment = next((s.node.shape_env for s in symbols if s.node is not None), None)
    written = 0
    with fake_mode(environment):
        for node, value in known.items():
            if all(_is_of(environment, symbol) for symbol in symbols_in(value)):
                node.meta[VAL] = fake_value(value)
                written += 1
    return written


def _is_of(environment: Any, symbol: Any) -> bool:
    """Tell whether torch's symbolic number stands behind a symbol, and is of an environment."""
    return symbol.node is not None and symbol.node.shape_env is environment
