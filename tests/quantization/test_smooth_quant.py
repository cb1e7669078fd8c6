"""SmoothQuant: the same program, whose activations lose less."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fxkit
from fxkit import quantization as q
from fxkit.errors import UnsupportedError
from fxkit.quantization.affine import signal_to_noise


class Block(nn.Module):
    """Two layers share an input, in which one channel is a hundred times as large as the others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 48), nn.Linear(32, 48)
        self.last = nn.Linear(48, 16)
        with torch.no_grad():
            for layer in (self.first, self.second):
                layer.weight[:, 5] /= 100

    def forward(self, x: Tensor) -> Tensor:
        x = x * (1 + 99 * (torch.arange(32) == 5))
        return self.last(torch.relu(self.first(x)) + self.second(x))


def batches(count: int = 4) -> list[tuple[Tensor]]:
    torch.manual_seed(2)
    return [(torch.randn(8, 32),) for _ in range(count)]


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_the_program_stays_the_same(alpha: float) -> None:
    torch.manual_seed(0)
    model, data = Block().eval(), batches()
    smooth: Any = q.smooth_quant(model, data, alpha=alpha)
    with torch.no_grad():
        for rows in (8, 3, 8):
            x = torch.randn(rows, 32)
            torch.testing.assert_close(smooth(x), model(x), rtol=1e-4, atol=1e-4)
    found = [node for node in smooth.graph_module.graph.nodes if node.target is torch.mul]
    assert len([n for n in found if "smoothing" in str(n.args[1])]) == 2  # one for each input


@pytest.mark.parametrize("spec", [q.int8_static(), q.int8_dynamic()])
def test_a_channel_of_outliers_costs_less(spec: q.QuantizationSpec) -> None:
    torch.manual_seed(0)
    model, data = Block().eval(), batches(6)

    def error(program: Any) -> float:
        quantized = q.quantize(program, spec, data[:4])
        with torch.no_grad():
            results = [(model(*batch), quantized(*batch)) for batch in data[4:]]
        exact, found = (torch.cat(one) for one in zip(*results, strict=True))
        return signal_to_noise(exact, found)

    assert error(q.smooth_quant(model, data[:4])) > error(model) + 3


def test_channels_without_values_and_graphs_of_other_kinds() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)).eval()
    data = [(torch.zeros(2, 4),), (torch.tensor([[0.0, 1.0, 0.0, -9.0]]),)]
    gm: Any = q.smooth_quant(fxkit.symbolic_trace(model), data)
    assert isinstance(gm, fx.GraphModule)
    x = torch.randn(5, 4)
    torch.testing.assert_close(gm(x), model(x))
    again = q.smooth_quant(q.smooth_quant(model, data), data)
    torch.testing.assert_close(again(x), model(x))


def test_faults_of_the_caller() -> None:
    model, data = Block().eval(), batches()
    with pytest.raises(UnsupportedError, match="got none"):
        q.smooth_quant(model, [])
    with pytest.raises(UnsupportedError, match="alpha between 0 and 1"):
        q.smooth_quant(model, data, alpha=1.5)
