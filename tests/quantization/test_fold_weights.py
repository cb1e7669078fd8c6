"""Weights that are computed of parameters in each call are weights, not activations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import fxkit
from fxkit import quantization as q


class Standardised(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        std, mean = torch.std_mean(self.weight, (1, 2, 3), keepdim=True)
        return F.conv2d(input, (self.weight - mean) / (std + 1e-5), self.bias)


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.t())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weight = torch.tanh(self.weight)
        return F.linear(x, weight), weight


@pytest.fixture(autouse=True)
def _of_its_own_seed() -> None:
    torch.manual_seed(0)


def _linear() -> nn.Module:
    return nn.Linear(16, 8)


_MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "weight_norm": (lambda: parametrizations.weight_norm(nn.Conv1d(4, 8, 3)), (2, 4, 20)),
    "weight_norm by hooks": (lambda: torch.nn.utils.weight_norm(_linear()), (5, 16)),
    "spectral_norm": (lambda: parametrizations.spectral_norm(_linear()), (5, 16)),
    "spectral_norm by hooks": (lambda: torch.nn.utils.spectral_norm(_linear()), (5, 16)),
    "orthogonal": (lambda: parametrizations.orthogonal(_linear()), (5, 16)),
    "standardised": (lambda: Standardised(3, 8, 3), (2, 3, 9, 9)),
    "transposed": (Transposed, (5, 16)),
}


@pytest.mark.one_in(3)
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("name", _MODELS)
def test_computed_weights_are_quantised_as_weights(name: str) -> None:
    make, shape = _MODELS[name]
    model, x = make().eval(), torch.randn(shape)
    expected = model(x)
    for spec in (q.int8_static(), q.int8_weight_only()):
        prepared = q.prepare(model, (x,), spec)
        assert torch.equal(prepared(x), expected)
        quantized = q.convert(prepared)
        rows = q.report(quantized, prepared).rows
        assert any(row.how.startswith("weight s8 symmetric per_channel") for row in rows)
        compiled = fxkit.compile(quantized)
        for _ in range(2):
            assert (compiled(x) - expected).norm() < 0.02 * expected.norm()


def test_a_computed_weight_that_is_returned_too_stays_what_it_was() -> None:
    model, x = Tied().eval(), torch.randn(5, 8)
    prepared = q.prepare(model, (x,), q.int8_static())
    assert all(map(torch.equal, prepared(x), model(x)))
    quantized = q.convert(prepared)
    first, second = quantized(x), quantized(x)
    assert torch.equal(first[1], model(x)[1])
    assert first[1].data_ptr() != second[1].data_ptr()
    (row,) = q.report(quantized, prepared).rows
    assert row.how.startswith("weight s8")


def test_a_weight_that_an_input_determines_is_an_activation() -> None:
    def program(x: Tensor, scale: Tensor) -> Tensor:
        return F.linear(x, scale * torch.ones(8, 16))

    args = torch.randn(5, 16), torch.tensor(2.0)
    prepared = q.prepare(program, args, q.int8_static())
    prepared(*args)
    (row,) = q.report(q.convert(prepared), prepared).rows
    assert "weight" not in row.how


def test_what_is_trained_is_not_folded() -> None:
    model, x = parametrizations.weight_norm(_linear()), torch.randn(5, 16)
    trained = q.prepare_qat(model, (x,), q.int8_static())
    trained(x).square().mean().backward()
    assert all(parameter.grad is not None for parameter in trained.model.parameters())
