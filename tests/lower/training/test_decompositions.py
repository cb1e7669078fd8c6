"""What operators are spelled out as is laid out in memory as their own results are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fxkit.lower.training.decompositions import decompositions
from tests.layouts import LAYOUTS, OPERATORS, SHAPE

SPELLED_OUT = [operator for operator in OPERATORS if operator in decompositions()]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("operator", SPELLED_OUT, ids=str)
@pytest.mark.parametrize("other", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_lie_as_the_operators_do(operator: Any, layout: str, other: str) -> None:
    x, y = LAYOUTS[layout](torch.randn(SHAPE)), LAYOUTS[other](torch.randn(SHAPE))
    args = OPERATORS[operator](x, y)
    ours, eager = (
        [it for it in pytree.tree_leaves(call(*args)) if isinstance(it, Tensor)]
        for call in (decompositions()[operator], operator)
    )
    assert [it.stride() for it in ours] == [it.stride() for it in eager]
