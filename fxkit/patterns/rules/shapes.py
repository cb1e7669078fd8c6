"""Changes of shape that cancel or that do nothing."""

from __future__ import annotations

from fxkit.ir.types import TensorType, type_of
from fxkit.patterns.matching import Match
from fxkit.patterns.rewriting import rule


def _is_same_type(match: Match) -> bool | str:
    before, after = match.type("x"), type_of(match.root)
    if not isinstance(before, TensorType) or not isinstance(after, TensorType):
        return "the types are not known; call propagate_types first"
    same = (before.shape, before.dtype, before.stride, before.device) == (
        after.shape,
        after.dtype,
        after.stride,
        after.device,
    )
    return True if same else f"it turns {before} into {after}, or changes strides or device"


def _is_no_copy(match: Match) -> bool | str:
    return _is_same_type(match) if match["copy"] is False else "a copy is asked for"


@rule
def transpose_of_transpose(x, a, b):
    """Transposing the same two axes twice changes nothing.

    Rewrites:
        x.transpose(a, b).transpose(a, b)  →  x
    """
    return x.transpose(a, b).transpose(a, b), x


@rule(where=_is_same_type)
def reshape_to_same(x, shape):
    """A reshape to the shape that is there already.

    Rewrites:
        x.reshape(shape)  →  x
    """
    return x.reshape(shape), x


@rule(where=_is_same_type)
def view_as_same(x, shape):
    """A view of the shape that is there already.

    Rewrites:
        x.view(shape)  →  x
    """
    return x.view(shape), x


@rule(where=_is_same_type)
def contiguous_of_contiguous(x):
    """`contiguous` of what is contiguous is the tensor itself.

    Rewrites:
        x.contiguous()  →  x
    """
    return x.contiguous(), x


@rule(where=_is_same_type)
def expand_to_same(x, shape):
    """An expansion to the shape that is there already.

    Rewrites:
        x.expand(shape)  →  x
    """
    return x.expand(shape), x


@rule
def unsqueeze_then_squeeze(x, dim):
    """An axis that comes and goes.

    Rewrites:
        x.unsqueeze(dim).squeeze(dim)  →  x
    """
    return x.unsqueeze(dim).squeeze(dim), x
