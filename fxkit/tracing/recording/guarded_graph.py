"""A guarded graph: one graph of a program, the guards under which it serves, how it is run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fxkit.torch_adapters.guards import GlobalStateGuard, TensorGuards
from fxkit.tracing.guarding import guards as g
from fxkit.tracing.guarding.aliasing_guards import OverlapGuard, SameTensorGuard, alias_groups
from fxkit.tracing.guarding.size_guards import FreeTensorGuard, SizeGuard
from fxkit.tracing.guarding.state_containers import ABSENT, GuardedContainer
from fxkit.tracing.guarding.state_guards import AttributesGuard, StateWatch
from fxkit.tracing.recorder.recorded import OpaqueCall
from fxkit.tracing.recorder.state_restore import MemorySnapshot, Mutations
from fxkit.tracing.values.effects import quietly
from fxkit.tracing.values.mode_scopes import RegionModes
from fxkit.tracing.values.scalar_inputs import ScalarInput, with_free
from fxkit.tracing.values.sources import ValueSource
from fxkit.tracing.values.structure import Blueprint

Backend = Callable[[fx.GraphModule, tuple[torch.Tensor, ...]], Callable[..., Any]]


class Repeat(Exception):
    """A torch call of a graph failed, and nothing is left changed."""


@dataclass(frozen=True, slots=True)
class Extra:
    """A tensor of the program's state that is read anew at each call and given to the graph.

    Attributes:
        name: The name of its placeholder.
        places: Where it lies; the same tensor in all of them.
    """

    name: str
    places: tuple[ValueSource, ...]


@dataclass(frozen=True, slots=True)
class RecordedEffects:
    """What the program writes to one place of its state.

    Attributes:
        holder: The dict, list, cell or object.
        changes: The new values by key; None where a key is removed.
        keys: All keys afterwards, in order.
    """

    holder: GuardedContainer
    changes: dict[Any, Blueprint | None]
    keys: tuple[Any, ...]

    def write(self, tensors: list[Any], containers: list[Any], memo: dict[int, Any]) -> None:
        """Write the values of this call."""
        built = {
            key: ABSENT if value is None else value.build(tensors, containers, memo)
            for key, value in self.changes.items()
        }
        before = self.holder.read()
        now = {key: built[key] if key in built else before[key] for key in self.keys}
        self.holder.write(built, now)


@dataclass(slots=True)
class GuardedGraph:
    """One graph of a program and the facts under which it may stand in for it.

    Attributes:
        graph_module: The graph.
        guards: What is checked before the graph runs.
        value_guards: What is checked inside it.
        undo: What may have to be taken back: what the graph changes before the last of its value
            guards, and all of it where the program handles exceptions.
        changes: What the graph changes in all.
        has_regions: Whether it changes gradient, inference or autocast modes on its way.
        result: How the program's result is put together from the graph's outputs.
        mutations: Which containers among the arguments are filled anew, and with what.
        is_single: Whether the graph's one output is the result, and no container or state is
            written to.
        outside: The tensors of the program's state that the graph holds, by their targets in it.
        run: What a backend made of it, which is called in its place; None without a backend.
        extras: Tensors of the program's state that are inputs of the graph.
        is_stale: Whether the graph was changed after the backend had compiled it.
        numbers: Numbers that are inputs of the graph, behind the arguments' tensors.
        replays: What the program writes to its state.
        watch: Tells quickly that the state which is guarded is as it was; None without such.
        opaque_calls: The calls in it that stay as they are.
        can_run_again: Whether the program can be run in its place when a call in it fails.
    """

    graph_module: fx.GraphModule
    guards: tuple[g.Guard, ...]
    value_guards: tuple[g.ValueGuard, ...]
    undo: Mutations
    changes: Mutations
    has_regions: bool
    result: Blueprint
    mutations: tuple[tuple[int, Blueprint], ...]
    is_single: bool
    outside: dict[str, torch.Tensor]
    run: Callable[..., Any] | None = None
    extras: tuple[Extra, ...] = ()
    replays: tuple[RecordedEffects, ...] = ()
    watch: StateWatch | None = None
    opaque_calls: tuple[OpaqueCall, ...] = ()
    can_run_again: bool = True
    numbers: tuple[ScalarInput, ...] = ()
    is_stale: bool = False
    _quick: _Quick | None = field(default=None, repr=False)

    @property
    def has_opaque_calls(self) -> bool:
        """Whether probing it would have effects."""
        return bool(self.opaque_calls)

    def mismatch(self, call: g.GuardedCall) -> g.Mismatch | None:
        """Return the first difference between `call` and what the graph expects on entry."""
        if self._quick is not None and self._quick.holds(call):
            return None
        for guard in self.guards:
            found = guard.check(call)
            if found is not None:
                return found
        if self._quick is None and self.watch is not None:
            self._quick = _Quick.of(self, call)
        return None

    def __call__(self, call: g.GuardedCall) -> Any:
        """Run the graph.

        Raises:
            GuardFailed: When a value guard fails; all that the graph changed is taken back.
            Repeat: When a torch call failed and all that the graph changed is taken back: the
                program itself may handle the exception.
        """
        return self._finish(call, self._execute(call, self.undo, self.run or self._forward()))

    def serves(self, other: GuardedGraph) -> bool:
        """Tell whether this graph of symbolic sizes holds wherever another one does."""
        if self.value_guards != other.value_guards or self.guards[0] != other.guards[0]:
            return False
        mine, theirs = self.guards[1], other.guards[1]
        assert isinstance(mine, g.StructureGuard) and isinstance(theirs, g.StructureGuard)
        if mine.tokens != theirs.tokens:
            return False
        types = [it.type for it in other.guards if isinstance(it, (g.TensorGuard, FreeTensorGuard))]
        return all(
            guard.has_type(types[guard.index])
            for guard in self.guards
            if isinstance(guard, (g.TensorGuard, FreeTensorGuard))
        ) and all(guard.check_types(types) for guard in self.guards if isinstance(guard, SizeGuard))

    def probe(self, call: g.GuardedCall) -> g.Mismatch | None:
        """Return the first value guard that fails for `call`, and leave everything as it was."""
        if self.has_opaque_calls:
            return None
        snapshot = self._snapshot(call, self.changes)
        try:
            with torch.no_grad(), quietly():
                self._execute(call, Mutations(), self._forward())
        except g.GuardFailed as failed:
            return failed.mismatch
        except Exception as error:
            cause = error.__cause__ if isinstance(error, Repeat) else error
            return g.Mismatch("the graph", "able to run", f"{type(cause).__name__}: {cause}")
        finally:
            snapshot.restore()
        return None

    def _forward(self) -> Callable[..., Any]:
        """Return the graph module's code, without torch.fx's own print of each exception in it."""
        return self.graph_module.forward

    def _execute(self, call: g.GuardedCall, undo: Mutations, run: Callable[..., Any]) -> Any:
        snapshot = self._snapshot(call, undo) if undo else None
        modes = RegionModes.now() if self.has_regions else None
        try:
            if self.extras or self.numbers:
                return run(*self.inputs(call))
            return run(*call.parts.tensors)
        except BaseException as error:
            if modes is not None:
                modes.restore(error)
            can_repeat = isinstance(error, Exception) and undo == self.changes
            can_repeat = can_repeat and self.can_run_again
            if not (can_repeat or isinstance(error, g.GuardFailed)):
                raise
            if snapshot is not None:
                snapshot.restore()
            if isinstance(error, g.GuardFailed):
                raise
            raise Repeat from error

    def inputs(self, call: g.GuardedCall) -> list[Any]:
        """Return what the graph is given for `call`."""
        numbers = [number.read(call.parts) for number in self.numbers]
        extras = [extra.places[0].read() for extra in self.extras]
        return [*call.parts.tensors, *numbers, *extras]

    def _snapshot(self, call: g.GuardedCall, undo: Mutations) -> MemorySnapshot:
        return MemorySnapshot(self._named(call, undo), undo.is_random)

    def _named(self, call: g.GuardedCall, undo: Mutations) -> list[torch.Tensor]:
        tensors = [call.parts.tensors[index] for index in undo.leaves]
        tensors += [self.outside[name] for name in undo.outside if name in self.outside]
        return tensors + [x.places[0].read() for x in self.extras if x.name in undo.outside]

    def _finish(self, call: g.GuardedCall, values: Any) -> Any:
        if self.is_single:
            return values
        tensors, containers, memo = list(values), call.parts.containers, {}
        result = self.result.build(tensors, containers, memo)
        for number, content in self.mutations:
            content.refill(containers[number], tensors, containers, memo)
        for replay in self.replays:
            replay.write(tensors, containers, memo)
        return result


# Guards that the quick check asks one by one.
_OTHERS = (OverlapGuard, SameTensorGuard, FreeTensorGuard, SizeGuard, AttributesGuard)


class _Quick:
    """Checks all guards of a graph at once, in C where torch can; never says yes in error.

    It is made from a call for which the guards hold. A no means nothing: the guards decide then.
    """

    def __init__(self, guarded: GuardedGraph, call: g.GuardedCall) -> None:
        modes = guarded.guards[0]
        assert isinstance(modes, g.ModesGuard)
        self._free = next(
            guard.free for guard in guarded.guards if isinstance(guard, g.StructureGuard)
        )
        self._tokens = with_free(call.parts.tokens, self._free).copy()
        self._keep = call.parts.alive
        self._modes = modes
        self._global = GlobalStateGuard()
        self._inference = modes.ambient.inference
        self._outside = list(guarded.outside.values())
        arguments = call.parts.tensors
        free = {it.index: it.free for it in guarded.guards if isinstance(it, FreeTensorGuard)}
        sizes, strides = _pinned((*arguments, *self._outside), free) if free else (None, None)
        self._tensors = TensorGuards(
            *arguments,
            *self._outside,
            dynamic_dims_sizes=sizes,
            dynamic_dims_strides=strides,
        )
        self._watch = guarded.watch
        self._groups = alias_groups(arguments)
        self._rest = [guard for guard in guarded.guards if isinstance(guard, _OTHERS)]

    @classmethod
    def of(cls, guarded: GuardedGraph, call: g.GuardedCall) -> _Quick | None:
        """Return the quick check of a graph; None where it has to be checked guard by guard."""
        strided = (*call.parts.tensors, *guarded.outside.values())
        if guarded.watch is None or guarded.extras or not strided:
            return None
        if any(tensor.layout is not torch.strided for tensor in strided):
            return None
        return None if call.has_modes else cls(guarded, call)

    def holds(self, call: g.GuardedCall) -> bool:
        """Tell whether all guards hold for sure."""
        parts = call.parts
        arguments = parts.tensors
        return (
            with_free(parts.tokens, self._free) == self._tokens
            and not call.has_modes
            and self._global.check()
            and torch.is_inference_mode_enabled() is self._inference
            and self._tensors.check(*arguments, *self._outside)
            and (len(arguments) < 2 or alias_groups(arguments) == self._groups)
            and self._watch is not None
            and self._watch.holds()
            and all(guard.check(call) is None for guard in self._rest)
        )


def _pinned(tensors: tuple[torch.Tensor, ...], free: dict[int, frozenset[int]]) -> tuple[Any, Any]:
    """Return sizes and strides as `TensorGuards` takes them: None for what it is not to compare."""
    sizes, strides = [], []
    for index, tensor in enumerate(tensors):
        axes = free.get(index, frozenset())
        sizes.append([None if a in axes else size for a, size in enumerate(tensor.shape)])
        strides.append([None if axes else stride for stride in tensor.stride()])
    return sizes, strides
