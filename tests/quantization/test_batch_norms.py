"""Batch norms take statistics of what quantised layers give them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxkit
from fxkit import quantization as q
from fxkit.errors import UnsupportedError
from fxkit.quantization.affine import signal_to_noise


def network() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, after in ((3, 16), (16, 16), (16, 12)):
        layers += [nn.Conv2d(before, after, 3, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(12 * 9, 5), nn.BatchNorm1d(5)).train()
    with torch.no_grad():
        for _ in range(60):
            model(torch.rand(32, 3, 9, 9))
    return model.eval()


def low_bits() -> q.QuantizationSpec:
    weights = q.TensorSpec(torch.int8, -4, 3, "symmetric", "per_channel")
    return q.QuantizationSpec(None, weights)


def images(count: int) -> list[tuple[Tensor]]:
    return [(torch.rand(64, 3, 9, 9),) for _ in range(count)]


@pytest.mark.parametrize("kind", ["captured", "traced"])
def test_three_bits_lose_less(kind: str) -> None:
    model, data = network(), images(8)
    source: Any = model if kind == "captured" else fxkit.symbolic_trace(model)
    quantized: Any = q.quantize(source, low_bits(), data[:1])
    with torch.no_grad():
        before = [quantized(*batch) for batch in data]
        again: Any = q.reestimate_batch_norms(quantized, data[:5])
        exact = torch.cat([model(*batch) for batch in data[5:]])
        plain = torch.cat(before[5:])
        found = torch.cat([again(*batch) for batch in data[5:]])
    assert signal_to_noise(exact, plain) < 5  # visibly off
    assert signal_to_noise(exact, found) > signal_to_noise(exact, plain) + 3
    assert torch.equal(quantized(*data[0]), before[0])  # it stays as it is
    torch.testing.assert_close(found.mean(0), exact.mean(0), atol=0.1, rtol=0)
    torch.testing.assert_close(found.std(0), exact.std(0), atol=0.15, rtol=0.15)
    torch.testing.assert_close(
        fxkit.compile(again)(*data[5]), again(*data[5]), rtol=1e-4, atol=1e-4
    )


def test_statistics_of_one_batch_are_those_of_its_values() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4)).eval()
    x = torch.randn(10, 4) * 3 + 1
    gm: Any = q.reestimate_batch_norms(fxkit.symbolic_trace(model), [(x,)])
    buffers = dict(gm.named_buffers())
    mean, variance = (buffers[f"_0_running_{name}"] for name in ("mean", "var"))
    torch.testing.assert_close(mean, x.mean(0))
    torch.testing.assert_close(variance, x.var(0))
    assert mean.dtype == torch.float32 and float(model[0].running_mean.abs().max()) == 0


def test_faults_of_the_caller() -> None:
    model = network()
    folded = fxkit.symbolic_trace(nn.Linear(4, 2).eval())
    with pytest.raises(UnsupportedError, match="got none"):
        q.reestimate_batch_norms(folded, [(torch.ones(1, 4),)])
    with pytest.raises(UnsupportedError, match="some batches"):
        q.reestimate_batch_norms(fxkit.symbolic_trace(model), [])
