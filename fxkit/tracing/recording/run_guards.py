"""The guards of a recorded run: on arguments, environment, and what was found on the way."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from fxkit.ir.types import TensorType
from fxkit.torch_adapters.layers import children_of
from fxkit.tracing.guarding import guards as g
from fxkit.tracing.guarding.aliasing_guards import (
    AliasGuard,
    OverlapGuard,
    alias_groups,
    storage_groups,
)
from fxkit.tracing.guarding.module_guards import ModuleGuard, hook_counts
from fxkit.tracing.guarding.state_guards import ExtraGuard
from fxkit.tracing.recorder.frames import source_text
from fxkit.tracing.recorder.recorded import Outside
from fxkit.tracing.recorder.recorder import Recorder
from fxkit.tracing.values.scalar_inputs import with_free
from fxkit.tracing.values.structure import Parts


def structure_guard(parts: Parts, free: frozenset[int] = frozenset()) -> g.StructureGuard:
    """Return the guard on the nesting and on the plain values of arguments.

    Args:
        parts: The arguments.
        free: Which tokens are numbers that may be others.
    """
    return g.StructureGuard(
        "the arguments that are not tensors",
        tokens=tuple(with_free(parts.tokens, free)),
        paths=tuple(parts.paths),
        keep=tuple(parts.alive),
        free=free,
    )


def module_guards(modules: list[tuple[str, torch.nn.Module, bool]]) -> list[g.Guard]:
    """Return a guard for each `(path, module, training flag)`."""
    return [
        ModuleGuard(
            path or "the module",
            module=module,
            training=training,
            children=tuple(children_of(module).values()),
            hooks=hook_counts(module.__dict__),
        )
        for path, module, training in modules
    ]


def tensor_guard(
    index: int, tensor: torch.Tensor, kind: TensorType, path: str, use: str | None
) -> g.Guard:
    """Return the guard on one argument that is a tensor.

    Args:
        index: Which of the tensor arguments it is.
        tensor: The argument.
        kind: Its type before the program ran.
        path: Where it lies in the arguments.
        use: The user's line that uses it first, or None.
    """
    return g.TensorGuard(
        path,
        source=use,
        index=index,
        kind=type(tensor),
        type=kind,
        layout=tensor.layout,
    )


def alias_guards(tensors: list[torch.Tensor], *, is_written: bool) -> list[g.Guard]:
    """Return the guards on which tensor arguments are one, and where something is written overlap.

    Args:
        tensors: The tensor arguments.
        is_written: Whether the graph writes to what is older than it.
    """
    found: list[g.Guard] = [
        AliasGuard("identity of the tensor arguments", groups=alias_groups(tensors))
    ]
    if is_written:
        groups = storage_groups(tensors)
        found.append(OverlapGuard("memory of the tensor arguments", groups=groups))
    return found


def outside_guards(found: Iterable[Outside]) -> list[g.Guard]:
    """Return a guard for each tensor of the program's state that the graph holds."""
    return [
        g.OutsideGuard(
            outside.places[0].name,
            source=_line(outside.node),
            places=outside.places,
            tensor=outside.tensor,
            type=outside.type,
        )
        for outside in found
    ]


def extra_guards(
    extras: Iterable[Outside], others: Iterable[Outside], *, is_written: bool
) -> list[g.Guard]:
    """Return a guard for each tensor of the program's state that is an input of the graph.

    Args:
        extras: The tensors.
        others: The tensors that the graph holds, from which they have to lie apart.
        is_written: Whether the graph writes to what is older than it.
    """
    held = tuple(item.tensor for item in others)
    return [
        ExtraGuard(
            item.places[0].name,
            source=_line(item.node),
            places=item.places,
            kind=type(item.tensor),
            type=item.type,
            layout=item.tensor.layout,
            apart=held if is_written else None,
        )
        for item in extras
    ]


def value_guards(recorder: Recorder) -> tuple[g.ValueGuard, ...]:
    """Return a guard for each value of a tensor that the program turned into a Python value."""
    return tuple(
        g.ValueGuard(read.what, source=_line(read.check), value=read.expected, node=read.check.name)
        for read in recorder.reads
    )


def first_use(node: fx.Node) -> str | None:
    """Return the user's line that uses a node first, or None."""
    return next((line for line in map(_line, node.users) if line), None)


def _line(node: fx.Node) -> str | None:
    return source_text(node.meta.get("stack_trace"))
