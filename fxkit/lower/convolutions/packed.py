"""A convolution, with the batch norm behind it, whose weight is packed once: `fxkit::convolution`.

oneDNN computes in a layout of the weight that it chooses; given the usual one it converts it at
each call. Here the weight is multiplied with the norm's scale in float64 and laid out once, and
again when anything that it was made of has changed: another tensor, another version, or other
numbers at its beginning, middle or end. Those tell of writes that no version counts, such as one
through `weight.data`; such a write to a few numbers alone is not seen.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from ctypes import string_at
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_SCHEMA = (
    "convolution(Tensor input, Tensor weight, Tensor? bias, Tensor? mean, Tensor? variance, "
    "Tensor? scale, Tensor? shift, float eps, SymInt[] stride, SymInt[] padding, "
    "SymInt[] dilation, SymInt groups) -> Tensor"
)

# Layouts that are kept of one weight, for inputs of other sizes.
_KEPT = 4

# Numbers that are compared at the beginning, in the middle and at the end of a tensor.
_SAMPLE = 16

_packed: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


@dataclass(frozen=True)
class Settings:
    """How a convolution goes over its input."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


@dataclass(frozen=True)
class _Packed:
    """A weight as oneDNN wants it.

    Attributes:
        state: What it was made of.
        weight: The weight, opaque to torch; None where it can't be packed.
        bias: float[out], or None.
    """

    state: tuple[Any, ...]
    weight: Tensor | None
    bias: Tensor | None


def is_available() -> bool:
    """Tell whether torch has been built with what packs weights, and it is not turned off."""
    return bool(_has_calls() and torch._C._get_mkldnn_enabled())


@functools.cache
def _has_calls() -> bool:
    names = ("_convolution_pointwise", "_reorder_convolution_weight")
    if not torch.backends.mkldnn.is_available():
        return False
    if not all(hasattr(torch.ops.mkldnn, name) for name in names):
        return False
    schema = torch.ops.mkldnn._convolution_pointwise.default._schema
    return len(schema.arguments) == 10


@functools.cache
def operator() -> Any:
    """Return the operator, registered when it is first needed."""
    library = torch.library.Library("fxkit", "FRAGMENT")
    library.define(_SCHEMA)
    library.impl("convolution", convolution, "CompositeImplicitAutograd")
    _libraries.append(library)
    return torch.ops.fxkit.convolution.default


_libraries: list[torch.library.Library] = []


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

    Returns:
        float[N, out, H', W'], with its channels innermost.
    """
    sources = (weight, bias, mean, variance, scale, shift)
    settings = Settings(tuple(stride), tuple(padding), tuple(dilation), groups)
    packed = _packed_of(input, sources, eps, settings) if _serves(input, sources) else None
    if packed is None or packed.weight is None:
        result = F.conv2d(input, weight, bias, settings.stride, settings.padding,
                          settings.dilation, groups)  # fmt: skip
        if mean is not None:
            result = F.batch_norm(result, mean, variance, scale, shift, False, 0.0, eps)
        return _channels_last(result)
    image = input.contiguous(memory_format=torch.channels_last)
    result = torch.ops.mkldnn._convolution_pointwise(
        image, packed.weight, packed.bias, settings.padding, settings.stride, settings.dilation,
        groups, "none", [], "",
    )  # fmt: skip
    return _channels_last(result)


def _channels_last(image: Tensor) -> Tensor:
    """Return an image with the strides of channels innermost, also where a size is one."""
    image = image.contiguous(memory_format=torch.channels_last)
    _, channels, height, width = image.shape
    strides = (channels * height * width, 1, width * channels, channels)
    return image if image.stride() == strides else image.as_strided(image.shape, strides)


def _serves(input: Tensor, sources: Sequence[Tensor | None]) -> bool:
    """Tell whether a plain float32 image is convolved, and no gradient is asked for."""
    if type(input) is not Tensor or input.dtype != torch.float32 or not input.is_cpu:
        return False
    if not is_available() or _is_transformed() or torch.is_autocast_enabled("cpu"):
        return False
    if torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (input, *sources)
    ):
        return False
    return input.dim() == 4 and input.numel() > 0 and input.layout == torch.strided


def _is_transformed() -> bool:
    """Tell whether a function transform or a mode looks at the calls."""
    return bool(
        torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
    )


def _packed_of(
    input: Tensor, sources: tuple[Tensor | None, ...], eps: float, settings: Settings
) -> _Packed | None:
    """Return the packed weight, made now or at an earlier call."""
    weight = sources[0]
    assert weight is not None
    kept = _packed.get(weight)
    if kept is None:
        kept = _packed[weight] = {}
    key = (input.shape, settings, eps, *map(id, sources[1:]))
    try:
        state = tuple([t if t is None else _state(t) for t in sources])
    except RuntimeError:
        return None
    found = kept.get(key)
    if found is None or found.state != state:
        if len(kept) >= _KEPT:
            kept.clear()
        found = kept[key] = _pack(input, sources, eps, settings, state)
    return found


def _state(tensor: Tensor) -> tuple[Any, ...]:
    """Return what changes when a tensor does.

    Raises:
        RuntimeError: When it counts no versions, or its numbers are not float32 in order.
    """
    if not (tensor.dtype == torch.float32 and tensor.is_cpu and tensor.is_contiguous()):
        raise RuntimeError("expected float32 numbers in order")
    start, version, count = tensor.data_ptr(), tensor._version, tensor.numel()
    if count <= 2 * _SAMPLE:  # of a vector, its beginning tells of a write to all of it
        return start, version, string_at(start, 4 * min(count, _SAMPLE))
    samples = [string_at(start + 4 * at, 4 * _SAMPLE) for at in (0, count // 2, count - _SAMPLE)]
    return start, version, *samples


def _pack(
    input: Tensor,
    sources: tuple[Tensor | None, ...],
    eps: float,
    settings: Settings,
    state: tuple[Any, ...],
) -> _Packed:
    kinds = {type(tensor) for tensor in sources if tensor is not None}
    if not kinds <= {Tensor, torch.nn.Parameter}:
        return _Packed(state, None, None)
    weight, bias, mean, variance, scale, shift = (
        None if tensor is None else tensor.detach() for tensor in sources
    )
    assert weight is not None
    if mean is not None and variance is not None:
        factor = (variance.double() + eps).rsqrt()
        factor = factor if scale is None else factor * scale.double()
        offset = -mean.double() if bias is None else bias.double() - mean.double()
        offset = offset * factor if shift is None else offset * factor + shift.double()
        weight = (weight.double() * factor.reshape(-1, 1, 1, 1)).float()
        bias = offset.float()
    if not bool(weight.isfinite().all()) or not (bias is None or bool(bias.isfinite().all())):
        return _Packed(state, None, None)
    laid_out = torch.ops.mkldnn._reorder_convolution_weight(
        weight.contiguous(memory_format=torch.channels_last),
        settings.padding, settings.stride, settings.dilation, settings.groups, input.shape,
    )  # fmt: skip
    return _Packed(state, laid_out, bias)
