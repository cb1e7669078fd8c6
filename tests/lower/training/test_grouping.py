"""Which nodes of a trained graph come together in a stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxkit
from fxkit.analysis.effects import AliasSets
from fxkit.lower.training import training_module
from fxkit.lower.training.grouping import followed_results, groups_of, signatures_of
from fxkit.lower.training.modes_of_calls import Mode, ModeSetter, modes_of
from fxkit.lower.training.stages import StagedModule
from tests.sampling import one_in

_ENTER = torch.amp.autocast_mode._enter_autocast


@pytest.fixture(autouse=True)
def _every_kernel_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_module, "CALL_SECONDS", -1.0)


class Heads(nn.Module):
    """A body and two heads, whose calls take turns."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.first, self.second = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        raise NotImplementedError


class Interleaved(Heads):
    def forward(self, x: Tensor) -> Any:
        shared = self.norm(self.body(x)).tanh()
        a, b = self.first(shared), self.second(shared)
        a, b = a.exp(), b.sigmoid()
        return a * 2, b * 3


class Dropped(Heads):
    def forward(self, x: Tensor) -> Any:
        shared = self.body(x).tanh()
        a, b = F.dropout(shared, 0.5), F.dropout(shared, 0.5)
        return self.first(a).exp(), F.dropout(self.second(b), 0.5).sigmoid()


class InModes(Heads):
    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            shared = self.body(x)
            with torch.no_grad():
                scale = shared.square().mean()
            a, b = self.first(shared).exp(), self.second(shared).sigmoid()
        return a.float(), b.float() / scale


class Apart(Heads):
    """One tensor is taken apart into two results, from which a third is computed."""

    def forward(self, x: Tensor) -> Any:
        a, b = self.body(x).tanh().chunk(2, -1)
        return a, b, (a * b).exp()


class Written(Heads):
    """A head writes its parts into a tensor that has no gradient before."""

    def forward(self, x: Tensor) -> Any:
        shared = self.body(x).tanh()
        a = self.first(shared).exp()
        b = torch.zeros(len(x), 8)
        b[:, :4] = self.second(shared)
        b[:, 4:] = a.detach()
        return a, b * 2


class Unused(Heads):
    """What draws random numbers for no result has a gradient all the same."""

    def forward(self, x: Tensor) -> Any:
        shared = self.body(x).tanh()
        F.dropout(self.norm.weight, 0.5)
        return self.first(shared).exp(), F.dropout(self.second(shared), 0.5)


def stages_of(fast: Any) -> list[list[str]]:
    """Return the names of the calls in each stage."""
    (guarded,) = fast.captured.kept
    assert isinstance(guarded.run, StagedModule)
    graphs = [stage.graph_module.graph for stage in guarded.run.stages]
    return [[node.name for node in graph.nodes if node.op[:4] == "call"] for graph in graphs]


def step(program: Any, net: nn.Module, uses: Callable[[Any], Any]) -> list[Any]:
    """Return what a call gives, what it leaves behind, and the gradients of a use of it."""
    torch.manual_seed(3)
    net.zero_grad()
    x = torch.linspace(-1, 1, 40).view(5, 8).requires_grad_()
    results = program(x)
    drawn = torch.rand(2)
    uses(results)
    gradients = [parameter.grad for parameter in net.parameters()]
    return [*(result.detach() for result in results), drawn, x.grad, *gradients, *net.buffers()]


USES: dict[str, Callable[[Any], Any]] = {
    "first": lambda results: results[0].sum().backward(),
    "second": lambda results: results[1].square().sum().backward(),
    "both": lambda results: (results[0].sum() + results[1].square().sum()).backward(),
    "last, then all": lambda results: [
        results[-1].sum().backward(retain_graph=True),
        sum(result.square().sum() for result in results).backward(),
    ],
}


@pytest.mark.parametrize(
    ("use", "kind"), one_in(4, USES, [Interleaved, Dropped, InModes, Apart, Written, Unused])
)
def test_steps_are_those_of_eager(kind: type[Heads], use: str) -> None:
    net, twin = kind(), kind()
    twin.load_state_dict(net.state_dict())
    fast = fxkit.compile(twin)
    for _ in range(3):
        expected, found = step(net, net, USES[use]), step(fast, twin, USES[use])
    tolerance = 2e-2 if kind is InModes else 1e-4
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    assert all(module.reason is None for module in fast.compiled_modules)


def test_heads_come_apart_though_their_calls_take_turns() -> None:
    fast = fxkit.compile(Interleaved())
    fast(torch.randn(5, 8))
    assert stages_of(fast) == [
        ["linear", "add_", "batch_norm", "tanh"],
        ["linear_1", "exp", "mul"],
        ["linear_2", "sigmoid", "mul_1"],
    ]


def test_random_numbers_keep_their_order() -> None:
    fast = fxkit.compile(Dropped())
    fast(torch.randn(5, 8))
    assert stages_of(fast) == [
        ["linear", "tanh"],
        ["dropout", "linear_1", "exp"],
        ["dropout_1", "linear_2", "dropout_2", "sigmoid"],
    ]
    late = fxkit.compile(lambda x: (F.dropout(F.dropout(x) * 2), F.dropout(x * 3)))
    late(torch.randn(5, 8, requires_grad=True))
    assert stages_of(late) == [["dropout", "mul", "dropout_1"], ["mul_1", "dropout_2"]]

    def in_turn(x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = F.dropout(x), F.dropout(x * 2)
        return F.dropout(a * 3), b

    last = fxkit.compile(in_turn)
    last(torch.randn(5, 8, requires_grad=True))
    assert stages_of(last) == [["dropout"], ["mul", "dropout_1"], ["mul_1", "dropout_2"]]


def test_statistics_lead_from_no_call_of_a_norm_to_the_next() -> None:
    norm = nn.BatchNorm1d(8)
    fast = fxkit.compile(lambda x, y: (norm(x).exp(), norm(y).sin()))
    fast(*(torch.randn(5, 8, requires_grad=True) for _ in range(2)))
    first, second = stages_of(fast)
    assert first == ["add_", "batch_norm", "exp", "add__1"] and second == ["batch_norm_1", "sin"]


def test_each_stage_sets_the_modes_of_its_calls() -> None:
    fast = fxkit.compile(InModes())
    fast(torch.randn(5, 8))
    body, first, second = stages_of(fast)
    assert body == ["_enter_autocast", "linear", "_exit_autocast"]
    assert first == ["_enter_autocast", "linear_1", "exp", "_exit_autocast", "float_1"]
    assert [name for name in second if name[0] != "_"] == [
        *("mul", "mean", "linear_2", "sigmoid", "float_2", "div")
    ]
    assert second.count("_enter_autocast") == second.count("_exit_autocast") == 1


@pytest.mark.parametrize(
    "program",
    [
        lambda x: x.exp(),
        lambda x: (y := x.exp(), (y > 1).sum(), y.detach() * 2, x),
        lambda x: (y := x.exp(), y),
    ],
)
def test_a_graph_with_one_gradient_stays_whole(program: Callable[..., Any]) -> None:
    fast = fxkit.compile(program)
    fast(torch.randn(5, 8, requires_grad=True))
    assert len(fast.compiled_modules) == 1


def test_what_has_no_gradient_stands_where_it_is_needed() -> None:
    fast = fxkit.compile(lambda x: ((x * (s := x.detach().sin())).exp(), x.cos(), s * 2))
    fast(torch.randn(5, 8, requires_grad=True))
    assert stages_of(fast) == [["detach", "sin", "mul", "exp", "mul_1"], ["cos"]]


def test_a_node_reaches_what_is_computed_from_it() -> None:
    gm = fxkit.symbolic_trace(lambda x: ((y := x.exp()), (z := y.sin()), y + z, x.cos()))
    results = followed_results(gm.graph)
    reached = signatures_of(gm.graph, results, AliasSets(gm.graph))
    names = {node.name: reached[node] for node in gm.graph.nodes if node.op[:4] == "call"}
    assert names == {"exp": 0b0111, "sin": 0b0110, "add": 0b0100, "cos": 0b1000}
    assert [[node.name for node in group] for group in groups_of(gm.graph)] == [
        *(["exp"], ["sin"], ["add"], ["cos"])
    ]


def test_modes_are_set_anew() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    entered = graph.call_function(_ENTER, ("cpu", torch.bfloat16, True, True))
    inside = graph.call_function(torch.sin, (x,))
    graph.call_function(torch._C._set_grad_enabled, (False,))
    unfollowed = graph.call_function(torch.cos, (inside,))
    graph.call_function(torch.amp.autocast_mode._exit_autocast, (entered,))
    graph.call_function(torch._C._set_grad_enabled, (True,))
    after = graph.call_function(torch.exp, (unfollowed,))
    graph.output(after)
    modes = modes_of(graph)
    assert modes[inside] == Mode(True, (entered,))
    assert modes[unfollowed] == Mode(False, (entered,))
    assert modes[after] == Mode()
    made = torch.fx.Graph()
    setter = ModeSetter(made)
    for node in (unfollowed, inside, after):
        setter.switch(modes[node])
    names = [node.name for node in made.nodes]
    assert names == [
        *("_enter_autocast", "_set_grad_enabled", "_set_grad_enabled_1", "_exit_autocast")
    ]
