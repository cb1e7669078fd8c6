"""A profile changes nothing: statistics, inputs and random numbers are as they were."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxkit


def test_running_statistics_and_random_numbers_stay():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    x = torch.randn(3, 4)
    gm = fxkit.capture(model, (x,)).graph_module
    before = {name: value.clone() for name, value in gm.state_dict().items()}
    stream = torch.random.get_rng_state()
    fxkit.profile(gm, (x,), iters=2)
    assert all(torch.equal(value, before[name]) for name, value in gm.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), stream)


@pytest.mark.parametrize("x", [torch.ones(3, 2), torch.ones(2, 3).t(), torch.ones(4, 4)[1:, ::2]])
def test_inputs_that_are_written_are_put_back(x):
    before = x.clone()
    fxkit.profile(fxkit.symbolic_trace(lambda x: x.mul_(2).sum()), (x,), iters=2)
    assert torch.equal(x, before)


def test_what_is_not_written_stays_fit_for_a_derivative():
    x = torch.randn(3, requires_grad=True)
    y = x.exp()
    fxkit.profile(fxkit.symbolic_trace(lambda y: y * 2), (y,), iters=1)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())


def test_inputs_of_every_kind_are_taken():
    gm = fxkit.symbolic_trace(lambda x, y, z: x.sum() + y.sum() + z)
    sparse, wide = torch.eye(3).to_sparse(), torch.ones(1).expand(3)
    profile = fxkit.profile(gm, (sparse, wide, 2.0), iters=1)
    assert {"sum_1", "sum_2", "add", "add_1"} <= {row["name"] for row in profile.to_rows()}
    assert wide.stride() == (0,)
