"""Modes of torch that are on in this thread. A default device counts for none: it says only where
new tensors lie."""

from __future__ import annotations

import torch
from torch.utils._device import DeviceContext


def has_modes() -> bool:
    """Tell whether a mode has to see each of torch's calls."""
    return bool(torch._C._len_torch_dispatch_stack()) or has_function_modes()


def has_function_modes(*ours: type) -> bool:
    """Tell whether function modes are on.

    Args:
        ours: Those that do not count.
    """
    if not torch._C._len_torch_function_stack():
        return False
    stack = torch.overrides._get_current_function_mode_stack()
    return any(not isinstance(mode, (DeviceContext, *ours)) for mode in stack)
