"""Where nodes of others' graphs come from."""

from __future__ import annotations

import torch
from torch import nn

from fxkit.ir.provenance import module_path, module_stack


class Flat(nn.Module):
    """Reads a size, which torch.export makes a node for."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).reshape(x.shape[0] * 3)


def test_nodes_of_an_exported_program_that_ran_in_no_module_have_none() -> None:
    rows = torch.export.Dim("rows", min=2, max=64)
    exported = torch.export.export(Flat(), (torch.ones(4, 3),), dynamic_shapes=({0: rows},))
    nodes = list(exported.graph_module.graph.nodes)
    assert any("_empty" in str(node.meta.get("nn_module_stack")) for node in nodes)
    for node in nodes:
        assert "_empty" not in module_path(node)
        assert all("_empty" not in path for path, _ in module_stack(node))
