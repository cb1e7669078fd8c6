"""Each part of a pass's contract, broken on purpose: caught, named, and taken back."""

from __future__ import annotations

import re
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxkit
from fxkit.errors import PassError, PostconditionError, PreconditionError
from fxkit.ir.printer import format_graph
from fxkit.passes import FixedPoint, Pass, graph_property, pass_function
from fxkit.passes.manager.manager import PassManager
from fxkit.passes.properties import PROPERTIES
from tests.passes import failing_passes

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return torch.relu(self.fc(x)) * 2


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.relu()

    @staticmethod
    def backward(ctx, grad):
        return grad


def straight_through(x):
    return Straight.apply(x)


@pytest.fixture
def gm():
    torch.manual_seed(0)
    return fxkit.symbolic_trace(Model())


@pytest.fixture
def no_relu():
    """A property of the test's own."""

    @graph_property
    def no_relu(gm):
        """There is no relu."""
        for found in fxkit.graph(gm).find(torch.relu):
            yield found.fx_node, "is a relu"

    yield no_relu
    del PROPERTIES["no_relu"]


def relus(edit):
    return [found.fx_node for found in fxkit.graph(edit.gm).find(torch.relu)]


def swap(edit, function):
    for relu in relus(edit):
        edit.replace(relu, edit.call(function, relu.args[0], before=relu))


def fails(gm, *passes, error=PostconditionError, **options):
    """Run passes that have to fail, and check that the last one left no trace."""
    options = {"args": (X,), **options}
    text, code, value = re.sub(r": f32\[[0-9,]*\]", "", format_graph(gm)), gm.code, gm(X)
    with pytest.raises(error) as caught:
        PassManager(passes, **options).run(gm)
    assert (re.sub(r": f32\[[0-9,]*\]", "", format_graph(gm)), gm.code) == (text, code)
    assert torch.equal(gm(X), value)
    return caught.value


def test_a_lie_about_what_it_ensures(gm, no_relu):
    @pass_function(ensures=("no_relu",))
    def liar(edit, context):
        swap(edit, F.relu)

    error = fails(gm, liar)
    assert error.message == (
        "expected the pass to ensure no_relu, got a graph where %relu_1 is a relu"
    )
    assert error.in_pass == "liar (1/1)"
    assert error.source.startswith("test_manager_contracts.py:")
    assert "> %relu_1: f32[3,4] = aten.relu(%fc)" in error.node


def test_a_pass_that_does_nothing_lies_too(gm, no_relu):
    @pass_function(ensures=("no_relu",))
    def idle(edit, context):
        pass

    assert "to ensure no_relu" in fails(gm, idle).message


def test_a_lie_about_what_it_preserves(gm):
    @pass_function(preserves=("functional", "deterministic"), numerics="changed")
    def liar(edit, context):
        for relu in relus(edit):
            if not any(user.target is torch.Tensor.add_ for user in relu.users):
                new = edit.call(torch.Tensor.add_, relu, 1, after=relu)
                edit.replace_uses(relu, new)

    error = fails(gm, liar)
    assert error.message.startswith("expected the pass to preserve functional, got a graph where")
    assert "writes %relu" in error.message


def test_what_did_not_hold_need_not_be_preserved(gm, no_relu):
    @pass_function(preserves=("no_relu",))
    def honest(edit, context):
        swap(edit, F.relu) if not edit.graph.find_nodes(op="call_function", target=F.relu) else None

    assert PassManager([honest], args=(X,)).run(gm).modified


def test_a_lie_about_being_idempotent(gm):
    @pass_function(numerics="changed")
    def grower(edit, context):
        for relu in relus(edit):
            edit.call(torch.neg, relu, after=relu)

    error = fails(gm, grower)
    assert error.message.startswith(
        "expected the pass to change nothing when it runs again, got 1 "
    )
    assert "neg" in error.message
    assert error.hint == "mend the pass, or set is_idempotent = False"


def test_a_second_run_that_raises_is_a_lie_too(gm):
    @pass_function(numerics="changed")
    def only_once(edit, context):
        relu = relus(edit)[0]
        edit.replace(relu, edit.call(torch.tanh, relu.args[0], before=relu))

    assert "runs again, got IndexError" in fails(gm, only_once).message


def test_a_pass_may_say_that_it_is_not_idempotent(gm):
    @pass_function(numerics="changed", is_idempotent=False)
    def grower(edit, context):
        for relu in relus(edit):
            edit.call(torch.neg, relu, after=relu)

    assert len(PassManager([grower, grower], args=(X,)).run(gm).sites) == 0
    assert format_graph(gm).count("aten.neg") == 2


def test_a_lie_about_exact_numbers_names_the_node_and_the_error(gm):
    @pass_function(numerics="exact")
    def nearly(edit, context):
        for relu in relus(edit):
            scaled = edit.call(torch.mul, edit.call(torch.tanh, relu.args[0], before=relu), 1.5,
                               before=relu)  # fmt: skip
            edit.replace(relu, scaled)

    error = fails(gm, nearly, verify="numerics")
    assert error.in_pass == "nearly (1/1)"
    assert "%mul_1: f32[3,4] = aten.mul(%tanh, 1.5) has an error of" in error.message
    assert "against float64" in error.message and "the largest is" in error.message
    assert error.hint == "the pass says that its numerics are 'exact'"


def test_numbers_may_be_close_but_not_far(gm):
    @pass_function(numerics="close")
    def by_another_way(edit, context):
        for relu in relus(edit):
            edit.replace(relu, edit.call(torch.clamp, relu.args[0], 0.0, before=relu))

    @pass_function(numerics="close")
    def bfloat16(edit, context):
        for node in edit.graph.find_nodes(op="call_function", target=torch.clamp):
            if node.args[0].op == "call_module":
                low = edit.call(".to", node.args[0], torch.bfloat16, before=node)
                high = edit.call(".to", low, torch.float32, before=node)
                edit.set_args(node, (high, 0.0))

    assert PassManager([by_another_way], verify="numerics", args=(X,)).run(gm).modified
    error = fails(gm, bfloat16, verify="numerics")
    assert "at most twice" in error.message


def test_changed_numbers_are_not_held_against_the_pass_nor_against_the_next(gm):
    @pass_function(numerics="changed")
    def tanh(edit, context):
        swap(edit, torch.tanh)

    result = PassManager(
        [tanh, fxkit.passes.Canonicalise(), fxkit.passes.Recompose()], verify="numerics", args=(X,)
    ).run(gm)
    assert [record.modified for record in result.records] == [True, False, False]


def test_gradients_are_numbers_too(gm):
    @pass_function(numerics="exact")
    def wrong_gradient(edit, context):
        swap(edit, straight_through)

    x = X.clone().requires_grad_()
    error = fails(gm, wrong_gradient, verify="numerics", args=(x,))
    assert "gradients[0]" in error.message
    error = fails(gm, wrong_gradient, verify="numerics", args=(X,))
    assert "the gradient of fc.weight" in error.message
    gm.requires_grad_(False)
    PassManager([wrong_gradient], verify="numerics", args=(X,)).run(gm)


def test_a_pass_that_raises_half_way_tells_rule_site_and_surroundings(gm):
    @pass_function
    def half(edit, context):
        (relu,) = relus(edit)
        edit.register("extra", torch.ones(2))
        with edit.on_behalf_of([relu], "my_rule"):
            edit.replace(relu, edit.call(torch.tanh, relu.args[0], before=relu))
            raise ValueError("half way")

    keys = list(gm.state_dict())
    error = fails(gm, half, error=PassError)
    assert list(gm.state_dict()) == keys
    assert (error.rule, error.site, error.in_pass) == ("my_rule", ("relu",), "half (1/1)")
    assert error.message == "expected half to run, got ValueError: half way"
    assert "> %relu: f32[3,4] = aten.relu(%fc)" in error.node
    assert "  %fc: f32[3,4] = aten.linear(" in error.node
    assert "rule:  my_rule at %relu" in str(error)


def test_a_rule_that_raises_is_named(gm):
    def no(match):
        raise KeyError("nothing")

    rule = fxkit.rule(lambda x: torch.relu(x), lambda x: torch.tanh(x), where=no, name="mine")

    @pass_function
    def with_rule(edit, context):
        from fxkit.patterns.engine import rewrite_in

        rewrite_in(edit, [rule])

    assert "predicate of mine" in fails(gm, with_rule, error=PassError).message


def test_a_pass_that_loops_without_an_edit_is_stopped(gm):
    @pass_function
    def endless(edit, context):
        while True:
            pass

    start = time.monotonic()
    error = fails(gm, endless, error=PassError, max_seconds=0.2)
    assert time.monotonic() - start < 20
    assert error.message == "expected the pass to come to an end in time, got no end"
    assert error.in_pass == "endless (1/1)"
    assert "max_seconds=" in error.hint


def test_a_pass_that_loops_with_edits_is_stopped(gm):
    @pass_function
    def rewires(edit, context):
        (relu,) = relus(edit)
        while True:
            edit.set_args(relu, relu.args)

    @pass_function
    def grows(edit, context):
        (relu,) = relus(edit)
        while True:
            relu = edit.call(torch.neg, relu, after=relu)

    error = fails(gm, rewires, error=PassError, max_seconds=0.2)
    assert "come to an end in time" in error.message
    error = fails(gm, grows, error=PassError, max_nodes=100)
    assert "below 100 nodes" in error.message and error.in_pass == "grows (1/1)"
    assert "below 10," in fails(gm, grows, error=PassError).message, "there is a limit by itself"


def test_a_time_limit_that_is_kept_leaves_no_timer_and_the_change(gm):
    waiting = []

    @pass_function
    def quick(edit, context):
        swap(edit, F.relu)
        waiting.extend(t for t in threading.enumerate() if isinstance(t, threading.Timer))

    result = PassManager([quick], max_seconds=300.0, verify="structure").run(gm)
    assert result.modified and F.relu in {node.target for node in gm.graph.nodes}
    (timer,) = waiting
    assert timer.finished.is_set(), "the timer was not called off"


def test_passes_that_undo_each_other_never_come_to_rest(gm):
    @pass_function(numerics="changed")
    def to_tanh(edit, context):
        swap(edit, torch.tanh)

    @pass_function(numerics="changed")
    def to_relu(edit, context):
        for found in fxkit.graph(edit.gm).find(torch.tanh):
            edit.replace(found.fx_node, edit.call(torch.relu, *found.fx_node.args,
                                                  before=found.fx_node))  # fmt: skip

    with pytest.raises(PassError, match=r"within 3 rounds.*in the last one by to_tanh, to_relu"):
        PassManager([FixedPoint(to_tanh, to_relu, max_rounds=3)], args=(X,)).run(gm)


def test_an_unmet_requirement_says_what_is_missing(gm, no_relu):
    @pass_function(requires=("no_relu",))
    def picky(edit, context):
        raise AssertionError("must not run")

    error = fails(gm, picky, error=PreconditionError)
    assert error.message == (
        "expected no_relu, which picky requires, got a graph where %relu is a relu"
    )
    assert error.hint == "no pass ensures no_relu; run one that does before picky"
    assert (error.in_pass, error.source.split(":")[0]) == (
        "picky (1/1)",
        "test_manager_contracts.py",
    )


def test_a_requirement_is_met_by_the_pass_that_ensures_it(gm, no_relu):
    @pass_function(requires=("no_relu",))
    def picky(edit, context):
        assert not relus(edit)

    @dataclass(frozen=True)
    class Clamp(Pass):
        ensures = ("no_relu",)

        def apply(self, edit, context):
            swap(edit, lambda x: torch.clamp(x, 0.0))

    result = PassManager([picky, Clamp()], args=(X,)).run(gm)
    assert [(r.name, r.scheduled_for) for r in result.records] == [
        ("clamp", "picky"),
        ("picky", None),
        ("clamp", None),
    ]
    assert "clamp for picky" in result.table()


def test_passes_that_wait_for_each_other_are_refused(gm, no_relu):
    @pass_function(requires=("no_relu",), ensures=("no_relu",))
    def itself(edit, context):
        pass

    assert "no pass ensures no_relu" in fails(gm, itself, error=PreconditionError).hint


@pytest.mark.parametrize(
    ("contract", "message"),
    [
        ({"numerics": "fine"}, "numerics of wrong to be one of exact, close, changed, got 'fine'"),
        ({"requires": ("shiny",)}, "name of a property, got 'shiny'"),
        ({"ensures": "functional"}, "ensures of wrong to be a tuple of names"),
    ],
)
def test_a_contract_in_unknown_words_is_refused_at_once(contract, message):
    @pass_function(**contract)
    def wrong(edit, context):
        pass

    with pytest.raises(PassError, match=message):
        PassManager([wrong])


def test_levels_check_what_they_say(gm, no_relu):
    @pass_function(ensures=("no_relu",), is_idempotent=False)
    def liar(edit, context):
        swap(edit, torch.tanh)
        edit.replace(edit.graph.find_nodes(op="call_function", target=torch.tanh)[0],
                     edit.call(torch.relu, *edit.graph.find_nodes(op="call_module")))  # fmt: skip

    for level in ("off", "structure"):
        PassManager([liar], verify=level, args=(X,)).run(gm)
    fails(gm, liar)


def test_types_are_found_for_a_pass_that_requires_them(gm):
    @pass_function(requires=("shapes_known",))
    def sized(edit, context):
        assert all(found.type is not None for found in fxkit.graph(edit.gm).find(torch.relu))

    error = fails(gm, sized, error=PassError, args=None)
    assert "expected example inputs" in error.message
    fxkit.propagate_types(gm, (X,))
    for node in gm.graph.nodes:
        if node.op != "placeholder":
            node.meta.pop("fxkit_type", None)
    result = PassManager([sized]).run(gm)
    assert [r.name for r in result.records] == ["type_propagation", "sized"]
    assert [r.name for r in PassManager([sized]).run(gm).records] == ["sized"]


def test_types_follow_each_pass_and_visit_only_what_changed():
    def deep(x):
        for _ in range(50):
            x = torch.relu(x) + 1
        return x

    @pass_function(numerics="changed")
    def last(edit, context):
        found = fxkit.graph(edit.gm).find(torch.relu)
        if len(found) == 50:
            node = found[-1].fx_node
            edit.replace(node, edit.call(torch.tanh, *node.args, before=node))

    gm = fxkit.symbolic_trace(deep)
    tally = PassManager([last], args=(X,)).run(gm).analyses["TypeAnalysis"]
    assert (tally.made, tally.updated) == (1, 1)
    assert 102 <= tally.visited <= 105, "all 102 nodes at first, then what was changed"


def test_types_after_a_failure_are_those_before(gm):
    @pass_function(numerics="changed")
    def to_integers(edit, context):
        for relu in relus(edit):
            edit.replace(relu, edit.call(torch.isnan, *relu.args, before=relu))

    with pytest.raises(PostconditionError, match="keep the output's type"):
        PassManager([to_integers], args=(X,)).run(gm)
    assert "%mul: f32[3,4]" in format_graph(gm) and "%relu: f32[3,4]" in format_graph(gm)


@pytest.mark.parametrize(
    ("failing", "said"),
    [
        (failing_passes.fails_on(function="mul"), "no mul, please"),
        (failing_passes.FailsAtOnce("that"), "ValueError: that"),
    ],
)
def test_a_failure_is_written_as_a_script_that_runs_alone(gm, tmp_path, python, failing, said):
    swapped = pass_function(lambda edit, context: swap(edit, F.relu))
    manager = PassManager([swapped, failing], args=(X,), reproduce=tmp_path, verify="structure")
    with pytest.raises(PassError) as caught:
        manager.run(gm)
    script = Path(caught.value.repro)
    assert script == tmp_path / failing.name / "run.py" and "repro:" in str(caught.value)
    run = subprocess.run([*python, str(script)], capture_output=True, text=True)
    assert run.returncode == 1 and said in run.stderr
    assert "relu_1" in script.with_name("graph.txt").read_text(), "as it was before that pass"
    assert not list(tmp_path.rglob("*.pkl"))


def test_a_folder_that_can_not_be_written_leaves_the_failure_to_be_told(gm, tmp_path):
    (tmp_path / "file").touch()
    manager = PassManager(
        [failing_passes.FailsAtOnce("that")], args=(X,), reproduce=tmp_path / "file"
    )
    with pytest.raises(PassError, match="that") as caught:
        manager.run(gm)
    assert "no script: expected a folder that can be written" in caught.value.hint


def test_a_pass_that_can_not_be_imported_leaves_a_script_of_the_program(gm, tmp_path, python):
    @pass_function
    def local(edit, context):
        raise ValueError

    with pytest.raises(PassError) as caught:
        PassManager([local], args=(X,), reproduce=tmp_path).run(gm)
    assert "the script has no pass" in caught.value.hint
    run = subprocess.run([*python, caught.value.repro], capture_output=True, text=True)
    assert run.returncode == 0 and "tensor(" in run.stdout


def by_target(edit):
    relus(edit)[0].target = torch.tanh


def by_operands(edit):
    relu = relus(edit)[0]
    relu.args = (edit.graph.find_nodes(op="placeholder")[0],)


def by_insertion(edit):
    with edit.graph.inserting_after(relus(edit)[0]):
        edit.graph.call_function(torch.neg, (relus(edit)[0],))


@pytest.mark.parametrize("way", [by_target, by_operands, by_insertion])
def test_a_change_behind_the_back_of_the_session_is_found(gm, way):
    @pass_function(numerics="changed", is_idempotent=False)
    def sly(edit, context):
        way(edit)

    with pytest.raises(PassError, match=r"through their session, got %\w+ changed .* one of sly"):
        PassManager([sly], verify="structure").run(gm)


@pytest.mark.parametrize("way", [by_target, by_operands, by_insertion])
def test_what_was_changed_behind_the_back_of_the_session_is_told_to_stay(gm, way):
    @pass_function
    def sly(edit, context):
        edit.call(torch.sin, relus(edit)[0])
        way(edit)
        raise KeyError("too late")

    with pytest.raises(PassError, match=r"changed by other means, as %\w+ was, is not taken back"):
        PassManager([sly]).run(gm)
    assert not fxkit.graph(gm).find(torch.sin)
