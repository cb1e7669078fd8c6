"""Numbers found in the data that no type depends on."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import fxkit
from fxkit.analysis.tensor_types import infer_type, propagate_types
from fxkit.errors import InvalidGraphError
from fxkit.ir.types import TensorType

X = torch.randn(2, 4, 3, 3)


@pytest.mark.parametrize("trace", [fxkit.symbolic_trace, fx.symbolic_trace])
@pytest.mark.parametrize("training", [True, False])
def test_a_batch_norm_without_momentum_has_a_type(trace, training):
    model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4, momentum=None)).train(training)
    gm = trace(model)
    assert propagate_types(gm, (X,)) == TensorType.of(model(X))
    assert model[1].momentum is None
    assert model[1].num_batches_tracked.item() == training


def test_the_type_of_a_new_call_needs_no_momentum():
    gm = fx.symbolic_trace(nn.Sequential(nn.BatchNorm2d(4, momentum=None)))
    propagate_types(gm, (X,))
    node = next(n for n in gm.graph.nodes if n.op == "call_module")
    node.meta.clear()
    assert infer_type(node).shape == X.shape


def test_a_momentum_from_the_data_decides_no_type():
    def program(x, mean, variance, count):
        momentum = 1.0 / count.item()
        return F.batch_norm(x, mean, variance, None, None, True, momentum)

    args = (X, torch.zeros(4), torch.ones(4), torch.tensor(3))
    gm = fxkit.symbolic_trace(program)
    assert propagate_types(gm, args) == TensorType.of(X)


def test_a_scale_from_the_data_decides_sizes():
    def program(x, number):
        return F.interpolate(x, scale_factor=number.item())

    with pytest.raises(InvalidGraphError):
        propagate_types(fxkit.symbolic_trace(program), (X, torch.tensor(2.0)))
