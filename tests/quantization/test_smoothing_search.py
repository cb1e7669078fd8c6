"""Smoothing as far as a config gains by it, input by input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxkit import quantization as q
from fxkit.errors import UnsupportedError
from fxkit.quantization.affine import signal_to_noise


class TwoKinds(nn.Module):
    """One input has a huge channel that matters little, the other has none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 48), nn.Linear(32, 48)
        self.last = nn.Linear(48, 16)
        with torch.no_grad():
            for layer in (self.first, self.second):
                layer.weight[:, 5] /= 300

    def forward(self, x: Tensor) -> Tensor:
        x = x * (1 + 299 * (torch.arange(32) == 5))
        return self.last(torch.sin(self.first(x) + self.second(x)))


def batches(count: int) -> list[tuple[Tensor]]:
    torch.manual_seed(2)
    return [(torch.randn(24, 32),) for _ in range(count)]


@pytest.mark.parametrize(
    "spec", [q.int8_static(), q.int8_dynamic(), q.int4_weight_only(16)], ids=["u8", "token", "4"]
)
def test_it_gains_at_least_what_one_exponent_for_all_does(spec: q.QuantizationSpec) -> None:
    torch.manual_seed(0)
    model, data = TwoKinds().eval(), batches(6)

    def error(program: Any) -> float:
        quantized: Any = q.quantize(program, spec, data[:4])
        with torch.no_grad():
            pairs = [(model(*batch), quantized(*batch)) for batch in data[4:]]
        exact, found = (torch.cat(one) for one in zip(*pairs, strict=True))
        return signal_to_noise(exact, found)

    smooth: Any = q.smooth_for(model, spec, data[:4])
    with torch.no_grad():
        for rows in (24, 3):
            x = torch.randn(rows, 32)
            torch.testing.assert_close(smooth(x), model(x), rtol=1e-4, atol=1e-4)
    found, half = error(smooth), error(q.smooth_quant(model, data[:4]))
    assert found > half - 0.5
    if spec.activations is not None:
        assert error(model) < 22  # visibly off
        assert found > error(model) + 6


def test_what_is_not_quantised_is_not_smoothed() -> None:
    model, data = TwoKinds().eval(), batches(2)
    config = q.QuantizationConfig(q.int8_static(), by_module={"second": None})
    smooth: Any = q.smooth_for(model, config, data)
    scaled = [
        node.args[0].name
        for node in smooth.graph_module.graph.nodes
        if node.target is torch.mul and "smoothing" in str(node.args[1])
    ]
    assert scaled in ([], ["sin"])  # the first two layers share an input
    bad = [(torch.full((2, 32), torch.nan),)]
    same: Any = q.smooth_for(model, q.int8_static(), bad)
    assert torch.equal(same(*data[0]), model(*data[0]))


def test_faults_of_the_caller() -> None:
    with pytest.raises(UnsupportedError, match="got none"):
        q.smooth_for(TwoKinds().eval(), q.int8_static(), [])
