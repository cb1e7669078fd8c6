"""Splitting by size: balanced, cut where little crosses, exact."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import fxkit
from fxkit.errors import PassError
from fxkit.ir.node_kinds import body_of
from fxkit.passes import SplitBySize
from fxkit.passes.manager.manager import PassManager
from fxkit.passes.split_by_size import _cuts
from tests.patterns.random_graphs import GRAPHS, difference, observe
from tests.sampling import examples

X = torch.linspace(-2.0, 2.0, 16).reshape(2, 8)


def split(function, **options):
    gm = fxkit.symbolic_trace(function)
    manager = PassManager([SplitBySize(**options)], verify="numerics", args=(X,))
    return gm, manager.run(gm).records[0]


def parts(gm):
    return [gm.get_submodule(str(n.target)) for n in gm.graph.nodes if n.name.startswith("part")]


def tower(widths):
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
    return nn.Sequential(*(layer for linear in layers for layer in (linear, nn.ReLU())))


def test_parameter_bytes_are_balanced():
    gm, record = split(tower([8, 64, 64, 64, 64, 8]), parts=3)
    found = parts(gm)
    sizes = [sum(p.nbytes for p in part.parameters()) for part in found]
    assert sum(sizes) == sum(p.nbytes for p in gm.parameters())
    assert max(sizes) <= 1.1 * 2 * 64 * 65 * 4
    assert record.notes == (f"parameters of the parts: {', '.join(f'{s:,}' for s in sizes)}",)


def test_flops_are_balanced():
    gm, _ = split(tower([8, 8, 8, 8, 8]), parts=2, by="flops")
    assert [len(body_of(part.graph)) for part in parts(gm)] == [4, 4]


def test_a_shared_parameter_counts_once_and_stays_shared():
    model = tower([8, 8, 8, 8])
    model[4].weight = model[0].weight
    gm, record = split(model, parts=3)
    assert "parameters of the parts: 288, 288, 32" in record.notes[0]
    shared = [p for n, p in gm.named_parameters(remove_duplicate=False) if n.endswith("weight")]
    assert len({id(p) for p in shared}) == 2


def test_a_cut_goes_where_little_crosses():
    def f(x):
        wide = torch.cat([x] * 8).exp()
        narrow = wide.sum(0)
        return torch.cat([narrow] * 8).sin()

    gm, _ = split(f, parts=2)
    assert [n.name for n in body_of(parts(gm)[0].graph)] == ["cat", "exp", "sum_1"]


def test_more_parts_than_nodes():
    gm, _ = split(lambda x: x.exp().sin(), parts=9)
    assert len(parts(gm)) == 2


@pytest.mark.parametrize("options", [{"parts": 0}, {"by": "beauty"}])
def test_what_makes_no_sense_is_refused(options):
    with pytest.raises(PassError, match="expected at least one part by parameters or flops"):
        split(lambda x: x, **options)


@settings(deadline=None, max_examples=200, derandomize=True)
@given(weights=st.lists(st.integers(0, 50), min_size=1, max_size=9), count=st.integers(1, 5))
def test_the_largest_part_is_as_small_as_any_cuts_make_it(weights, count):
    def largest(cuts):
        bounds = [0, *cuts, len(weights)]
        return max(sum(weights[a:b]) for a, b in itertools.pairwise(bounds))

    places = range(1, len(weights))
    tried = (
        largest(cuts)
        for n in range(min(count, len(weights)))
        for cuts in itertools.combinations(places, n)
    )
    best = min(tried)
    cuts = _cuts(weights, [0] * len(weights), count)
    assert len(cuts) < count
    assert largest(cuts) <= 1.1 * best


@examples(35, of=100, derandomize=True, suppress_health_check=list(HealthCheck))
@given(gm=GRAPHS, count=st.integers(1, 6))
def test_any_graph_does_the_same_in_parts(gm, count):
    before = observe(gm, transposed=False, same=False)
    PassManager([SplitBySize(parts=count)], verify="structure").run(gm)
    assert difference(before, observe(gm, transposed=False, same=False)) is None
