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
from fxkit.tracing.guarding.state_guards import EmptyGuard, StateGuard, StateWatch
from fxkit.tracing.recorder.frames import source_text
from fxkit.tracing.recorder.recorded import TracedValue
from fxkit.tracing.recorder.recorder import Recorder
from fxkit.tracing.recorder.rewind import Entries, put_back
from fxkit.tracing.recorder.rollback import MemorySnapshot
from fxkit.tracing.recording.cache_entry import CacheEntry
from fxkit.tracing.recording.dynamic_recording import is_same_but_for_sizes, rewound
from fxkit.tracing.recording.invocation import Invocation
from fxkit.tracing.recording.recording import Attempt, RecordedRun
from fxkit.tracing.recording.state import raw
from fxkit.tracing.values.refusals import Failure, Refusal
from fxkit.tracing.values.structure import content_of

MAX_RUNS = 32
MAX_NODES = 20_000

_BY_TEXT = frozenset(
    {type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device}
)
_DECIDING = frozenset({"__bool__", "is_nonzero"})


def capture_cond(
    invocation: Invocation, first: Attempt
) -> tuple[CacheEntry | Failure, tuple[str, ...]]:
    """Record a call again that was just recorded, once for each way through its branches.

    Args:
        invocation: The call.
        first: The first recording.

    Returns:
        A graph with `cond` nodes in the places of branches, or why there is none; and a line for
        each branch that stays a guard.
    """
    reasons: list[str] = []

    def again(static: CacheEntry) -> CacheEntry | Failure:
        try:
            return _Search(invocation, static, reasons).variant()
        except Refusal as refusal:
            return Failure(refusal.reason, refusal.hint)

    variant = first.variant
    if variant is None or not any(type(it.value) is bool for it in variant.value_guards):
        return Failure("no branch depends on a tensor", None), ()
    if variant.changes or variant.replays or variant.mutations or variant.extras:
        found: CacheEntry | Failure = Failure("the program does more than to compute", None)
    else:
        found = rewound(invocation.call, first, again)
    if isinstance(found, Failure) and not reasons:
        reasons.append(f"its branches are guards: {found.reason}")
    return found, tuple(dict.fromkeys(reasons))


class _Stop(BaseException):
    """Breaks a run off."""


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
        raise _Stop

    def note_text(self, stream: str, text: str) -> None:
        """Refuse to print."""
        self.refuse("it prints")

    def record_opaque(self, *_: Any, **__: Any) -> Any:
        """Refuse what is not known to be harmless."""
        self.refuse("it makes an opaque call")

    def begin_special(self, frame: Any) -> None:
        """Refuse custom autograd functions and seeds."""
        self.refuse("it makes an opaque call")


class _ForcedRun(RecordedRun):
    """A run whose first branches go ways that are given."""

    recorder: _Forced
    is_repeated = True

    def make_recorder(self, leaves: Iterable[tuple[str, torch.Tensor]]) -> Recorder:
        """Return what records the run."""
        return _Forced(leaves, self.environment, sys._getframe())


@dataclass(slots=True)
class _Way(Run):
    """One way through the program, and what was recorded beside its graph."""

    variant: CacheEntry
    blueprint: Any


class _Search:
    """Runs a program on all of its ways, as far as they can be joined."""

    def __init__(self, invocation: Invocation, static: CacheEntry, reasons: list[str]) -> None:
        self._invocation = invocation
        self._static = static
        self._reasons = reasons
        self._runs = 0
        self._has_joined = False

    def variant(self) -> CacheEntry:
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
        if not forced and not is_same_but_for_sizes(
            self._static.graph_module.graph, way.module.graph, {}
        ):
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
            way.variant = _both(way.variant, other.variant)
        return way

    def _check_alike(self, way: _Way, other: _Way) -> None:
        if way.variant.is_single != other.variant.is_single or way.blueprint != other.blueprint:
            raise Refusal("its sides return different things")

    def _run(self, forced: tuple[bool, ...]) -> _Way:
        self._runs += 1
        if self._runs > MAX_RUNS:
            raise Refusal(f"there are more than {MAX_RUNS} ways through the program")
        invocation = self._invocation
        run = _ForcedRun(invocation)
        recorder = run.recorder
        recorder.forced = forced
        try:
            with _Unchanged(run) as unchanged:
                result = run.execute(invocation.args, invocation.kwargs)
                unchanged.note()
                variant = run.variant(result)
        except (_Stop, Exception) as error:
            raise _reason(recorder, error) from None
        finally:
            recorder.close()
        if variant is None or recorder.failure is not None:
            raise _reason(recorder, None)
        if variant.changes or variant.replays or variant.mutations or variant.extras:
            raise Refusal("a side of it does more than to compute")
        if len(recorder.checks) != len(recorder.outcomes):
            raise Refusal("it could not be followed")
        return _Way(
            variant.graph_module,
            list(recorder.checks),
            tuple(recorder.outcomes),
            variant,
            _outline(result, _existing(run)),
        )

    def _finished(self, way: _Way) -> CacheEntry:
        guards = tuple(_value_guards(way.module))
        return replace(way.variant, graph_module=way.module, value_guards=guards, _quick=None)


def _reason(recorder: Recorder, error: BaseException | None) -> Refusal:
    if recorder.failure is not None:
        return Refusal(f"on a side of it {recorder.failure.reason}", recorder.failure.hint)
    if isinstance(error, Refusal):
        return error
    return Refusal(f"a side of it raises {type(error).__name__}")


class _Unchanged:
    """Puts back what a run has changed of tensors, arguments and Python state."""

    def __init__(self, run: _ForcedRun) -> None:
        self._run = run
        self._random = MemorySnapshot([], is_random=True)
        self._found: Entries | None = None
        for tensor in run.call.parts.tensors:
            run.recorder.keep(tensor)

    def note(self) -> None:
        """Note what has changed, before guards are made of it."""
        self._found = raw(self._run.state.reach.holders)

    def __enter__(self) -> _Unchanged:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        run = self._run
        if self._found is None:
            self.note()
        put_back(self._found or [])
        for container, before in zip(run.call.parts.containers, run.containers, strict=True):
            now = content_of(container)
            is_same = now is not None and before is not None and now.label == before.label
            if is_same and all(map(_is, now.values, before.values)):  # type: ignore[union-attr]
                continue
            if before is not None and before.fill is not None:
                before.fill(container, before.values)
        run.recorder.put_back_tensors()
        self._random.restore()


def _is(left: Any, right: Any) -> bool:
    return left is right


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


def _both(ours: CacheEntry, theirs: CacheEntry) -> CacheEntry:
    """Return our variant with what either takes for granted."""
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
    if isinstance(guard, g.ModuleGuard):
        return type(guard), id(guard.module)
    return type(guard), guard.what, getattr(guard, "place", None)


def _existing(run: RecordedRun) -> set[int]:
    """Return the `id` of what is older than the run, and returned as it is."""
    return {*map(id, run.call.parts.containers), *run.state.reach.kept}


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
