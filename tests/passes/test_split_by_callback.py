"""Splitting by labels: one submodule a label where it can be, state shared, effects in order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import fxkit
from fxkit.ir.node_kinds import body_of
from fxkit.ir.provenance import source_of
from fxkit.ir.types import type_of
from fxkit.passes import SplitByCallback
from fxkit.passes.manager.manager import PassManager
from tests.patterns.random_graphs import GRAPHS, difference, observe
from tests.sampling import examples

X = torch.linspace(-2.0, 2.0, 12).reshape(3, 4)


def split(function, args, label):
    gm = fxkit.symbolic_trace(function)
    manager = PassManager([SplitByCallback(label)], verify="numerics", args=args)
    return gm, manager.run(gm).records[0]


def called(gm):
    return [str(n.target) for n in gm.graph.nodes if n.op == "call_module"]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.decoder = nn.Linear(4, 4)
        self.decoder.weight = self.encoder[0].weight

    def forward(self, x):
        return self.decoder(self.encoder(x) * 2)


def test_by_default_a_submodule_for_each_top_module_with_its_state():
    model = Model()
    gm = fxkit.symbolic_trace(model)
    PassManager([SplitByCallback()], verify="numerics", args=(X,)).run(gm)
    assert called(gm) == ["part_encoder", "part_decoder"]
    assert set(model.state_dict()) <= set(gm.state_dict())
    weights = [p for n, p in gm.named_parameters(remove_duplicate=False) if n.endswith("weight")]
    assert len({id(w) for w in weights}) == 1, "tied before, tied after"
    assert all(source_of(n) and type_of(n) for n in body_of(gm.graph))


def test_a_label_that_waits_for_another_in_between_gets_two_and_a_note():
    labels = {"exp": "a", "sin": "b", "cos": "a"}
    gm, record = split(lambda x: x.exp().sin().cos(), (X,), lambda n: labels[n.name])
    assert called(gm) == ["part_a", "part_b", "part_a_1"]
    assert record.notes == ("'a' gets 2 submodules, since other labels come in between",)


def test_labels_that_alternate_without_need_get_one_each():
    def f(x):
        return x.exp(), x.sin(), x.cos(), x.tan()

    gm, _ = split(f, (X,), lambda n: n.name in ("exp", "cos"))
    assert len(called(gm)) == 2


def test_nodes_without_a_label_stay_outside():
    gm, _ = split(lambda x: x.exp().sin().cos(), (X,), lambda n: None if n.name == "sin" else 7)
    assert [n.name for n in body_of(gm.graph)] == ["part_7", "sin", "part_7_1"]


def test_a_write_in_another_part_is_seen():
    def f(x):
        y = x * 2
        a = y.sum()
        y.add_(1)
        return a, y.sum()

    gm, _ = split(f, (X,), lambda n: n.name.startswith("sum"))
    assert [t.sum().item() for t in gm(X)] == pytest.approx([t.sum().item() for t in f(X)])


@examples(35, of=100, derandomize=True, suppress_health_check=list(HealthCheck))
@given(gm=GRAPHS, chosen=st.integers(0, 4**16))
def test_any_labels_on_any_graph_change_nothing(gm, chosen):
    place = {node: index for index, node in enumerate(body_of(gm.graph))}
    labels = (None, "a", "b", "c")
    before = observe(gm, transposed=False, same=False)
    callback = SplitByCallback(lambda n: labels[chosen >> (2 * (place[n] % 16)) & 3])
    PassManager([callback], verify="structure").run(gm)
    assert difference(before, observe(gm, transposed=False, same=False)) is None


def test_stages_chain_where_one_takes_all_that_the_other_gives():
    def program(x):
        a, b = x.sin(), x.cos()
        return (b - a) * a + b

    first = ("sin", "cos")
    gm, _ = split(program, (X,), lambda node: 0 if node.name in first else 1)
    torch.testing.assert_close(gm.part_1(*gm.part_0(X)), program(X), rtol=0, atol=0)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=8))
def test_stages_of_random_programs_chain(pairs):
    def program(x):
        made = [x.sin(), x.cos(), x.exp(), x.tanh(), x.abs(), x.neg()]
        results = [made[i] - made[j] * 0.5 for i, j in pairs]
        return torch.stack(results)

    made = ("sin", "cos", "exp", "tanh", "abs_1", "neg")
    gm = fxkit.symbolic_trace(program)
    manager = PassManager([SplitByCallback(lambda n: 0 if n.name in made else 1)], args=(X,))
    manager.run(gm)
    given_on = gm.part_0(X)
    given_on = given_on if isinstance(given_on, tuple) else (given_on,)
    if len(gm.graph.find_nodes(op="call_module", target="part_1")[0].args) == len(given_on):
        torch.testing.assert_close(gm.part_1(*given_on), program(X), rtol=0, atol=0)


def test_a_label_gets_what_graph_shows_which_is_the_node_of_torch_fx_too():
    gm = fxkit.symbolic_trace(lambda x: x.sin() + 1)
    stages = {node: node.name for node in gm.graph.nodes}
    seen = []

    def label(node):
        seen.append((node.op, node.target, node.args, node.kwargs, node.operator))
        return stages[node]

    PassManager([SplitByCallback(label)], args=(X,)).run(gm)
    assert called(gm) == ["part_sin", "part_add"]
    assert [it[0] for it in seen] == ["call_method", "call_function"]
    assert seen[0][1:] == ("sin", (seen[0][2][0],), {}, "aten.sin")
    assert seen[0][2][0].op == "placeholder"
