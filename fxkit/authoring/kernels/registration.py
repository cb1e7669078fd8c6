"""The operator of a kernel in `torch.ops.fxkit`: schema, fake, vmap, autograd where there is one.

In a graph a kernel is one node, whose target is that operator. Called with what the kernel does not
serve, it computes its pattern.
"""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fxkit.errors import UnsupportedError
from fxkit.torch_adapters.operator_derivatives import register_pattern_derivatives

_lock = threading.Lock()
_numbers: dict[str, itertools.count[int]] = {}
_kept: list[torch.library.Library] = []  # what a library registers lives as long as it does

_SCHEMA_TYPES = {float: "float", int: "int", bool: "bool"}


def register_operator(
    name: str,
    captures: Sequence[tuple[str, type]],
    results: int,
    run: Callable[..., Any],
    reference: Callable[..., Any],
    gradient: Callable[..., Any] | None,
) -> Any:
    """Return a new operator.

    Args:
        name: What it is called; a number is added where that is taken.
        captures: Its arguments, each with its kind: `torch.Tensor`, float, int or bool.
        results: How many tensors it returns.
        run: Computes it.
        reference: Computes it on fake tensors.
        gradient: Computes the gradients of its tensors from those of its results, then what it was
            called with.
    """
    library = torch.library.Library("fxkit", "FRAGMENT")
    _kept.append(library)
    taken = _free_name(name)
    declared = [
        f"{'Tensor' if kind is torch.Tensor else _SCHEMA_TYPES[kind]} {capture}"
        for capture, kind in captures
    ]
    returned = "Tensor" if results == 1 else f"({', '.join(['Tensor'] * results)})"
    library.define(f"{taken}({', '.join(declared)}) -> {returned}")
    qualified = f"fxkit::{taken}"
    for key in ("CPU", "CUDA"):
        library.impl(taken, run, key)
    torch.library.register_fake(qualified, _distinct(reference), lib=library)
    torch.library.register_vmap(qualified, _batched(qualified), lib=library)
    places = [i for i, (_, kind) in enumerate(captures) if kind is torch.Tensor]
    overload = getattr(torch.ops.fxkit, taken).default
    _register_gradient(overload, library, reference, gradient, places, len(captures))
    return overload


def _free_name(name: str) -> str:
    plain = re.sub(r"\W", "_", name).strip("_") or "kernel"
    plain = plain if not plain[0].isdigit() else f"kernel_{plain}"
    with _lock:
        numbers = _numbers.setdefault(plain, itertools.count())
        while True:
            number = next(numbers)
            taken = f"{plain}_{number}" if number else plain
            if not hasattr(torch.ops.fxkit, taken):
                return taken


def _distinct(reference: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of fake tensors that returns a tuple, where there are several results."""

    def fake(*values: Any) -> Any:
        made = reference(*values)
        return tuple(made) if isinstance(made, (tuple, list)) else made

    return fake


def _batched(qualified: str) -> Callable[..., Any]:
    """Return the rule of vmap: a call for each of the batch, as a pattern may be anything."""
    namespace, name = qualified.split("::")

    def rule(info: Any, in_dims: tuple[int | None, ...], *values: Any) -> tuple[Any, Any]:
        operator = getattr(getattr(torch.ops, namespace), name).default
        count, places = info.batch_size, list(zip(values, in_dims, strict=True))
        if not count:  # one of zeros tells shapes
            places = [(v if d is None else _one_of_zeros(v, d), d) for v, d in places]
        made = [
            operator(*(v if dim is None else v.select(dim, row) for v, dim in places))
            for row in range(max(count, 1))
        ]
        if isinstance(made[0], tuple):
            stacked = tuple(torch.stack(parts)[:count] for parts in zip(*made, strict=True))
            return stacked, (0,) * len(stacked)
        return torch.stack(made)[:count], 0

    return rule


def _one_of_zeros(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    shape = list(tensor.shape)
    shape[dim] = 1
    return tensor.new_zeros(shape)


def _register_gradient(
    overload: Any,
    library: torch.library.Library,
    reference: Callable[..., Any],
    gradient: Callable[..., Any] | None,
    places: Sequence[int],
    count: int,
) -> None:
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*(inputs[place] for place in places))
        ctx.others = [None if place in places else inputs[place] for place in range(count)]

    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        values = list(ctx.others)
        for place, tensor in zip(places, ctx.saved_tensors, strict=True):
            values[place] = tensor
        assert gradient is not None
        made = gradient(*grads, *values)
        found = list(made) if isinstance(made, (tuple, list)) else [made]
        if len(found) != len(places):
            raise UnsupportedError(
                f"expected {len(places)} gradient(s), one for each operand of {overload}, got "
                f"{len(found)}",
                hint="gradient= returns one for each tensor, or None; numbers have none",
            )
        result: list[Any] = [None] * count
        for place, grad in zip(places, found, strict=True):
            result[place] = grad
        return tuple(result)

    register_pattern_derivatives(
        library, overload, _distinct(reference), gradient and backward, setup_context
    )
