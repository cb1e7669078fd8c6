"""In-place calls in kernels: where nobody sees the memory that they change, and where not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fxkit
from fxkit.lower import to_cpp
from tests.lower.kernels import fused_names


def rand(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def fused(program, *shapes):
    """Compare a lowered program and its effects with eager; return the names that are fused."""
    args = tuple(rand(*s) for s in shapes)
    gm = fxkit.capture(program, tuple(a.clone() for a in args)).graph_module
    compiled = to_cpp(gm, args)
    given, taken = [[a.clone() for a in args] for _ in range(2)]
    with torch.no_grad():
        found, expected = compiled(*given), program(*taken)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(given, taken)
    return fused_names(compiled)


def chain(x):
    return torch.exp(x * 2).relu_().add_(1) * 3


def over_a_view(x):
    y = (x * 2).view(-1)
    y.add_(1)
    return y * 3


def after_a_convolution(x, w):
    y = F.conv2d(x, w)
    y += 1
    y = F.relu(y.mul_(y), inplace=True)
    return y.clamp_(0, 3).flatten(1)


def after_a_product(x, w):
    return torch.sigmoid_(F.linear(x, w).relu_()) * 2


def over_another(x, y):
    z = x + 1
    z.copy_(y)
    return z.tanh_() * 2


HIDDEN = [
    (chain, {"relu_", "add_"}, (50, 60)),
    (over_a_view, {"add_"}, (50, 60)),
    (after_a_convolution, {"add_", "mul_", "clamp_"}, (1, 3, 20, 20), (8, 3, 3, 3)),
    (after_a_product, {"relu_", "sigmoid_"}, (60, 60), (60, 60)),
    (over_another, {"copy_", "tanh_"}, (50, 60), (50, 60)),
]


@pytest.mark.parametrize("case", HIDDEN, ids=lambda case: case[0].__name__)
def test_hidden_overwrites_are_fused(case):
    program, names, *shapes = case
    assert names <= fused(program, *shapes)


def an_input(x):
    x.relu_()
    return x * 3 + 1


def through_a_view(x):
    y = x * 2
    row = y[0]
    y.relu_()
    return row + 1, y * 3


def of_a_view(x):
    y = x * 2
    y.view(-1).add_(1)
    return y * 3


def of_a_part(x):
    y = x * 2
    y[0].zero_()
    return y * 3


def of_an_expanded_view(x):
    y = (x * 2).unsqueeze(0)
    z = y.transpose(1, 2)
    z.mul_(3)
    return y + 1


def of_another_dtype(x):
    y = x * 2
    y.add_(x.double())
    return y * 3


@pytest.mark.parametrize(
    "program",
    [an_input, through_a_view, of_a_view, of_a_part, of_an_expanded_view, of_another_dtype],
)
def test_overwrites_that_somebody_sees_stay_in_eager(program):
    assert not any(name.endswith("_") for name in fused(program, (50, 60)))


def test_the_value_before_is_kept_for_those_who_read_it_before():
    def program(x):
        y = x * 2
        before = y + 1
        y.relu_()
        return before, y * 3

    assert "relu_" in fused(program, (50, 60))
