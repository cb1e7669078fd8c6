"""Checkpointing: the same numbers and gradients, less memory, as much as the estimate says."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fxkit
from fxkit.errors import PassError
from fxkit.ir.provenance import source_of
from fxkit.passes import ActivationCheckpointing
from fxkit.passes.activation_checkpointing import CheckpointedPart
from fxkit.passes.manager.manager import PassManager
from fxkit.passes.partitioning.saved_tensors import saved_memories


class Layer(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        y = F.dropout(F.gelu(self.up(self.norm(x))), 0.2, self.training)
        return x + self.down(y)


class Net(nn.Module):
    def __init__(self, layers=8):
        super().__init__()
        self.layers = nn.Sequential(*(Layer() for _ in range(layers)))

    def forward(self, x):
        return self.layers(x).square().mean(-1)


class Alive(TorchDispatchMode):
    """Counts the bytes of the tensors that operators made and that still live."""

    def __init__(self, *outside):
        super().__init__()
        self.outside = {t.untyped_storage()._cdata for t in outside}
        self.sizes = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.note(tensor.untyped_storage())
        return result

    def note(self, storage):
        key = storage._cdata
        if key in self.outside or key in self.sizes:
            return
        self.sizes[key] = storage.nbytes()
        weakref.finalize(storage, self.sizes.pop, key, None)
        self.peak = max(self.peak, self.now)

    @property
    def now(self):
        return sum(self.sizes.values())


X = torch.linspace(-2.0, 2.0, 32 * 16).reshape(32, 16)


def traced(model=None):
    torch.manual_seed(0)
    return fxkit.symbolic_trace((model or Net()).train())


def checkpointed(gm, args=(X,), **options):
    manager = PassManager([ActivationCheckpointing(**options)], verify="structure", args=args)
    return manager.run(gm).records[0]


def gradients(gm, x):
    torch.manual_seed(7)
    gm.zero_grad()
    result = gm(x)
    result.sum().backward()
    return result, {name: p.grad.clone() for name, p in gm.named_parameters() if p.grad is not None}


def kept_bytes(gm, x):
    """Run forward, and return the bytes of the activations that live on."""
    outside = [*gm.parameters(), *gm.buffers(), x]
    with Alive(*outside) as alive:
        result = gm(x)
    return alive.now - result.untyped_storage().nbytes(), result


@pytest.mark.parametrize("share", [0.8, 0.5, 0.3])
def test_numbers_gradients_and_random_numbers_are_the_same_within_the_budget(share):
    gm = traced()
    before = copy.deepcopy(gm)
    kept = sum(m.nbytes for m in saved_memories(gm, (X,)) if m.savers)
    record = checkpointed(gm, budget=int(share * kept))
    assert f"within the budget of {int(share * kept):,}" in record.notes[-1]
    expected, wanted = gradients(before, X)
    got, found = gradients(gm, X)
    assert torch.equal(expected, got)
    for name, gradient in wanted.items():
        assert torch.equal(gradient, found[name]), name
    assert kept_bytes(gm, X)[0] <= share * kept


def test_the_estimate_is_what_is_kept():
    gm = traced()
    estimate = sum(m.nbytes for m in saved_memories(gm, (X,)) if m.savers)
    measured, result = kept_bytes(gm, X)
    assert measured == pytest.approx(estimate, rel=0.05)
    assert result.requires_grad


def test_backward_stays_below_its_peak_of_before():
    gm = traced()
    before = copy.deepcopy(gm)
    checkpointed(gm, budget=0)
    peaks = []
    for module in (before, gm):
        for parameter in module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        with Alive(*module.parameters(), *(p.grad for p in module.parameters()), X) as alive:
            module(X).sum().backward()
        peaks.append(alive.peak)
    assert peaks[1] < 0.6 * peaks[0]


def test_less_is_computed_again_when_there_is_more_room():
    runs = []
    for share in (0.9, 0.6, 0.3):
        gm = traced()
        kept = sum(m.nbytes for m in saved_memories(gm, (X,)) if m.savers)
        checkpointed(gm, budget=int(share * kept))
        inside = [m for m in gm.children() if isinstance(m, CheckpointedPart)]
        runs.append(sum(len(m.part.graph.nodes) for m in inside))
    assert 0 < runs[0] < runs[1] < runs[2]


def test_half_is_the_budget_when_none_is_given():
    record = checkpointed(traced())
    kept, _, budget, *_ = _numbers(record.notes[-1])
    assert budget == kept // 2


def _numbers(text):
    words = (word.strip(",;:").replace(",", "") for word in text.split())
    return [int(word) for word in words if word.isdigit()]


def test_a_budget_that_can_not_be_met_is_told():
    record = checkpointed(traced(), budget=1)
    assert "the least found, and more than the budget of 1" in record.notes[-1]


def test_enough_room_leaves_the_graph_alone():
    record = checkpointed(traced(), budget=10**9)
    assert not record.modified
    assert "which is within 1,000,000,000" in record.notes[-1]


def test_what_writes_is_not_run_twice():
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
            self.norm = nn.BatchNorm1d(16)

        def forward(self, x):
            y = torch.sigmoid(self.first(x)).exp().sin()
            y = self.norm(y)
            z = y * 2
            z.add_(1)
            return torch.tanh(self.second(z)).exp().sin()

    gm = traced(Normed())
    before = copy.deepcopy(gm)
    checkpointed(gm, budget=0)
    assert sum(isinstance(m, CheckpointedPart) for m in gm.children()) == 2
    _, wanted = gradients(before, X)
    _, found = gradients(gm, X)
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)
    assert torch.equal(before.norm.running_mean, gm.norm.running_mean)
    assert gm.norm.num_batches_tracked == 1


def test_without_gradients_nothing_is_kept_or_run_again():
    gm = traced()
    expected = copy.deepcopy(gm).eval()
    checkpointed(gm, budget=0)
    with torch.no_grad():
        torch.manual_seed(1)
        got = gm(X)
        torch.manual_seed(1)
        assert torch.equal(expected.train()(X), got)


def test_inputs_are_needed():
    with pytest.raises(PassError, match="example inputs to find what autograd keeps"):
        gm = traced()
        fxkit.propagate_types(gm, (X,))
        PassManager([ActivationCheckpointing()]).run(gm)


def test_sources_are_kept():
    gm = traced()
    checkpointed(gm, budget=0)
    called = [n for n in gm.graph.nodes if n.op.startswith("call")]
    assert all(source_of(n) is not None for n in called)
    parameters = {id(p) for p in gm.parameters()}
    assert len(parameters) == len(list(traced().parameters()))
