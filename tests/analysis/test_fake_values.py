"""Fake tensors where passes of torch look for them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxkit
from fxkit.errors import UnsupportedError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, places = self.linear(x).t().max(dim=0)
        return values, places


def test_values_have_the_layout_of_what_runs() -> None:
    net, x = Net(), torch.randn(3, 4)
    gm = fxkit.capture(net, (x,)).graph_module
    typed = [node for node in gm.graph.nodes if fxkit.ir.types.type_of(node) is not None]
    assert fxkit.fill_fake_values(gm) == len(typed) > 5
    turned = next(
        node.meta["val"] for node in gm.graph.nodes if "aten.t" in str(fxkit.graph(gm)[node.name])
    )
    assert (turned.shape, turned.stride(), turned.dtype) == ((6, 3), (1, 6), torch.float32)
    for node, real in zip(gm.graph.output_node().args[0], net(x), strict=True):
        assert (node.meta["val"].shape, node.meta["val"].dtype) == (real.shape, real.dtype)
    with pytest.raises(Exception, match=r"(?i)fake|data_ptr|storage"):
        turned.data_ptr()


def test_symbolic_sizes_are_those_of_torch() -> None:
    gm = fxkit.symbolic_trace(lambda x: torch.cat([x, x]) + 1)
    rows = torch.export.Dim("rows")
    fxkit.propagate_types(gm, (torch.randn(3, 4),), dynamic_shapes=({0: rows},))
    assert fxkit.fill_fake_values(gm) == 4
    found = {node.name: node.meta["val"].shape for node in gm.graph.nodes if "val" in node.meta}
    assert all(isinstance(shape[0], torch.SymInt) and shape[1] == 4 for shape in found.values())
    assert found["cat"] == (found["x"][0] * 2, 4)


def test_what_has_no_types_is_left_alone_and_what_is_no_graph_refused() -> None:
    gm = fxkit.symbolic_trace(torch.sin)
    assert fxkit.fill_fake_values(gm) == 0
    with pytest.raises(UnsupportedError, match="got Net"):
        fxkit.fill_fake_values(Net())
