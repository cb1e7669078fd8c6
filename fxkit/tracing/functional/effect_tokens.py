"""Functional graphs without the tokens by which torch's tracing keeps in order what may raise.

Nodes of a graph run in order without them. A check that returns nothing, such as that of an
inverse, is then a call like others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxkit.torch_adapters.operators import schema_of


def drop_tokens(gm: fx.GraphModule) -> None:
    """Call what returns nothing without a token; leave a graph with other tokens as it is.

    Rewrites:
        %e = with_effects(%token, check, %x); %t = getitem(%e, 0); return (%t, %y)
            →  check(%x); return (%y)
    """
    graph = gm.graph
    with_effects = torch.ops.higher_order.with_effects
    calls: list[Any] = list(graph.find_nodes(op="call_function", target=with_effects))
    if not calls or any(schema_of(call.args[1]).returns for call in calls):
        return
    tokens = {token for call in calls for token in (call.args[0], *call.users)}
    for call in calls:
        _, check, *operands = call.args
        with graph.inserting_before(call):
            made = graph.call_function(check, tuple(operands), dict(call.kwargs))
        made.meta.update(call.meta)
    output: Any = graph.output_node()
    output.args = (tuple(node for node in output.args[0] if node not in tokens),)
    gone = tokens.union(calls)
    for node in reversed(list(graph.nodes)):
        if node in gone:
            graph.erase_node(node)
    gm.recompile()
