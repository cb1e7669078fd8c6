"""The modes of torch that decide result types: grad, inference, autocast, the default dtype."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxkit.torch_adapters.grad_modes import set_grad_enabled
from fxkit.torch_adapters.modes import count_dispatch_modes, count_function_modes

_DEVICES = ("cpu", "cuda", "xpu", "mps")


@dataclass(frozen=True, slots=True, eq=False)
class TypeModes:
    """One state of the modes; equal states are the same object.

    Attributes:
        grad: Whether autograd records.
        inference: Whether inference mode is on.
        default_dtype: What a new tensor of floats gets.
        autocast: For each kind of device, the dtype that autocast casts to; None where it is off.
    """

    grad: bool
    inference: bool
    default_dtype: torch.dtype
    autocast: tuple[torch.dtype | None, ...]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Have this state inside of the block, and afterwards the one that was before it."""
        before = read_modes()
        if before is not self:
            self.enter()
        try:
            yield
        finally:
            before.enter()

    def enter(self) -> None:
        """Have this state from now on; inference mode alone is left as it is."""
        now = read_modes()
        if now is self:
            return
        if torch.is_grad_enabled() != self.grad:
            set_grad_enabled(self.grad)
        if now.default_dtype != self.default_dtype:
            torch.set_default_dtype(self.default_dtype)
        for device, wanted, is_now in zip(_DEVICES, self.autocast, now.autocast, strict=True):
            if wanted == is_now:
                continue
            torch.set_autocast_enabled(device, wanted is not None)
            if wanted is not None:
                torch.set_autocast_dtype(device, wanted)


def read_modes() -> TypeModes:
    """Return the present state of the modes of this thread."""
    autocast = tuple(
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        for device in _DEVICES
    )
    return _modes(
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        autocast,
    )


@functools.cache
def _modes(
    grad: bool, inference: bool, default: torch.dtype, autocast: tuple[torch.dtype | None, ...]
) -> TypeModes:
    return TypeModes(grad, inference, default, autocast)


def leave_regions(values: dict[fx.Node, Any]) -> None:
    """Leave the autocast regions that a graph entered and did not come to leave.

    Args:
        values: What the nodes that did run returned, in order.
    """
    for node, value in reversed(values.items()):
        is_left = any(user in values for user in node.users)
        if isinstance(value, torch.autocast) and not is_left:
            value.__exit__(None, None, None)


def is_intercepted() -> bool:
    """Tell whether the caller's own modes see every operator, and may change what it returns."""
    return bool(count_function_modes() or count_dispatch_modes())
