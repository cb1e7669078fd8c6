"""Record a call again with symbolic numbers, which become inputs of the graph.

The graph counts when it is that of the first recording, with numbers that are computed in the
places of constants. What the program does with a number beside arithmetic is a guard in the graph;
a number that is wholly guarded is no input.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import fx

from fxkit.analysis.dependencies import ancestors
from fxkit.tracing.guarding import state_containers as h
from fxkit.tracing.guarding.special_state import ArrayHolder, MemoHolder
from fxkit.tracing.parameter_names import placeholder_names
from fxkit.tracing.recorder.scalar_tracing import NAME
from fxkit.tracing.recorder.state_restore import Mutations
from fxkit.tracing.recording.graph_comparison import is_same_but_for_scalars
from fxkit.tracing.recording.guarded_graph import GuardedGraph
from fxkit.tracing.recording.invocation import Invocation
from fxkit.tracing.recording.recording import Attempt
from fxkit.tracing.recording.rerun import Rerun, rerun, why_not_again
from fxkit.tracing.values.contents import content_of
from fxkit.tracing.values.refusals import Failure, Refusal
from fxkit.tracing.values.scalar_inputs import SCALAR_KINDS, AnyScalar, ScalarInput, ScalarPlace
from fxkit.tracing.values.symbolic_scalars import SYMBOLIC, plain

# Code that names these sees what a stand-in is.
_REVEALING = frozenset({"type", "id", "DisableTorchFunction", "_DisableTorchFunction"})


def record_scalars(invocation: Invocation, first: Attempt) -> GuardedGraph | Failure:
    """Record a call again that was just recorded, and leave no trace of that.

    Args:
        invocation: The call. The numbers that change are among what is known of the program; those
            that turn out to be no inputs are noted there.
        first: The first recording.

    Returns:
        A graph that takes numbers as inputs, or why there is none.
    """
    objection = why_not_again(first)
    if objection is not None:
        return objection
    learned = invocation.learned
    found: GuardedGraph | Failure = Failure("no number that changes can be an input", None)
    while wanted := learned.numbers - learned.fixed:
        found = rerun(first, lambda: _ScalarRun(invocation, first))
        if not isinstance(found, Failure):
            return found
        if learned.numbers - learned.fixed == wanted:
            learned.fixed |= wanted
    return found


class _ScalarRun(Rerun[GuardedGraph]):
    """A run of a program with stand-ins for numbers that change."""

    subject = "with stand-ins for numbers it"

    def __init__(self, invocation: Invocation, first: Attempt) -> None:
        assert first.guarded is not None
        self._learned = learned = invocation.learned
        self._first = first.guarded.graph_module
        self._names: dict[str, str] = {}
        super().__init__(invocation)
        if self.state.reach.names & _REVEALING:
            raise Refusal("the program may tell stand-ins from numbers")
        self._wanted: set[ScalarPlace] = learned.numbers - learned.fixed
        self._inputs: dict[fx.Node, tuple[ScalarPlace, ScalarInput, Any]] = {}
        self._numbers: dict[int, Any] = {}

    # Stand-ins, put in and taken out again -------------------------------------------------------

    def stand_ins(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Put stand-ins in the places of numbers, and return the arguments with theirs."""
        args, kwargs = super().stand_ins()
        counts = Counter(self.call.parts.paths)
        wanted = {it for it in self._wanted if isinstance(it, str) and counts[it] == 1}
        paths = {path: i for i, path in enumerate(self.call.parts.paths) if path in wanted}
        self._names = dict(
            zip(paths, placeholder_names(self.invocation.fn, list(paths)), strict=True)
        )
        args = tuple([self._argument(a, f"args[{i}]", paths) for i, a in enumerate(args)])
        kwargs = {name: self._argument(value, name, paths) for name, value in kwargs.items()}
        parts = self.call.parts
        for container, path in zip(parts.containers, parts.container_paths, strict=True):
            self._put_inside(container, path, paths)
        for holder in self.state.reach.holders:
            self._put_state(holder)
        if not self._inputs:
            self._learned.fixed |= self._wanted
            raise Refusal("no number that changes is there")
        return args, kwargs

    def _argument(self, value: Any, path: str, paths: dict[str, int]) -> Any:
        if path not in paths or type(value) not in SCALAR_KINDS:
            return value
        return self._stand_in(value, path, ScalarInput(path, paths[path], None))

    def _put_inside(self, container: Any, where: str, paths: dict[str, int]) -> None:
        """Put stand-ins for the numbers in a container that is an argument, or inside of one."""
        content = content_of(container) if paths else None
        if content is None or content.fill is None:
            return
        values = [self._argument(value, where + step, paths) for step, value in content.children()]
        if any(type(value) in SYMBOLIC for value in values):
            content.fill(container, values)

    def _put_state(self, holder: h.GuardedContainer) -> None:
        changes = {}
        for key, value in holder.entries.items():
            where = (id(holder.value), key)
            if where not in self._wanted or not AnyScalar(type(value)).has(value):
                continue
            if type(value) not in SCALAR_KINDS or key in holder.lenient:
                continue
            place = holder.place(key)
            changes[key] = self._stand_in(value, where, ScalarInput(place.name, None, place))
            self.state.free.add(where)
        if changes:
            holder.write(changes, {**holder.read(), **changes})

    def _stand_in(self, value: Any, where: ScalarPlace, source: ScalarInput) -> Any:
        node = self.recorder.scalar_input(self._names.get(source.name, source.name))
        node.meta[NAME] = source.name
        self._inputs[node] = (where, source, value)
        number = self.recorder.stand_in(value, node)
        self._numbers[id(number)] = number
        return number

    def remove_stand_ins(self) -> None:
        """Put numbers back where the program has left their stand-ins."""
        for holder in self.state.reach.holders:
            if isinstance(holder, (MemoHolder, ArrayHolder)):
                continue
            now = holder.read()
            # What was found while the program ran may have been read with a stand-in in it.
            holder.entries.update(self._plain_values(holder.entries))
            changes = self._plain_values(now)
            if changes:
                holder.write(changes, {**now, **changes})
        for container in self.call.parts.containers:
            content = content_of(container)
            if content is None or content.fill is None:
                continue
            if any(id(value) in self._numbers for value in content.values):
                values = [plain(it) if id(it) in self._numbers else it for it in content.values]
                content.fill(container, values)

    def _plain_values(self, entries: dict[Any, Any]) -> dict[Any, Any]:
        return {key: plain(it) for key, it in entries.items() if id(it) in self._numbers}

    # The graph -----------------------------------------------------------------------------------

    @property
    def free_tokens(self) -> frozenset[int]:
        """Which values in the arguments are numbers that the graph takes as inputs."""
        found = (source.token for _, source, _ in self._inputs.values())
        return frozenset(token for token in found if token is not None)

    def scalar_inputs(self) -> tuple[tuple[ScalarInput, ...], list[Any]]:
        """Return the numbers that are inputs of the graph, and what they are in this run."""
        found = list(self._inputs.values())
        return tuple(source for _, source, _ in found), [value for _, _, value in found]

    def _undo(self) -> Mutations:
        """Take all back where a call fails: other numbers may make it fail."""
        return self.changes

    def settle(self, module: fx.GraphModule, inputs: tuple[Any, ...]) -> None:
        """Compare the graph with the first one, and find the numbers that are no inputs."""
        recorder = self.recorder
        pinned = {*recorder.pinned, *ancestors(recorder.pinned)}
        useless = {where for node, (where, *_) in self._inputs.items() if node in pinned}
        self._learned.fixed |= useless
        missing = self._wanted - {where for where, *_ in self._inputs.values()}
        if useless or missing == self._wanted:
            raise Refusal("a number that changes is used as the number that it is")
        if not is_same_but_for_scalars(self._first.graph, module.graph, recorder.scalars):
            raise Refusal("the program goes another way with stand-ins for numbers")
