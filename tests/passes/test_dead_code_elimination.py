"""Dead code: what goes, and above all what stays."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxkit
from fxkit.passes import DeadCodeElimination
from fxkit.passes.manager.manager import PassManager


def names_left(function):
    gm = fxkit.symbolic_trace(function)
    PassManager([DeadCodeElimination()]).run(gm)
    return gm, [n.name for n in gm.graph.nodes if n.op not in ("placeholder", "output")]


def test_chain_nobody_needs_goes():
    def f(x):
        torch.relu(torch.exp(x) + 1)
        return x * 2

    assert names_left(f)[1] == ["mul"]


def test_unused_input_stays():
    gm, _ = names_left(lambda x, y: x * 2)
    assert gm(torch.ones(2), torch.ones(2)).tolist() == [2, 2]


def write(x):
    x.add_(1)


def inplace_argument(x):
    F.relu(x, inplace=True)


def write_through_view(x):
    x[0].zero_()


def item_assignment(x):
    x[0] = 1


def out_argument(x):
    torch.add(x, 1, out=x)


def augmented(x):
    y = x.view(-1)
    y += 1


@pytest.mark.parametrize(
    "change",
    [write, inplace_argument, write_through_view, item_assignment, out_argument, augmented],
)
def test_writes_stay(change):
    def f(x):
        y = x * 2
        change(y)
        return y

    gm, _ = names_left(f)
    x = torch.tensor([[-1.0, 2.0], [3.0, -4.0]])
    assert torch.equal(gm(x), f(x))


def test_random_numbers_stay():
    def f(x):
        torch.rand_like(x)
        F.dropout(x, 0.5, training=True)
        return torch.rand_like(x)

    gm, left = names_left(f)
    assert len(left) == 3
    x = torch.ones(4)
    torch.manual_seed(0)
    expected = f(x)
    torch.manual_seed(0)
    assert torch.equal(gm(x), expected)


def test_dropout_in_eval_goes():
    assert names_left(lambda x: (F.dropout(x, 0.5, training=False), x * 2)[1])[1] == ["mul"]


def test_checks_stay(capsys):
    def f(x):
        torch._check(True)
        torch._assert(x, "must hold")
        return x * 2

    _, left = names_left(f)
    assert "_assert" in left


def test_batch_norm_stays_in_training_only():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x):
            self.norm(x)
            return x * 2

    for training, left in ((True, ["norm", "mul"]), (False, ["mul"])):
        gm = fxkit.symbolic_trace(Net().train(training))
        PassManager([DeadCodeElimination()]).run(gm)
        assert [n.name for n in gm.graph.nodes if n.op.startswith("call")] == left


def test_module_with_a_hook_stays():
    seen = []
    net = nn.Sequential(nn.ReLU())
    net[0].register_forward_hook(lambda *_: seen.append(1))

    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = net

        def forward(self, x):
            self.inner(x)
            return x * 2

    gm = fxkit.symbolic_trace(Root())
    PassManager([DeadCodeElimination()]).run(gm)
    gm(torch.ones(1))
    assert seen
