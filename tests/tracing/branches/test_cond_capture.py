"""Branches on tensors become nodes with both of their sides where nothing else would change."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

import fxkit
from fxkit.errors import UnsupportedError
from fxkit.tracing.captured import Captured
from fxkit.tracing.recorder.control_sides import cond
from tests.tracing.faithful import assert_same


def _conds(module: fx.GraphModule) -> int:
    return sum(node.target is cond for node in module.graph.nodes)


def one_branch(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    z = (y + 1) @ y if y.sum() > 0 else (y - 3) @ x
    return z.relu() + y


def in_sequence(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        x = x * 2
    x = x.sin()
    if x.sum() > 0.5:
        x = x - 1
    x = x.cos()
    if x[0, 0] > 0.5:
        x = x * 5
    return x.exp()


def nested(x: torch.Tensor) -> dict[str, Any]:
    if x.sum() > 0:
        x = x * 2
        x = x.sin() if x.max() > 1 else x.cos()
    elif x.min() < -1:
        x = x + 1
    return {"x": x, "twice": [x, x * 2], "n": 3}


def one_value_or_two(x: torch.Tensor) -> torch.Tensor:
    y = x if x.sum() > 0 else x.sin()
    return y * x - y


def returns_early(x: torch.Tensor) -> torch.Tensor:
    if (x > 1).any():
        return x.abs()
    y = x.sin()
    if not y.sum().bool():
        return y
    return y * 2


def without_gradients(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = x.max() if x.sum() > 0 else x.min() * 2
    return x * scale


def writes_to_its_own(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    if x.sum() > 0:
        z = torch.zeros(3, 3)
        z[0] = 1.0
        y = y + z
    return y * 2


def bounded_loop(x: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = x * 2 if x.mean() > 0 else x.sin() - 1
    return x


PROGRAMS: list[tuple[Callable[..., Any], int]] = [
    (one_branch, 1),
    (in_sequence, 3),
    (nested, 1),
    (one_value_or_two, 1),
    (returns_early, 1),
    (without_gradients, 1),
    (writes_to_its_own, 1),
    (bounded_loop, 3),
]


@pytest.mark.parametrize(("fn", "count"), PROGRAMS, ids=[fn.__name__ for fn, _ in PROGRAMS])
@pytest.mark.parametrize("first", [0, 3])
def test_one_graph_goes_both_ways(fn: Callable[..., Any], count: int, first: int) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(3, 3) * scale + shift for scale in (1, 4) for shift in (-2, 0, 2)]
    inputs += [torch.zeros(3, 3), -torch.ones(3, 3), torch.full((3, 3), torch.nan)]
    inputs = inputs[first:] + inputs[:first]
    captured = fxkit.capture(fn, (inputs[0],), control_flow=True)
    assert _conds(captured.graph_module) == count, captured.explain(inputs[0])
    for x in inputs:
        assert_same(captured(x), fn(x), str(x))
    assert captured.recaptures == 0
    module = captured.graph_module
    for x in inputs:
        leaf, twin = (x.clone().requires_grad_() for _ in range(2))
        ours, theirs = pytree.tree_leaves(module(leaf)), pytree.tree_leaves(fn(twin))
        theirs = [it for it in theirs if isinstance(it, torch.Tensor)]
        for found, expected in zip(ours, theirs, strict=True):
            assert_same(_gradient(found, leaf), _gradient(expected, twin), str(x))


def _gradient(result: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(result.sum(), leaf, retain_graph=True)[0]


class Routed(nn.Module):
    """Sends its input through one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(3, 3) for _ in range(3))
        self.gain = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) if x.mean() > 0 else self.second(x) * self.gain
        return self.last(x)


def test_what_the_other_side_reads_is_guarded() -> None:
    ours = Routed()
    theirs = copy.deepcopy(ours)
    captured = fxkit.capture(ours, (torch.ones(2, 3),), control_flow=True)
    assert _conds(captured.graph_module) == 1
    for x in (torch.ones(2, 3), -torch.ones(2, 3)):
        assert_same(captured(x), theirs(x), "as captured")
    assert captured.recaptures == 0
    ours.gain = theirs.gain = 5.0
    assert "gain to be 2.0, got 5.0" in captured.explain(-torch.ones(2, 3))
    assert_same(captured(-torch.ones(2, 3)), theirs(-torch.ones(2, 3)), "another gain")
    for module in (ours, theirs):
        module.second.weight = nn.Parameter(torch.eye(3))
    assert_same(captured(-torch.ones(2, 3)), theirs(-torch.ones(2, 3)), "another weight")
    assert_same(captured(torch.ones(2, 3)), theirs(torch.ones(2, 3)), "the other side")


def test_gradients_of_parameters_on_both_sides() -> None:
    module = Routed()
    captured = fxkit.capture(module, (torch.ones(2, 3),), control_flow=True)
    for x in (torch.ones(2, 3), -torch.ones(2, 3)):
        grads = [
            torch.autograd.grad(fn(x).sum(), tuple(module.parameters()), allow_unused=True)
            for fn in (captured, module)
        ]
        assert [it is None for it in grads[0]] == [it is None for it in grads[1]]
        for ours, theirs in zip(*grads, strict=True):
            assert ours is None or torch.equal(ours, theirs)


def test_other_tools_take_the_graph() -> None:
    module = Routed()
    captured = fxkit.capture(module, (torch.ones(2, 3),), control_flow=True)
    graph = captured.graph_module
    compiled = fxkit.compile(graph)
    exported = torch.export.export(graph, (torch.ones(2, 3),)).module()
    traced = torch.compile(graph, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for x in (torch.ones(2, 3), -torch.ones(2, 3)):
            for fn in (compiled, exported, traced):
                torch.testing.assert_close(fn(x), module(x))


log: list[int] = []
counts = {"calls": 0}
total = torch.zeros(3)


def _appends(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        log.append(1)
    return x * 2


def _counts(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        counts["calls"] += 1
    return x * 2


def _adds_up(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        total.add_(x)
    return x * 2


def _writes_to_its_input(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        x.mul_(2)
    return x * 2


def _prints(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        print("positive")
    return x * 2


def _raises(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        raise ValueError("positive")
    return x * 2


def _draws(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand(3) if x.sum() > 0 else x * 2


def _other_shape(x: torch.Tensor) -> torch.Tensor:
    return x[:1] if x.sum() > 0 else x * 2


def _other_structure(x: torch.Tensor) -> Any:
    return [x] if x.sum() > 0 else x * 2


def _loop(x: torch.Tensor) -> torch.Tensor:
    while x.sum() < 10:
        x = x + 4
    return x


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (_appends, "does more than to compute"),
        (_counts, "does more than to compute"),
        (_adds_up, "does more than to compute"),
        (_writes_to_its_input, "does more than to compute"),
        (_prints, "it prints"),
        (_raises, "raises ValueError"),
        (_draws, "does more than to compute"),
        (_other_shape, "give different things"),
        (_other_structure, "return different things"),
        (_loop, "a loop that may go on"),
    ],
)
def test_else_the_branch_is_a_guard(
    fn: Callable[..., Any], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    log.clear()
    counts["calls"] = 0
    total.zero_()
    version = total._version
    given, random = torch.full((3,), -1.0), torch.get_rng_state()
    captured = fxkit.capture(fn, (given,), control_flow=True)
    assert not log and not counts["calls"] and not total.any()
    assert total._version == version
    assert torch.equal(given, torch.full((3,), -1.0)) and given._version == 0
    assert torch.equal(torch.get_rng_state(), random) and capsys.readouterr().out == ""
    text = captured.explain(torch.full((3,), -50.0) if fn is _loop else torch.ones(3))
    assert reason in text and f"in {fn.__name__}" in text
    for x in (torch.ones(3), torch.full((3,), -1.0), torch.full((3,), 9.0)):
        assert_same(_outcome(captured, x), _outcome(fn, x), reason)


def _outcome(fn: Callable[..., Any], x: torch.Tensor) -> Any:
    x = x.clone()
    torch.manual_seed(0)
    try:
        return fn(x), x
    except ValueError as error:
        return str(error)


def test_effects_of_the_other_side_do_not_happen(tmp_path: Path) -> None:
    path = tmp_path / "written"

    def fn(x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            path.write_text("positive")
        return x * 2

    captured = Captured(fn, control_flow=True)
    captured(-torch.ones(2))
    captured(-torch.ones(2))
    assert not path.exists()
    captured(torch.ones(2))
    assert path.read_text() == "positive"


def test_only_the_whole_mode_takes_both_sides() -> None:
    with pytest.raises(UnsupportedError, match="mode 'whole' with control_flow=True, got 'aten'"):
        fxkit.capture(one_branch, (torch.ones(3, 3),), mode="aten", control_flow=True)


def test_numbers_that_change_are_inputs_first() -> None:
    def fn(x: torch.Tensor, n: int) -> torch.Tensor:
        return x * n if x.sum() > 0 else x - n

    captured = fxkit.capture(fn, (torch.ones(3), 1), control_flow=True)
    assert _conds(captured.graph_module) == 1
    for n in range(2, 14):
        for x in (torch.ones(3), -torch.ones(3)):
            assert_same(captured(x, n), fn(x, n), f"{n}")
    assert captured.recaptures == 2
