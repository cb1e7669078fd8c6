"""Which input sizes of a graph are dynamic."""

from __future__ import annotations

import itertools
import math

import torch

from fxkit.lower.loop_ir.runtime_parameters import bits_of


class VaryingSizes:
    """The dimensions of a program's inputs that had other sizes before.

    Attributes:
        vary: Whether there are any.
    """

    def __init__(self) -> None:
        self._first: list[torch.Size] | None = None
        self._last: list[torch.Size] = []
        self._found: set[tuple[int, int]] = set()

    @property
    def vary(self) -> bool:
        """Whether any size was another one before."""
        return bool(self._found)

    def see(self, args: tuple[torch.Tensor, ...]) -> None:
        """Note the sizes of a program's inputs."""
        self._last = [arg.shape for arg in args]
        if self._first is None:
            self._first = self._last
        for number, (before, now) in enumerate(zip(self._first, self._last, strict=False)):
            if len(before) == len(now):
                pairs = enumerate(zip(before, now, strict=True))
                self._found |= {(number, d) for d, (one, other) in pairs if one != other}

    def numbers(self) -> set[int]:
        """Return the numbers that the varying sizes of the last inputs are likely to be behind.

        Those are the numbers of elements along neighbouring dimensions, some of which vary; as
        integers, and as the bits of floats.
        """
        found: set[int] = set()
        for number, shape in enumerate(self._last):
            for start, end in itertools.combinations(range(len(shape) + 1), 2):
                varying = [shape[d] for d in range(start, end) if (number, d) in self._found]
                if math.prod(varying) != 1:
                    found.add(math.prod(shape[start:end]))
        return found | {bits_of(float(number)) for number in found}
