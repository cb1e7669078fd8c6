"""What a convolution can do by itself: its bias and its padding."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F

from fxkit.patterns.conditions import UNKNOWN, not_empty, types_of
from fxkit.patterns.language import computed, operand
from fxkit.patterns.match_results import Match
from fxkit.patterns.rewriting import Where, rule


def _is_bias_over(axes: int) -> Where:
    """Accept one number a channel, with the axes of the picture all of size one."""

    def accept(match: Match) -> bool | str:
        known = types_of(match, ("x", "w", "b"))
        if known is None:
            return UNKNOWN
        picture, weight, bias = known
        wanted = (weight.shape[0], *(1,) * axes)
        if bias.shape not in (wanted, (1, *wanted)) or len(weight.shape) != axes + 2:
            return f"expected b: [{','.join(map(str, wanted))}], got {bias}"
        if len(bias.shape) > len(picture.shape):
            return f"expected no more axes of b: {bias} than of x: {picture}"
        return True if bias.dtype == weight.dtype else f"b is {bias} and w {weight}"

    return accept


def _plain(axes: int, **shapes: Any) -> dict[str, Any]:
    """Return a sample with the plainest options of a convolution."""
    one, zero = ([1] * axes, [0] * axes) if axes > 1 else (1, 0)
    return {"s": one, "p": zero, "d": one, "g": 1, **shapes}


@rule(
    at="aten.add",
    where=_is_bias_over(1),
    exact=False,
    samples=(_plain(1, x=(2, 3, 8), w=(4, 3, 3), b=(4, 1)),),
)
def bias_of_convolution_1d(x, w, b, s, p, d, g):
    """A bias that is added after a convolution over one axis.

    Rewrites:
        F.conv1d(x, w, None, s, p, d, g) + b  →  F.conv1d(x, w, b.reshape(-1), s, p, d, g)
    """
    options = {"stride": s, "padding": p, "dilation": d, "groups": g}
    return F.conv1d(x, w, **options) + b, F.conv1d(x, w, b.reshape(-1), **options)


@rule(
    at="aten.add",
    where=_is_bias_over(2),
    exact=False,
    samples=(
        _plain(2, x=(2, 3, 6, 6), w=(4, 3, 3, 3), b=(1, 4, 1, 1)),
        _plain(2, x=(2, 4, 6, 6), w=(4, 2, 3, 3), b=(4, 1, 1), g=2, s=[2, 2], p=[1, 0]),
    ),
)
def bias_of_convolution_2d(x, w, b, s, p, d, g):
    """A bias that is added after a convolution over two axes.

    Rewrites:
        F.conv2d(x, w, None, s, p, d, g) + b  →  F.conv2d(x, w, b.reshape(-1), s, p, d, g)
    """
    options = {"stride": s, "padding": p, "dilation": d, "groups": g}
    return F.conv2d(x, w, **options) + b, F.conv2d(x, w, b.reshape(-1), **options)


@rule(
    at="aten.add",
    where=_is_bias_over(3),
    exact=False,
    samples=(_plain(3, x=(1, 2, 4, 4, 4), w=(3, 2, 2, 2, 2), b=(1, 3, 1, 1, 1)),),
)
def bias_of_convolution_3d(x, w, b, s, p, d, g):
    """A bias that is added after a convolution over three axes.

    Rewrites:
        F.conv3d(x, w, None, s, p, d, g) + b  →  F.conv3d(x, w, b.reshape(-1), s, p, d, g)
    """
    options = {"stride": s, "padding": p, "dilation": d, "groups": g}
    return F.conv3d(x, w, **options) + b, F.conv3d(x, w, b.reshape(-1), **options)


def _is_even(axes: int) -> Any:
    """Accept as much zero padding at the end of an axis as at its beginning, over `axes` axes."""

    def accept(widths: Any) -> bool:
        if not isinstance(widths, (list, tuple)) or len(widths) != 2 * axes:
            return False
        if any(type(width) is not int or width < 0 for width in widths):
            return False
        return list(widths[::2]) == list(widths[1::2])

    return operand(value=accept)


def _listed(padding: Any) -> list[Any]:
    return list(padding) if isinstance(padding, (list, tuple)) else [padding]


def _together(widths: Any, padding: Any) -> list[int]:
    """Add padding, which names the last axis first, to that of a convolution."""
    return [a + b for a, b in zip(widths[::2][::-1], _listed(padding), strict=True)]


_IS_ZERO = operand(value=lambda value: value is None or value == 0)
_IS_SIZES = operand(value=lambda padding: all(type(n) is int for n in _listed(padding)))


# A NaN or Inf among the weights times a zero of the padding was NaN.
@rule(
    at="aten.conv1d",
    where=[not_empty("x"), {"widths": _is_even(1), "zero": _IS_ZERO, "p": _IS_SIZES}],
    exact=False,
    finite_only=True,
    samples=(_plain(1, x=(2, 3, 8), w=(4, 3, 3), b=(4,), widths=[2, 2], zero=None),),
)
def padding_of_convolution_1d(x, w, b, s, p, d, g, widths, zero):
    """Zeros that a convolution over one axis adds by itself, without a copy.

    Rewrites:
        F.conv1d(F.pad(x, widths, "constant", zero), w, b, s, p, d, g)
            →  F.conv1d(x, w, b, s, [widths[0] + p], d, g)
    """
    padded = F.pad(x, widths, "constant", zero)
    options = {"stride": s, "dilation": d, "groups": g}
    together = computed(_together)(widths, p)
    return (
        F.conv1d(padded, w, b, padding=p, **options),
        F.conv1d(x, w, b, padding=together, **options),
    )


# A NaN or Inf among the weights times a zero of the padding was NaN.
@rule(
    at="aten.conv2d",
    where=[not_empty("x"), {"widths": _is_even(2), "zero": _IS_ZERO, "p": _IS_SIZES}],
    exact=False,
    finite_only=True,
    samples=(
        _plain(2, x=(2, 3, 6, 6), w=(4, 3, 3, 3), b=(4,), widths=[1, 1, 2, 2], zero=0.0),
        _plain(2, x=(2, 3, 6, 6), w=(4, 3, 3, 3), b=None, widths=[2, 2, 0, 0], zero=0, p=[0, 1]),
    ),
)
def padding_of_convolution_2d(x, w, b, s, p, d, g, widths, zero):
    """Zeros that a convolution over two axes adds by itself, without a copy.

    Rewrites:
        F.conv2d(F.pad(x, widths, "constant", zero), w, b, s, p, d, g)
            →  F.conv2d(x, w, b, s, [widths[2] + p[0], widths[0] + p[1]], d, g)
    """
    padded = F.pad(x, widths, "constant", zero)
    options = {"stride": s, "dilation": d, "groups": g}
    together = computed(_together)(widths, p)
    return (
        F.conv2d(padded, w, b, padding=p, **options),
        F.conv2d(x, w, b, padding=together, **options),
    )
