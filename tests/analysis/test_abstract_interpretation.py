"""Analyses by transfer functions: arguments as schemas name them, and intervals that hold."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxkit
from fxkit.errors import UnsupportedError
from fxkit.passes import Pass

Interval = tuple[float, float]


class Intervals(fxkit.Analysis[Interval]):
    """Between which numbers the elements of each value lie; inputs lie between -1 and 1."""

    def input(self, node):
        return (-1.0, 1.0)

    def attribute(self, node, held):
        return (held.min().item(), held.max().item())

    def otherwise(self, node, operands):
        return (-math.inf, math.inf)

    @fxkit.transfer(torch.add)
    def add(self, node, a, b, *, alpha=1):
        (low, high), scale = bounds(b), alpha
        low, high = sorted((low * scale, high * scale))
        return (bounds(a)[0] + low, bounds(a)[1] + high)

    @fxkit.transfer(torch.mul)
    def mul(self, node, a, b):
        ends = [x * y for x in bounds(a) for y in bounds(b)]
        return (min(ends), max(ends))

    @fxkit.transfer(F.relu, "aten.relu6")
    def clip_below(self, node, x):
        return (max(x[0], 0.0), max(x[1], 0.0))

    @fxkit.transfer(torch.sigmoid)
    def sigmoid(self, node, x):
        return (0.0, 1.0)

    @fxkit.transfer(torch.chunk, torch.split)
    def pieces(self, node, x, *rest):
        return (x, x)

    @fxkit.transfer(torch.cat)
    def joined(self, node, tensors, **options):
        assert set(options) == {"dim"}
        return (min(t[0] for t in tensors), max(t[1] for t in tensors))


def bounds(value: Interval | float) -> Interval:
    return value if isinstance(value, tuple) else (value, value)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([0.5, -2.0, 3.0, 1.0]))

    def forward(self, x, y):
        first, second = torch.chunk(F.relu(x * self.scale + 1), 2, dim=-1)
        return torch.cat([first.sigmoid(), second]), torch.sub(torch.add(x, y, alpha=-3), 1)


X, Y = torch.rand(3, 4) * 2 - 1, torch.rand(3, 4) * 2 - 1


@pytest.mark.parametrize("trace", ["symbolic", "captured"])
def test_values_follow_the_schemas_of_operators(trace: str) -> None:
    net = Net()
    gm = (
        fxkit.symbolic_trace(net)
        if trace == "symbolic"
        else fxkit.capture(net, (X, Y)).graph_module
    )
    found = Intervals(gm)
    assert found["relu"] == (0.0, 4.0)
    joined, rest = found.result
    assert joined == (0.0, 4.0) and rest == (-math.inf, math.inf)
    assert found[fxkit.graph(gm)["add_1"]] == (-4.0, 4.0)


def test_what_intervals_say_holds_of_what_runs() -> None:
    gm = fxkit.symbolic_trace(Net())
    found = Intervals(gm)
    results = gm(X, Y)
    for (low, high), result in zip(found.result, results, strict=True):
        assert low <= result.min().item() and result.max().item() <= high


def test_parameters_of_called_modules_are_values_too() -> None:
    class Largest(fxkit.Analysis[float]):
        def input(self, node):
            return 1.0

        def attribute(self, node, held):
            return held.abs().max().item()

        def otherwise(self, node, operands):
            return max(operands)

    layer = nn.Linear(4, 2)
    layer.bias.data.fill_(7.0)
    assert Largest(fxkit.symbolic_trace(nn.Sequential(layer))).result == 7.0


def test_a_graph_that_writes_is_refused_unless_writes_are_ignored() -> None:
    gm = fxkit.symbolic_trace(lambda x: x.relu_() + x)
    with pytest.raises(
        UnsupportedError, match=r"writes to no memory, got %relu_: writes %x"
    ) as caught:
        Intervals(gm)
    assert "Functionalise" in caught.value.hint

    class Careless(Intervals):
        ignores_writes = True

    assert Careless(gm).result == (-math.inf, math.inf)


def test_an_error_in_a_transfer_function_says_at_which_node() -> None:
    class Broken(Intervals):
        @fxkit.transfer(torch.sigmoid)
        def sigmoid(self, node, x):
            raise KeyError("no such thing")

    with pytest.raises(KeyError) as caught:
        Broken(fxkit.symbolic_trace(lambda x: x.sigmoid()))
    assert "%sigmoid = aten.sigmoid(%x)" in caught.value.__notes__[0]


def test_a_subclass_inherits_and_overrides() -> None:
    class Tanh(Intervals):
        @fxkit.transfer(torch.tanh)
        def tanh(self, node, x):
            return (-1.0, 1.0)

    gm = fxkit.symbolic_trace(lambda x: torch.tanh(x * 3) + 1)
    assert Tanh(gm).result == (0.0, 2.0) and Intervals(gm).result == (-math.inf, math.inf)


def test_a_pass_asks_for_one_and_it_is_kept_until_the_graph_changes() -> None:
    @dataclass(frozen=True)
    class DropNeedlessRelu(Pass):
        """Replace relu by its operand where that is never negative."""

        def apply(self, edit, context):
            for found in fxkit.graph(edit.gm).find(torch.relu):
                intervals = context.analysis(Intervals)
                (operand,) = found.producers
                if intervals[operand][0] >= 0:
                    edit.replace(found.fx_node, operand.fx_node)

    gm = fxkit.symbolic_trace(
        lambda x: torch.relu(torch.relu(x.sigmoid()) + x.sigmoid()) - x.relu()
    )
    result = fxkit.PassManager([DropNeedlessRelu()], args=(X,)).run(gm)
    assert len(fxkit.graph(gm).find(torch.relu)) == 1
    assert result.analyses["Intervals"].made == 3
    torch.testing.assert_close(gm(X), 2 * X.sigmoid() - X.relu())
