"""Types of tensors as the C binding knows them."""

from __future__ import annotations

from typing import Any

from fxkit.ir.types import TensorType
from fxkit.lower.runtime import binding


def is_plain(known: Any) -> bool:
    """Tell whether the binding can check that a value is of a type."""
    return (
        isinstance(known, TensorType)
        and binding.can_read(known.device)
        and known.stride is not None
        and not known.is_symbolic
    )


def spec_of(known: TensorType) -> tuple[Any, ...]:
    """Return a type as the binding knows it: dtype, bytes spanned, sizes, strides, any device."""
    stride = known.stride or ()
    last = sum([(size - 1) * step for size, step in zip(known.shape, stride, strict=True)])
    count = last + 1 if all(known.shape) else 0
    spec = binding.code_of(known.dtype), count * known.dtype.itemsize, tuple(known.shape), stride
    return spec if known.device.type == "cpu" else (*spec, binding.place_of(known.device))
