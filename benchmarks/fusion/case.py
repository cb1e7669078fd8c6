"""What is timed: a program and its inputs; cases of a kind form a family with a goal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Work:
    """A program, ready to be called.

    Attributes:
        program: A function or a module; of one tensor, or of several.
        args: Its inputs.
        wanted: What gradients are asked for; a step is the forward and the backward then.
    """

    program: Callable[..., Any]
    args: tuple[Tensor, ...]
    wanted: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class Case:
    """Work by name.

    Attributes:
        name: What is computed, with the shape; its first word chooses it.
        make: Makes the work; the same in every run.
        in_microseconds: The most that a call may take, where that is a goal.
    """

    name: str
    make: Callable[[], Work]
    in_microseconds: float | None = None


@dataclass(frozen=True)
class Family:
    """Cases of a kind.

    Attributes:
        cases: The cases.
        goal: How many times as fast as torch.compile they are meant to be, as a geometric mean.
        is_memory_bound: Whether they are meant to come near the time of a copy.
        has_roofline: Whether a bound by bytes and operations says anything of them.
    """

    cases: tuple[Case, ...]
    goal: float = 1.0
    is_memory_bound: bool = False
    has_roofline: bool = True


def of_function(
    name: str,
    program: Callable[..., Any],
    *shapes: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    in_microseconds: float | None = None,
) -> Case:
    """Make a case of a function of tensors with normal random elements.

    Args:
        name: Name of the case.
        program: The function.
        shapes: Shapes of its inputs.
        dtype: Their dtype.
        in_microseconds: See `Case`.
    """

    def make() -> Work:
        generator = torch.Generator().manual_seed(0)
        args = tuple(torch.randn(*shape, generator=generator).to(dtype) for shape in shapes)
        return Work(program, args)

    return Case(name, make, in_microseconds)


def of_module(
    name: str, make: Callable[[], torch.nn.Module], *shapes: tuple[int, ...], **options: Any
) -> Case:
    """Make a case of a module, without gradients, on tensors with normal random elements."""

    def work() -> Work:
        torch.manual_seed(0)
        module = make().eval().requires_grad_(False)
        return Work(module, tuple(torch.randn(*shape) for shape in shapes))

    return Case(name, work, **options)
