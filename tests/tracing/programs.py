"""Where programs are put down that a captured one is compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Make = Callable[[], tuple[Any, list[tuple[Any, ...]]]]


class Programs:
    """A decorator that registers functions which return a program and its calls.

    Attributes:
        made: Name → the function, and how many graphs its calls take: one a set of facts.
    """

    def __init__(self) -> None:
        self.made: dict[str, tuple[Make, int]] = {}

    def __call__(self, *, graphs: int) -> Callable[[Any], Any]:
        """Register a function whose calls take so many graphs."""

        def register(make: Any) -> Any:
            self.made[make.__name__] = (make, graphs)
            return make

        return register


def x(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (3, 4)))
