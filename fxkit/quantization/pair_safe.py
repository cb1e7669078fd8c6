"""Scales for which no sum of two products of 8 bits leaves 16 bits.

Processors without VNNI multiply unsigned by signed bytes with an instruction that adds two
neighbouring products and saturates at 16 bits (`vpmaddubsw`). An activation is at most 255, so that
a sum is safe where two neighbouring integers of one sign sum up to 128 at most: 255 * 128 < 2**15.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fxkit.quantization.specs import TensorSpec

LARGEST_SUM = 128
"""What two integers of one sign may sum up to."""
SCALED_SUM = 127.5
"""What two weights of one sign over their scale may sum up to: rounding adds a half to each."""
ELEMENTS_AT_ONCE = 1 << 17
"""How many are made float64 at a time, 1 MiB a copy: a whole weight would be five of its size."""


def largest_pairs(weight: Tensor, axis: int) -> Tensor:
    """Return the largest magnitude of a sum of two elements of one sign, by channel.

    In a matrix the two are neighbours that are summed: the first and second, third and fourth, and
    so on. In a convolution, whose order of sums is the kernel's own, any two elements of a channel.

    Args:
        weight: Any real type, two axes at least.
        axis: The axis of channels.

    Returns:
        float64[channels].
    """
    rows = weight.detach().movedim(axis, 0).flatten(1)
    blocks = rows.split(max(1, ELEMENTS_AT_ONCE // max(1, rows.shape[1])))
    return torch.cat([_largest_of_a_sign(one.double(), weight.ndim == 2) for one in blocks])


def range_of_pairs(weight: Tensor, axis: int, spec: TensorSpec) -> Tensor:
    """Return the largest element that a channel must be able to store to be pair-safe.

    Args:
        weight: As for `largest_pairs`.
        axis: The axis of channels.
        spec: How it is stored.

    Returns:
        float64[channels].
    """
    return largest_pairs(weight, axis) * (spec.high / SCALED_SUM)


def _largest_of_a_sign(rows: Tensor, are_neighbours: bool) -> Tensor:
    positive, negative = (_largest(one.clamp(min=0), are_neighbours) for one in (rows, -rows))
    return positive.maximum(negative)


def _largest(rows: Tensor, are_neighbours: bool) -> Tensor:
    if are_neighbours:
        return F.pad(rows, (0, rows.shape[1] % 2)).unflatten(1, (-1, 2)).sum(-1).amax(1)
    return F.pad(rows, (0, max(0, 2 - rows.shape[1]))).topk(2, 1).values.sum(1)


def is_pair_safe(integers: Tensor, axis: int) -> bool:
    """Tell whether sums of two products with bytes stay in 16 bits; see `largest_pairs`."""
    return bool((largest_pairs(integers, axis) <= LARGEST_SUM).all())


def made_pair_safe(integers: Tensor, axis: int) -> Tensor:
    """Return integers of which none are changed but those of pairs that are too large.

    The larger one of such a pair is made smaller; in a convolution, all above 64 but the largest of
    its channel become 64 first.

    Args:
        integers: As for `largest_pairs`, between -127 and 127.
        axis: The axis of channels.
    """
    if is_pair_safe(integers, axis):
        return integers
    rows = integers.double().movedim(axis, 0)
    shape = rows.shape
    rows = rows.flatten(1)
    signs = (rows.clamp(min=0), (-rows).clamp(min=0))
    if integers.ndim == 2:
        plus, minus = (_neighbours(one) for one in signs)
    else:
        plus, minus = (_any_two(one) for one in signs)
    return (plus - minus).reshape(shape).movedim(0, axis).to(integers.dtype).contiguous()


def _neighbours(rows: Tensor) -> Tensor:
    pairs = F.pad(rows, (0, rows.shape[1] % 2)).unflatten(1, (-1, 2))
    other = pairs.flip(-1)
    excess = (pairs + other - LARGEST_SUM).clamp(min=0)
    is_first = (pairs > other) | ((pairs == other) & (pairs.cumsum(-1) == pairs))
    return (pairs - excess.where(is_first, 0)).flatten(1)[:, : rows.shape[1]]


def _any_two(rows: Tensor) -> Tensor:
    half = LARGEST_SUM // 2
    top = rows.argmax(1, keepdim=True)
    kept = rows.clamp(max=half).scatter(1, top, 0)
    largest = rows.gather(1, top).minimum(LARGEST_SUM - kept.amax(1, keepdim=True))
    return kept.scatter(1, top, largest)
