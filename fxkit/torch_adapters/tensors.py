"""What `torch.Tensor` keeps to itself: its base, how often it was written, where it lies."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch


def version_counter_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor's memory was written; torch raises for those that don't count."""
    return tensor._version


def is_view_of_another(tensor: torch.Tensor) -> bool:
    """Tell whether autograd knows a tensor as the view of another one."""
    return tensor._is_view()


def base_of_view(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor that autograd knows another one as a view of."""
    return tensor._base


def is_zero_tensor(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is zeros without memory, as autograd makes them."""
    return tensor._is_zerotensor()


impl_address_of: Callable[[Any], int] = operator.attrgetter("_cdata")
"""Returns the address of what a tensor, or the storage of one, is in C++: the same for the same."""
