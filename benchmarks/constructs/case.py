"""What a construct is: a program, the arguments of two kinds of call, and what changes between."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Arguments = Callable[[], tuple[Any, ...]]
CALLS = "AABBA"


@dataclass(frozen=True)
class Case:
    """One construct of model code, set up anew.

    Attributes:
        fn: The program.
        a: Returns the arguments of a call of kind A, anew each time.
        b: Those of kind B; as for A when left out.
        change: Called with the kind before the first call of each run of that kind.
        state: Returns the Python state that the program may change.
    """

    fn: Callable[..., Any]
    a: Arguments
    b: Arguments | None = None
    change: Callable[[str], None] | None = None
    state: Callable[[], Any] | None = None

    def arguments(self, kind: str) -> tuple[Any, ...]:
        """Return fresh arguments for a call."""
        return (self.a if kind == "A" or self.b is None else self.b)()


Make = Callable[[], Case]
CONSTRUCTS: dict[str, Make] = {}


def construct(make: Make) -> Make:
    """Register a function that sets a construct up."""
    CONSTRUCTS[make.__name__] = make
    return make


def x(*shape: int) -> torch.Tensor:
    """Return the same small tensor at each call."""
    shape = shape or (3, 4)
    count = torch.Size(shape).numel()
    return torch.linspace(-1.0, 2.0, count).reshape(shape)
