"""Operators that torch spells out while it traces, though eager has a kernel for each of them.

Spelled out, a gradient in 16 bits is rounded at each step, and at NaN, at knots and for negative
zeros it is another one than that of eager's kernel.

Source: torch/export/exported_program.py, `_override_composite_implicit_decomp`, torch 2.13.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

from fxkit.tracing.functional.recurrent_layers import trained_layers

_NAMES = ("silu_backward", "mish_backward", "hardshrink", "softshrink")

# What is changed belongs to all threads: the first of them changes it, the last one puts it back.
_lock = threading.Lock()
_within: list[contextlib.ExitStack] = []


@contextlib.contextmanager
def kept_whole() -> Iterator[None]:
    """Let tracing leave operators whole that eager computes by a kernel of their own.

    Recurrent layers, which it spells out, are those that can be trained.
    """
    with _lock:
        _within.append(contextlib.ExitStack())
        if len(_within) == 1:
            for name in _NAMES:
                _within[0].enter_context(_whole(getattr(torch.ops.aten, name).default))
            _within[0].enter_context(trained_layers())
    try:
        yield
    finally:
        with _lock:
            if len(_within) == 1:
                _within[0].close()
            _within.pop()


@contextlib.contextmanager
def _whole(operator: Any) -> Iterator[None]:
    """Take from an operator what torch's tracing would compute it by."""
    kernels = operator.py_kernels
    before = dict(kernels)
    kernels.pop(torch._C.DispatchKey.Autograd, None)
    kernels[torch._C.DispatchKey.CompositeImplicitAutograd] = _nothing
    operator._dispatch_cache.clear()
    try:
        yield
    finally:
        kernels.clear()
        kernels.update(before)
        operator._dispatch_cache.clear()


def _nothing(*args: Any, **kwargs: Any) -> Any:
    """Answer as an operator that no others stand for."""
    return NotImplemented
