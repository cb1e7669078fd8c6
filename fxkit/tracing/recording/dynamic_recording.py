"""Record a call again with symbolic sizes, to get a graph that serves other sizes too.

The first recording gave the call's result, and a graph for its very sizes. The second one sees the
same state and the same arguments, and leaves nothing behind. Its graph counts when it is the first
one's, with expressions in the places of numbers, and when all that it takes for granted of sizes
can be told from the arguments.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable, Mapping
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
from fxkit.tracing.recorder.rewind import Rewind, put_back
from fxkit.tracing.recorder.rollback import MemorySnapshot
from fxkit.tracing.recorder.tape import TENSOR_CLASSES
from fxkit.tracing.recording.cache_entry import CacheEntry
from fxkit.tracing.recording.invocation import Invocation
from fxkit.tracing.recording.recording import Attempt, RecordedRun
from fxkit.tracing.recording.size_facts import FreeSize, SizeFacts
from fxkit.tracing.recording.size_recorder import SizeRecorder
from fxkit.tracing.recording.state import raw
from fxkit.tracing.values.refusals import Failure, Refusal
from fxkit.tracing.values.sources import ValueSource
from fxkit.tracing.values.structure import Content

FreeAxes = Mapping[int, frozenset[int]]

# Inside of these, a look at a size is not seen.
_HIDING = frozenset({"DisableTorchFunction", "_DisableTorchFunction"})


def record_free(invocation: Invocation, first: Attempt, free: FreeAxes) -> CacheEntry | Failure:
    """Record a call again that was just recorded, and leave no trace of that.

    Args:
        invocation: The call.
        first: The first recording.
        free: The axes whose sizes are to be free, for tensor arguments by index.

    Returns:
        A graph for more sizes than those of the call, or why there is none.
    """

    def again(static: CacheEntry) -> CacheEntry | Failure:
        return _record_again(invocation, static, free)

    return rewound(invocation.call, first, again)


def rewound(
    call: g.GuardedCall, first: Attempt, again: Callable[[CacheEntry], CacheEntry | Failure]
) -> CacheEntry | Failure:
    """Record a call again on the state that its first recording found, and leave no trace of that.

    Args:
        call: The arguments, taken apart before the first recording.
        first: The first recording.
        again: Records the call again, given the graph of the first recording.
    """
    variant, run = first.variant, first.run
    reason = _why_not(variant)
    if reason is not None or variant is None or run is None:
        return Failure(reason or "the program runs in Python", None)
    rewind = Rewind(run.state.before, _changed(run, variant))
    rewind.to_before()
    try:
        written = variant.tensors_written(call)
        if any(tensor.requires_grad for tensor in written):
            return Failure("autograd follows what it writes to, and would follow it twice", None)
        snapshot = MemorySnapshot(written, is_random=True)
        try:
            return again(variant)
        finally:
            snapshot.restore()
    finally:
        rewind.to_after()


def _why_not(variant: CacheEntry | None) -> str | None:
    if variant is None:
        return "the program runs in Python"
    if variant.has_opaque_calls:
        return "an opaque call may happen only once"
    if variant.changes and variant.value_guards:
        return "what the program reads of tensors may follow from what it writes or draws"
    return None


def _changed(run: RecordedRun, variant: CacheEntry) -> list[tuple[Any, Content]]:
    containers = run.call.parts.containers
    found = ((containers[number], run.containers[number]) for number, _ in variant.mutations)
    return [(container, content) for container, content in found if content is not None]


def _record_again(
    invocation: Invocation, first: CacheEntry, free: FreeAxes
) -> CacheEntry | Failure:
    try:
        run = _FreeRun(invocation, first, free)
    except Refusal as refusal:
        return Failure(refusal.reason, refusal.hint)
    try:
        try:
            result = run.execute(invocation.args, invocation.kwargs)
        except Exception as error:  # the program's own, for want of plain numbers
            return Failure(f"it raises with stand-ins for sizes: {_line(error)}", None)
        found = raw(run.state.reach.holders)
        variant = run.variant(result)
        put_back(found)
        return variant or run.recorder.failure or Failure("it could not be recorded", None)
    finally:
        run.recorder.close()


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


class _FreeRun(RecordedRun):
    """A run of a program with stand-ins for sizes."""

    recorder: SizeRecorder
    is_repeated = True

    def __init__(self, invocation: Invocation, first: CacheEntry, free: FreeAxes) -> None:
        self._first = first
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
        numbers = recorder.numbers
        if not _HIDING.isdisjoint(self.state.reach.names):
            raise Refusal("the program hides calls from function modes")
        if not is_same_but_for_sizes(self._first.graph_module.graph, module.graph, numbers):
            raise Refusal("the program goes another way with stand-ins for sizes")
        recorded = {node: node.meta.get(KEY) for node in module.graph.nodes if node not in numbers}
        spec = {recorder.placeholders[index].name: {} for index in self._free}
        sizes = []
        for index, tensor in enumerate(self.call.parts.tensors):
            for axis in sorted(self._free.get(index, ())):
                spec[recorder.placeholders[index].name][axis] = _automatic()
                sizes.append(self._free_size(len(sizes), index, axis, tensor.shape[axis]))
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

    def _free_size(self, number: int, index: int, axis: int, size: int) -> FreeSize:
        shown = f"{self._names[index]}.shape[{axis}]"
        return FreeSize(f"s{number}", shown, index, axis, size)

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


def is_same_but_for_sizes(static: fx.Graph, free: fx.Graph, numbers: Mapping[fx.Node, Any]) -> bool:
    """Tell whether two graphs are the same but for numbers that one of them computes of sizes.

    Args:
        static: A graph for the sizes of one call.
        free: The other graph, captured from the same call.
        numbers: The nodes of `free` that compute numbers, and their values in that call.
    """
    return _Comparison(numbers).holds(static, free)


class _Comparison:
    """Goes through two graphs side by side.

    Where one of several results is taken depends on who asks for it first, which a look at its size
    does; such nodes are compared where they are used.
    """

    def __init__(self, numbers: Mapping[fx.Node, Any]) -> None:
        self._numbers = numbers
        self._same: dict[fx.Node, fx.Node] = {}

    def holds(self, static: fx.Graph, free: fx.Graph) -> bool:
        left = [node for node in static.nodes if not _takes(node)]
        right = [n for n in free.nodes if n not in self._numbers and not _takes(n)]
        return len(left) == len(right) and all(map(self._is_same_node, left, right))

    def _is_same_node(self, ours: fx.Node, theirs: fx.Node) -> bool:
        if ours.op != theirs.op:
            return False
        if ours.op == "output":
            return self._is_same_output(ours.args[0], theirs.args[0])
        self._same[ours] = theirs
        return (
            ours.target == theirs.target
            and self._is_same(ours.args, theirs.args)
            and self._is_same(ours.kwargs, theirs.kwargs)
        )

    def _is_same_output(self, ours: Any, theirs: Any) -> bool:
        """Compare what is returned; the other graph's result has numbers of sizes as constants."""
        if isinstance(theirs, fx.Node):
            return self._is_same(ours, theirs)
        return self._is_same(tuple(ours), tuple(it for it in theirs if it not in self._numbers))

    def _is_same(self, ours: Any, theirs: Any) -> bool:
        if isinstance(theirs, fx.Node) or isinstance(ours, fx.Node):
            return self._is_same_operand(ours, theirs)
        if isinstance(ours, (tuple, list)) and isinstance(theirs, (tuple, list)):
            return len(ours) == len(theirs) and all(map(self._is_same, ours, theirs))
        if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
            values = (ours.values(), theirs.values())
            return list(ours) == list(theirs) and all(map(self._is_same, *values))
        if isinstance(ours, slice) and isinstance(theirs, slice):
            return self._is_same(
                (ours.start, ours.stop, ours.step), (theirs.start, theirs.stop, theirs.step)
            )
        return g.is_same(ours, theirs)

    def _is_same_operand(self, ours: Any, theirs: Any) -> bool:
        if theirs in self._numbers:
            return g.is_same(ours, self._numbers[theirs])
        if not (isinstance(ours, fx.Node) and isinstance(theirs, fx.Node)):
            return False
        if _takes(ours) and _takes(theirs):
            return self._is_same(ours.args, theirs.args)
        return self._same.get(ours) is theirs


def _takes(node: fx.Node) -> bool:
    """Tell whether a node takes one of several results of another."""
    if node.target is not operator.getitem:
        return False
    source = node.args[0]
    return isinstance(source, fx.Node) and isinstance(type_of(source), (tuple, list, dict))


def _drop_unused(module: fx.GraphModule, numbers: Mapping[fx.Node, Any]) -> None:
    graph = module.graph
    for node in reversed(list(graph.nodes)):
        if node in numbers and not node.users:
            graph.erase_node(node)
    module.recompile()
