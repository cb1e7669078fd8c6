"""The pass manager: order, verification, atomicity, what it tells."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import fxkit
from fxkit.errors import FxkitError, InvalidGraphError, PassError, PostconditionError
from fxkit.ir.printer import format_graph
from fxkit.passes import Canonicalise, DeadCodeElimination, Pass, When
from fxkit.passes.manager.manager import PassManager
from fxkit.tracing.symbolic import symbolic_trace


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return torch.relu(self.fc(x)) * 2


@pytest.fixture
def gm():
    torch.manual_seed(0)
    return fxkit.symbolic_trace(Model())


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def node(gm, name):
    return next(n for n in gm.graph.nodes if n.name == name)


@dataclass(frozen=True)
class Swap(Pass):
    """Replace relu by another function."""

    function: object = torch.tanh
    numerics: ClassVar[str] = "close"

    def apply(self, edit, context):
        for relu in edit.graph.find_nodes(op="call_function", target=torch.relu):
            edit.replace(relu, edit.call(self.function, relu.args[0], before=relu))


@dataclass(frozen=True)
class RaiseHalfWay(Pass):
    def apply(self, edit, context):
        relu = node(edit.gm, "relu")
        edit.replace(relu, edit.call(torch.tanh, relu.args[0], before=relu))
        edit.register("extra", torch.ones(2))
        raise ValueError("half way")


@dataclass(frozen=True)
class BreakGraph(Pass):
    def apply(self, edit, context):
        relu = node(edit.gm, "relu")
        edit.insert("call_module", "no_such_module", relu.args, before=relu)


@dataclass(frozen=True)
class Nothing(Pass):
    def apply(self, edit, context):
        pass


def test_modified_is_read_from_the_journal(gm):
    result = PassManager([Nothing(), Swap()]).run(gm)
    assert [record.modified for record in result.records] == [False, True]
    assert result.modified
    assert result.graph_module is gm
    assert torch.equal(gm(X), torch.tanh(gm.fc(X)) * 2)


def test_no_pass_and_no_change():
    gm = fxkit.symbolic_trace(Model())
    assert not PassManager([]).run(gm).modified
    assert not PassManager([Nothing()]).run(gm).modified


def test_raising_pass_leaves_the_module_as_it_was(gm):
    text, code, keys = format_graph(gm), gm.code, list(gm.state_dict())
    with pytest.raises(PassError, match="half way") as caught:
        PassManager([Nothing(), RaiseHalfWay()]).run(gm)
    assert caught.value.in_pass == "raise_half_way (2/2)"
    assert (format_graph(gm), gm.code, list(gm.state_dict())) == (text, code, keys)
    assert torch.equal(gm(X), torch.relu(gm.fc(X)) * 2)


def test_broken_graph_is_refused_and_rolled_back(gm):
    text = format_graph(gm)
    with pytest.raises(PostconditionError, match="no_such_module") as caught:
        PassManager([BreakGraph()], verify="structure").run(gm)
    assert caught.value.in_pass == "break_graph (1/1)"
    assert format_graph(gm) == text


def test_broken_input_is_refused_before_any_pass(gm):
    node(gm, "relu").target = 3
    with pytest.raises(InvalidGraphError, match="expected a function"):
        PassManager([Nothing()]).run(gm)


def test_each_refuses_another_output_type(gm):
    with pytest.raises(PostconditionError, match=r"f32\[3,4\].*, got i64\[3,4\]"):
        PassManager([Swap(torch.isnan)], args=(X,)).run(gm)
    assert node(gm, "relu").target is torch.relu


def test_numerics_names_the_pass_that_changed_them(gm):
    text = format_graph(gm)
    with pytest.raises(PostconditionError, match="error") as caught:
        PassManager([Nothing(), Swap()], verify="numerics", args=(X,)).run(gm)
    assert caught.value.in_pass == "swap (2/2)"
    assert format_graph(gm).count("\n") == text.count("\n")
    assert torch.equal(gm(X), torch.relu(gm.fc(X)) * 2)


def test_numerics_accepts_what_keeps_them(gm):
    PassManager([Swap(F.relu)], verify="numerics", args=(X,)).run(gm)
    assert torch.equal(gm(X), torch.relu(gm.fc(X)) * 2)


def test_numerics_leaves_buffers_alone():
    gm = fxkit.symbolic_trace(nn.Sequential(nn.BatchNorm1d(4), nn.ReLU()))
    before = gm.get_buffer("0.running_mean").clone()
    relu = node(gm, "_1")
    with fxkit.edit(gm) as e:
        e.call(torch.tanh, relu, after=relu)
    result = PassManager([DeadCodeElimination()], verify="numerics", args=(X,)).run(gm)
    assert result.modified
    assert torch.equal(gm.get_buffer("0.running_mean"), before)


def test_plain_functions_are_passes(gm):
    def with_torch_fx(module):
        for n in module.graph.nodes:
            if n.target is torch.relu:
                n.target = torch.tanh
        module.recompile()
        return True

    result = PassManager([with_torch_fx, lambda module: None]).run(gm)
    assert [r.modified for r in result.records] == [True, False]
    assert result.records[0].name == "with_torch_fx"
    assert torch.equal(gm(X), torch.tanh(gm.fc(X)) * 2)


def test_plain_function_that_raises_changes_nothing(gm):
    def half(module):
        for n in module.graph.nodes:
            if n.target is torch.relu:
                n.target = torch.tanh
        raise RuntimeError("no more")

    text = format_graph(gm)
    with pytest.raises(PassError, match="no more"):
        PassManager([half]).run(gm)
    assert format_graph(gm) == text


def test_plain_function_may_return_another_module(gm):
    result = PassManager([lambda module: fx.symbolic_trace(nn.ReLU())], verify="structure").run(gm)
    assert result.graph_module is gm
    assert torch.equal(gm(X), torch.relu(X))


@pytest.mark.parametrize("wrong", [DeadCodeElimination, 3, None])
def test_what_is_no_pass_is_refused(wrong):
    with pytest.raises(PassError, match="expected a pass"):
        PassManager([wrong])


def test_unknown_level_is_refused():
    with pytest.raises(PassError, match="off, structure, each, numerics, got 'all'"):
        PassManager([], verify="all")


def test_numerics_without_inputs_or_types_is_refused(gm):
    with pytest.raises(PassError, match=r"expected example inputs.*%x of unknown type"):
        PassManager([], verify="numerics").run(gm)


def test_table_and_diff(gm):
    result = PassManager([Nothing(), Swap()], args=(X,)).run(gm)
    lines = result.table().splitlines()
    assert lines[0].split() == ["pass", "ms", "verify", "ms", "nodes", "rules", "hit"]
    assert lines[1].startswith("nothing") and lines[1].endswith("no change")
    assert lines[2].startswith("swap") and lines[2].endswith("3 edits")
    assert result.diff().splitlines()[1].startswith("  insert    %tanh = aten.tanh(%fc)")


def test_pass_shows_its_options():
    assert str(fxkit.passes.ConstantFolding(max_bytes=8)) == "constant_folding(max_bytes=8)"
    assert str(fxkit.passes.ConstantFolding()) == "constant_folding"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PassManager(None), "expected a list of passes, got NoneType"),
        (lambda: PassManager(Canonicalise()), r"write \[canonicalise\]"),
        (lambda: PassManager(PassManager([Canonicalise()])), r"write \[PassManager\(\[canon"),
        (lambda: PassManager(print), r"got builtin.*\n.*write \[\.\.\.\] around a single pass"),
        (lambda: PassManager("simplify"), "expected a list of passes, got str"),
        (lambda: PassManager([], args=torch.ones(2)), r"write args=\(x,\)"),
        (lambda: PassManager([], instruments=[print]), "expected instruments, got builtin"),
        (
            lambda: PassManager([Canonicalise()], args=(torch.ones(2),) * 2).run(
                symbolic_trace(torch.nn.ReLU())
            ),
            "expected at most 1 inputs, got 2",
        ),
        (
            lambda: PassManager([When(lambda gm: 1 / 0, Canonicalise())]).run(
                symbolic_trace(torch.nn.ReLU())
            ),
            "expected the condition of when <lambda> to answer, got ZeroDivisionError",
        ),
    ],
)
def test_what_a_manager_can_not_use_is_told(make, message):
    with pytest.raises(FxkitError) as raised:
        make()
    assert re.search(message, str(raised.value))


def test_plain_function_may_return_another_graph():
    def other_graph(module):
        graph = copy.deepcopy(module.graph)
        for node in graph.nodes:
            node.target = torch.tanh if node.target is torch.relu else node.target
        return graph

    gm = symbolic_trace(lambda x: torch.relu(x) + 1)
    result = PassManager([other_graph], verify="structure").run(gm)
    x = torch.randn(3)
    assert result.modified
    assert torch.equal(gm(x), torch.tanh(x) + 1)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"max_seconds": -1}, "expected max_seconds to be a number from 0 on, got -1"),
        ({"max_seconds": float("nan")}, "expected max_seconds to be a number from 0 on, got nan"),
        ({"max_seconds": "k"}, "expected max_seconds to be a number from 0 on, got 'k'"),
        ({"max_nodes": 0}, "expected max_nodes to be a count from 1 on, got 0"),
        ({"max_nodes": "k"}, "expected max_nodes to be a count from 1 on, got 'k'"),
    ],
)
def test_limits_that_are_none_are_refused(option, message):
    with pytest.raises(PassError, match=message):
        PassManager([], **option)
