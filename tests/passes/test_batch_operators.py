"""Equal small operators in one call, and those that must stay on their own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxkit
from fxkit.ir.op import resolve
from fxkit.passes import BatchOperators
from fxkit.passes.manager.manager import PassManager

X = torch.randn(8, 3, 4, generator=torch.Generator().manual_seed(0))


def calls(gm, name):
    found = [resolve(n) for n in gm.graph.nodes]
    return sum(call is not None and call.name == name for call in found)


def batch(function, *args, **options):
    gm = fxkit.capture(function, args).graph_module
    result = PassManager([BatchOperators(**options)], verify="numerics", args=args).run(gm)
    return gm, result.records[0]


class Experts(nn.Module):
    def __init__(self, bias=True, count=8):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 5, bias=bias) for _ in range(count))

    def forward(self, x):
        return sum(layer(row * 2).sin() for layer, row in zip(self.layers, x, strict=False))


@pytest.mark.parametrize("bias", [True, False])
def test_linear_layers(bias):
    gm, _ = batch(Experts(bias), X)
    assert calls(gm, "aten.linear") == 0
    assert calls(gm, "aten.baddbmm") + calls(gm, "aten.bmm") == 1


def test_functions():
    gm, _ = batch(lambda *rows: sum(torch.tanh(row * 2) for row in rows), *X.unbind())
    assert calls(gm, "aten.tanh") == calls(gm, "aten.mul") == 1


def test_too_few_or_too_large():
    assert calls(batch(Experts(count=5), X)[0], "aten.linear") == 5
    assert calls(batch(Experts(count=5), X, fewest=5)[0], "aten.linear") == 0
    assert calls(batch(Experts(), X, max_bytes=40)[0], "aten.linear") == 8


def test_parts_of_a_split():
    gm, _ = batch(lambda x: sum(torch.sigmoid(part) for part in x.chunk(4, 1)), torch.randn(2, 8))
    assert calls(gm, "aten.sigmoid") == 1
    assert calls(gm, "aten.stack") == 0


def gates(x):
    a, b, c, d = x.chunk(4, -1)
    return torch.sigmoid(a) + torch.sigmoid(b) * torch.tanh(c) + torch.sigmoid(d)


def part_used_twice(x):
    a, b = x.chunk(2, -1)
    return torch.sin(a) + torch.sin(b) + a


def part_written(x):
    a, b = (x * 2).chunk(2, -1)
    a.add_(1)
    return torch.sin(a) + torch.sin(b)


def parts_returned(x):
    return [torch.sin(part) for part in x.chunk(2, 0)]


def one_after_another(x):
    for _ in range(8):
        x = torch.tanh(x)
    return x


def result_written(x):
    rows = [torch.tanh(row * 2) for row in x.unbind()]
    rows[0].add_(1)
    return sum(rows)


def operand_written(x):
    x = x * 1
    total = torch.tanh(x[0])
    for index in range(1, 8):
        x.add_(1)
        total = total + torch.tanh(x[index])
    return total


def random(x):
    return sum(F.dropout(row, 0.5, True) for row in x.unbind())


def different_numbers(x):
    return sum(row * index for index, row in enumerate(x.unbind()))


def results_returned(x):
    return [torch.tanh(row.sum(0)) for row in x.unbind()]


@pytest.mark.parametrize("function", [
    gates, part_used_twice, part_written, parts_returned, one_after_another, operand_written,
    random, different_numbers, results_returned,
])  # fmt: skip
def test_stay_apart(function):
    assert not batch(function, X)[1].modified


def test_written_result_stays_on_its_own():
    gm, _ = batch(result_written, X)
    assert calls(gm, "aten.tanh") == 2


def test_numbers_are_exact_for_functions():
    rows = X.unbind()
    gm, _ = batch(lambda *rows: sum(torch.exp(row * 2) for row in rows), *rows)
    expected = sum(torch.exp(row * 2) for row in rows)
    found = gm(*rows)
    found = found[0] if isinstance(found, (tuple, list)) else found
    assert torch.equal(found, expected)
