"""A linear layer whose weight is packed once.

MKL goes through a matrix in an order that it chooses, and copies it into that order at each call.
Here the weight is copied once, and again when any of its numbers has changed: at each call all of
them are read into a fingerprint, which tells of every write, counted by torch or not.
"""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from fxkit.lower.library_calls import mkl
from fxkit.lower.library_calls.torch_calls import serve
from fxkit.lower.runtime import binding

# Copies that are kept of one weight, for inputs of other numbers of rows.
_KEPT = 4

# Bytes of all copies that are kept; weights beyond that are multiplied as they are.
MOST_BYTES = 1 << 30


@dataclass(eq=False)
class _Weight:
    """What is kept of one weight.

    Attributes:
        weight: It, not kept alive.
        size: Bytes of a copy.
        packed: Number of rows → the fingerprint of what was packed for it, and the copy.
    """

    weight: weakref.ref[Tensor]
    size: int
    packed: dict[int, tuple[bytes, Tensor]] = field(default_factory=dict)


# Identity of a weight → what is kept of it.
_weights: dict[int, _Weight] = {}


def is_available() -> bool:
    """Tell whether weights can be packed: by MKL, with the binding to tell of changes."""
    return mkl.is_available() and binding.load() is not None


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply each row by a weight, and add a bias: `torch.nn.functional.linear`.

    Args:
        input: float[..., in]
        weight: float[out, in]
        bias: float[out], or None.

    Returns:
        float[..., out], row by row.
    """
    packed = _find(input, weight) if _serves(input, weight, bias) else None
    if packed is None:
        return F.linear(input, weight, bias)
    return mkl.multiply(input, packed, weight, bias)


def _serves(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Tell whether plain float32 numbers are multiplied by a matrix that fits."""
    if weight.dim() != 2 or not serve(input, (weight, bias)):
        return False
    fits = input.shape[-1:] == weight.shape[1:]
    return fits and (bias is None or _is_row(bias, weight))


def _is_row(bias: Tensor, weight: Tensor) -> bool:
    """Tell whether a bias is one that MKL may read without looking."""
    is_plain = bias.layout == torch.strided and bias.is_cpu and bias.dtype == torch.float32
    return is_plain and bias.shape == weight.shape[:1]


def _find(input: Tensor, weight: Tensor) -> Tensor | None:
    """Return the packed weight, made now or earlier; None where there can't be one."""
    native = binding.loaded()
    state = native.fingerprint(weight) if native is not None and mkl.is_available() else None
    if state is None:
        return None
    kept = _weights.get(id(weight))
    if kept is None or kept.weight() is not weight:
        gone = functools.partial(_forget, id(weight))
        kept = _weights[id(weight)] = _Weight(weakref.ref(weight, gone), weight.nbytes)
    rows = input.numel() // input.shape[-1]
    found = kept.packed.get(rows)
    if found is None or found[0] != state:
        if len(kept.packed) >= _KEPT:
            kept.packed.clear()
        if rows not in kept.packed and _kept_bytes() + kept.size > MOST_BYTES:
            return None
        found = kept.packed[rows] = (state, mkl.pack(weight.detach(), rows))
    return found[1]


def _kept_bytes() -> int:
    return sum(kept.size * len(kept.packed) for kept in list(_weights.values()))


def _forget(key: int, weight: weakref.ref[Tensor]) -> None:
    kept = _weights.get(key)
    if kept is not None and kept.weight is weight:
        del _weights[key]
