"""A graph of symbolic sizes, with a module lowered for each set of sizes that it meets."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import fx

from fxkit.ir.types import TensorType, type_of
from fxkit.lower.runtime.argument_key import argument_key

# Sets of sizes that are lowered when they first come. Later ones may never come again: they are
# lowered at their third call, and until then the graph runs as it was captured.
AT_ONCE = 16
CALLS_TO_LOWER = 3

# Sets of sizes that are lowered at all, and that are counted.
MAX_LOWERED = 256
_MAX_COUNTED = 4096

Lower = Callable[[tuple[Any, ...]], Callable[..., Any]]


def has_symbolic_sizes(gm: fx.GraphModule) -> bool:
    """Tell whether the types of a graph's inputs hold expressions."""
    types = (type_of(node) for node in gm.graph.nodes if node.op == "placeholder")
    return any(isinstance(known, TensorType) and known.is_symbolic for known in types)


class ShapeCache:
    """Callable like a graph with symbolic sizes; lowers it for each set of sizes of its inputs.

    Lowering for further sizes plans the graph again, which takes Python milliseconds; what is built
    for the first ones serves them, where `lower` sees to that.

    Args:
        gm: The graph.
        lower: Makes of inputs what runs in the graph's place for their sizes.
        may_run_graph: Whether the graph may run as it was captured where that is cheaper; else it
            is lowered for all sizes, and what is made for those that came first is given up.
    """

    def __init__(self, gm: fx.GraphModule, lower: Lower, *, may_run_graph: bool = True) -> None:
        self.graph_module = gm
        self._lower = lower
        self._may_run_graph = may_run_graph
        self._made: dict[Any, Callable[..., Any]] = {}
        self._calls: Counter[Any] = Counter()
        self._lock = threading.Lock()

    def __call__(self, *args: Any) -> Any:
        """Run the graph."""
        key = argument_key(args)
        run = self._made.get(key)
        if run is None:
            run = self._make(key, args)
        return run(*args)

    def module_for(self, args: tuple[Any, ...]) -> Callable[..., Any] | None:
        """Return what runs in place of the graph for the sizes of some inputs, if it is made."""
        return self._made.get(argument_key(args))

    def prepare(self, *args: Any) -> None:
        """Lower the graph for the sizes of some inputs, without running it."""
        self._make(argument_key(args), args)

    def _make(self, key: Any, args: tuple[Any, ...]) -> Callable[..., Any]:
        with self._lock:
            if key not in self._made:
                if not self._is_due(key):
                    return self.graph_module.forward
                if len(self._made) >= MAX_LOWERED:
                    self._made.pop(next(iter(self._made)))
                self._made[key] = self._lower(args)
            return self._made[key]

    def _is_due(self, key: Any) -> bool:
        """Count a call with sizes that are not lowered; tell whether they are to be now."""
        if len(self._made) < AT_ONCE or not self._may_run_graph:
            return True
        if len(self._calls) >= _MAX_COUNTED:
            self._calls.clear()
        self._calls[key] += 1
        return self._calls[key] >= CALLS_TO_LOWER and len(self._made) < MAX_LOWERED
