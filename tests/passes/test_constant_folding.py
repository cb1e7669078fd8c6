"""Constant folding: what becomes a buffer, and what must stay computed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxkit
from fxkit.ir.op import is_check
from fxkit.passes import ConstantFolding
from fxkit.passes.manager.manager import PassManager

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


class Constants(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(4.0))
        self.register_buffer("table", torch.arange(8.0))

    def forward(self, x):
        return x + torch.cos(self.table[:4]) * 2 + self.weight.exp()


def fold(module, args=(X,), **options):
    gm = fxkit.symbolic_trace(module)
    result = PassManager([ConstantFolding(**options)], verify="numerics", args=args).run(gm)
    return gm, result.records[0]


def calls(gm):
    return [n.name for n in gm.graph.nodes if n.op.startswith("call")]


def test_buffers_fold_and_parameters_stay():
    gm, _ = fold(Constants())
    assert "cos" not in calls(gm) and "exp" in calls(gm)
    assert torch.equal(gm._folded, torch.cos(torch.arange(4.0)) * 2)
    assert not isinstance(gm._folded, nn.Parameter)


def test_parameters_fold_when_asked():
    with torch.no_grad():
        gm, _ = fold(Constants(), fold_parameters=True)
    assert "exp" not in calls(gm)
    assert not gm._folded.requires_grad


def test_parameter_is_still_trained_when_not_folded():
    module = Constants()
    gm, _ = fold(module)
    with torch.no_grad():
        module.weight.add_(1)
    assert torch.equal(gm(X), module(X))


def test_large_results_stay():
    gm, record = fold(Constants(), max_bytes=15)
    assert "cos" in calls(gm)
    assert any("too large" in note for note in record.notes)


def test_views_of_constants_stay_views():
    class View(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.arange(8.0))

        def forward(self, x):
            return x + self.table[:4]

    gm, record = fold(View())
    assert not record.modified
    gm.table.add_(1)
    assert torch.equal(gm(X), X + torch.arange(1.0, 5.0))


class Written(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x):
        self.count.add_(1)
        return x + self.count * 2


class Returned(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.ones(4))

    def forward(self, x):
        return x * 2, self.table * 3


class WrittenResult(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.ones(4))

    def forward(self, x):
        y = self.table * 3
        y.add_(x[0])
        return y + x


@pytest.mark.parametrize("cls", [Written, Returned, WrittenResult])
def test_not_folded(cls):
    module = cls()
    gm = fxkit.symbolic_trace(module)
    record = PassManager([ConstantFolding()], args=(X,)).run(gm).records[0]
    assert not record.modified


def test_result_is_another_tensor_at_each_call():
    gm, _ = fold(Returned())
    first = gm(X)[1]
    first.zero_()
    assert torch.equal(gm(X)[1], torch.full((4,), 3.0))


def test_random_numbers_are_drawn_at_each_call():
    class Noise(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.ones(4))

        def forward(self, x):
            return x + torch.rand_like(self.table)

    gm, record = fold(Noise())
    assert not record.modified
    assert not torch.equal(gm(X), gm(X))


def test_folded_parameters_need_no_gradient_any_more():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.scale = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.ones(4))

        def forward(self, x):
            return F.linear(x, self.weight * self.scale)

    module, args = Scaled(), (torch.randn(2, 4),)
    gm = fxkit.symbolic_trace(module)
    passes = [ConstantFolding(fold_parameters=True), fxkit.passes.DeadCodeElimination()]
    PassManager(passes, args=args).run(gm)
    assert not gm(*args).requires_grad
    torch.testing.assert_close(gm(*args), module(*args).detach())


@pytest.mark.parametrize("spec", ["int8_weight_only", "int4_weight_only"])
def test_quantised_weights_stay_integers(spec):
    layer = nn.Linear(128, 4).eval()
    x = torch.randn(2, 128)
    gm = fxkit.quantize(layer, getattr(fxkit.quantization, spec)(), args=(x,)).graph_module
    assert not PassManager([ConstantFolding(fold_parameters=True)], args=(x,)).run(gm).modified
    assert gm.get_buffer("weight_quantized").dtype == torch.int8
    folding = ConstantFolding(fold_parameters=True, fold_dequantized=True)
    assert PassManager([folding], args=(x,)).run(gm).modified


def test_checks_of_what_constants_determine_go():
    def program(x, mask):
        positions = torch.arange(8)
        if (positions.diff() == 1).all():
            x = x + positions
        return x * 2 if mask.any() else x

    args = torch.randn(3, 8), torch.ones(3, dtype=torch.bool)
    graph_module = fxkit.capture(program, args).graph_module
    expected = graph_module(*args)
    PassManager([ConstantFolding()], args=args).run(graph_module)
    assert len([node for node in graph_module.graph.nodes if is_check(node)]) == 1  # of the mask
    assert torch.equal(graph_module(*args), expected)
    with pytest.raises(fxkit.errors.CaptureError, match="bool_2"):
        graph_module(args[0], ~args[1])
