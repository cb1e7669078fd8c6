"""torch's fake tensors behind one door: modes that compute types only, and what they raise."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fxkit.analysis.type_inference.dynamo_config import call_with_settings


@contextmanager
def fake_mode(shape_env: Any = None) -> Iterator[Any]:
    """Enter a mode in which operators compute types only, on inputs that may still be real."""
    with new_fake_mode(shape_env) as mode, without_log():
        yield mode


def new_fake_mode(shape_env: Any = None) -> Any:
    """Return a mode to enter; sizes that data decide become symbols when it has a `ShapeEnv`."""
    if shape_env is not None:
        return _mode_class()(allow_non_fake_inputs=True, shape_env=shape_env)
    return call_with_settings(_mode_class(), allow_non_fake_inputs=True)


@functools.cache
def _mode_class() -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    # torch wraps it to hide it from TorchDynamo, and imports that for it.
    wrapped = FakeTensorMode.__torch_dispatch__
    dispatch = getattr(wrapped, "__wrapped__", wrapped)

    class FaithfulMode(FakeTensorMode):
        """torch's mode, with the strides of results put right where its kernels give others."""

        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if self.shape_env is not None:
                result = dispatch(self, func, types, args, kwargs)
            else:
                result = call_with_settings(dispatch, self, func, types, args, kwargs)
            if func in _DENSE_NORMS and isinstance(result, tuple):
                return (_densely(self, result[0], args[0]), *result[1:])
            return result

    return FaithfulMode


# torch 2.13 says that these keep the layout of their operand. Its kernels make a result that is
# contiguous, or channels last where the operand is that.
_DENSE_NORMS = frozenset(
    [
        torch.ops.aten.native_batch_norm.default,
        torch.ops.aten._native_batch_norm_legit.default,
        torch.ops.aten._native_batch_norm_legit.no_stats,
        torch.ops.aten._native_batch_norm_legit_no_training.default,
    ]
)


def _densely(mode: Any, result: Any, operand: Any) -> Any:
    from torch._prims_common import suggest_memory_format

    if result.device.type != "cpu":
        return result
    is_dense = operand.is_contiguous()
    wanted = torch.contiguous_format if is_dense else suggest_memory_format(operand)
    with mode:
        return torch.empty_like(result, memory_format=wanted)


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
