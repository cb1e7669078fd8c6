"""Partition: few convex regions, effects respected, the backend's word, the way back."""

from __future__ import annotations

import copy
import operator
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from torch import fx, nn

import fxkit
from fxkit.errors import PassError, UnsupportedError
from fxkit.ir.op import resolve
from fxkit.ir.provenance import provenance_of, source_of
from fxkit.ir.types import TensorType, type_of
from fxkit.ir.verifier import verify
from fxkit.passes import Partition
from fxkit.passes.manager.manager import PassManager
from fxkit.passes.partition import plan_regions
from fxkit.passes.partitioning.backend_call import BackendCall
from tests.patterns.random_graphs import GRAPHS, difference, observe
from tests.sampling import examples


@dataclass(eq=False)
class Recorder:
    """Runs regions as they are, and remembers what it was asked."""

    unsupported: tuple[str, ...] = ()
    refuses: str = ""
    name: str = "toy"
    shown: list = field(default_factory=list)
    calls: int = 0

    def supports(self, node):
        call = resolve(node)
        if call is not None and call.name.removeprefix("aten.") in self.unsupported:
            return f"no kernel for {call.name}"
        return None

    def compile(self, region, types):
        self.shown.append((region, types))
        if self.refuses and self.refuses in region.code:
            raise UnsupportedError(f"expected a region without {self.refuses}, got one")

        def run(*args):
            self.calls += 1
            return region(*args)

        return run


def partition(function, args, backend, **options):
    gm = fxkit.symbolic_trace(function)
    manager = PassManager([Partition(backend, **options)], verify="numerics", args=args)
    return gm, manager.run(gm).records[0]


def regions(gm):
    found = [(n, m) for n, m in gm.named_children() if isinstance(m, BackendCall)]
    return {name: [n.name for n in body(part.region.graph)] for name, part in found}


def body(graph):
    return [n for n in graph.nodes if n.op not in ("placeholder", "get_attr", "output")]


X = torch.linspace(-2.0, 2.0, 12).reshape(3, 4)


def test_a_diamond_around_an_unsupported_node_becomes_two_regions():
    def f(x):
        a = torch.exp(x)
        b = torch.sort(a)[0]
        c = torch.sin(a)
        return torch.cos(b) + c

    gm, record = partition(f, (X,), Recorder(unsupported=("sort",)))
    assert regions(gm) == {"toy_0": ["exp", "sin"], "toy_1": ["cos", "add"]}
    assert any("no kernel for aten.sort" in note and "%sort" in note for note in record.notes)


def test_branches_without_a_common_value_are_one_region_unless_asked():
    def f(x, y):
        return torch.exp(x).neg(), torch.sin(y).neg()

    assert len(regions(partition(f, (X, X), Recorder())[0])) == 1
    gm, _ = partition(f, (X, X), Recorder(), is_connected=True)
    assert list(regions(gm).values()) == [["exp", "neg"], ["sin", "neg_1"]]


def test_a_region_gets_types_and_shares_parameters():
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU())
    backend = Recorder()
    gm, _ = partition(model, (X,), backend)
    region, types = backend.shown[0]
    assert types == (TensorType.of(X),)
    held = {id(p) for p in region.parameters()}
    assert held == {id(p) for p in gm.parameters()}, "no copies"
    assert len(list(gm.parameters())) == 2
    assert set(model.state_dict()) <= set(gm.state_dict())


def test_a_written_value_and_its_writer_stay_in_order():
    def f(x):
        a = torch.exp(x)
        b = torch.sin(a)
        a.add_(1)
        c = torch.sin(a)
        return b * 2, c * 2

    gm, record = partition(f, (X,), Recorder())
    names = [n.name for n in body(gm.graph)]
    assert names.index("exp") < names.index("toy_0") < names.index("add_") < names.index("toy_1")
    assert any("%add_ writes to its memory" in note for note in record.notes)


def test_random_numbers_stay_in_order():
    def f(x):
        a = torch.rand_like(x) * 2
        return torch.exp(a) + torch.randn_like(a), torch.rand_like(a).neg().exp()

    gm, record = partition(f, (X,), Recorder())
    outside = [n.name for n in body(gm.graph) if "rand" in n.name]
    assert outside == ["rand_like", "randn_like", "rand_like_1"]
    assert sum("draws random numbers" in note for note in record.notes) == 2


def test_what_the_backend_refuses_stays_as_it_was():
    def f(x):
        a = torch.exp(x) + 1
        b = torch.sort(a)[0]
        return torch.cos(b) * 2

    backend = Recorder(unsupported=("sort",), refuses="cos")
    gm, record = partition(f, (X,), backend)
    assert list(regions(gm)) == ["toy_0"]
    assert [n.name for n in body(gm.graph)] == ["toy_0", "sort", "getitem", "cos", "mul"]
    assert any("toy refused: expected a region without cos" in note for note in record.notes)


def test_a_backend_that_fails_leaves_the_graph_as_it_was():
    class Broken(Recorder):
        def compile(self, region, types):
            raise ZeroDivisionError("in the backend")

    gm = fxkit.symbolic_trace(lambda x: torch.exp(x) + 1)
    before = gm.code
    with pytest.raises(PassError, match="ZeroDivisionError: in the backend"):
        PassManager([Partition(Broken())]).run(gm)
    assert gm.code == before
    assert not list(gm.children())


def test_size_and_benefit_decide_what_is_worth_a_call():
    def f(x):
        return torch.sort(torch.exp(x))[0].sin().cos()

    backend = Recorder(unsupported=("sort",))
    assert list(regions(partition(f, (X,), backend)[0]).values()) == [["sin", "cos"]]
    assert len(regions(partition(f, (X,), backend, min_nodes=1)[0])) == 2
    gm, record = partition(
        f, (X,), backend, min_nodes=1, benefit=lambda nodes: len(nodes) / 2, min_benefit=0.75
    )
    assert list(regions(gm).values()) == [["sin", "cos"]]
    assert any("benefit of 0.5, and min_benefit is 0.75" in note for note in record.notes)


def test_inputs_of_another_type_run_the_region_itself():
    backend = Recorder()
    gm, _ = partition(lambda x: torch.exp(x) + 1, (X,), backend)
    call = gm.get_submodule("toy_0")
    backend.calls = 0
    assert torch.equal(gm(X), torch.exp(X) + 1)
    assert backend.calls == 1
    assert call.explain(X) is None
    for other in (X.double(), X[:2], X[None]):
        assert torch.equal(gm(other), torch.exp(other) + 1)
        assert "input 0 is not f32[3,4]" in call.explain(other)
    assert backend.calls == 1


def test_a_gradient_is_not_lost_in_a_backend_without_one():
    class Detaching(Recorder):
        def compile(self, region, types):
            return lambda *args: region(*(a.detach() for a in args))

    x = X.clone().requires_grad_()
    gm, _ = partition(lambda x: torch.exp(x) + 1, (x,), Detaching())
    (gradient,) = torch.autograd.grad(gm(x).sum(), x)
    assert torch.equal(gradient, torch.exp(X))
    assert "a gradient is wanted" in gm.toy_0.explain(x)
    with torch.no_grad():
        assert gm.toy_0.explain(x) is None


def test_a_copy_is_compiled_for_its_own_parameters():
    gm, _ = partition(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), (X,), Recorder())
    twin = copy.deepcopy(gm)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
        assert twin(X).abs().sum() == 0
        assert gm(X).abs().sum() > 0
    assert twin.double()(X.double()).dtype == torch.float64


def test_sources_types_and_provenance_are_kept():
    def f(x):
        a = torch.exp(x)
        return torch.sin(a), torch.cos(a)

    gm, _ = partition(f, (X,), Recorder())
    call, *parts = body(gm.graph)
    assert type_of(call) == (TensorType.of(X), TensorType.of(X))
    assert [type_of(p) for p in parts] == [TensorType.of(X)] * 2
    assert provenance_of(call).replaced == ("exp", "sin", "cos")
    assert source_of(parts[0]).line == source_of(parts[1]).line
    inner = body(gm.toy_0.region.graph)
    assert all(source_of(n) is not None for n in inner)


def test_the_plan_can_be_looked_at_alone():
    gm = fxkit.symbolic_trace(lambda x: torch.sort(torch.exp(x) + 1)[0])
    plan = plan_regions(gm.graph, Partition(Recorder(unsupported=("sort",))))
    assert [[n.name for n in r.nodes] for r in plan.regions] == [["exp", "add"]]
    assert {n.name: why for n, why in plan.refused.items()} == {
        "sort": "no kernel for aten.sort",
        "getitem": "takes a part of %sort, which stays",
    }


@examples(50, of=150, derandomize=True, suppress_health_check=list(HealthCheck))
@given(gm=GRAPHS, inside=st.sets(st.integers(0, 40)), connected=st.booleans())
def test_any_choice_of_nodes_on_any_graph_changes_nothing(gm, inside, connected):
    chosen = {n.name for i, n in enumerate(body(gm.graph)) if i in inside or not inside}

    class Chosen(Recorder):
        def supports(self, node):
            return None if node.name in chosen else "not chosen"

    before = observe(gm, transposed=False, same=False)
    options = Partition(Chosen(), min_nodes=1, is_connected=connected)
    PassManager([options], verify="structure").run(gm)
    verify(gm)
    assert difference(before, observe(gm, transposed=False, same=False)) is None


def test_many_regions_one_after_another():
    graph = fx.Graph()
    value = graph.placeholder("x")
    for _ in range(300):
        value = graph.call_function(torch.sin, (value,))
        value = graph.call_function(operator.neg, (value,))
        value = graph.call_function(torch.sort, (value,))
        value = graph.call_function(operator.getitem, (value, 0))
    graph.output(value)
    gm = fx.GraphModule({}, graph)
    reference = gm(X)
    PassManager([Partition(Recorder(unsupported=("sort",)))], verify="structure").run(gm)
    assert len(regions(gm)) == 300
    assert torch.equal(gm(X), reference)
