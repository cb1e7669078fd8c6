"""Modules of torch that quantise as if: captured, trained compiled, and one call when frozen."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.quantization import disable_observer
from torch.ao.quantization.fake_quantize import (
    default_fake_quant,
    default_fused_act_fake_quant,
    default_fused_per_channel_wt_fake_quant,
    default_per_channel_weight_fake_quant,
    default_weight_fake_quant,
)

import fxkit

pytestmark = pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max")

KINDS = {
    "by tensor": (default_fake_quant, default_weight_fake_quant),
    "by channel": (default_fake_quant, default_per_channel_weight_fake_quant),
    "fused": (default_fused_act_fake_quant, default_fused_per_channel_wt_fake_quant),
}


class Network(nn.Module):
    """A convolution and a linear layer whose operands are quantised as if."""

    def __init__(self, activation: Any, weight: Any) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(1, 4, 3), nn.Linear(4 * 16, 3)
        self.activations = nn.ModuleList(activation() for _ in range(2))
        self.weights = nn.ModuleList(weight() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x, weight = self.activations[0](x), self.weights[0](self.conv.weight)
        y = torch.relu(F.conv2d(x, weight, self.conv.bias)).flatten(1)
        y, weight = self.activations[1](y), self.weights[1](self.linear.weight)
        return F.linear(y, weight, self.linear.bias)


def network(kind: str) -> Network:
    torch.manual_seed(0)
    model = Network(*KINDS[kind])
    model(images())  # their buffers get their sizes
    return model


def images() -> Tensor:
    return torch.randn(8, 1, 6, 6, generator=torch.Generator().manual_seed(1))


def train(model: nn.Module, run: Any, steps: int = 4) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(run(images() + step / 4), torch.arange(8) % 3).backward()
        optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
def test_training_runs_compiled(kind: str) -> None:
    plain = network(kind)
    fast = copy.deepcopy(plain)
    train(plain, plain)
    train(fast, fxkit.compile(fast))
    for (name, ours), theirs in zip(
        fast.state_dict().items(), plain.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_one_call_each_when_observers_are_off(kind: str) -> None:
    model = network(kind).apply(disable_observer)
    captured = fxkit.capture(model, (images(),))
    calls = [node.name for node in captured.graph_module.graph.nodes if node.op != "get_attr"]
    assert sum("fake_quant" in call for call in calls) == 4
    with torch.no_grad():
        assert torch.equal(captured(images()), model(images()))


def test_a_tensor_of_another_size_is_still_refused() -> None:
    kept = torch.zeros(3)

    def run(x: Tensor) -> Tensor:
        return kept.resize_(x.shape) + x

    assert torch.equal(fxkit.capture(run, (torch.ones(3),))(torch.ones(3)), torch.ones(3))
    with pytest.raises(fxkit.errors.CaptureError, match="resize_ changes a tensor's storage"):
        fxkit.capture(run, (torch.ones(4),))
