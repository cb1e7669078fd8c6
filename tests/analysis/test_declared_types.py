"""Types that are declared because torch's own fakes do not tell them."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from fxkit.analysis.tensor_types import fake_mode, propagate_types
from fxkit.ir.types import TensorType

_OFFSETS = torch.tensor([3, 5, 9, 14], dtype=torch.int32)
_GROUPED_MM = torch.__dict__["_grouped_mm"]


@pytest.mark.parametrize(
    ("left", "right", "offsets"),
    [
        (torch.randn(14, 32), torch.randn(4, 32, 8), _OFFSETS),
        (torch.randn(4, 16, 32), torch.randn(4, 32, 8), None),
    ],
)
def test_product_of_groups_has_its_type(
    left: torch.Tensor, right: torch.Tensor, offsets: torch.Tensor | None
):
    graph = fx.Graph()
    inputs = [graph.placeholder(name) for name in ("left", "right")]
    kwargs = {} if offsets is None else {"offs": graph.placeholder("offsets")}
    graph.output(graph.call_function(_GROUPED_MM, tuple(inputs), kwargs))
    args = (left, right) if offsets is None else (left, right, offsets)
    found = propagate_types(fx.GraphModule(torch.nn.Module(), graph), args)
    assert found == TensorType.of(_GROUPED_MM(left, right, offs=offsets))


def test_fakes_of_torch_still_refuse_it():
    with fake_mode() as mode, pytest.raises(Exception, match=r"BF16|BFloat16"):
        left, right = map(mode.from_tensor, (torch.randn(14, 32), torch.randn(4, 32, 8)))
        _GROUPED_MM(left, right, offs=mode.from_tensor(_OFFSETS))


def test_fakes_run_operators_of_higher_order():
    with fake_mode() as mode:
        x = mode.from_tensor(torch.ones(3))
        cond = torch.ops.higher_order.cond
        (chosen,) = cond(x.sum() > 0, lambda y: (y.sin(),), lambda y: (y.cos(),), (x,))
    assert chosen.shape == (3,)
