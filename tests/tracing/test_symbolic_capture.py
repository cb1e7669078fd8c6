"""Mode `symbolic`: one graph for all shapes, with guards on what is not a tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fxkit.errors import CaptureError
from fxkit.tracing.capture_modes import capture


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def forward(self, a: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.layer(a)) * self.scale


def test_a_graph_holds_for_all_shapes():
    net = Scaled()
    captured = capture(net, (torch.ones(2, 4),), mode="symbolic")
    for batch in (1, 2, 7):
        a = torch.rand(batch, 4)
        assert torch.equal(captured(a), net(a))
    assert captured.recaptures == 0


def test_arguments_and_results_may_be_nested():
    def fn(batch: dict[str, Any], scale: float) -> dict[str, Any]:
        return {"sum": batch["a"] + batch["b"][0] * scale, "same": [batch["a"], None]}

    args = ({"a": torch.rand(3), "b": [torch.rand(3)]}, 2.0)
    captured = capture(fn, args, mode="symbolic")
    got, expected = captured(*args), fn(*args)
    assert torch.equal(got["sum"], expected["sum"])
    assert got["same"][0] is args[0]["a"] and got["same"][1] is None
    assert torch.equal(captured.graph_module(args[0]["a"], args[0]["b"][0])[0], expected["sum"])
    assert "expected args[1] to be 2.0, got 3.0" in captured.explain(args[0], 3.0)


def test_a_method_is_captured():
    class Encoder(Scaled):
        def encode(self, a: torch.Tensor) -> torch.Tensor:
            return self.forward(a) + 1

    net = Encoder()
    captured = capture(net.encode, (torch.ones(2, 4),), mode="symbolic")
    assert torch.equal(captured(torch.ones(3, 4)), net.encode(torch.ones(3, 4)))


def test_training_flags_and_modes_are_guarded():
    class Dropping(Scaled):
        def forward(self, a: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                b = super().forward(a)
            return b + 1 if self.training else b

    net = Dropping().eval()
    captured = capture(net, (torch.ones(2, 4),), mode="symbolic")
    with torch.no_grad():
        assert "grad off" in captured.explain(torch.ones(2, 4))
    net.train()
    assert "in training mode" in captured.explain(torch.ones(2, 4))
    assert torch.equal(captured(torch.ones(2, 4)), net(torch.ones(2, 4)))


def test_a_branch_is_refused():
    def branches(a: torch.Tensor) -> torch.Tensor:
        return a + 1 if a.sum() > 0 else a

    with pytest.raises(CaptureError, match="an `if`, `while`"):
        capture(branches, (torch.ones(3),), mode="symbolic")
