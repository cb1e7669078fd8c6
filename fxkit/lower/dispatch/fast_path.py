"""The fast path of a call: guards and program in one call of the C binding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fxkit.ir.types import TensorType
from fxkit.lower.compiling.compiled_module import CompiledModule
from fxkit.lower.dispatch.shape_cache import ShapeCache
from fxkit.lower.runtime import binding
from fxkit.lower.runtime.type_specs import is_plain, spec_of
from fxkit.lower.training.stages import StagedModule
from fxkit.lower.training.training_module import TrainingModule
from fxkit.torch_adapters.layers import forward_hooks_of, forward_pre_hooks_of
from fxkit.tracing.captured import Captured
from fxkit.tracing.guarding.state_containers import ABSENT
from fxkit.tracing.guarding.table_watch import UNGUARDED, WatchedTable
from fxkit.tracing.recording.entry_facts import EntryFacts, entry_facts
from fxkit.tracing.recording.guarded_graph import GuardedGraph

# More are compared pair by pair for too long.
_MAX_ARGUMENTS = 32

# What the binding has room for on its stack.
_MAX_TABLES = 4096

_MAX_TRIES = 3

# Each is asked in turn; those that were not used for longest are given up.
_MAX_PATHS = 16

# What can be run in the place of a graph.
Module = CompiledModule | TrainingModule | StagedModule


@dataclass(frozen=True, slots=True, eq=False)
class FastPath:
    """A quick path into a captured program, past Python.

    Attributes:
        entry: A callable of the arguments.
        guarded: The graph that it runs.
        module: What runs in the graph's place, which is for certain sizes where they are free.
        finish: Makes what the program returns of what the graph returns; None: they are the same.
        miss: What the entry returns where it is not sure that the graph serves.
    """

    entry: Callable[..., Any]
    guarded: GuardedGraph
    module: Module
    finish: Callable[[Any], Any] | None
    miss: Any


class FastPaths:
    """The quick paths into a captured program, the last used one first.

    Args:
        captured: The program.
        may_leave: Whether the program itself may run in the place of a graph without kernels, as
            nothing that changes results was done to the graph.

    Attributes:
        paths: The fast paths.
    """

    def __init__(self, captured: Captured, *, may_leave: bool = False) -> None:
        self.paths: tuple[FastPath, ...] = ()
        self._captured = captured
        self._may_leave = may_leave
        self._tries: dict[int, tuple[Module, int]] = {}

    def use(self, path: FastPath) -> None:
        """Note which path was taken, if it is another one than the last."""
        self.paths = (path, *(other for other in self.paths if other is not path))
        self._captured.note_run(path.guarded)

    def learn(self, args: tuple[Any, ...]) -> None:
        """Make a fast path of the call that the captured program has just served, if possible."""
        if binding.is_awaited():
            return
        kept = self._captured.kept
        self.paths = tuple(path for path in self.paths if any(path.guarded is it for it in kept))
        if not kept or not self._captured.whole:
            return
        guarded, module = kept[0], kept[0].run
        if isinstance(module, ShapeCache):
            is_plain_call = all(issubclass(type(arg), torch.Tensor) for arg in args)
            module = module.module_for(args) if is_plain_call else None
        if not isinstance(module, Module) or any(path.module is module for path in self.paths):
            return
        tries = self._tries.get(id(module), (module, 0))[1]
        if tries >= _MAX_TRIES:
            return
        self._tries[id(module)] = (module, tries + 1)
        facts = entry_facts(guarded, args)
        if facts is not None and (path := self._path(guarded, module, facts, args)) is not None:
            self.paths = (path, *self.paths[: _MAX_PATHS - 1])

    def _path(
        self,
        guarded: GuardedGraph,
        module: Module,
        facts: EntryFacts,
        args: tuple[torch.Tensor, ...],
    ) -> FastPath | None:
        if self._may_leave and isinstance(module, CompiledModule) and not module.has_kernels:
            entry, finish = make_entry(facts, module, _noted(module, self._captured.fn)), None
        else:
            entry, finish = make_entry(facts, module, _program(module, facts, args)), facts.finish
        return None if entry is None else FastPath(entry, guarded, module, finish, binding.miss())


def make_entry(facts: EntryFacts, module: Module, program: Callable[..., Any] | None) -> Any | None:
    """Return a callable of the arguments; None where the binding can't check all facts.

    It returns the binding's `MISS` where it can't tell that the facts hold: another entry is asked
    then. It is made in the modes in which it is to be called.

    Args:
        facts: What has to hold.
        module: The module of which it is.
        program: What is called when all facts hold, if there is such.
    """
    native = binding.loaded()
    if native is None or program is None or len(facts.arguments) > _MAX_ARGUMENTS:
        return None
    if not all(is_plain(guard.type) for guard in facts.arguments):
        return None
    is_native = isinstance(program, native.Program)
    specs = [None if is_native else spec_of(guard.type) for guard in facts.arguments]
    if any(
        not isinstance(t, torch.Tensor) or not binding.can_read(t.device) for t in facts.outside
    ):
        return None
    if any(t.layout is not torch.strided for t in facts.outside):
        return None
    state = facts.state
    if len(state.tables) > _MAX_TABLES:
        return None
    return native.Entry(
        program,
        is_native,
        tuple(
            (guard.kind, keys, guard.type.requires_grad, first, spec)
            for guard, keys, first, spec in zip(
                facts.arguments, facts.keys, facts.groups, specs, strict=True
            )
        ),
        tuple(
            (t, type(t), binding.keys_of(t), t.requires_grad, spec_of(TensorType.of(t)))
            for t in facts.outside
        ),
        (torch.is_grad_enabled(), *native.read_local_keys()),
        facts.check_globals,
        state.holds,
        state.has_more,
        tuple(_table(watched, native) for watched in state.tables),
        state.lists,
        state.cells,
        state.parts,
        (*state.empties, forward_hooks_of(module), forward_pre_hooks_of(module)),
    )


def _noted(module: CompiledModule, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return the program itself; its module counts the calls that eager runs."""

    def run(*args: Any) -> Any:
        module.note_eager_call()
        return fn(*args)

    return run


def _program(
    module: Module, facts: EntryFacts, args: tuple[torch.Tensor, ...]
) -> Callable[..., Any] | None:
    """Return what a module runs when all facts hold; None where it is not for such arguments."""
    types = [guard.type for guard in facts.arguments]
    if not isinstance(module, CompiledModule):
        return module.way_for(args) if all(map(is_plain, types)) else None
    known = module.input_types
    is_same = len(known) == len(types) and all(map(_is_same, facts.arguments, known))
    return module.native_program if is_same else None


def _is_same(guard: Any, known: Any) -> bool:
    ours = guard.type
    return (
        isinstance(known, TensorType)
        and (ours.shape, ours.dtype, ours.stride) == (known.shape, known.dtype, known.stride)
        and ours.device == known.device
    )


def _table(watched: WatchedTable, native: Any) -> tuple[Any, ...]:
    stand_ins = {id(ABSENT): native.MISS, id(UNGUARDED): native.FREE}
    entries = watched.entries
    if watched.is_whole:  # what it lacks is told by its keys
        entries = {key: value for key, value in entries.items() if value is not ABSENT}
    values = tuple(stand_ins.get(id(value), value) for value in entries.values())
    return (
        *(watched.table, entries, tuple(entries), values),
        *(watched.is_whole, watched.is_guarded, watched.version),
    )
