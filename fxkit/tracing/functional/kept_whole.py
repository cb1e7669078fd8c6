"""Operators that torch spells out while it traces, though eager has a kernel for each of them.

Spelled out, a gradient in 16 bits is rounded at each step, and at NaN, at knots and for negative
zeros it is another one than that of eager's kernel. A margin loss over several labels counts labels
behind the last one then, and a dropout of everything draws random numbers.

Source: torch/export/exported_program.py, `_override_composite_implicit_decomp`, torch 2.13.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

from fxkit.torch_adapters.decompositions import has_trained_loops
from fxkit.torch_adapters.operators import (
    can_keep_order,
    can_keep_whole,
    effect_of,
    kept_by_tracing,
    register_ordered,
)
from fxkit.tracing.functional.recurrent_layers import trained_layers
from fxkit.tracing.values.refusals import Refusal

_NAMES = (
    *("silu_backward", "mish_backward", "hardshrink", "softshrink"),
    "multilabel_margin_loss_forward",
)

# What is changed belongs to all threads: the first of them changes it, the last one puts it back.
_lock = threading.Lock()
_within: list[contextlib.ExitStack] = []


@contextlib.contextmanager
def kept_whole() -> Iterator[None]:
    """Let tracing leave operators whole that eager computes by a kernel of their own.

    Recurrent layers, which it spells out, are those that can be trained.

    Raises:
        Refusal: When this torch lacks what that takes.
    """
    if not (can_keep_whole() and can_keep_order() and has_trained_loops()):
        raise Refusal(f"torch {torch.__version__} keeps no operators whole in a way fxkit knows")
    with _lock:
        _within.append(contextlib.ExitStack())
        if len(_within) == 1:
            for name in _NAMES:
                _within[0].enter_context(kept_by_tracing(getattr(torch.ops.aten, name).default))
            _within[0].enter_context(kept_by_tracing(torch.ops.aten.dropout.default, _dropout))
            _within[0].enter_context(trained_layers())
            _within[0].enter_context(_checked())
    try:
        yield
    finally:
        with _lock:
            if len(_within) == 1:
                _within[0].close()
            _within.pop()


@contextlib.contextmanager
def _checked() -> Iterator[None]:
    """Let tracing see that the check of an inverse or factor has an effect: it may raise.

    torch 2.13 says so itself; torch 2.11 drops the check from the graph, for it returns nothing.
    """
    check = torch.ops.aten._linalg_check_errors.default
    registered = None if effect_of(check) is not None else register_ordered(check)
    try:
        yield
    finally:
        if registered is not None:
            registered.destroy()


def _dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    if not train or p == 0:
        return x.clone()
    return x * x.new_zeros(()) if p == 1 else torch.ops.aten.native_dropout(x, p, train)[0]
