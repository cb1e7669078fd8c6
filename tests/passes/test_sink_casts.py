"""Casts that cancel across what only moves numbers, and those that stay where they are."""

from __future__ import annotations

import pytest
import torch

import fxkit
from fxkit.ir.op import resolve
from fxkit.passes import SinkCasts
from fxkit.passes.manager.manager import PassManager

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).bfloat16()
WIDE, NARROW = torch.float32, torch.bfloat16


def casts(gm):
    calls = [resolve(n) for n in gm.graph.nodes]
    return sum(call is not None and call.name == "aten.to" for call in calls)


def sink(function, x=X):
    """Return the casts before and after, checking that every number stays."""
    gm = fxkit.symbolic_trace(function)
    before = casts(gm)
    PassManager([SinkCasts()], verify="numerics", args=(x,)).run(gm)
    kept = x.clone()
    gm(x)
    assert torch.equal(x, kept)
    return before, casts(gm)


def chain(x):
    return x.to(WIDE).transpose(0, 1).reshape(2, 12)[:, 1:].to(NARROW) * 2


def joined(x):
    return torch.cat([x.float(), (x + 1).float()], 1).bfloat16() + 1


def used_elsewhere(x):
    y = x.to(WIDE).view(6, 4)
    return y.to(NARROW) * 2, y.sin()


def selected(x):
    return x.float().index_select(0, torch.tensor([1, 0])).bfloat16() + 1


@pytest.mark.parametrize("function, before, after", [
    (chain, 2, 0), (joined, 3, 0), (selected, 2, 0), (used_elsewhere, 2, 1),
])  # fmt: skip
def test_cancel(function, before, after):
    assert sink(function) == (before, after)


def to_another_dtype(x):
    return x.to(WIDE).view(6, 4).to(torch.float16) * 2


def computed_between(x):
    return (x.to(WIDE).view(6, 4) * 3).to(NARROW)


def narrowed_first(x):
    return x.to(torch.float8_e5m2).view(6, 4).to(NARROW) * 2


def returned(x):
    return x.to(WIDE).view(6, 4).to(NARROW)


def view_returned(x):
    return x.to(WIDE).view(6, 4).to(NARROW)[1:].detach()


def written(x):
    y = x.to(WIDE).view(6, 4).to(NARROW)
    y.add_(1)
    return y * 2


def joined_with_another(x):
    return torch.cat([x.float(), torch.ones(4, 6)], 1).bfloat16() + 1


@pytest.mark.parametrize("function", [
    to_another_dtype, computed_between, narrowed_first, returned, view_returned, written,
    joined_with_another,
])  # fmt: skip
def test_stay(function):
    before, after = sink(function)
    assert before == after


def test_two_results_stay_two_tensors():
    gm = fxkit.symbolic_trace(returned)
    record = PassManager([SinkCasts()], verify="numerics", args=(X,)).run(gm).records[0]
    assert gm(X).data_ptr() != X.data_ptr()
    assert "became one tensor" in record.notes[0]


def test_gradients_are_added_up_in_the_wide_dtype():
    x = X.clone().requires_grad_()
    gm = fxkit.symbolic_trace(chain)
    record = PassManager([SinkCasts()], verify="numerics", args=(x,)).run(gm).records[0]
    assert casts(gm) == 2
    assert "gradients" in record.notes[0]
