"""Warnings of what a config does not quantise, though it seems to be meant."""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Sequence

from torch import fx

from fxkit.analysis.objects import GraphNode, graph
from fxkit.quantization.config import QuantizationConfig
from fxkit.quantization.operand_table import FAST_PATHS, OPERATORS
from fxkit.quantization.placement import placements


def warn_of_what_stays(graph_modules: Sequence[fx.GraphModule], config: QuantizationConfig) -> None:
    """Warn of layers that torch computes in one call, and of patterns and specs that fit nothing.

    Args:
        graph_modules: The graphs of a program.
        config: What is to be quantised in them.
    """
    nodes = [node for gm in graph_modules for node in graph(gm)]
    _warn_of_patterns(nodes, config)
    if any(node.operator in FAST_PATHS for node in nodes):
        _warn_of_fast_paths(nodes)
    else:
        _warn_of_nothing(graph_modules, config)


def _warn_of_fast_paths(nodes: Sequence[GraphNode]) -> None:
    """Warn of layers that torch computes in one call, which is not quantised."""
    found = [node.name for node in nodes if node.operator in FAST_PATHS]
    _warn(
        f"linear layers to quantise, got {', '.join(found[:4])}: torch's fast path for masked "
        "layers, which stays in float",
        "torch.backends.mha.set_fastpath_enabled(False) before prepare or quantize lets torch "
        "call linear layers",
    )


def _warn_of_patterns(nodes: Sequence[GraphNode], config: QuantizationConfig) -> None:
    """Warn of modules and nodes in a config that fit no operator: they may be misspelt."""
    paths = {node.module_path for node in nodes}
    for pattern in config.by_module:
        if not any(fnmatch.fnmatchcase(path, pattern) for path in paths):
            known = ", ".join(sorted(path for path in paths if path)[:8]) or "no module"
            _warn(
                f"by_module to name modules of the program, got {pattern!r}, which fits none",
                f"operators ran in {known}",
            )
    can_be = {node.name for node in nodes if node.operator in OPERATORS}
    for name in config.by_node:
        if name not in can_be:
            known = ", ".join(sorted(can_be)[:8]) or "none"
            _warn(
                f"by_node to name operators that can be quantised, got {name!r}, which fits none",
                f"there are {known}",
            )


def _warn_of_nothing(graph_modules: Sequence[fx.GraphModule], config: QuantizationConfig) -> None:
    """Warn of a spec for all operators that none can have, and say why."""
    if config.spec is None or config.state or config.where is not None:
        return
    decided = [one for gm in graph_modules for one in placements(gm, config)]
    reasons = list(dict.fromkeys(one.reason for one in decided))
    if reasons and not any(one.is_quantized for one in decided):
        problem = f"operators to quantise, got none: {'; '.join(reasons[:3])}"
        _warn(problem, "another spec, or another part of the model")


def _warn(problem: str, hint: str) -> None:
    warnings.warn(f"expected {problem}.\n  hint: {hint}", stacklevel=5)
