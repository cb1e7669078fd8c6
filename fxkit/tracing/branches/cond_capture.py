"""Capture a branch on a tensor as `cond`, by running the program again with the other outcome.

A run that goes another way than the tensors say is made on the same state and leaves nothing
behind. It is broken off before its first effect: at a call in C that is not known to be harmless,
at an opaque call, where it draws random numbers or prints; what it has written by then is put back.
Where two runs have the same state, arguments and results, and do no more than to compute, they are
joined into one graph; else the branch stays a guard, with the reason.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fxkit.tracing.branches.joining import Run, join
from fxkit.tracing.guarding import guards as g
from fxkit.tracing.guarding.module_guards import ModuleGuard
from fxkit.tracing.guarding.state_guards import EmptyGuard, StateGuard, StateWatch
from fxkit.tracing.recorder.frames import source_text
from fxkit.tracing.recorder.recorded import TracedValue
from fxkit.tracing.recorder.recorder import Recorder
from fxkit.tracing.recorder.state_restore import Entries, MemorySnapshot
from fxkit.tracing.recording.graph_comparison import is_same_but_for_scalars
from fxkit.tracing.recording.guarded_graph import GuardedGraph
from fxkit.tracing.recording.invocation import Invocation
from fxkit.tracing.recording.recording import Attempt
from fxkit.tracing.recording.rerun import Rerun, RunStopped, rerun
from fxkit.tracing.values.contents import content_of
from fxkit.tracing.values.refusals import Failure, Refusal

MAX_RUNS = 32
MAX_NODES = 20_000

_BY_TEXT = frozenset(
    {type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device}
)
_DECIDING = frozenset({"__bool__", "is_nonzero"})


def capture_cond(
    invocation: Invocation, first: Attempt
) -> tuple[GuardedGraph | Failure, tuple[str, ...]]:
    """Record a call again that was just recorded, once for each way through its branches.

    Args:
        invocation: The call.
        first: The first recording.

    Returns:
        A graph with `cond` nodes in the places of branches, or why there is none; and a line for
        each branch that stays a guard.
    """
    reasons: list[str] = []

    guarded = first.guarded
    if guarded is None or not any(type(it.value) is bool for it in guarded.value_guards):
        return Failure("no branch depends on a tensor", None), ()
    try:
        if _has_effects(guarded):
            raise Refusal("the program does more than to compute")
        found: GuardedGraph | Failure = _Search(
            invocation, first, guarded.graph_module.graph, reasons
        ).guarded_graph()
    except Refusal as refusal:
        found = Failure(refusal.reason, refusal.hint)
    if isinstance(found, Failure) and not reasons:
        reasons.append(f"its branches are guards: {found.reason}")
    return found, tuple(dict.fromkeys(reasons))


class _Forced(Recorder):
    """Records a run whose first branches go ways that are given.

    Attributes:
        outcomes: Which way each branch on a tensor went.
        checks: The nodes that guard that.
    """

    forced: tuple[bool, ...] = ()

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.outcomes: list[bool] = []
        self.checks: list[fx.Node] = []
        self._kept: dict[int, tuple[torch.Tensor, MemorySnapshot]] = {}

    def keep(self, tensor: torch.Tensor) -> None:
        """Keep what is in a tensor that is older than the run."""
        if id(tensor) not in self._kept:
            self._kept[id(tensor)] = (tensor, self.unseen(lambda: MemorySnapshot([tensor], False)))

    def put_back_tensors(self) -> None:
        """Let tensors that are older than the run hold what they held."""
        for _, snapshot in self._kept.values():
            snapshot.restore_if_changed()

    def _lift(self, tensor: torch.Tensor) -> TracedValue:
        value = super()._lift(tensor)
        self.keep(tensor)
        return value

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        result = super()._run(func, args, kwargs)
        if getattr(func, "__name__", "") not in _DECIDING or type(result) is not bool:
            return result
        index = len(self.outcomes)
        outcome = self.forced[index] if index < len(self.forced) else result
        self.outcomes.append(outcome)
        return outcome

    def _guard(self, node: fx.Node, expected: Any, what: str) -> None:
        super()._guard(node, expected, what)
        if len(self.checks) < len(self.outcomes):
            self.checks.append(self.reads[-1].check)
        if len(self.graph.nodes) > MAX_NODES:
            self.refuse("it is too long")

    def refuse(self, reason: str, hint: str | None = None, *, watch: bool = False) -> None:
        """Break the run off at once."""
        super().refuse(reason, hint)
        raise RunStopped

    def note_text(self, stream: str, text: str) -> None:
        """Refuse to print."""
        self.refuse("it prints")

    def record_opaque(self, *_: Any, **__: Any) -> Any:
        """Refuse what is not known to be harmless."""
        self.refuse("it makes an opaque call")

    def begin_special(self, frame: Any) -> None:
        """Refuse custom autograd functions and seeds."""
        self.refuse("it makes an opaque call")


@dataclass(slots=True)
class _Way(Run):
    """One way through the program, and what was recorded beside its graph."""

    guarded: GuardedGraph
    blueprint: Any


class _ForcedRun(Rerun[_Way]):
    """A run whose first branches go ways that are given."""

    recorder: _Forced
    subject = "a side of it"

    def __init__(self, invocation: Invocation, forced: tuple[bool, ...]) -> None:
        super().__init__(invocation)
        self.recorder.forced = forced
        for tensor in self.call.parts.tensors:
            self.recorder.keep(tensor)

    def make_recorder(self, leaves: Iterable[tuple[str, torch.Tensor]]) -> Recorder:
        """Return what records the run."""
        return _Forced(leaves, self.environment, sys._getframe())

    def outcome(self, entry: GuardedGraph, result: Any) -> _Way:
        """Return the way that was recorded, where it does nothing but compute."""
        recorder = self.recorder
        if _has_effects(entry):
            raise Refusal("a side of it does more than to compute")
        if len(recorder.checks) != len(recorder.outcomes):
            raise Refusal("it could not be followed")
        existing = {*map(id, self.call.parts.containers), *self.state.reach.kept}
        outline = _outline(result, existing)
        checks, outcomes = list(recorder.checks), tuple(recorder.outcomes)
        return _Way(entry.graph_module, checks, outcomes, entry, outline)

    def failure(self, error: BaseException | None) -> Failure:
        """Return why this way has no graph."""
        found = super().failure(error)
        if self.recorder.failure is None:
            return found
        return replace(found, reason=f"on a side of it {found.reason}")

    def restore(self, changed: Entries) -> None:
        """Put back what the program has changed; tensors too, which no other run has written to."""
        super().restore(changed)
        self.recorder.put_back_tensors()


def _has_effects(entry: GuardedGraph) -> bool:
    return bool(entry.changes or entry.replays or entry.mutations or entry.extras)


class _Search:
    """Runs a program on all of its ways, as far as they can be joined."""

    def __init__(
        self, invocation: Invocation, first: Attempt, graph: fx.Graph, reasons: list[str]
    ) -> None:
        self._invocation = invocation
        self._first = first
        self._graph = graph
        self._reasons = reasons
        self._runs = 0
        self._has_joined = False

    def guarded_graph(self) -> GuardedGraph:
        """Return the graph of all ways.

        Raises:
            Refusal: When no two could be joined.
        """
        way = self._explore((), None)
        if not self._has_joined:
            raise Refusal("no branch could be joined")
        return self._finished(way)

    def _explore(self, forced: tuple[bool, ...], limits: Counter[Any] | None) -> _Way:
        """Run one way, and join it with those that turn off behind the branches that are forced.

        Args:
            forced: Which way the first branches go.
            limits: How often each branch was met on the way that this one turns off from; where it
                is met more often, tensors decide how often a loop runs.
        """
        way = self._run(forced)
        if not forced and not is_same_but_for_scalars(self._graph, way.module.graph, {}):
            raise Refusal("the program goes another way the second time")
        met = Counter(map(_place, way.checks))
        if limits is not None and any(limits[it] and met[it] > limits[it] for it in met):
            raise Refusal("it is in a loop that may go on", "use torch.while_loop")
        for index in reversed(range(len(forced), len(way.checks))):
            source = source_text(way.checks[index].meta.get("stack_trace"))
            try:
                turned = (*way.outcomes[:index], not way.outcomes[index])
                other = self._explore(turned, met)
                self._check_alike(way, other)
                join(way, other, index)
            except Refusal as refusal:
                self._reasons.append(f"the branch at {source} is a guard: {refusal.reason}")
                continue
            self._has_joined = True
            way.guarded = _both(way.guarded, other.guarded)
        return way

    def _check_alike(self, way: _Way, other: _Way) -> None:
        if way.guarded.is_single != other.guarded.is_single or way.blueprint != other.blueprint:
            raise Refusal("its sides return different things")

    def _run(self, forced: tuple[bool, ...]) -> _Way:
        self._runs += 1
        if self._runs > MAX_RUNS:
            raise Refusal(f"there are more than {MAX_RUNS} ways through the program")
        way = rerun(self._first, lambda: _ForcedRun(self._invocation, forced))
        if isinstance(way, Failure):
            raise Refusal(way.reason, way.hint)
        return way

    def _finished(self, way: _Way) -> GuardedGraph:
        guards = tuple(_value_guards(way.module))
        return replace(way.guarded, graph_module=way.module, value_guards=guards, _quick=None)


def _place(check: fx.Node) -> tuple[Any, str]:
    return check.meta.get("stack_trace"), repr(check.meta.get("nn_module_stack"))


def _value_guards(module: fx.GraphModule) -> Iterable[g.ValueGuard]:
    for node in module.graph.nodes:
        if node.target is g.check_value:
            yield g.ValueGuard(
                str(node.args[2]),
                source=source_text(node.meta.get("stack_trace")),
                value=node.args[1],
                node=node.name,
            )
        elif node.op == "get_attr":
            inner = getattr(module, str(node.target), None)
            if isinstance(inner, fx.GraphModule):
                yield from _value_guards(inner)


def _both(ours: GuardedGraph, theirs: GuardedGraph) -> GuardedGraph:
    """Return our graph with what either takes for granted."""
    known = {_key(guard) for guard in ours.guards}
    guards = (*ours.guards, *(it for it in theirs.guards if _key(it) not in known))
    watch = StateWatch(
        [guard.holder for guard in guards if isinstance(guard, StateGuard)],
        [guard.table for guard in guards if isinstance(guard, EmptyGuard)],
    )
    held = {id(tensor) for tensor in ours.outside.values()}
    outside = dict(ours.outside)
    for name, tensor in theirs.outside.items():
        if id(tensor) not in held:
            outside[f"{name}_{len(outside)}" if name in outside else name] = tensor
    has_regions = ours.has_regions or theirs.has_regions
    return replace(ours, guards=guards, watch=watch, outside=outside, has_regions=has_regions)


def _key(guard: g.Guard) -> Any:
    """Return what two guards have in common that ask the same."""
    if isinstance(guard, g.OutsideGuard):
        return type(guard), id(guard.tensor)
    if isinstance(guard, EmptyGuard):
        return type(guard), id(guard.table)
    if isinstance(guard, StateGuard):
        holder = guard.holder
        keys = frozenset((key, id(value)) for key, value in holder.entries.items())
        return type(guard), id(holder.value), keys
    if isinstance(guard, ModuleGuard):
        return type(guard), id(guard.module)
    return type(guard), guard.what, getattr(guard, "place", None)


def _outline(result: Any, existing: set[int]) -> Any:
    """Return a nested result without its tensors, so that two can be compared."""
    seen: dict[int, tuple[int, Any]] = {}

    def outline(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return "tensor"
        if type(value) in _BY_TEXT:
            return type(value), repr(value)
        content = None if id(value) in existing else content_of(value)
        if content is None:
            return type(value), id(value)
        if id(value) in seen:
            return "same", seen[id(value)][0]
        seen[id(value)] = (len(seen), value)
        return type(value), content.label, tuple([outline(it) for it in content.values])

    return outline(result)
