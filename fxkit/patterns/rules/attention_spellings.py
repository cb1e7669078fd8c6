"""Other spellings of attention, to those that the rules of attention.py look for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fxkit.patterns.conditions import einsum_form, every, floating, letters_agree
from fxkit.patterns.language import computed, operand
from fxkit.patterns.rewriting import rule


def _swaps_last(axes: Any) -> bool:
    """Tell whether a permutation swaps the last two axes and leaves the others."""
    rank = len(axes) if isinstance(axes, (list, tuple)) else 0
    if rank < 2 or any(type(axis) is not int for axis in axes):
        return False
    return [axis % rank for axis in axes] == [*range(rank - 2), rank - 1, rank - 2]


def _makes_columns(axes: Any) -> bool:
    """Tell whether a permutation turns [B, T, H, E] into [B, H, E, T]."""
    is_list = isinstance(axes, (list, tuple)) and all(type(axis) is int for axis in axes)
    return is_list and len(axes) == 4 and [axis % 4 for axis in axes] == [0, 2, 3, 1]


def _rows(axes: Sequence[int]) -> list[int]:
    """Return a permutation with its last two axes the other way round."""
    *batch, last, before = axes
    return [*batch, before, last]


@rule(
    at="aten.matmul",
    where={"axes": operand(value=_swaps_last)},
    exact=False,
    benefit=6,
    samples=(
        {"x": (2, 3, 5, 4), "y": (2, 3, 6, 4), "axes": [0, 1, 3, 2]},
        {"x": (5, 4), "y": (6, 4), "axes": [1, 0]},
    ),
)
def matmul_with_swapped_axes(x, y, axes):
    """A permutation of the last two axes is a transposition.

    Rewrites:
        x @ y.permute(axes)  →  x @ y.transpose(-2, -1)
    """
    return torch.matmul(x, y.permute(axes)), torch.matmul(x, y.transpose(-2, -1))


_COLUMNS = {"x": (2, 3, 5, 4), "y": (2, 6, 3, 4), "axes": [0, 2, 3, 1], "factor": 0.5}


@rule(
    at="aten.matmul",
    where={"axes": operand(value=_makes_columns)},
    exact=False,
    benefit=6,
    samples=(_COLUMNS,),
)
def matmul_with_columns(x, y, axes):
    """Keys that one permutation has made columns: the rows of heads, transposed.

    Rewrites:
        x @ y.permute(axes)  →  x @ y.permute([0, 2, 1, 3]).transpose(-2, -1)
    """
    rows = y.permute(computed(_rows)(axes))
    return torch.matmul(x, y.permute(axes)), torch.matmul(x, rows.transpose(-2, -1))


@rule(
    at="aten.matmul",
    where={"axes": operand(value=_makes_columns)},
    exact=False,
    benefit=6,
    samples=(_COLUMNS,),
)
def matmul_with_scaled_columns(x, y, axes, factor):
    """The same where the keys are scaled, as Whisper has them.

    Rewrites:
        x @ (y.permute(axes) * factor)
            →  x @ (y.permute([0, 2, 1, 3]).transpose(-2, -1) * factor)
    """
    rows = y.permute(computed(_rows)(axes))
    before = torch.matmul(x, y.permute(axes) * factor)
    return before, torch.matmul(x, rows.transpose(-2, -1) * factor)


@rule(
    at="aten.einsum",
    where=[
        every(floating("x", "y"), letters_agree("x", "y")),
        {"equation": operand(value=einsum_form("bthd,bshd->bhts"))},
    ],
    exact=False,
    benefit=6,
    samples=({"x": (2, 5, 3, 4), "y": (2, 6, 3, 4), "equation": "bthd,bshd->bhts"},),
)
def scores_by_einsum(x, y, equation):
    """Scores of queries and keys whose heads come third; the letters may be others.

    Rewrites:
        torch.einsum(equation, x, y)  →  x.transpose(1, 2) @ y.transpose(1, 2).transpose(-2, -1)
    """
    queries, keys = x.transpose(1, 2), y.transpose(1, 2)
    return torch.einsum(equation, x, y), torch.matmul(queries, keys.transpose(-2, -1))


@rule(
    at="aten.einsum",
    where=[
        every(floating("w", "v"), letters_agree("w", "v")),
        {"equation": operand(value=einsum_form("bhts,bshd->bthd"))},
    ],
    exact=False,
    benefit=6,
    samples=({"w": (2, 3, 5, 6), "v": (2, 6, 3, 4), "equation": "bhts,bshd->bthd"},),
)
def values_by_einsum(w, v, equation):
    """Means of values whose heads come third; the letters may be others.

    Rewrites:
        torch.einsum(equation, w, v)  →  (w @ v.transpose(1, 2)).transpose(1, 2)
    """
    means = torch.matmul(w, v.transpose(1, 2)).transpose(1, 2)
    return torch.einsum(equation, w, v), means


@rule(
    at="aten.masked_fill",
    where={"mask": operand(dtype=torch.bool)},
    samples=({"x": (3, 4), "mask": (1, 4), "value": -1.5},),
)
def fill_by_expanded_mask(x, mask, value):
    """Filling in numbers expands the mask by itself.

    Rewrites:
        x.masked_fill(mask.expand_as(x), value)  →  x.masked_fill(mask, value)
    """
    return x.masked_fill(mask.expand_as(x), value), x.masked_fill(mask, value)
