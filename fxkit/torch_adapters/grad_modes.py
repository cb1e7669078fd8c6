"""Calls that switch gradients, inference mode and autocast, as nodes of a graph make them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from fxkit.torch_adapters.private_names import private

_OURS = "a function of fxkit's stands in its place"
_SET_GRAD = private("torch._C._set_grad_enabled", "switching gradients in a graph", _OURS)
_ENTER_INFERENCE = private(
    "torch.autograd.grad_mode._enter_inference_mode", "inference mode in a graph", _OURS
)
_EXIT_INFERENCE = private(
    "torch.autograd.grad_mode._exit_inference_mode", "inference mode in a graph", _OURS
)
_INFERENCE = private("torch._C._InferenceMode", "closing inference mode after an error", _OURS)
_ENTER_AUTOCAST = private("torch.amp.autocast_mode._enter_autocast", "autocast in a graph", _OURS)
_EXIT_AUTOCAST = private("torch.amp.autocast_mode._exit_autocast", "autocast in a graph", _OURS)
_ANY_AUTOCAST = private(
    "torch._C._is_any_autocast_enabled", "telling whether autocast is on", "each device is asked"
)
_NO_AUTOCAST = private(
    "torch._C._DisableAutocast", "leaving autocast out", "it is left for each device"
)

_DEVICES = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "maia", "xla", "ipu", "privateuseone")


def _set_grad_enabled(mode: bool) -> None:
    torch.set_grad_enabled(mode)


def _enter_inference_mode(mode: bool) -> Any:
    entered = torch.inference_mode(mode)
    entered.__enter__()
    return entered


def _exit_inference_mode(entered: Any) -> None:
    entered.__exit__(None, None, None)


def _enter_autocast(*options: Any) -> Any:
    entered = torch.autocast(*options)
    entered.__enter__()
    return entered


def _exit_autocast(entered: Any) -> None:
    entered.__exit__(None, None, None)


def _is_any_autocast_enabled() -> bool:
    return any(map(_is_autocast_enabled, _DEVICES))


def _is_autocast_enabled(device: str) -> bool:
    try:
        return torch.is_autocast_enabled(device)
    except RuntimeError:  # a device that this torch does not know
        return False


def _without_autocast() -> AbstractContextManager[Any]:
    contexts = contextlib.ExitStack()
    for device in filter(_is_autocast_enabled, _DEVICES):
        contexts.enter_context(torch.autocast(device, enabled=False))
    return contexts


set_grad_enabled: Callable[[bool], None] = _SET_GRAD.get(_set_grad_enabled)
is_any_autocast_enabled: Callable[[], bool] = _ANY_AUTOCAST.get(_is_any_autocast_enabled)
without_autocast: Callable[[], AbstractContextManager[Any]] = _NO_AUTOCAST.get(_without_autocast)
"""Return a context in which autocast is off."""

_of_inference = (_ENTER_INFERENCE.get(), _EXIT_INFERENCE.get(), _INFERENCE.get())
if None in _of_inference:
    _of_inference = (_enter_inference_mode, _exit_inference_mode, torch.inference_mode)
enter_inference_mode: Callable[[bool], Any] = _of_inference[0]
exit_inference_mode: Callable[[Any], None] = _of_inference[1]
InferenceMode: type = _of_inference[2]

_of_autocast = (_ENTER_AUTOCAST.get(), _EXIT_AUTOCAST.get())
if None in _of_autocast:
    _of_autocast = (_enter_autocast, _exit_autocast)
enter_autocast: Callable[..., Any] = _of_autocast[0]
exit_autocast: Callable[[Any], None] = _of_autocast[1]
