"""What does nothing outside of training, and what only looks like it."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxkit
from fxkit.passes import RemoveInferenceNoOps
from fxkit.passes.manager.manager import PassManager

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def names_left(function, x=X, **options):
    """Return the calls that stay, after checking that the function kept its meaning."""
    gm = fxkit.symbolic_trace(function)
    manager = PassManager([RemoveInferenceNoOps(**options)], verify="numerics", args=(x,))
    result = manager.run(gm)
    names = [n.name for n in gm.graph.nodes if n.op not in ("placeholder", "output", "get_attr")]
    return names, result.records[0].notes


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop, self.same, self.wide = nn.Dropout(0.5), nn.Identity(), nn.Dropout2d(0.5)

    def forward(self, x):
        x = self.same(self.drop(x)).to(torch.float32).contiguous().reshape(2, 3, 4, 5)
        return torch.sin(F.alpha_dropout(self.wide(x), 0.2, self.training).detach())


PICTURE = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))


def test_chain_of_nothing():
    assert names_left(Block().eval(), PICTURE)[0] == ["sin"]


def test_dropout_in_training_stays():
    gm = fxkit.symbolic_trace(Block().train())
    PassManager([RemoveInferenceNoOps()], args=(PICTURE,)).run(gm)
    names = [n.name for n in gm.graph.nodes]
    assert {"drop", "wide", "alpha_dropout"} <= set(names)
    assert "same" not in names


def test_copy_that_nobody_can_tell_goes():
    assert names_left(lambda x: (x * 2).clone() + 1)[0] == ["mul", "add"]


@pytest.mark.parametrize("empty", [torch.empty(0), torch.empty(0, 4)])
def test_joins_with_nothing_go(empty):
    assert "cat" not in names_left(lambda x: torch.cat([empty, x * 2, empty]) + 1)[0]


def test_a_cache_that_is_empty_is_not_copied():
    def step(x):
        first = torch.cat([torch.tensor([]), x], -1)
        return torch.cat([first, x.sin()], -1)

    assert sum("cat" in name for name in names_left(step)[0]) == 1


def joined_with_a_wider_dtype(x):
    return torch.cat([torch.empty(0, dtype=torch.float64), x]) + 1


def joined_of_two(x):
    return torch.cat([torch.empty(0), x, x]) + 1


def joined_across(x):
    return torch.cat([torch.empty(0), x.t()]) + 1


def joined_then_written(x):
    y = torch.cat([torch.empty(0), x])
    y.add_(1)
    return x + y


def copied_then_written(x):
    y = x.clone()
    y.add_(1)
    return x + y


def original_written(x):
    y = x * 2
    z = y.clone()
    y.add_(1)
    return y + z


def copy_returned(x):
    return x.clone()


def both_returned(x):
    y = x * 2
    return y, y.clone()


def laid_out_anew(x):
    return x.t().contiguous() + 1


def copied_in_another_layout(x):
    return x.t().clone(memory_format=torch.contiguous_format) + 1


def really_cast(x):
    return x.to(torch.float64) + 1


def really_reshaped(x):
    return x.reshape(4, 3) + 1


@pytest.mark.parametrize("function, calls", [
    (copied_then_written, 3), (original_written, 4), (copy_returned, 1), (both_returned, 2),
    (joined_with_a_wider_dtype, 2), (joined_of_two, 2), (joined_across, 3),
    (joined_then_written, 3), (laid_out_anew, 3), (copied_in_another_layout, 3),
    (really_cast, 2), (really_reshaped, 2),
])  # fmt: skip
def test_stays(function, calls):
    assert len(names_left(function)[0]) == calls


def test_detach_of_what_is_learnt_stays():
    x = X.clone().requires_grad_()
    names, notes = names_left(lambda x: x.detach() * x, x)
    assert names == ["detach", "mul"]
    assert "autograd" in notes[0]


class Checked(nn.Module):
    def forward(self, x):
        torch.ops.aten._assert_tensor_metadata(x, None, None, torch.float32)
        torch.ops.aten._assert_tensor_metadata(x, dtype=torch.float32, device="cpu")
        torch.ops.aten._assert_async(x.sum() < 1e9)
        return x * 2


def test_detach_stays_where_something_is_set_of_the_result_or_of_the_operand():
    def of_result(x):
        y = x.detach()
        y.requires_grad_()
        return y * 2

    def of_operand(x):
        y = x * 2
        z = y.detach()
        y.requires_grad_()
        return z + 1

    for function in (of_result, of_operand):
        names, notes = names_left(function)
        assert "detach" in names and "a tensor each" in notes[0]


def test_checks_that_types_answer_go():
    names, notes = names_left(Checked())
    assert "_assert_async" in names
    assert not any("metadata" in name for name in names)
    assert "not known to hold" in notes[0]


def test_checks_of_numbers_go_when_asked_for():
    assert not any("assert" in name for name in names_left(Checked(), assertions=True)[0])


def test_checks_of_unknown_types_stay():
    gm = fxkit.symbolic_trace(Checked())
    PassManager([RemoveInferenceNoOps()]).run(gm)
    assert sum("metadata" in n.name for n in gm.graph.nodes) == 2


def test_exported_checks_and_copies():
    class Net(nn.Module):
        def forward(self, x):
            return F.dropout(x.to(torch.float32), 0.5, False) * 2

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*LeafSpec", FutureWarning)  # torch 2.11 to 2.13
        gm = torch.export.export(Net(), (X,)).run_decompositions().module()
    PassManager([RemoveInferenceNoOps()], verify="numerics", args=(X,)).run(gm)
    calls = [n.name for n in gm.graph.nodes if n.op == "call_function"]
    assert calls == ["mul"]
