"""Modes of torch that are on in this thread. A default device counts for none: it says only where
new tensors lie."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fxkit.torch_adapters.autograd_state import has_saved_tensors_hooks
from fxkit.torch_adapters.fx_tracing import is_fx_tracing, is_jit_tracing
from fxkit.torch_adapters.modes import (
    DeviceContext,
    count_dispatch_modes,
    count_function_modes,
    function_modes,
    without_dispatch_modes,
)
from fxkit.torch_adapters.transforms import has_transforms, is_forward_mode


def is_followed() -> bool:
    """Tell whether calls are followed operator by operator without a mode.

    So do function transforms, forward-mode differentiation, `torch.fx` and `torch.jit.trace`. Hooks
    for the tensors that autograd saves are given each of them, and those of a checkpoint stop its
    program.
    """
    return bool(
        has_transforms()
        or is_forward_mode()
        or is_jit_tracing()
        or is_fx_tracing()
        or (torch.is_grad_enabled() and has_saved_tensors_hooks())
    )


def has_dispatch_modes() -> bool:
    """Tell whether a mode has to see each operator."""
    return bool(count_dispatch_modes())


def has_modes() -> bool:
    """Tell whether a mode has to see each of torch's calls."""
    return has_dispatch_modes() or has_function_modes()


def has_function_modes(*ours: type) -> bool:
    """Tell whether function modes are on.

    Args:
        ours: Those that do not count.
    """
    if not count_function_modes():
        return False
    stack = function_modes()
    return any(not isinstance(mode, (DeviceContext, *ours)) for mode in stack)


@contextmanager
def without_modes() -> Iterator[None]:
    """Compute with tensors of our own, which no dispatch mode of the caller's is to see.

    A mode for fake tensors, in which AOTAutograd calls its backends, refuses real ones.
    """
    if not has_dispatch_modes():
        yield
        return
    with without_dispatch_modes():
        yield
