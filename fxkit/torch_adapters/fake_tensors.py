"""Fake tensors: types that run through operators without numbers. Without them no type is known."""

from __future__ import annotations

import contextlib
import functools
import threading
from contextlib import AbstractContextManager
from typing import Any

import torch

from fxkit.errors import UnsupportedError
from fxkit.torch_adapters.private_names import PrivateName, private

_MODULE = "torch._subclasses.fake_tensor"
_TYPES = "finding types without running a program"
_EAGER = "programs run in eager"
_MODE = private(f"{_MODULE}.FakeTensorMode", _TYPES, _EAGER)
_FAKE = private(f"{_MODULE}.FakeTensor", "telling fake tensors from others", _EAGER)
_ON_DATA = "telling that numbers decide"
_MESSAGE = "torch's own words are shown instead"
_READS = private(f"{_MODULE}.DataDependentOutputException", _ON_DATA, _MESSAGE)
_SIZES = private(f"{_MODULE}.DynamicOutputShapeException", _ON_DATA, _MESSAGE)
_SOURCE = private(
    "torch._guards.Source", "naming fake tensors", "torch names them, for which it imports Dynamo"
)
_GUARD = private(
    "torch._C._ensureCUDADeviceGuardSet",
    "first fake tensors in many threads at once",
    "torch does it when the first of them is made",
)
_PYTHON = private(
    "torch._dispatch.python.enable_python_dispatcher",
    "types with symbolic sizes",
    "some operators ask for numbers of sizes",
)
_FORMAT = private(
    "torch._prims_common.suggest_memory_format",
    "laying results out as torch does",
    "channels last is told by strides",
)
_ONE_AT_A_TIME = threading.Lock()


class _Never(Exception):
    """What nobody raises."""


def needed(name: PrivateName) -> Any:
    """Return what has a name.

    Raises:
        UnsupportedError: When this torch lacks it.
    """
    found = name.get()
    if found is None:
        raise UnsupportedError(
            f"expected a torch with {name.path}, got {torch.__version__} without it",
            hint=f"fxkit needs it for {name.purpose}; install a torch that it is tested with",
        )
    return found


@functools.cache
def mode_class() -> Any:
    """Return the class of modes in which tensors are fake."""
    mode = needed(_MODE)
    with _ONE_AT_A_TIME:
        _keep_device_guard()
    return mode


@functools.cache
def _keep_device_guard() -> None:
    """Let a thread that does not end be the one that sets torch's guard of CUDA devices.

    Each mode sets it when it is entered, if nobody has. In a torch 2.11 for CUDA that finds no
    device, the guard goes with the thread that set it, and the process dies when it is used.
    """
    set_guard = _GUARD.get()
    if set_guard is None or torch.version.cuda is None:
        return
    if threading.current_thread() is threading.main_thread():
        set_guard()
        return
    is_set = threading.Event()

    def keep() -> None:
        try:
            set_guard()
        finally:
            is_set.set()
        threading.Event().wait()

    threading.Thread(target=keep, name="fxkit-device-guard", daemon=True).start()
    is_set.wait()


@functools.cache
def tensor_class() -> Any:
    """Return the class of fake tensors."""
    return needed(_FAKE)


def why_untyped() -> str | None:
    """Say why no types can be found with this torch, or return None."""
    if _MODE.get() is not None and _FAKE.get() is not None:
        return None
    lost = _MODE if _MODE.get() is None else _FAKE
    lost.warn()
    return f"torch {torch.__version__} has no {lost.path}"


@functools.cache
def reading_errors() -> tuple[type[Exception], type[Exception]]:
    """Return what is raised where an operator needs numbers: for a value, and for a size."""
    return _READS.get(_Never), _SIZES.get(_Never)


def source_class() -> Any:
    """Return the class of names of fake tensors, or None."""
    return _SOURCE.get()


def kernels_in_python() -> AbstractContextManager[Any]:
    """Return a context in which kernels in Python, which take symbolic sizes, go before others."""
    enable = _PYTHON.get()
    return contextlib.nullcontext() if enable is None else enable()


def suggested_format(tensor: torch.Tensor) -> torch.memory_format:
    """Return the layout that operators give results which are like a tensor."""
    return _FORMAT.get(_format_by_strides)(tensor)


def _format_by_strides(tensor: torch.Tensor) -> torch.memory_format:
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    if last is None or tensor.is_contiguous() or not tensor.is_contiguous(memory_format=last):
        return torch.contiguous_format
    return last
