"""What a view looks at: a graph module, or something that holds one."""

from __future__ import annotations

from typing import Any

from torch import fx

from fxkit.errors import UnsupportedError


def graph_module_of(gm: Any) -> fx.GraphModule:
    """Return the graph that a captured or compiled program runs, or the graph module itself.

    Raises:
        UnsupportedError: There is none.
    """
    if isinstance(gm, fx.GraphModule):
        return gm
    inner = getattr(gm, "lowered", None) or getattr(gm, "graph_module", None)
    if not isinstance(inner, fx.GraphModule):
        raise UnsupportedError(
            f"expected a torch.fx.GraphModule or something that holds one, got {type(gm).__name__}",
            hint="make one with fxkit.capture(fn, args) or fxkit.symbolic_trace(module)",
        )
    return inner
