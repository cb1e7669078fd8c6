"""Bias correction: means of results stay where they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxkit
from fxkit import quantization as q
from fxkit.errors import UnsupportedError
from fxkit.quantization.affine import signal_to_noise


class Product(nn.Module):
    """Products that have no operand for a bias, and one whose bias is scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(24, 8)), nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x @ self.w, torch.addmm(self.b, x, self.w)], -1)


MODELS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(24, 16), (64, 24)),
    "no bias": (lambda: nn.Linear(24, 16, bias=False), (64, 24)),
    "depthwise": (lambda: nn.Conv2d(8, 8, 3, groups=8, padding=1), (4, 8, 9, 9)),
    "conv, no bias": (lambda: nn.Conv1d(4, 8, 3, bias=False), (4, 4, 30)),
    "unbatched conv": (lambda: nn.Conv1d(4, 8, 3), (4, 90)),
    "products": (Product, (64, 24)),
}


def case(name: str, spec: q.QuantizationSpec) -> tuple[nn.Module, Any, list[Any]]:
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model = make().eval()
    data = [(torch.rand(shape) + 0.5,) for _ in range(6)]  # not centred
    prepared = q.prepare(model, data[0], spec)
    q.calibrate(prepared, data[:4], progress=False)
    return model, prepared, data


def results(program: Any, data: list[Any]) -> Tensor:
    with torch.no_grad():
        return torch.stack([program(*batch).double() for batch in data])


def low_bits() -> q.QuantizationSpec:
    weights = q.TensorSpec(torch.int8, -7, 7, "symmetric", "per_channel")
    return q.QuantizationSpec(None, weights)


def static_low_bits() -> q.QuantizationSpec:
    activations = q.TensorSpec(torch.uint8, 0, 15, "affine")
    return q.QuantizationSpec(activations, low_bits().weights)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("spec", [low_bits(), static_low_bits(), q.int8_dynamic()], ids=str)
def test_means_of_channels_come_back(name: str, spec: q.QuantizationSpec) -> None:
    if spec.activations is not None and spec.activations.is_dynamic and name != "linear":
        pytest.skip("a scale for each token is taken by linear layers alone")
    model, prepared, data = case(name, spec)
    exact = results(model, data)
    before = results(q.convert(prepared), data)
    rows = q.correct_biases(prepared, data[:4])
    after = results(q.convert(prepared), data)
    axes = tuple(range(exact.ndim - 1)) if "conv" not in name and name != "depthwise" else None
    axes = axes or ((0, 2) if name == "unbatched conv" else (0, 1, *range(3, exact.ndim)))

    def shift(found: Tensor) -> float:
        return float((found - exact).mean(axes).square().mean().sqrt())

    assert shift(after) < shift(before) / 3
    assert all(row.shift > 0 for row in rows)
    if spec.weights.bits < 8:
        assert signal_to_noise(exact, before) < 30  # visibly off
        assert signal_to_noise(exact, after) > signal_to_noise(exact, before) + 1


def test_a_corrected_graph_compiles_and_the_prepared_program_stays() -> None:
    model, prepared, data = case("products", q.int8_static())
    q.correct_biases(prepared, data)
    assert torch.equal(prepared(*data[0]), model(*data[0]))
    reference: Any = q.convert(prepared)
    torch.testing.assert_close(fxkit.compile(reference)(*data[0]), reference(*data[0]))


def test_it_corrects_the_integers_that_were_chosen() -> None:
    model, prepared, data = case("linear", low_bits())
    q.gptq(prepared, data[:4])
    chosen = results(q.convert(prepared), data)
    q.correct_biases(prepared, data[:4])
    exact = results(model, data)
    found = results(q.convert(prepared), data)
    assert (found - exact).mean((0, 1)).abs().mean() < (chosen - exact).mean((0, 1)).abs().mean()


def test_faults_of_the_caller() -> None:
    _, prepared, _ = case("linear", low_bits())
    with pytest.raises(UnsupportedError, match="got none"):
        q.correct_biases(prepared, [])
    assert not prepared.choices.biases
