"""Functions of scalars, and running extremes, that torch takes apart no further, by the core set.

Integers are converted to the default dtype, halves are computed in float32, as torch does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from fxkit.passes.decomposition.unrecordable import Unrecordable

_NARROW = (torch.float16, torch.bfloat16)


def _widened(*values: Any) -> tuple[Any, ...]:
    """Return operands in the dtype in which they are computed, and that of the result."""
    dtype = values[0].dtype
    for value in values[1:]:
        dtype = torch.result_type(values[0], value)
    if dtype.is_complex:
        raise Unrecordable(f"torch takes nothing apart for {dtype}")
    if not dtype.is_floating_point:
        dtype = torch.get_default_dtype()
    wide = torch.float32 if dtype in _NARROW else dtype
    return *(x.to(wide) if isinstance(x, torch.Tensor) else x for x in values), dtype


def is_negative(x: Any) -> Any:
    """Tell where floats have a sign, -0 among them; not a number counts as without."""
    return torch.logical_or(x < 0, torch.reciprocal(x) < 0)


def copysign(x: Any, other: Any) -> Any:
    """Return the magnitude of one with the sign of another; not a number has none."""
    x, other, dtype = _widened(x, other)
    size = torch.abs(x)
    if isinstance(other, (bool, int, float)):
        return (-size if math.copysign(1.0, other) < 0 else size).to(dtype)
    return torch.where(is_negative(other), -size, size).to(dtype)


def chosen(condition: Any, x: Any, other: Any) -> Any:
    """Return one or another; of bools by logic, since ONNX Runtime chooses none."""
    if x.dtype is not torch.bool:
        return torch.where(condition, x, other)
    first = torch.logical_and(condition, x)
    return torch.logical_or(first, torch.logical_and(torch.logical_not(condition), other))


def exp2(x: Any) -> Any:
    """Return a power of two."""
    x, dtype = _widened(x)
    return torch.pow(2.0, x).to(dtype)


def hypot(x: Any, other: Any) -> Any:
    """Return √(x² + y²) without overflow; infinite where either is."""
    x, other, dtype = _widened(x, other)
    x, other = torch.abs(x), torch.abs(other)
    large, small = torch.maximum(x, other), torch.minimum(x, other)
    ratio = torch.where(large == 0, small, small / large)
    found = large * torch.sqrt(1.0 + ratio * ratio)
    is_infinite = torch.logical_or(x == math.inf, other == math.inf)
    return torch.where(is_infinite, torch.full_like(found, math.inf), found).to(dtype)


# Chebyshev's coefficients of (1 + 2x) e^(x²) erfc(x), x from 0 on, in (x - 3.75) / (x + 3.75).
_ERFC_CENTRE = 3.75
_ERFC = (
    1.1775789345674017541, -0.0045900545806464773309, -0.084249133366517915584,
    0.059209939998191890498, -0.026658668435305752277, 0.0090749976707052650939,
    -0.0024131635404176081909, 0.00049077583652580863229, -0.000069169733025012063671,
    4.1390279860730101675e-6, 7.7403830661984906686e-7, -2.1886401049234395661e-7,
    1.0764999465670910377e-8, 4.5219598112182868979e-9, -7.7544002088313511065e-10,
    -6.3180883408866844944e-11, 2.8687950109306698981e-11, 1.945586854577734723e-13,
    -9.6546967484334389059e-13, 3.2525481481487398415e-14, 3.3478119482868053878e-14,
    -1.8645628804193131015e-15, -1.2507950530688647085e-15, 7.4182352566240434629e-17,
    5.0681489047961113167e-17,
)  # fmt: skip


def erfc(x: Any) -> Any:
    """Return what the error function lacks to 1, with small relative error.

    Source: M. Shepherd and J. Laframboise, "Chebyshev approximation of (1 + 2x) exp(x²) erfc(x)",
    Mathematics of Computation 36 (1981); the coefficients were computed anew.
    """
    x, dtype = _widened(x)
    size = torch.minimum(torch.abs(x), torch.full_like(x, 30.0))  # where it is zero in any dtype
    t = 1.0 - (2.0 * _ERFC_CENTRE) / (size + _ERFC_CENTRE)
    later, last = torch.zeros_like(t), torch.zeros_like(t)
    for coefficient in _ERFC[:0:-1]:  # Clenshaw's recurrence
        later, last = 2.0 * t * later - last + coefficient, later
    series = t * later - last + _ERFC[0]
    # The square in two parts, of which the first is exact.
    head = torch.trunc(size * 16.0) / 16.0
    decay = torch.exp(-head * head) * torch.exp(-(size - head) * (size + head))
    found = series * decay / (1.0 + 2.0 * size)
    return torch.where(x < 0, 2.0 - found, found).to(dtype)


# Of Stirling's series, B(2n) / (2n (2n - 1)) from n = 1 on.
_STIRLING = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360, 1 / 156)


def lgamma(x: Any) -> Any:
    """Return log |Γ(x)|, with small error relative to 1.

    By Stirling's series from seven on, by Γ's recurrence below, by its reflection below one half.
    """
    x, dtype = _widened(x)
    is_low = x < 0.5
    shifted, product = torch.where(is_low, 1.0 - x, x), torch.ones_like(x)
    for _ in range(7):
        is_small = shifted < 7.0
        product = torch.where(is_small, product * shifted, product)
        shifted = torch.where(is_small, shifted + 1.0, shifted)
    inverse, series = torch.reciprocal(shifted), torch.zeros_like(x)
    for coefficient in _STIRLING[::-1]:
        series = series * (inverse * inverse) + coefficient
    start = (shifted - 0.5) * torch.log(shifted) - shifted + 0.5 * math.log(2.0 * math.pi)
    found = start + series * inverse - torch.log(product)
    distance = torch.abs(x - torch.round(x))
    sine = torch.sin(math.pi * distance)
    reflected = math.log(math.pi) - torch.log(sine) - found
    # π times what is close to zero would be rounded.
    reflected = torch.where(distance < 1e-9, -torch.log(distance) - found, reflected)
    is_pole = torch.logical_or(torch.logical_and(is_low, sine == 0), torch.abs(x) == math.inf)
    found = torch.where(is_low, reflected, found)
    return torch.where(is_pole, torch.full_like(x, math.inf), found).to(dtype)


def nextafter(x: Any, other: Any) -> Any:
    """Return the float that follows one in the direction of another.

    Source: S. Rump, P. Zimmermann, S. Boldo, G. Melquiond, "Computing predecessor and successor in
    rounding to nearest", BIT 49 (2009), algorithm 2.
    """
    dtype = torch.result_type(x, other)
    if dtype in _NARROW or not dtype.is_floating_point:
        raise Unrecordable(f"what follows a number of {dtype} has no form in core operators")
    x, other = x.to(dtype), other.to(dtype)
    about = torch.finfo(dtype)
    unit = about.eps / 2
    least, factor = about.smallest_normal * about.eps, unit * (1 + 2 * unit)
    size = torch.abs(x)
    # Outwards, for numbers that are large, close to zero, and between.
    scaled = size / unit
    between = (scaled + factor * scaled) * unit
    inner = (scaled - factor * scaled) * unit
    is_large, is_small = size >= least / (2 * unit * unit), size < least / unit
    up = torch.where(is_large, size + factor * size, torch.where(is_small, size + least, between))
    down = torch.where(is_large, size - factor * size, torch.where(is_small, size - least, inner))
    largest = torch.full_like(size, about.max)
    down = torch.where(size == math.inf, largest, down)
    is_above = torch.logical_and(x >= 0, torch.logical_or(other > x, x == 0))
    is_outwards = torch.logical_or(is_above, torch.logical_and(x < 0, other < x))
    moved = torch.where(is_outwards, up, down)
    found = copysign(moved, torch.where(x == 0, other, x))
    found = torch.where(x == other, other, found)
    return torch.where(torch.logical_or(x != x, other != other), x + other, found)


def running_extreme(is_max: bool) -> Callable[..., tuple[Any, Any]]:
    """Return what computes running extremes and their places, in log2 of the length steps.

    Source: W. D. Hillis and G. Steele, "Data parallel algorithms", CACM 29 (1986).
    """

    def computed(x: Any, dim: int) -> tuple[Any, Any]:
        aten = torch.ops.aten
        if not x.dim():
            return x.clone(), torch.zeros_like(x, dtype=torch.int64)
        dim, step = dim % x.dim(), 1
        size = x.shape[dim]
        shape = [size if axis == dim else 1 for axis in range(x.dim())]
        places = torch.arange(size, device=x.device).reshape(shape).expand(x.shape)
        found, places = x.clone(), places.clone()

        def moved(of: Any) -> Any:
            start = aten.slice.Tensor(of, dim, 0, step)
            return aten.cat.default([start, aten.slice.Tensor(of, dim, 0, size - step)], dim)

        while step < size:
            before, their_places = moved(found), moved(places)
            takes = before > found if is_max else before < found
            if x.dtype.is_floating_point:
                takes = torch.logical_or(takes, torch.isnan(before))
                takes = torch.logical_and(takes, torch.logical_not(torch.isnan(found)))
            found = torch.where(takes, before, found)
            places = torch.where(takes, their_places, places)
            step *= 2
        return found, places

    return computed


def special_functions() -> dict[Any, Callable[..., Any]]:
    """Return operator → what computes it by core operators."""
    aten = torch.ops.aten
    return {
        aten.copysign.Tensor: copysign,
        aten.copysign.Scalar: copysign,
        aten.cummax.default: running_extreme(True),
        aten.cummin.default: running_extreme(False),
        aten.erfc.default: erfc,
        aten.exp2.default: exp2,
        aten.hypot.default: hypot,
        aten.lgamma.default: lgamma,
        aten.nextafter.default: nextafter,
    }
