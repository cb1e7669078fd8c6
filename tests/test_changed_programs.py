"""A change of a program holds for every kind of call, from the first one on.

Each public way to change a program is paired with each kind of call that makes fxkit take another
graph: modes, sizes, gradients, masks, numbers, layouts. What is computed, its gradients, what is
written and how often Python runs are those of a model that was written changed.
"""

from __future__ import annotations

import copy
import dataclasses
import random
import typing
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import fxkit
from fxkit.errors import RewriteError, UnsupportedError
from fxkit.patterns.engine import rewrite_in


@fxkit.rule
def relu_to_100_tanh(x):
    return torch.relu(x), torch.tanh(x) * 100


@dataclasses.dataclass(frozen=True)
class UseTanh(fxkit.passes.Pass):
    """Replace relu by a hundred times tanh."""

    numerics: typing.ClassVar[str] = "changed"

    def apply(self, edit, context):
        context.reports.append(rewrite_in(edit, [relu_to_100_tanh]))


def by_torch_fx(gm: fx.GraphModule) -> fx.GraphModule:
    for node in list(gm.graph.nodes):
        if node.target in (torch.relu, F.relu):
            with gm.graph.inserting_after(node):
                tanh = gm.graph.call_function(torch.tanh, (node.args[0],))
            with gm.graph.inserting_after(tanh):
                scaled = gm.graph.call_function(torch.mul, (tanh, 100))
            node.replace_all_uses_with(scaled)
            gm.graph.erase_node(node)
    return gm


def by_edit(gm: fx.GraphModule) -> None:
    with fxkit.edit(gm) as edit:
        for found in fxkit.graph(gm).find(torch.relu):
            node = found.fx_node
            tanh = edit.call(torch.tanh, node.args[0], before=node)
            edit.replace(node, edit.call(torch.mul, tanh, 100, before=node))


class Net(nn.Module):
    def __init__(self, activation: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.drop, self.down = nn.Dropout(0.5), nn.Linear(8, 3)
        self.activation = activation
        self.calls = 0

    def forward(self, x, mask=None, scale=1.0):
        self.calls += 1
        y = self.activation(self.norm(self.up(x)))
        if mask is not None and not bool(mask.all()):
            y = y.masked_fill(~mask, 0.0)
        return self.down(self.drop(y)) * scale


def captured(net: nn.Module, x: torch.Tensor, change: Callable[[Any], Any], **options: Any) -> Any:
    program = fxkit.capture(net, (x,), **options)
    change(program)
    return program


def rewritten_in_backend(gm: fx.GraphModule, args: tuple[torch.Tensor, ...]) -> fx.GraphModule:
    fxkit.rewrite(gm, relu_to_100_tanh)
    return gm


def compiled_then_rewritten(net: nn.Module, x: torch.Tensor) -> Any:
    program = fxkit.compile(net)
    program(x)
    fxkit.rewrite(program, relu_to_100_tanh)
    return program


def by_torch_compile(net: nn.Module, **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(net, backend="fxkit", options={"passes": [UseTanh()]}, **options)


def rewrite(program: Any) -> None:
    fxkit.rewrite(program.graph_module, relu_to_100_tanh)


WAYS: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "rewrite": lambda net, x: captured(net, x, rewrite),
    "edit": lambda net, x: captured(net, x, lambda p: by_edit(p.graph_module)),
    "manager": lambda net, x: captured(
        net, x, lambda p: fxkit.PassManager([UseTanh()], args=(x,)).run(p)
    ),
    "compile": lambda net, x: fxkit.compile(net, passes=[UseTanh()]),
    "torch.compile": lambda net, x: by_torch_compile(net),
    "rewrite_program": lambda net, x: captured(
        net, x, lambda p: fxkit.rewrite(p, relu_to_100_tanh)
    ),
    "rewrite_dynamic": lambda net, x: captured(net, x, rewrite, dynamic=True),
    "manager_of_graph": lambda net, x: captured(
        net, x, lambda p: fxkit.PassManager([UseTanh()]).run(p.graph_module)
    ),
    "torch_fx": lambda net, x: captured(
        net, x, lambda p: fxkit.PassManager([by_torch_fx], verify="structure").run(p)
    ),
    "copy": lambda net, x: copy.copy(captured(net, x, rewrite)),
    "compile_dynamic": lambda net, x: fxkit.compile(net, passes=[UseTanh()], dynamic=True),
    "compile_torch_fx": lambda net, x: fxkit.compile(net, passes=[by_torch_fx]),
    "compile_backend": lambda net, x: fxkit.compile(net, backend=rewritten_in_backend),
    "compile_eager": lambda net, x: fxkit.compile(net, passes=[UseTanh()], backend="eager"),
    "compile_train": lambda net, x: fxkit.compile(net, passes=[UseTanh()], train=True),
    "compile_captured": lambda net, x: fxkit.compile(captured(net, x, rewrite)),
    "compile_then_rewrite": compiled_then_rewritten,
    "torch.compile_dynamic": lambda net, x: by_torch_compile(net, dynamic=True),
}

ALL = torch.ones(5, 8, dtype=torch.bool)
CALLS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "same": lambda f, x: f(x),
    "no_grad": lambda f, x: torch.no_grad()(f)(x),
    "inference": lambda f, x: torch.inference_mode()(f)(x.clone()),
    "larger": lambda f, x: f(torch.cat([x, x[:2]])),
    "two_rows": lambda f, x: f(x[:2]),
    "gradient": lambda f, x: f(x.clone().requires_grad_()),
    "mask": lambda f, x: f(x, ALL),
    "part_of_mask": lambda f, x: f(x, mask=ALL & (torch.arange(8) > 3)),
    "number": lambda f, x: f(x, scale=2.0),
    "integer": lambda f, x: f(x, scale=3),
    "strides": lambda f, x: f(x.t().contiguous().t()),
}


def check(way: Callable[[nn.Module, torch.Tensor], Any], call: Any, *, is_training: bool) -> None:
    """Call a changed program three times beside a model that is written changed."""
    torch.manual_seed(0)
    wanted, net = Net(lambda x: torch.tanh(x) * 100).double(), Net(F.relu).double()
    x = torch.randn(5, 6, dtype=torch.float64)
    net.load_state_dict(wanted.state_dict())
    program = way(net.eval(), x)
    net.load_state_dict(wanted.state_dict())
    for module in (net, wanted):
        module.train(is_training)
        module.calls = 0
    for seed in range(3):
        torch.manual_seed(seed)
        expected = call(wanted, x)
        torch.manual_seed(seed)
        found = call(program, x)
        torch.testing.assert_close(found, expected)
        assert found.requires_grad == expected.requires_grad
        assert net.calls == wanted.calls == seed + 1
        torch.testing.assert_close(dict(net.state_dict()), dict(wanted.state_dict()))
        if expected.requires_grad:
            theirs = torch.autograd.grad(expected.square().sum(), list(wanted.parameters()))
            ours = torch.autograd.grad(found.square().sum(), list(net.parameters()))
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("call", ["no_grad", "larger", "gradient", "part_of_mask"])
@pytest.mark.parametrize("way", ["rewrite", "edit", "compile"])
def test_a_change_holds_for_other_calls(way: str, call: str) -> None:
    check(WAYS[way], CALLS[call], is_training=False)


def test_a_change_holds_for_inference_tensors() -> None:
    for way in ("torch.compile", "compile"):
        check(WAYS[way], CALLS["inference"], is_training=False)


def test_a_change_holds_beside_an_inference_tensor_that_is_not_used() -> None:
    changed = fxkit.compile(lambda x, unused: torch.relu(x) * 1.0, passes=[UseTanh()])
    with torch.inference_mode():
        for rows in (2, 3):
            x = torch.randn(rows, 3)
            torch.testing.assert_close(changed(x, torch.ones(2)), torch.tanh(x) * 100)


@pytest.mark.sweep
@pytest.mark.parametrize("is_training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("way", WAYS)
def test_a_change_holds_for_every_call(way: str, call: str, is_training: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of graphs that eager runs, and of torch.compile
        check(WAYS[way], CALLS[call], is_training=is_training)


def test_an_edit_that_can_not_be_made_again_raises_at_the_call() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) if x.shape[0] > 3 else torch.sin(x)

    changed = fxkit.capture(program, (torch.randn(5, 2),))
    by_edit(changed.graph_module)
    with pytest.raises((RewriteError, UnsupportedError), match="edit"):
        changed(torch.randn(2, 2))


@pytest.mark.parametrize("way", ["rules", "torch_fx"])
def test_opaque_calls_of_a_changed_program_happen_once(way: str) -> None:
    changed = fxkit.capture(lambda x: torch.relu(x) * random.random(), (torch.randn(4, 3),))
    if way == "rules":
        rewrite(changed)
    else:
        fxkit.PassManager([by_torch_fx], verify="structure").run(changed)
    for rows in (4, 7, 7, 9):
        x = torch.randn(rows, 3)
        random.seed(1)
        found, after = changed(x), random.random()
        random.seed(1)
        torch.testing.assert_close(found, torch.tanh(x) * 100 * random.random())
        assert after == random.random()


def test_following_a_changed_program_symbolically_is_refused() -> None:
    changed = fxkit.capture(lambda x: torch.relu(x), (torch.randn(4, 3),))
    rewrite(changed)
    with pytest.raises(UnsupportedError, match=r"changed by the rewrite by relu_to_100_tanh"):
        fxkit.symbolic_trace(changed)


def _with_plain_edit() -> fxkit.Captured:
    """Capture a program and edit its graph by torch.fx alone."""
    captured = fxkit.capture(lambda x: torch.relu(x) + 1, (torch.ones(3),))
    gm = captured.graph_module
    (relu,) = (node for node in gm.graph.nodes if node.target is torch.relu)
    relu.target = torch.tanh
    gm.recompile()
    return captured


def test_an_edit_by_torch_fx_alone_is_told_of_when_another_graph_is_captured() -> None:
    captured, x = _with_plain_edit(), torch.ones(3)
    torch.testing.assert_close(captured(x), torch.tanh(x) + 1)
    with torch.no_grad(), pytest.warns(UserWarning, match=r"edit inside `with fxkit.edit"):
        captured(x)
    captured(torch.ones(3, dtype=torch.float64))  # once is enough


def test_an_edit_by_torch_fx_alone_is_told_of_when_its_program_is_compiled() -> None:
    captured = _with_plain_edit()
    with pytest.warns(UserWarning, match=r"or by fxkit.compile"):
        fxkit.compile(captured)


def test_a_reported_edit_and_none_at_all_are_not_told_of() -> None:
    captured, x = fxkit.capture(lambda x: torch.relu(x) + 1, (torch.ones(3),)), torch.ones(3)
    captured(x.double())
    with fxkit.edit(captured) as edit:
        (relu,) = (node for node in edit.gm.graph.nodes if node.target is torch.relu)
        edit.set_target(relu, torch.tanh)
    with torch.no_grad():
        torch.testing.assert_close(captured(x), torch.tanh(x) + 1)
