"""The kinds of nodes of torch.fx, and which of them compute something."""

from __future__ import annotations

from torch import fx

KINDS = ("placeholder", "get_attr", "call_function", "call_method", "call_module", "output")
COMPUTES_NOTHING = ("placeholder", "get_attr", "output")


def body_of(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes that compute something, in order."""
    return [node for node in graph.nodes if node.op not in COMPUTES_NOTHING]
