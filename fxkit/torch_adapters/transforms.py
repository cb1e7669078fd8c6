"""Transforms of functions (`torch.func`, forward-mode differentiation) that are active."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.autograd.forward_ad as forward_ad

from fxkit.torch_adapters.private_names import private

_TAKEN_TO_BE = "they are taken to be: everything runs in eager"
_LEVEL = private(
    "torch._C._functorch.maybe_current_level",
    "telling which transform of torch.func is active",
    "programs are not recorded, and run in eager",
)
_ACTIVE = private(
    "torch._C._are_functorch_transforms_active",
    "telling whether transforms of torch.func are active",
    _TAKEN_TO_BE,
)
_DUAL = private(
    "torch.autograd.forward_ad._current_level",
    "telling whether forward-mode differentiation is active",
    _TAKEN_TO_BE,
)
_WRAPPED = private(
    "torch._C._functorch.is_functorch_wrapped_tensor",
    "telling a gradient from many of them",
    "a backward runs the program again",
)
_BATCHED = private(
    "torch._C._functorch.is_legacy_batchedtensor",
    "telling a gradient from many of them",
    "a backward runs the program again",
)

_level, _has_dual = _LEVEL.get(), _DUAL.get() is not None
_is_wrapped, _is_batched = _WRAPPED.get(), _BATCHED.get()


def _has_level() -> bool:
    if _level is None:
        _ACTIVE.warn()
        return True
    return _level() is not None


def _no_level() -> None:
    return None


current_level: Callable[[], int | None] = _level or _no_level
"""Return the level of the innermost transform of torch.func, or None."""

has_transforms: Callable[[], bool] = _ACTIVE.get(_has_level)
"""Tell whether transforms of torch.func are active."""


def is_forward_mode() -> bool:
    """Tell whether forward-mode differentiation is active."""
    if _has_dual:
        return forward_ad._current_level >= 0
    _DUAL.warn()
    return True


def stands_for_many(gradient: torch.Tensor) -> bool:
    """Tell whether a tensor may be one of many that a transform runs at once."""
    if _is_wrapped is None or _is_batched is None:
        return True
    return bool(_is_wrapped(gradient) or _is_batched(gradient))


def why_not_recorded() -> str | None:
    """Say why this torch can't be recorded, or return None."""
    missing = next((n for n, is_there in ((_LEVEL, _level is not None), (_DUAL, _has_dual))
                    if not is_there), None)  # fmt: skip
    if missing is None:
        return None
    missing.warn()
    return f"torch {torch.__version__} has no {missing.path}"
