"""The Python state of a recorded run: what to guard, and which writes to replay."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch

from fxkit.ir.types import TensorType
from fxkit.tracing.bytecode.call_hooks import can_hook, original
from fxkit.tracing.bytecode.living_functions import functions_of
from fxkit.tracing.environment.call_watch import Watcher
from fxkit.tracing.environment.environment_walk import EnvironmentWalk
from fxkit.tracing.environment.random_generators import check_handed_on, check_strangers
from fxkit.tracing.guarding import guards as g
from fxkit.tracing.guarding import state_containers as h
from fxkit.tracing.guarding.parts import PartsHolder
from fxkit.tracing.guarding.special_state import ArrayHolder, MemoHolder
from fxkit.tracing.guarding.state_guards import (
    AttributesGuard,
    EmptyGuard,
    StateGuard,
    StateWatch,
    given_attributes,
    is_asked,
)
from fxkit.tracing.recording.guarded_graph import RecordedEffects
from fxkit.tracing.values.refusals import Refusal
from fxkit.tracing.values.scalar_inputs import AnyScalar
from fxkit.tracing.values.sources import ValueSource
from fxkit.tracing.values.structure import Blueprint, Parts
from fxkit.tracing.values.symbolic_scalars import plain

Plan = Callable[[Any, str], Blueprint]


MAX_LEARNED = 1000


@dataclass(slots=True)
class Learned:
    """What earlier runs of a program have shown, for the captures that follow.

    Attributes:
        functions: Functions that ran although no walk had found them, with their names.
        codes: Code whose calls go through a hook.
        makers: Code that makes functions with such code.
        replaced: Places, as `(id of what holds them, key)`, whose tensors are replaced by others.
        numbers: Numbers that were seen to change, and are to be inputs of the next graph.
        fixed: Numbers that change and that no graph can take as inputs.
    """

    functions: list[tuple[Any, str]] = field(default_factory=list)
    replaced: set[tuple[int, Any]] = field(default_factory=set)
    codes: set[CodeType] = field(default_factory=set)
    makers: set[CodeType] = field(default_factory=set)
    numbers: set[Any] = field(default_factory=set)
    fixed: set[Any] = field(default_factory=set)

    def learn(self, codes: Iterable[CodeType], ran: Iterable[CodeType]) -> bool:
        """Note code whose calls are to go through a hook, and tell whether any is new.

        Args:
            codes: The code.
            ran: All code that ran; some of it makes functions with that code.
        """
        new = {code for code in map(original, codes) if can_hook(code)} - self.codes
        self.codes |= new
        found = bool(new)
        while new:
            new = {code for code in map(original, ran) if not new.isdisjoint(code.co_consts)}
            new -= self.makers
            self.makers |= new
        return found


class State:
    """What a program may read and write beside its arguments, as it was before the run.

    Args:
        fn: The program.
        parts: The arguments; the classes, functions and modules among them are looked into.
        learned: What earlier runs have shown.

    Attributes:
        before: What held values that the program has changed, and what it held before.
        free: Numbers that are inputs of the graph, as `(id of what holds them, key)`.
    """

    def __init__(self, fn: Any, parts: Parts, learned: Learned) -> None:
        kinds = {token[0] for token in parts.tokens if isinstance(token, tuple)}
        classes = [(kind, kind.__name__) for kind in kinds if isinstance(kind, type)]
        given = [(value, "an argument") for value in (*parts.alive, *_named_by_value(parts))]
        self.reach = EnvironmentWalk.of(fn, parts.modules, [*given, *classes, *learned.functions])
        self.watch = StateWatch([], [])
        self._tensors = parts.tensors
        self._learned = learned
        self._replaced = set(learned.replaced)
        self._codes: frozenset[CodeType] = frozenset()
        self.before: list[tuple[h.GuardedContainer, dict[Any, Any]]] = []
        self.free: set[tuple[int, Any]] = set()

    def finish(self, watcher: Watcher) -> None:
        """Close the books after the run.

        Raises:
            Refusal: When the state of an object can't be told, or when a function ran of which it
                is not known what it may read.
        """
        reach = self.reach
        reach.finish()
        self._codes = frozenset(watcher.codes)
        if reach.missed:
            self._learn(reach.missed, watcher)
        if reach.refusal is not None:
            raise reach.refusal
        given = given_attributes(self._tensors, reach.names_of_given)
        if given is not None:
            raise Refusal(f"the program may read or set .{given} of an argument")
        check_handed_on(reach)
        check_strangers(reach, watcher)
        self._check_foreign(watcher.foreign)
        self.watch = StateWatch(
            [holder for holder in reach.holders if _has_guards(holder)],
            [table for _, table in self._empties()],
        )

    def _check_foreign(self, foreign: dict[tuple[int, Any], str]) -> None:
        """Refuse where an opaque call changes what the program reads; other keys are its own."""
        if not foreign:
            return
        for holder in self.reach.holders:
            for (where, key), name in foreign.items():
                if where != id(holder.value):
                    continue
                is_named = not isinstance(holder, h.NamespaceHolder) or key in holder.entries
                if is_named and holder.is_guarded(key):
                    raise Refusal(f"an opaque call changes {name}, which the program may read")
                holder.foreign.add(key)

    def _learn(self, missed: list[CodeType], watcher: Watcher) -> None:
        learned = self._learned.functions
        known = {id(function) for function, _ in learned}
        found = [function for function in functions_of(missed) if id(function) not in known]
        if len(learned) + len(found) > MAX_LEARNED:
            found = []
        learned += [(function, function.__name__) for function in found]
        name = f"{watcher.codes[missed[0]].get('__name__')}.{missed[0].co_name}"
        raise Refusal(
            f"the program calls {name}, which it keeps where it can't be found",
            "call it once more: the next capture knows that function"
            if found
            else "keep it in a variable or an attribute, or mark what calls it with fxkit.opaque",
        )

    def has_memoised(self) -> bool:
        """Tell whether the program computed a memoised function, such as one that warns once."""
        memos = (holder for holder in self.reach.holders if isinstance(holder, MemoHolder))
        return any(memo.entries["misses"] != memo.read()["misses"] for memo in memos)

    def _empties(self) -> list[tuple[str, dict[Any, Any]]]:
        """Return the tables of modules that have to stay empty."""
        reach = self.reach
        return [it for it in reach.empties if is_asked(it[0], reach.names, reach.reads_all)]

    def check(self) -> None:
        """Raise where the program changed what can't be written again."""
        for holder in self.watch.touched():
            if isinstance(holder, ArrayHolder) and holder.changes():
                raise Refusal(f"the program writes to the NumPy array {holder.path}")
            if isinstance(holder, PartsHolder) and (changed := holder.difference()):
                raise Refusal(f"the program exchanges {holder.name_of(changed[0])}")
        for path, table in self._empties():
            if table:
                raise Refusal(f"the program adds to {path}")

    def replays(self, plan: Plan) -> tuple[RecordedEffects, ...]:
        """Return what the program wrote to its state."""
        found = []
        for holder in self.watch.touched():
            changes = {} if isinstance(holder, MemoHolder) else holder.changes()
            if changes:
                found.append(self._replay(holder, changes, plan))
        return tuple(found)

    def _replay(
        self, holder: h.GuardedContainer, changes: dict[Any, Any], plan: Plan
    ) -> RecordedEffects:
        self.before.append((holder, dict(holder.entries)))
        planned: dict[Any, Blueprint | None] = {}
        for key, value in changes.items():
            key = plain(key)
            planned[key] = None if value is h.ABSENT else plan(value, holder.name_of(key))
            if isinstance(value, torch.Tensor):
                self._replaced.add((id(holder.value), key))
        return RecordedEffects(holder, planned, tuple(map(plain, holder.read())))

    def is_replaced(self, places: Iterable[ValueSource]) -> bool:
        """Tell whether the tensor in some places is likely to be another one at the next call."""
        return any(_key(place) in self._replaced for place in places)

    def guards(self) -> list[g.Guard]:
        """Return a guard for each thing that holds state which the program may read."""
        for holder in self.reach.holders:
            if isinstance(holder, MemoHolder) and holder.keeps_plain_values():
                holder.entries = holder.read()
            if isinstance(holder, h.GlobalsHolder):
                holder.settle()
            for key, before in holder.entries.items():
                if (id(holder.value), key) in self._replaced and isinstance(before, torch.Tensor):
                    holder.lenient[key] = TensorType.of(before)
                elif self.free and (id(holder.value), key) in self.free:
                    holder.lenient[key] = AnyScalar(type(before))
            for key, kind in holder.lenient.items():
                holder.entries[key] = kind
        guarded = [holder for holder in self.reach.holders if _has_guards(holder)]
        found: list[g.Guard] = [
            StateGuard(holder.path or "the program", holder=holder, codes=self._codes)
            for holder in guarded
        ]
        found += [EmptyGuard(path, table=table) for path, table in self._empties()]
        found.append(AttributesGuard("the tensor arguments", names=self.reach.names))
        return found


def raw(holders: Iterable[h.GuardedContainer]) -> list[tuple[h.GuardedContainer, dict[Any, Any]]]:
    """Return what holders held that the run has changed."""
    return [
        (holder, dict(holder.entries))
        for holder in holders
        if not isinstance(holder, (MemoHolder, ArrayHolder)) and holder.changes()
    ]


def _named_by_value(parts: Parts) -> list[Any]:
    """Return the classes and members of enumerations among some arguments."""
    tokens = [token for token in parts.tokens if isinstance(token, tuple) and len(token) == 2]
    return [value for _, value in tokens if isinstance(value, (type, enum.Enum))]


def _has_guards(holder: h.GuardedContainer) -> bool:
    if isinstance(holder, h.NamespaceHolder) and not holder.copied:
        return bool(holder.entries)
    return True


def _key(place: ValueSource) -> tuple[int, Any]:
    holder = place.holder.value if isinstance(place.holder, h.Slots) else place.holder
    return id(holder), place.key


def replaced_tensors(guards: Iterable[g.Guard], *, parameters: bool) -> Iterable[tuple[int, Any]]:
    """Iterate over the places, as `Learned.replaced` has them, where another tensor lies now.

    Args:
        guards: Those of a graph.
        parameters: Whether they count where the tensor is a parameter.
    """
    for guard in guards:
        found = guard.holder.difference() if isinstance(guard, StateGuard) else None
        if found is None or not isinstance(guard, StateGuard):
            continue
        key, before, now = found
        was_tensor = isinstance(before, (torch.Tensor, TensorType))
        is_wanted = parameters or not isinstance(now, torch.nn.Parameter)
        if was_tensor and isinstance(now, torch.Tensor) and is_wanted:
            yield id(guard.holder.value), key
