"""Canonicalise: results taken by place. Its rules are tested where they are."""

from __future__ import annotations

from operator import getitem

import torch

import fxkit
from fxkit.passes import Canonicalise


def test_results_are_taken_by_place() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        found = x.max(0)
        return found.values * found.indices + x.shape[0]

    x = torch.randn(3, 4)
    gm = fxkit.symbolic_trace(program)
    fxkit.PassManager([Canonicalise()], args=(x,), verify="numerics").run(gm)
    read = [node.args[1] for node in gm.graph.find_nodes(op="call_function", target=getattr)]
    assert read == ["shape"]
    taken = [node.args[1] for node in gm.graph.find_nodes(op="call_function", target=getitem)]
    assert taken == [0, 1, 0]
