"""torch's fake tensors behind one door: modes that compute types only, and what they raise."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def fake_mode(shape_env: Any = None) -> Iterator[Any]:
    """Enter a mode in which operators compute types only, on inputs that may still be real."""
    with new_fake_mode(shape_env) as mode, without_log():
        yield mode


def new_fake_mode(shape_env: Any = None) -> Any:
    """Return a mode to enter; sizes that data decide become symbols when it has a `ShapeEnv`."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=shape_env)


@contextmanager
def without_log() -> Iterator[None]:
    """Keep torch from logging what it also raises."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was_disabled


def is_about_data(error: BaseException) -> bool:
    """Tell whether an operator failed for want of the numbers in a tensor."""
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
    )
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    kinds = (
        DataDependentOutputException,
        DynamicOutputShapeException,
        GuardOnDataDependentSymNode,
    )
    return isinstance(error, kinds)


def holds_constant(value: Any) -> bool:
    """Tell whether a fake tensor knows its numbers after all."""
    return isinstance(value, torch.Tensor) and getattr(value, "constant", None) is not None


def is_of_mode(tensor: torch.Tensor, mode: Any) -> bool:
    """Tell whether a tensor is a fake one of this mode."""
    return getattr(tensor, "fake_mode", None) is mode


def tensors_of(module: torch.nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    """Yield the parameters and buffers of a module, by name."""
    yield from module.named_parameters()
    yield from module.named_buffers()
