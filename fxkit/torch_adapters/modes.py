"""Function and dispatch modes that are on in this thread."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from fxkit.torch_adapters.private_names import private

_NOT_RECORDED = "programs are not recorded, and run in eager"
_FUNCTION_COUNT = private(
    "torch._C._len_torch_function_stack",
    "telling whether function modes are on",
    "torch.overrides.has_torch_function is asked",
)
_FUNCTION_STACK = private(
    "torch.overrides._get_current_function_mode_stack", "finding what records", _NOT_RECORDED
)
_REFUSES_FUNCTIONS = private(
    "torch._C._disabled_torch_function_impl",
    "telling tensors with a __torch_function__ from others",
    "the one of torch.nn.Parameter is looked at",
)
_DISPATCH_COUNT = private(
    "torch._C._len_torch_dispatch_stack",
    "telling whether dispatch modes are on",
    "they are taken to be on: everything runs in eager",
)
_DISPATCH_MODE = private(
    "torch.utils._python_dispatch.TorchDispatchMode",
    "seeing operators one by one",
    "passes and views that need it refuse",
)
_NO_MODES = private(
    "torch.utils._python_dispatch._disable_current_modes",
    "computing with tensors that no mode is to see",
    "modes see them",
)
_DEVICE = private(
    "torch.utils._device.DeviceContext",
    "telling a default device from other function modes",
    "programs run in eager under a default device",
)

_ONE = torch.zeros(())


def _asked_for_functions() -> int:
    return int(torch.overrides.has_torch_function((_ONE,)))


def _always_one() -> int:
    _DISPATCH_COUNT.warn()
    return 1


class _NoDispatchMode:
    def __enter__(self) -> Any:
        raise RuntimeError(f"torch {torch.__version__} has no {_DISPATCH_MODE.path}")

    def __exit__(self, *error: Any) -> None:
        pass


count_function_modes: Callable[[], int] = _FUNCTION_COUNT.get(_asked_for_functions)
"""Return how many function modes are on."""

count_dispatch_modes: Callable[[], int] = _DISPATCH_COUNT.get(_always_one)
"""Return how many dispatch modes are on."""

TorchDispatchMode: Any = _DISPATCH_MODE.get(_NoDispatchMode)
DeviceContext: type = _DEVICE.get(type("NoDeviceContext", (), {}))

REFUSES_FUNCTIONS: Any = _REFUSES_FUNCTIONS.get(torch.nn.Parameter.__torch_function__)
"""The `__torch_function__` of tensors that have none."""

_function_stack = _FUNCTION_STACK.get()
_no_modes = _NO_MODES.get()


def function_modes() -> list[Any]:
    """Return the function modes that are on, the outer ones first."""
    if _function_stack is not None:
        return _function_stack()
    return [None] * count_function_modes()


def without_dispatch_modes() -> AbstractContextManager[Any]:
    """Return a context in which no dispatch mode sees an operator."""
    return contextlib.nullcontext() if _no_modes is None else _no_modes()


def why_not_recorded() -> str | None:
    """Say why programs can't be recorded with this torch, or return None."""
    if _function_stack is not None:
        return None
    _FUNCTION_STACK.warn()
    return f"torch {torch.__version__} has no {_FUNCTION_STACK.path}"
