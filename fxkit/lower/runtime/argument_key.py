"""What kernels are built for: sizes, strides and dtypes of tensors."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import torch


def argument_key(args: Iterable[torch.Tensor]) -> Hashable:
    """Return a key of tensors; the strides of a sparse one can't be read."""
    dense = torch.strided
    return tuple([(a.shape, a.stride() if a.layout is dense else None, a.dtype) for a in args])
