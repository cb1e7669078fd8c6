"""What each transformation of a loop nest has in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace

from fxkit.lower.loop_ir.loop_nest import LoopNest, ThreadMapping
from fxkit.lower.loop_ir.nest_statements import (
    Block,
    For,
    LoopKind,
)

_OF_THREADS = (LoopKind.BLOCK, LoopKind.SPLIT, LoopKind.THREAD)


class NestPass(ABC):
    """One transformation of loop nests: `apply` returns a nest that computes the same.

    Implementations are frozen dataclasses; their docstrings show a nest before and after.
    """

    @abstractmethod
    def apply(self, nest: LoopNest) -> LoopNest:
        """Return the nest transformed, or as it is where there is nothing to do."""

    @property
    def name(self) -> str:
        """Name of the pass: that of its class."""
        return type(self).__name__


def mapping_of(nest: LoopNest) -> ThreadMapping:
    """Return how work is divided among threads; one thread has it all where it is not chosen."""
    return nest.mapping or ThreadMapping(1, max(0, len(nest.kernel.sizes) - 1), 1)


def of_each_thread(nest: LoopNest, change: Callable[[Block], Block]) -> LoopNest:
    """Return a nest in which what one thread runs is changed, in each launch."""

    def changed(body: Block) -> Block:
        outer = [s for s in body if isinstance(s, For) and s.kind in _OF_THREADS]
        if not outer:
            return change(body)
        return tuple(
            replace(s, body=changed(s.body)) if isinstance(s, For) and s in outer else s
            for s in body
        )

    return replace(nest, body=changed(nest.body))
