"""The guards of a cache entry in a form that the C binding can check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fxkit.ir.types import TensorType
from fxkit.torch_adapters.guards import GlobalStateGuard
from fxkit.torch_adapters.operators import can_read_keys, dispatch_keys
from fxkit.tracing.guarding import guards as g
from fxkit.tracing.guarding.aliasing_guards import AliasGuard, alias_groups
from fxkit.tracing.guarding.module_guards import ModuleGuard
from fxkit.tracing.guarding.size_guards import FreeTensorGuard, SizeGuard
from fxkit.tracing.guarding.state_guards import (
    AttributesGuard,
    EmptyGuard,
    StateGuard,
    WatchedState,
)
from fxkit.tracing.recording.guarded_graph import GuardedGraph

# All that these ask is asked by the facts below too.
_KNOWN = (
    g.ModesGuard,
    g.StructureGuard,
    g.TensorGuard,
    AliasGuard,
    ModuleGuard,
    g.OutsideGuard,
    StateGuard,
    EmptyGuard,
    AttributesGuard,
    FreeTensorGuard,
    SizeGuard,
)

_OF_TENSORS = (g.TensorGuard, FreeTensorGuard)


@dataclass(frozen=True)
class EntryFacts:
    """The facts under which a graph may stand in for a call of nothing but tensors.

    Attributes:
        arguments: The type of each argument.
        keys: Their dispatch keys, as a number.
        groups: For each argument the first that is the same object.
        outside: Tensors of the program whose types may not have changed.
        check_globals: Tells whether torch's global state is as it was.
        state: The program's own state.
        finish: Makes what the program returns of the graph's results; None where it is the result.
    """

    arguments: tuple[g.TensorGuard, ...]
    keys: tuple[int, ...]
    groups: tuple[int, ...]
    outside: tuple[torch.Tensor, ...]
    check_globals: Callable[[], bool]
    state: WatchedState
    finish: Callable[[Any], Any] | None


def entry_facts(guarded: GuardedGraph, args: tuple[Any, ...]) -> EntryFacts | None:
    """Return the facts of a graph that holds for this call; None where they are not so simple.

    They are those of a graph that changes nothing, whose arguments are all tensors, and whose
    guards are all of the usual kinds. Where sizes are free, they are those of this call.
    """
    if not (can_read_keys and _is_simple(guarded)) or guarded.watch is None:
        return None
    call = g.GuardedCall.of(args, {})
    if call.has_modes or guarded.mismatch(call) is not None:
        return None
    modes = next(guard for guard in guarded.guards if isinstance(guard, g.ModesGuard))
    if modes.ambient.autocast is not None or modes.defaults[1] is not None:
        return None
    arguments = tuple(
        _exact(guard, call) for guard in guarded.guards if isinstance(guard, _OF_TENSORS)
    )
    if call.parts.tokens != [("tensor",)] * len(arguments):
        return None
    return EntryFacts(
        arguments,
        tuple(dispatch_keys(tensor) for tensor in call.parts.tensors),
        alias_groups(call.parts.tensors),
        tuple(guarded.outside.values()),
        GlobalStateGuard().check,
        guarded.watch.state(),
        None if guarded.is_single else _builder(guarded),
    )


def _exact(guard: g.TensorGuard | FreeTensorGuard, call: g.GuardedCall) -> g.TensorGuard:
    """Return the guard on an argument with the sizes that it has in a call."""
    if isinstance(guard, g.TensorGuard):
        return guard
    found = TensorType.of(call.parts.tensors[guard.index])
    return g.TensorGuard(guard.what, guard.index, guard.kind, found, torch.strided)


def _is_simple(guarded: GuardedGraph) -> bool:
    has_more = (
        guarded.value_guards
        or guarded.undo
        or guarded.changes
        or guarded.has_regions
        or guarded.mutations
        or guarded.extras
        or guarded.numbers
        or guarded.replays
        or guarded.has_opaque_calls
        or not guarded.can_run_again
    )
    return not has_more and all(type(guard) in _KNOWN for guard in guarded.guards)


def _builder(guarded: GuardedGraph) -> Callable[[Any], Any]:
    build = guarded.result.build
    return lambda values: build(list(values), [], {})
