"""Dynamic inputs: sizes that were asked for or seen to change, and scalars that were."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from fxkit.errors import UnsupportedError
from fxkit.ir.types import TensorType
from fxkit.tracing.guarding import guards as g
from fxkit.tracing.guarding import state_containers as h
from fxkit.tracing.guarding.size_guards import FreeTensorGuard
from fxkit.tracing.guarding.state_guards import StateGuard
from fxkit.tracing.parameter_names import placeholder_names
from fxkit.tracing.values.scalar_inputs import SCALAR_KINDS, ScalarPlace, with_free
from fxkit.tracing.values.structure import Parts

Request = bool | Mapping[str, Any] | None
FreeAxes = dict[int, frozenset[int]]


def check_request(request: Any) -> None:
    """Raise where `dynamic` is of another kind than what `capture` takes.

    Raises:
        UnsupportedError: When it is.
    """
    if request is None or isinstance(request, (bool, Mapping)):
        return
    raise UnsupportedError(
        f"expected dynamic to be None, True, False or a dict, got {type(request).__name__}",
        hint="write dynamic={'x': 0} to let the first axis of x have any size",
    )


def requested(
    request: Request, fn: Callable[..., Any], call: g.GuardedCall, *, is_first: bool
) -> FreeAxes:
    """Return the axes that a request names, for each tensor argument by its index.

    Args:
        request: True for all axes; or for each argument, by name, an axis, some axes, or a dict
            whose keys are axes. An argument that holds several tensors means all of them.
        fn: The program.
        call: The arguments.
        is_first: Whether a name or an axis that the call does not have is an error.

    Raises:
        UnsupportedError: When it is, and there is no such argument or axis.
    """
    tensors = call.parts.tensors
    if request is True:
        return {index: frozenset(range(tensor.dim())) for index, tensor in enumerate(tensors)}
    if not isinstance(request, Mapping):
        return {}
    names = placeholder_names(fn, call.parts.tensor_paths)
    found: FreeAxes = {}
    for name, axes in request.items():
        indices = _indices(str(name), names, call.parts.tensor_paths)
        if not indices and is_first:
            raise UnsupportedError(
                f"expected the name of a tensor argument in dynamic, got {name!r}",
                hint=f"the tensor arguments are {', '.join(names) or 'none'}",
            )
        for index in indices:
            found[index] = found.get(index, frozenset()) | _axes(
                name, axes, tensors[index], is_first
            )
    return found


def _indices(name: str, names: list[str], paths: list[str]) -> list[int]:
    return [
        index
        for index, (short, path) in enumerate(zip(names, paths, strict=True))
        if name in (short, path) or short.startswith(f"{name}_") or path.startswith(f"{name}[")
    ]


def _axes(name: str, axes: Any, tensor: torch.Tensor, is_first: bool) -> frozenset[int]:
    wanted: Iterable[Any] = axes if isinstance(axes, Iterable) else (axes,)
    found = frozenset(wanted)
    rank = tensor.dim()
    fitting = {axis for axis in found if type(axis) is int and -rank <= axis < rank}
    if is_first and len(fitting) < len(found):
        raise UnsupportedError(
            f"expected axes of {name}, which has {rank}, got {axes!r}",
            hint="write an int, a tuple of ints, or a dict whose keys are ints",
        )
    return frozenset(axis % rank for axis in fitting)


def seen_to_change(guards: Iterable[tuple[g.Guard, ...]], call: g.GuardedCall) -> FreeAxes:
    """Return the axes whose sizes differ from those of a graph that would do otherwise.

    Args:
        guards: The guards of each graph.
        call: The call that none of them holds for.
    """
    now = [TensorType.of(tensor) for tensor in call.parts.tensors]
    for each in guards:
        found = _differing(each, call, now)
        if found:
            return found
    return {}


def _differing(guards: tuple[g.Guard, ...], call: g.GuardedCall, now: list[TensorType]) -> FreeAxes:
    found: FreeAxes = {}
    for guard in guards:
        if isinstance(guard, (g.TensorGuard, FreeTensorGuard)):
            axes = _axes_that_differ(guard.type, now[guard.index])
            if axes is None:
                return {}
            if isinstance(guard, FreeTensorGuard):
                axes |= guard.free
            if axes:
                found[guard.index] = axes
        elif isinstance(guard, g.StructureGuard) and guard.check(call) is not None:
            return {}
    return found


def _axes_that_differ(before: TensorType, now: TensorType) -> frozenset[int] | None:
    same = before.dtype is now.dtype and before.device == now.device
    if not same or before.requires_grad != now.requires_grad:
        return None
    if len(before.shape) != len(now.shape):
        return None
    pairs = zip(before.shape, now.shape, strict=True)
    return frozenset(axis for axis, (old, new) in enumerate(pairs) if old != new)


def changed_scalars(guards: Iterable[tuple[g.Guard, ...]], call: g.GuardedCall) -> set[ScalarPlace]:
    """Return the numbers that differ from those for which graphs were captured.

    Args:
        guards: The guards of each graph.
        call: The call that none of them holds for.
    """
    found: set[ScalarPlace] = set()
    for each in guards:
        for guard in each:
            if isinstance(guard, g.StructureGuard):
                found.update(_changed_arguments(guard, call.parts))
            elif isinstance(guard, StateGuard):
                found.update(_changed_entries(guard.holder))
    return found


def _changed_arguments(guard: g.StructureGuard, parts: Parts) -> Iterable[ScalarPlace]:
    tokens = with_free(parts.tokens, guard.free)
    if len(tokens) != len(guard.tokens):
        return []
    pairs = zip(guard.tokens, tokens, parts.paths, strict=True)
    differing = [(old, new, path) for old, new, path in pairs if old != new]
    if any(old[0] is not new[0] or old[0] not in SCALAR_KINDS for old, new, _ in differing):
        return []
    return [path for _, _, path in differing]


def _changed_entries(holder: h.GuardedContainer) -> Iterable[ScalarPlace]:
    now = holder.read()
    for key, before in holder.entries.items():
        current = now.get(key)
        if type(before) not in SCALAR_KINDS or type(current) is not type(before):
            continue
        if holder.is_guarded(key) and not h.is_same_value(current, before):
            yield id(holder.value), key
