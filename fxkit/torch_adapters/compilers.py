"""torch's own compiler: whether it is there, and how programs run without it."""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_LOCK = threading.Lock()
_stances: list[Any] = []
_inside = 0


def has_inductor() -> bool:
    """Tell whether this torch has Inductor; it is not imported."""
    return importlib.util.find_spec("torch._inductor") is not None


@contextmanager
def run_as_written() -> Iterator[None]:
    """Let what `torch.compile` returned run the code that it was given, in all threads.

    What records a program sees the calls of that code then, and not those of a compiler at work.
    Nothing is imported for it: where nobody has imported the compiler, nothing is compiled.
    """
    if "torch._dynamo" not in sys.modules or not _enter():
        yield
        return
    try:
        yield
    finally:
        _leave()


def _enter() -> bool:
    """Set the stance for the first of those that are inside; tell whether torch lets that be."""
    global _inside
    with _LOCK:
        if not _inside:
            try:
                _stances.append(torch.compiler.set_stance("force_eager"))
            except RuntimeError:  # torch is compiling what calls this
                return False
        _inside += 1
        return True


def _leave() -> None:
    """Put back the stance, behind the last of those that were inside."""
    global _inside
    with _LOCK:
        _inside -= 1
        if not _inside:
            _stances.pop().__exit__(None, None, None)
