"""Record a call again with symbolic sizes, to get a graph that serves other sizes too.

The graph counts when it is that of the first recording, with expressions in the places of numbers,
and when all that it takes for granted of sizes can be told from the arguments.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx

from fxkit.analysis.tensor_types import TypeAnalysis
from fxkit.errors import FxkitError
from fxkit.ir.types import KEY, TensorType, type_of
from fxkit.tracing.guarding import guards as g
from fxkit.tracing.guarding.size_guards import FreeTensorGuard
from fxkit.tracing.parameter_names import placeholder_names
from fxkit.tracing.recorder.recorder import Recorder
from fxkit.tracing.recorder.tape import TENSOR_CLASSES
from fxkit.tracing.recording.graph_comparison import is_same_but_for_scalars
from fxkit.tracing.recording.guarded_graph import GuardedGraph
from fxkit.tracing.recording.invocation import Invocation
from fxkit.tracing.recording.recording import Attempt
from fxkit.tracing.recording.rerun import Rerun, rerun
from fxkit.tracing.recording.size_facts import SizeFacts, SymbolicSize
from fxkit.tracing.recording.size_recorder import SizeRecorder
from fxkit.tracing.values.refusals import Failure, Refusal
from fxkit.tracing.values.sources import ValueSource

FreeAxes = Mapping[int, frozenset[int]]

# Inside of these, a look at a size is not seen.
_HIDING = frozenset({"DisableTorchFunction", "_DisableTorchFunction"})


def record_sizes(invocation: Invocation, first: Attempt, free: FreeAxes) -> GuardedGraph | Failure:
    """Record a call again that was just recorded, and leave no trace of that.

    Args:
        invocation: The call.
        first: The first recording.
        free: The axes whose sizes are to be free, for tensor arguments by index.

    Returns:
        A graph for more sizes than those of the call, or why there is none.
    """
    return rerun(first, lambda: _SizeRun(invocation, first, free))


class _SizeRun(Rerun[GuardedGraph]):
    """A run of a program with stand-ins for sizes."""

    recorder: SizeRecorder
    subject = "with stand-ins for sizes it"

    def __init__(self, invocation: Invocation, first: Attempt, free: FreeAxes) -> None:
        assert first.guarded is not None
        self._first = first.guarded.graph_module
        self._wanted = free
        self._free: dict[int, frozenset[int]] = {}
        self._facts: SizeFacts | None = None
        super().__init__(invocation)
        if not self._free:
            raise Refusal("no size of a tensor argument can be free")
        self._names = placeholder_names(invocation.fn, self.call.parts.tensor_paths)

    def make_recorder(self, leaves: Iterable[tuple[str, torch.Tensor]]) -> Recorder:
        """Return what records the run."""
        places: Mapping[int, tuple[torch.Tensor, list[ValueSource]]] = self.environment.places
        for index, tensor in enumerate(self.call.parts.tensors):
            axes = frozenset(a for a in self._wanted.get(index, ()) if tensor.shape[a] >= 2)
            is_plain = type(tensor) in TENSOR_CLASSES and tensor.layout is torch.strided
            if axes and is_plain and id(tensor) not in places:
                self._free[index] = axes
        return SizeRecorder(leaves, self.environment, sys._getframe(), self._free)

    # The graph -----------------------------------------------------------------------------------

    def settle(self, module: fx.GraphModule, inputs: tuple[Any, ...]) -> None:
        """Tell types as expressions, and what has to hold of sizes."""
        recorder = self.recorder
        numbers = recorder.scalars
        if not _HIDING.isdisjoint(self.state.reach.names):
            raise Refusal("the program hides calls from function modes")
        if not is_same_but_for_scalars(self._first.graph, module.graph, numbers):
            raise Refusal("the program goes another way with stand-ins for sizes")
        recorded = {node: node.meta.get(KEY) for node in module.graph.nodes if node not in numbers}
        spec = {recorder.placeholders[index].name: {} for index in self._free}
        sizes = []
        for index, tensor in enumerate(self.call.parts.tensors):
            for axis in sorted(self._free.get(index, ())):
                spec[recorder.placeholders[index].name][axis] = _automatic()
                sizes.append(self._symbolic_size(len(sizes), index, axis, tensor.shape[axis]))
        try:
            analysis = TypeAnalysis(module, inputs, dynamic_shapes=spec)
        except FxkitError as error:
            raise Refusal(f"types can't be told for other sizes: {error.message}") from error
        facts = self._facts = SizeFacts(sizes, numbers)
        facts.add_limits()
        facts.add_relations(analysis)
        facts.add_facts(recorder.facts)
        recorded.pop(next(iter(reversed(module.graph.nodes))))
        facts.check_types(recorded)
        if facts.fixed() >= {size.name for size in sizes}:
            raise Refusal("the program uses each size that might be free as a plain number")
        _drop_unused(module, numbers)

    def _symbolic_size(self, number: int, index: int, axis: int, size: int) -> SymbolicSize:
        shown = f"{self._names[index]}.shape[{axis}]"
        return SymbolicSize(f"s{number}", shown, index, axis, size)

    # Guards --------------------------------------------------------------------------------------

    def size_guards(self) -> list[g.Guard]:
        """Return the guards on sizes that are free."""
        return [] if self._facts is None else list(self._facts.guards.values())

    def tensor_guard(
        self, index: int, tensor: torch.Tensor, kind: TensorType, path: str, use: str | None
    ) -> g.Guard:
        """Return the guard on one argument."""
        if index not in self._free:
            return super().tensor_guard(index, tensor, kind, path, use)
        return FreeTensorGuard(
            path,
            source=use,
            index=index,
            kind=type(tensor),
            type=kind,
            shown=type_of(self.recorder.placeholders[index]),
            free=self._free[index],
        )


def _automatic() -> Any:
    from torch.export import Dim

    return Dim.AUTO


def _drop_unused(module: fx.GraphModule, numbers: Mapping[fx.Node, Any]) -> None:
    graph = module.graph
    for node in reversed(list(graph.nodes)):
        if node in numbers and not node.users:
            graph.erase_node(node)
    module.recompile()
