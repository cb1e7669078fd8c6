"""Changes of shape that cancel or that do nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fxkit.patterns.conditions import contiguous, keeps_type
from fxkit.patterns.language import any_of, computed, operand
from fxkit.patterns.rewriting import rule


def _is_axes(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(type(axis) is int for axis in value)


def _is_identity(value: Any) -> bool:
    return _is_axes(value) and [a % len(value) for a in value] == list(range(len(value)))


def _composed(first: Sequence[int], second: Sequence[int]) -> list[int]:
    """Return the one permutation that two are, the first applied first."""
    return [first[axis] % len(first) for axis in second]


@rule(at="aten.transpose")
def transpose_of_transpose(x, a, b):
    """Transposing the same two axes twice changes nothing.

    Rewrites:
        x.transpose(a, b).transpose(a, b)  →  x
    """
    back = any_of(lambda v: v.transpose(a, b), lambda v: v.transpose(b, a))
    return back(x.transpose(a, b)), x


@rule(at=("aten.t", "aten.numpy_T", "aten.transpose"), samples=({"x": (3, 4)},))
def flip_of_matrix_back(x):
    """The transpose of the transpose of a matrix is the matrix.

    Rewrites:
        x.t().t()  →  x
    """
    twice = any_of(lambda v: v.t().t(), lambda v: v.T.T, lambda v: v.mT.mT)
    return twice(x), x


@rule(
    at="aten.permute",
    where={"p": operand(value=_is_axes), "q": operand(value=_is_axes)},
    samples=({"x": (2, 3, 4), "p": [2, 0, 1], "q": [0, -1, 1]},),
)
def permute_of_permute(x, p, q):
    """Two permutations of axes are one.

    Rewrites:
        x.permute(p).permute(q)  →  x.permute([p[a] for a in q])
    """
    return x.permute(p).permute(q), x.permute(computed(_composed)(p, q))


@rule(
    at="aten.permute",
    where={"p": operand(value=_is_identity)},
    samples=({"x": (2, 3, 4), "p": [0, 1, -1]},),
)
def permute_to_same(x, p):
    """A permutation that leaves every axis where it is.

    Rewrites:
        x.permute(p)  →  x
    """
    return x.permute(p), x


@rule(at="aten.reshape", where=keeps_type)
def reshape_to_same(x, shape):
    """A reshape to the shape that is there already.

    Rewrites:
        x.reshape(shape)  →  x
    """
    return x.reshape(shape), x


@rule(at="aten.view", where=keeps_type)
def view_as_same(x, shape):
    """A view of the shape that is there already.

    Rewrites:
        x.view(shape)  →  x
    """
    return x.view(shape), x


@rule(at="aten.flatten", where=keeps_type, samples=({"a": 0, "b": 0},))
def flatten_to_same(x, a, b):
    """Flattening a single axis.

    Rewrites:
        x.flatten(a, b)  →  x
    """
    return x.flatten(a, b), x


@rule(at=("aten.view_as", "aten.reshape_as", "aten.expand_as"), where=keeps_type)
def shape_as_same(x, y):
    """Taking on the shape of another, which is the same.

    Rewrites:
        x.view_as(y)  →  x
    """
    alike = any_of(
        lambda v, w: v.view_as(w), lambda v, w: v.reshape_as(w), lambda v, w: v.expand_as(w)
    )
    return alike(x, y), x


_SHAPES = {"x": (2, 6), "shape": [3, 4], "last": [-1, 2], "a": 0, "b": 1}


def _reshaped(x, shape, a, b):
    """Any other shape of the same elements in the same order."""
    return any_of(
        lambda v: v.view(shape),
        lambda v: v.reshape(shape),
        lambda v: v.flatten(a, b),
        lambda v: v.unsqueeze(a),
    )(x)


@rule(at="aten.reshape", where=contiguous("x"), samples=(_SHAPES,))
def reshape_of_reshape(x, shape, a, b, last):
    """The last shape counts; of a tensor that is not contiguous, the first may have been a copy.

    Rewrites:
        x.reshape(shape).reshape(last)  →  x.reshape(last)
    """
    return _reshaped(x, shape, a, b).reshape(last), x.reshape(last)


@rule(at="aten.view", where=contiguous("x"), samples=(_SHAPES,))
def view_of_view(x, shape, a, b, last):
    """The last shape counts.

    Rewrites:
        x.view(shape).view(last)  →  x.view(last)
    """
    return _reshaped(x, shape, a, b).view(last), x.view(last)


@rule(at="aten.contiguous", where=keeps_type)
def contiguous_of_contiguous(x):
    """`contiguous` of what is contiguous is the tensor itself.

    Rewrites:
        x.contiguous()  →  x
    """
    return x.contiguous(), x


@rule(at=("aten.expand", "aten.broadcast_to"), where=keeps_type)
def expand_to_same(x, shape):
    """An expansion to the shape that is there already.

    Rewrites:
        x.expand(shape)  →  x
    """
    return any_of(lambda v, s: v.expand(s), torch.broadcast_to)(x, shape), x


def _tells_all_sizes(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(type(s) is not int or s >= 0 for s in value)


# The gradient is summed in one step instead of two.
@rule(
    at="aten.expand",
    where={"last": operand(value=_tells_all_sizes)},
    exact=False,
    samples=({"x": (1, 4), "shape": [3, 4], "last": [2, 3, 4]},),
)
def expand_of_expand(x, shape, last):
    """The last expansion counts, unless it leaves sizes as the first made them.

    Rewrites:
        x.expand(shape).expand(last)  →  x.expand(last)
    """
    return x.expand(shape).expand(last), x.expand(last)


@rule(at="aten.squeeze")
def unsqueeze_then_squeeze(x, dim):
    """An axis that comes and goes.

    Rewrites:
        x.unsqueeze(dim).squeeze(dim)  →  x
    """
    return x.unsqueeze(dim).squeeze(dim), x


@rule(
    at="aten.unsqueeze",
    where=keeps_type,
    samples=({"x": (3, 1, 4), "dim": 1}, {"x": (3, 1), "dim": -1}),
)
def squeeze_then_unsqueeze(x, dim):
    """An axis of size one that goes and comes.

    Rewrites:
        x.squeeze(dim).unsqueeze(dim)  →  x
    """
    return x.squeeze(dim).unsqueeze(dim), x


@rule(at="aten.squeeze", where=keeps_type)
def squeeze_of_nothing(x, dim):
    """Squeezing an axis that has another size than one.

    Rewrites:
        x.squeeze(dim)  →  x
    """
    return x.squeeze(dim), x


@rule(
    at=("aten.repeat", "aten.tile"),
    where=keeps_type,
    samples=({"x": (3, 4), "ones": [1, 1]}, {"x": (0, 4), "ones": [1, 1]}),
)
def repeat_once(x, ones):
    """Repeating once along each axis.

    Rewrites:
        x.repeat(ones)  →  x
    """
    return any_of(lambda v, n: v.repeat(n), torch.tile)(x, ones), x


@rule(
    at="aten.flip",
    where=keeps_type,
    samples=({"x": (3, 4), "dims": [0]}, {"x": (2, 3, 4), "dims": [1, 2]}),
)
def reverse_of_reverse(x, dims):
    """Reversing an axis twice changes nothing.

    Rewrites:
        x.flip(dims).flip(dims)  →  x
    """
    return x.flip(dims).flip(dims), x


def _is_all_zero(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(type(n) is int and n == 0 for n in value)


@rule(
    at="aten.pad",
    where=[keeps_type, {"widths": operand(value=_is_all_zero)}],
    samples=({"x": (3, 4), "widths": [0, 0], "mode": "constant", "value": None},),
)
def pad_by_nothing(x, widths, mode, value):
    """Padding by zero elements.

    Rewrites:
        F.pad(x, widths, mode, value)  →  x
    """
    return torch.nn.functional.pad(x, widths, mode, value), x


_START = operand(value=lambda start: type(start) is int and start >= 0)


@rule(
    at="aten.narrow",
    where={"start": _START, "further": _START},
    samples=({"x": (3, 9), "dim": 1, "start": 2, "length": 6, "further": 1, "last": 3},),
)
def narrow_of_narrow(x, dim, start, length, further, last):
    """A part of a part is a part.

    Rewrites:
        x.narrow(dim, start, length).narrow(dim, further, last)
            →  x.narrow(dim, start + further, last)
    """
    part = x.narrow(dim, start, length).narrow(dim, further, last)
    return part, x.narrow(dim, computed(lambda a, b: a + b)(start, further), last)


@rule(
    at="aten.squeeze",
    samples=({"x": (3, 4), "dim": 1}, {"x": (2, 1, 4), "dim": 1}, {"x": (5,), "dim": 0}),
)
def sum_then_squeeze(x, dim):
    """A summed axis that is kept and then dropped.

    Rewrites:
        x.sum(dim, keepdim=True).squeeze(dim)  →  x.sum(dim)
    """
    return x.sum(dim, keepdim=True).squeeze(dim), x.sum(dim)


@rule(
    at="aten.squeeze",
    samples=({"x": (3, 4), "dim": 1}, {"x": (2, 1, 4), "dim": 1}, {"x": (5,), "dim": 0}),
)
def mean_then_squeeze(x, dim):
    """An averaged axis that is kept and then dropped.

    Rewrites:
        x.mean(dim, keepdim=True).squeeze(dim)  →  x.mean(dim)
    """
    return x.mean(dim, keepdim=True).squeeze(dim), x.mean(dim)
