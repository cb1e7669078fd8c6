"""Products with a parameter are layers: they are quantised as those are, and multiply integers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxkit
from fxkit import quantization as q
from fxkit.lower.compiling import multiply_integers
from fxkit.quantization.affine import signal_to_noise

of_nothing = pytest.mark.filterwarnings("ignore:expected operators to quantise")


class Products(nn.Module):
    """Multiplies as GPT-2's layers do, and by operators of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = (
            nn.Parameter(torch.randn(n, m) / 8) for n, m in ((64, 96), (96, 64))
        )
        self.bias = nn.Parameter(torch.randn(96))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.addmm(self.bias, x.view(-1, 64), self.inner).view(*x.shape[:-1], 96)
        return F.gelu(y) @ self.outer


SPECS = {
    "static": q.int8_static(),
    "dynamic": q.int8_dynamic(),
    "int8 weights": q.int8_weight_only(),
    "int4 weights": q.int4_weight_only(32),
}


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Products().eval().requires_grad_(False)


@pytest.mark.parametrize("shape", [(20, 64), (2, 10, 64), (2, 3, 4, 64)])
def test_what_is_prepared_computes_the_same(model: nn.Module, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    prepared = q.prepare(model, (x,), q.int8_static())
    assert torch.equal(prepared(x), model(x))


@pytest.mark.parametrize("spec", SPECS)
def test_a_bias_may_be_a_row(spec: str) -> None:
    torch.manual_seed(0)
    bias, weight = (nn.Parameter(torch.randn(n, 32)) for n in (1, 64))

    class Row(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias, self.weight = bias, weight

        def forward(self, x: Tensor) -> Tensor:
            return torch.addmm(self.bias, x, self.weight)

    model, x = Row().eval(), torch.randn(5, 64)
    prepared = q.prepare(model, (x,), SPECS[spec])
    assert torch.equal(prepared(x), model(x))
    q.calibrate(prepared, [(x,)])
    (row,) = q.report(q.convert(prepared), prepared, [(x,)]).rows
    assert row.is_quantized and row.operator == "aten.linear"


@of_nothing
def test_a_product_that_is_no_layer_is_told() -> None:
    weight = nn.Parameter(torch.randn(64, 32))

    def program(x: Tensor, residual: Tensor) -> Tensor:
        return torch.addmm(residual, x, weight)

    args = torch.randn(5, 64), torch.randn(5, 32)
    prepared = q.prepare(program, args, q.int8_dynamic())
    (row,) = q.report(q.convert(prepared), prepared, [args]).rows
    assert not row.is_quantized and "adds no vector" in row.reason


@pytest.mark.parametrize("spec", SPECS)
def test_each_spec_takes_them(model: nn.Module, spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiply_integers, "reason_to_stay_float", lambda *_, **__: None)
    x = torch.randn(2, 10, 64)
    prepared = q.prepare(model, (x,), SPECS[spec])
    q.calibrate(prepared, [(x,)])
    quantized = q.convert(prepared)
    rows = q.report(quantized, prepared, [(x,)]).rows
    assert [row.operator for row in rows] == ["aten.linear"] * 2
    assert all(row.is_quantized for row in rows)
    compiled = fxkit.compile(quantized)
    compiled(x)
    assert signal_to_noise(quantized(x), compiled(x)) > 50
    if spec in ("static", "dynamic"):
        graph = compiled.compiled_modules[-1].graph_module.graph
        assert sum("integer_product" in str(node.target) for node in graph.nodes) == 2


@pytest.mark.parametrize("choose", [q.gptq, q.fit_scales])
def test_algorithms_take_them(model: nn.Module, choose: Callable[..., None]) -> None:
    x = torch.randn(200, 8) @ torch.randn(8, 64)
    found = []
    for chooses in (False, True):
        prepared = q.prepare(model, (x,), q.int4_weight_only(32))
        if chooses:
            choose(prepared, [(x,)])
        found.append(signal_to_noise(model(x), q.convert(prepared)(x)))
    assert found[1] > found[0]


@pytest.mark.parametrize(
    "program",
    [
        lambda weight, x: torch.addmm(torch.ones(20, 1), x, weight),
        lambda weight, x: torch.addmm(torch.ones(96), x, weight, beta=2),
        lambda weight, x: x[0] @ weight,
        lambda weight, x: weight.t() @ weight + x.sum(),
    ],
)
def test_other_products_stay_what_they_are(program: Callable[[Tensor, Tensor], Tensor]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 96))

        def forward(self, x: Tensor) -> Tensor:
            return program(self.weight, x)

    model, x = Model().eval().requires_grad_(False), torch.randn(20, 64)
    prepared = q.prepare(model, (x,), q.int8_static())
    assert torch.equal(prepared(x), model(x))
    rows = q.report(q.convert(prepared), prepared, [(x,)]).rows
    assert all(row.operator != "aten.linear" for row in rows)


def test_weights_may_be_computed() -> None:
    torch.manual_seed(0)

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.gain = nn.Parameter(torch.randn(64, 96)), nn.Parameter(torch.rand(96))

        def forward(self, x: Tensor) -> Tensor:
            return x @ (self.weight * self.gain)

    model, x = Scaled().eval().requires_grad_(False), torch.randn(20, 64)
    prepared = q.prepare(model, (x,), q.int8_dynamic())
    assert torch.equal(prepared(x), model(x))
    (row,) = q.report(q.convert(prepared), prepared, [(x,)]).rows
    assert row.is_quantized and row.operator == "aten.linear"
