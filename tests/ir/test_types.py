"""Shapes broadcast as torch broadcasts them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxkit.ir.types import broadcast_shape

SHAPES = st.lists(st.lists(st.sampled_from([0, 1, 2, 3]), max_size=4), max_size=4)


@given(SHAPES)
def test_shapes_broadcast_as_in_torch(shapes: list[list[int]]) -> None:
    try:
        expected = torch.broadcast_tensors(*[torch.empty(shape, device="meta") for shape in shapes])
    except RuntimeError:
        with pytest.raises(RuntimeError, match="expected shapes that fit together"):
            broadcast_shape(*shapes)
        return
    assert broadcast_shape(*shapes) == (tuple(expected[0].shape) if shapes else ())
