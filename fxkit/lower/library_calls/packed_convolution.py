"""A convolution, with the batch norm behind it, whose weight is packed once: `fxkit::convolution`.

oneDNN computes in a layout of the weight that it chooses; given the usual one it converts it at
each call. Here the weight is multiplied with the norm's scale in float64 and laid out once, and
again when any number that it was made of has changed. At each call all of these numbers are read
into a fingerprint, which tells of every write, counted by torch or not.

With channels innermost, oneDNN adds up all terms of a result one after the other, so that its error
grows with the root of their number; that of eager's blocked layout does not. Where there are many
terms, the channels are convolved in parts, and the parts added.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fxkit.analysis.type_inference.own_operators import define_operator
from fxkit.ir.types import TensorType
from fxkit.lower.library_calls import onednn
from fxkit.lower.library_calls.onednn import Settings
from fxkit.lower.library_calls.torch_calls import serve
from fxkit.lower.loop_ir.convolution import result_size
from fxkit.lower.runtime import binding

_SCHEMA = (
    "convolution(Tensor input, Tensor weight, Tensor? bias, Tensor? mean, Tensor? variance, "
    "Tensor? scale, Tensor? shift, float eps, SymInt[] stride, SymInt[] padding, "
    "SymInt[] dilation, SymInt groups, int slot) -> Tensor"
)

# Layouts that are kept of one weight, for inputs of other sizes.
_KEPT = 4

# Terms that are added up one after the other: their error is measured to be at most 1.4 times that
# of eager's kernels, which is 1.6e-7 from some hundred terms on.
MOST_TERMS = 288


@dataclass(frozen=True)
class _Packed:
    """A weight as oneDNN wants it.

    Attributes:
        state: Fingerprint of what it was made of.
        weights: Each part's first channel, the channel behind its last, and its weight, opaque to
            torch; None where the weight can't be packed.
        bias: float[out], or None.
    """

    state: bytes
    weights: tuple[tuple[int, int, Tensor], ...] | None
    bias: Tensor | None


@dataclass(eq=False)
class _Slot:
    """What is kept of one convolution.

    Attributes:
        weight: Its weight, not kept alive.
        settings: Those of the call, the norm's epsilon, and the weight's strides.
        packed: Shape of the input → what was packed for it.
    """

    weight: weakref.ref[Tensor]
    settings: tuple[Any, ...]
    packed: dict[tuple[int, ...], _Packed] = field(default_factory=dict)


_slots: dict[int, _Slot] = {}
_numbers = itertools.count()


def is_available() -> bool:
    """Tell whether weights can be packed: by oneDNN, with the binding to tell of changes."""
    return onednn.is_available() and binding.load() is not None


def new_slot() -> int:
    """Return a number for a convolution, under which its packed weight will be kept."""
    return next(_numbers)


@functools.cache
def operator() -> Any:
    """Return the operator, registered when it is first needed."""
    return define_operator(_SCHEMA, convolution, _type)


def _type(input: TensorType, weight: TensorType, *given: Any) -> TensorType:
    """Return the type of what `convolution` returns, from what it is given."""
    *sources, _, stride, padding, dilation, _, _ = given
    channels = weight.shape[0]
    height, width = result_size(input.shape[2:], weight.shape[2:], stride, padding, dilation)
    is_followed = any(it is not None and it.requires_grad for it in (input, weight, *sources))
    return replace(
        input,
        shape=(input.shape[0], channels, height, width),
        stride=(channels * height * width, 1, width * channels, channels),
        requires_grad=torch.is_grad_enabled() and is_followed,
    )


def without_dispatcher(target: Any) -> Any:
    """Return what a graph calls; in the place of the operator the function that it ends in.

    Where no mode watches the call, that saves the way through torch's dispatcher.
    """
    is_defined = operator.cache_info().currsize > 0
    return convolution if is_defined and target is operator() else target


def convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mean: Tensor | None,
    variance: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    eps: float,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    slot: int,
) -> Tensor:
    """Convolve, then normalise by the statistics that are given, if any.

    Args:
        input: float[N, C, H, W]
        weight: float[out, C / groups, h, w]
        bias: float[out], or None.
        mean: float[out]: that of the batch norm; None without one.
        variance: float[out]
        scale: float[out]: its weight, or None.
        shift: float[out]: its bias, or None.
        eps: Its epsilon.
        stride: Two numbers, as all that follows.
        padding: Zeros on each side.
        dilation: Steps between the elements of the weight.
        groups: Number of groups.
        slot: Where the packed weight is kept: one of `new_slot`. What is found there only serves
            when it was made of the same numbers, so that a slot in use costs time, no more.

    Returns:
        float[N, out, H', W'], with its channels innermost.
    """
    sources = (weight, bias, mean, variance, scale, shift)
    if _serves(input, sources):
        settings = (stride, padding, dilation, groups, eps)
        packed = _find(input, sources, settings, slot)
        if packed is not None and packed.weights is not None:
            return _convolve(input, packed, Settings(*settings[:4]))  # type: ignore[arg-type]
    result = F.conv2d(input.contiguous(), weight, bias, stride, padding, dilation, groups)
    if mean is not None:
        result = F.batch_norm(result, mean, variance, scale, shift, False, 0.0, eps)
    return _channels_last(result)


def _convolve(input: Tensor, packed: _Packed, settings: Settings) -> Tensor:
    image = input.contiguous(memory_format=torch.channels_last)
    assert packed.weights is not None
    (first, end, weight), *others = packed.weights
    part = image[:, first:end] if others else image
    result = onednn.convolve(part, weight, packed.bias, settings)
    for first, end, weight in others:
        onednn.add_convolved(result, image[:, first:end], weight, settings)
    return _channels_last(result)


def _channels_last(image: Tensor) -> Tensor:
    """Return an image with the strides of channels innermost, also where a size is one."""
    image = image.contiguous(memory_format=torch.channels_last)
    _, channels, height, width = image.shape
    strides = (channels * height * width, 1, width * channels, channels)
    return image if image.stride() == strides else image.as_strided(image.shape, strides)


def _serves(input: Tensor, sources: Sequence[Tensor | None]) -> bool:
    """Tell whether a plain float32 image is convolved, and no gradient is asked for."""
    return onednn.is_available() and serve(input, sources) and input.dim() == 4


def _find(
    input: Tensor,
    sources: tuple[Tensor | None, ...],
    settings: tuple[Any, ...],
    slot: int,
) -> _Packed | None:
    """Return the packed weight, made now or earlier; None where changes can't be told."""
    native = binding.loaded()
    weight = sources[0]
    if native is None or weight is None:
        return None
    in_order = weight if weight.is_contiguous() else weight.permute(0, 2, 3, 1)
    state = native.fingerprint(in_order, *sources[1:])
    if state is None:
        return None
    settings = (*settings, weight.stride())
    kept = _slots.get(slot)
    if kept is None or kept.weight() is not weight or kept.settings != settings:
        gone = weakref.ref(weight, functools.partial(_forget, slot))
        kept = _slots[slot] = _Slot(gone, settings)
    found = kept.packed.get(input.shape)
    if found is None or found.state != state:
        if len(kept.packed) >= _KEPT:
            kept.packed.clear()
        found = kept.packed[input.shape] = _pack(input.shape, sources, settings, state)
    return found


def _forget(slot: int, weight: weakref.ref[Tensor]) -> None:
    kept = _slots.get(slot)
    if kept is not None and kept.weight is weight:
        del _slots[slot]


def _pack(
    shape: Sequence[int],
    sources: tuple[Tensor | None, ...],
    settings: tuple[Any, ...],
    state: bytes,
) -> _Packed:
    weight, bias, mean, variance, scale, shift = (
        None if tensor is None else tensor.detach() for tensor in sources
    )
    *how, eps, _ = settings
    parts = parts_of(weight.shape, how[-1]) if weight is not None else None
    if weight is None or parts is None:
        return _Packed(state, None, None)
    if mean is not None and variance is not None:
        factor = (variance.double() + eps).rsqrt()
        factor = factor if scale is None else factor * scale.double()
        offset = -mean.double() if bias is None else bias.double() - mean.double()
        offset = offset * factor if shift is None else offset * factor + shift.double()
        weight = (weight.double() * factor.reshape(-1, 1, 1, 1)).float()
        bias = offset.float()
    elif bias is not None:
        bias = bias.clone()
    if not bool(weight.isfinite().all()) or not (bias is None or bool(bias.isfinite().all())):
        return _Packed(state, None, None)
    batch, channels, *sizes = shape
    packed = []
    for first, end in parts:
        seen = (batch, channels if len(parts) == 1 else end - first, *sizes)
        packed.append((first, end, onednn.lay_out(weight[:, first:end], Settings(*how), seen)))
    return _Packed(state, tuple(packed), bias)


def parts_of(shape: Sequence[int], groups: int) -> list[tuple[int, int]] | None:
    """Return the channels of a weight in parts of at most `MOST_TERMS` terms, where they can be.

    Args:
        shape: Of the weight: [out, C / groups, h, w].
        groups: Number of groups; with several, all channels are one part.

    Returns:
        First channel and the one behind the last, of each part; None where there are too many
        terms for one part and there can't be several.
    """
    _, channels, height, width = shape
    most = MOST_TERMS // (height * width)
    if channels <= most:
        return [(0, channels)]
    if groups != 1 or most == 0:
        return None
    step = next(step for step in (16, 8, 4, 2, 1) if step <= most)
    count = -(-channels // (most // step * step))
    size = -(-channels // (count * step)) * step
    return [(at, min(at + size, channels)) for at in range(0, channels, size)]
