"""Layers as products of matrices, and what their inputs say of errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxkit
from fxkit.quantization.algorithms.input_moments import InputMoments, input_moments
from fxkit.quantization.preparation import graph_of
from fxkit.quantization.stored_layers import StoredLayer, stored_layers

LAYERS: list[tuple[nn.Module, tuple[int, ...]]] = [
    (nn.Linear(6, 4), (3, 5, 6)),
    (nn.Linear(6, 4, bias=False), (6,)),
    (nn.Conv1d(4, 6, 3, padding=2, dilation=2), (2, 4, 9)),
    (nn.Conv2d(4, 6, 3, padding="same", dilation=(2, 1), groups=2), (2, 4, 7, 5)),
    (nn.Conv2d(4, 8, (5, 1), padding="same", groups=4), (2, 4, 7, 6)),
    (nn.Conv2d(5, 3, (3, 2), stride=(2, 1), padding=(1, 0)), (5, 8, 5)),
    (nn.Conv3d(2, 3, 2, padding="valid"), (2, 2, 4, 3, 5)),
]


def layer_of(model: Any, *args: Tensor) -> tuple[Any, StoredLayer]:
    program: Any = graph_of(model, args, None)
    (layer,) = stored_layers(program.graph_module)
    return program, layer


@pytest.mark.parametrize(("module", "shape"), LAYERS, ids=lambda one: str(one))
def test_rows_times_matrix_are_the_layers_results(module: Any, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    _, layer = layer_of(module.eval(), x)
    matrix = layer.matrix(module.weight.detach())
    assert torch.equal(layer.weight(matrix), module.weight)
    products = layer.rows(x) @ matrix.mT  # [groups, n, out]
    exact = module(x).detach()
    if "conv" not in layer.operator:
        found = products[0].reshape(exact.shape)
    else:
        batched = exact if exact.ndim == len(layer.shape) else exact[None]
        places = batched.shape[2:]
        found = products.unflatten(1, (batched.shape[0], -1)).permute(1, 0, 3, 2)
        found = found.reshape(*batched.shape[:2], *places).reshape(exact.shape)
    if module.bias is not None:
        ones = (1,) * (len(layer.shape) - 2)
        found = found + module.bias.reshape(-1, *ones)
    torch.testing.assert_close(found, exact)


class Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(5, 3))
        self.b = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return torch.addmm(self.b, x, self.w), x @ self.w, torch.addmm(self.b, x, self.w, alpha=2)


def test_products_with_a_stored_matrix_are_layers_unless_they_are_scaled() -> None:
    x = torch.randn(4, 5)
    model = Products().eval()
    program: Any = graph_of(model, (x,), None)
    layers = stored_layers(program.graph_module)
    assert [layer.operator for layer in layers] == ["aten.linear", "aten.linear"]
    for layer in layers:
        weight = model.w.detach().t()
        product = layer.rows(x)[0] @ layer.matrix(weight)[0].mT
        torch.testing.assert_close(product, x @ model.w)
        assert torch.equal(layer.weight(layer.matrix(weight)), weight)


@pytest.mark.parametrize(("module", "shape"), LAYERS, ids=lambda one: str(one))
def test_moments_tell_the_squared_error(module: Any, shape: tuple[int, ...]) -> None:
    batches = [(torch.randn(shape),) for _ in range(3)]
    program, layer = layer_of(module.eval(), *batches[0])
    moments = input_moments(program, [layer], batches)[layer.path]
    difference = torch.randn(module.weight.shape, dtype=torch.float64) * 0.1
    with torch.no_grad():
        exact = [module(*batch).double() for batch in batches]
        module.weight += difference.float()
        error = sum(
            (module(*batch).double() - one).square().sum()
            for batch, one in zip(batches, exact, strict=True)
        )
        module.weight -= difference.float()
    found = moments.error(layer.matrix(difference)).sum()
    torch.testing.assert_close(found, error, rtol=1e-4, atol=1e-6)


def test_rows_that_are_not_finite_are_left_out() -> None:
    rows = torch.randn(1, 5, 3)
    rows[0, 2, 1], rows[0, 4, 0] = torch.nan, torch.inf
    moments = InputMoments.of(rows)
    kept = rows[:, [0, 1, 3]].double()
    assert moments.count == 3
    torch.testing.assert_close(moments.second, kept.mT @ kept)
    torch.testing.assert_close(moments.mean, kept.mean(1))


def test_layers_of_traced_graphs() -> None:
    gm: Any = graph_of(fxkit.symbolic_trace(nn.Sequential(nn.Linear(4, 3), nn.ReLU())), (), None)
    (layer,) = stored_layers(gm)
    assert (layer.path, layer.shape) == ("0.weight", (3, 4))
