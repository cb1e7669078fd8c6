"""Modes of torch that are on in this thread. A default device counts for none: it says only where
new tensors lie."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.autograd.forward_ad as forward_ad
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes

from fxkit.torch_adapters.fx_tracing import is_fx_tracing


def is_followed() -> bool:
    """Tell whether calls are followed operator by operator without a mode.

    So do function transforms, forward-mode differentiation, `torch.fx` and `torch.jit.trace`. Hooks
    for the tensors that autograd saves are given each of them, and those of a checkpoint stop its
    program.
    """
    return bool(
        torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
        or is_fx_tracing()
        or (torch.is_grad_enabled() and _top_saved_tensors_default_hooks(True) is not None)
    )


def has_dispatch_modes() -> bool:
    """Tell whether a mode has to see each operator."""
    return bool(torch._C._len_torch_dispatch_stack())


def has_modes() -> bool:
    """Tell whether a mode has to see each of torch's calls."""
    return has_dispatch_modes() or has_function_modes()


def has_function_modes(*ours: type) -> bool:
    """Tell whether function modes are on.

    Args:
        ours: Those that do not count.
    """
    if not torch._C._len_torch_function_stack():
        return False
    stack = torch.overrides._get_current_function_mode_stack()
    return any(not isinstance(mode, (DeviceContext, *ours)) for mode in stack)


@contextmanager
def without_modes() -> Iterator[None]:
    """Compute with tensors of our own, which no dispatch mode of the caller's is to see.

    A mode for fake tensors, in which AOTAutograd calls its backends, refuses real ones.
    """
    if not has_dispatch_modes():
        yield
        return
    with _disable_current_modes():
        yield
