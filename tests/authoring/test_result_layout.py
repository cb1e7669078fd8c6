"""Results lie in memory as those of torch's own operators do."""

from __future__ import annotations

import random

import pytest
import torch

from fxkit.authoring.operators.result_layout import broadcast_shape, result_strides


def operand(draw: random.Random, sizes: list[int]) -> torch.Tensor:
    """Return a tensor that broadcasts to some sizes: permuted, with gaps, or expanded."""
    rank = len(sizes)
    axes = draw.randint(0, rank) if draw.random() < 0.3 else rank
    shape = [size if draw.random() > 0.2 else 1 for size in sizes[rank - axes :]]
    steps = [draw.choice((1, 1, 1, 2)) for _ in shape]
    order = draw.sample(range(axes), axes)
    base = torch.empty([shape[axis] * steps[axis] for axis in order])
    whole = base.permute([order.index(axis) for axis in range(axes)])
    return whole[
        tuple(slice(None, size * step, step) for size, step in zip(shape, steps, strict=True))
    ]


@pytest.mark.parametrize("seed", range(20))
def test_strides_are_those_of_torch(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(100):
        sizes = [draw.choice((0, 1, 1, 2, 3, 4)) for _ in range(draw.randint(0, 5))]
        tensors = [operand(draw, sizes) for _ in range(draw.randint(1, 3))]
        compute = (torch.neg, torch.add, torch.addcmul)[len(tensors) - 1]
        expected = compute(*tensors)
        shape = broadcast_shape(tensors)
        assert shape == expected.shape
        if expected.numel():
            assert result_strides(shape, tensors) == expected.stride()


def test_shapes_that_do_not_broadcast() -> None:
    with pytest.raises(RuntimeError, match="shapes that broadcast"):
        broadcast_shape([torch.empty(2, 3), torch.empty(2)])
