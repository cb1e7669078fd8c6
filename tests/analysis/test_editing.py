"""`edit.replace` refuses a node whose memory somebody could tell from the replaced node's."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, reject, settings
from hypothesis import strategies as st
from torch import fx

import fxkit
from fxkit.errors import PassError, RewriteError
from fxkit.ir.op import resolve
from fxkit.ir.session import EditSession
from fxkit.passes.base import Pass, PassContext
from tests.patterns.random_graphs import GRAPHS, SHAPE, difference, observe


def _view_written(x: torch.Tensor) -> torch.Tensor:
    y = x.t()
    y.add_(1)
    return x * 1.0


def _base_written(x: torch.Tensor) -> torch.Tensor:
    x = x * 2
    y = x.t()
    x.add_(1)
    return y.sum()


def _view_written_base_dead(x: torch.Tensor) -> torch.Tensor:
    y = (x * 2).t()
    y.add_(1)
    return y.sum()


def _written_after_the_last_read(x: torch.Tensor) -> torch.Tensor:
    x = x * 2
    total = x.t().sum()
    x.add_(1)
    return total + x.sum()


def _both_returned(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = x * 2
    return x, x.t()


class _Buffer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.ones(2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.state.t()


def _cloned(e: Any, node: fx.Node) -> fx.Node:
    """Insert a copy of what a node takes a view of, and that view of the copy."""
    if node.target is operator.getitem:
        return e.call(".clone", e.call(operator.getitem, *node.args, before=node), before=node)
    inner = e.call(".clone", node.args[0], before=node)
    return e.insert(node.op, node.target, (inner, *node.args[1:]), node.kwargs, before=node)


def _itself(e: Any, node: fx.Node) -> Any:
    return node.args[0]


@dataclass(frozen=True)
class Case:
    """A program, the name of the node replaced, by what, and what the refusal says, if anything."""

    program: Callable[..., Any]
    node: str
    new: Callable[[Any, fx.Node], Any]
    why: str | None


_CASES: dict[str, Case] = {
    "view written": Case(_view_written, "t", _cloned,
                         "no memory with %x, and %add_ writes to it before the caller gets"),
    "base written": Case(_base_written, "t", _cloned, "%add_ writes to it before %sum_1 reads"),
    "view written, base dead": Case(_view_written_base_dead, "t", _cloned, None),
    "written after the last read": Case(_written_after_the_last_read, "t", _cloned, None),
    "both returned": Case(_both_returned, "t", _cloned, "the caller gets both"),
    "view of an input": Case(lambda x: x.t(), "t", _cloned, "the caller gets both"),
    "view of a buffer": Case(_Buffer().forward, "t", _cloned, "the caller gets both"),
    "view of an inner value": Case(lambda x: (x * 2).t(), "t", _cloned, None),
    "view that nobody writes": Case(lambda x: x.t() + 1, "t", _cloned, None),
    "copy written": Case(lambda x: (x.clone().add_(1), x * 1), "clone", _itself,
                         "share memory with %x, and %add_ writes to it before"),
    "copy returned": Case(lambda x: x.clone(), "clone", _itself, "the caller gets both"),
    "copy of an inner value": Case(lambda x: (x * 2).clone(), "clone", _itself, None),
    "copy read": Case(lambda x: x.clone() + 1, "clone", _itself, None),
    "view by another view": Case(
        _view_written, "t", lambda e, n: e.call(".transpose", n.args[0], 0, 1, before=n), None
    ),
    "one of several results": Case(lambda x: (lambda r: (r[0], r[1]))(torch.max(x, 0)), "getitem",
                                   _cloned, None),
    "parts of one split": Case(lambda x: (lambda r: (r[0], r[1], x.sum()))((x * 2).chunk(2)),
                               "getitem", _cloned, "the caller gets both"),
    "no views": Case(lambda x: torch.relu(x), "relu",
                     lambda e, n: e.call(torch.tanh, n.args[0], before=n), None),
}  # fmt: skip


def _traced(program: Callable[..., Any]) -> fx.GraphModule:
    owner = getattr(program, "__self__", None)
    return fxkit.symbolic_trace(owner if isinstance(owner, torch.nn.Module) else program)


@pytest.mark.parametrize("name", sorted(_CASES))
def test_a_replacement_is_refused_where_somebody_can_tell(name: str) -> None:
    case = _CASES[name]
    gm = _traced(case.program)
    node = fxkit.graph(gm)[case.node].fx_node
    before, args = gm.code, (torch.arange(4.0).reshape(2, 2),)
    if case.why is None:
        with fxkit.edit(gm) as e:
            e.replace(node, case.new(e, node))
        assert node not in gm.graph.nodes
        if name != "no views":
            fxkit.testing.assert_equivalent(case.program, gm, args, exact=True)
        return
    with pytest.raises(RewriteError, match=case.why.replace("%", ".")), fxkit.edit(gm) as e:
        e.replace(node, case.new(e, node))
    assert gm.code == before


@pytest.mark.parametrize("name", ["view written", "copy written"])
def test_a_pass_is_refused_too(name: str) -> None:
    case = _CASES[name]
    gm = _traced(case.program)

    class Careless(Pass):
        def apply(self, edit: EditSession, context: PassContext) -> None:
            node = fxkit.graph(edit.gm)[case.node].fx_node
            edit.replace(node, case.new(edit, node))

    with pytest.raises(PassError, match="nobody can tell"):
        fxkit.PassManager([Careless()]).run(gm)


_QUIET = settings(
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
_RANDOM = {"gm": GRAPHS, "typed": st.booleans(), "transposed": st.booleans()}


def _check_each_replacement(gm: fx.GraphModule, typed: bool, transposed: bool) -> tuple[int, int]:
    """Replace each view by a copy and each copy by its operand; return how many were refused."""
    try:
        expected = observe(gm, transposed=transposed, same=False)
    except RuntimeError:  # a view that torch refuses
        reject()
    if typed:
        x = torch.empty(SHAPE[::-1]).t() if transposed else torch.empty(SHAPE)
        fxkit.propagate_types(gm, (x, torch.empty(SHAPE)))
    done = refused = 0
    for name in [node.name for node in gm.graph.nodes]:
        changed = copy.deepcopy(gm)
        node = next(node for node in changed.graph.nodes if node.name == name)
        call = resolve(node)
        if call is None or call.name not in _CHANGED:
            continue
        try:
            with fxkit.edit(changed) as e:
                e.replace(node, _CHANGED[call.name](e, node))
        except RewriteError:
            refused += 1
            continue
        done += 1
        found = difference(expected, observe(changed, transposed=transposed, same=False))
        assert found in (None, "strides"), f"{found} differ\n{gm.code}\n{name}"
    return done, refused


_VIEWS = "transpose view reshape expand squeeze unsqueeze to contiguous".split()
_CHANGED = {**{f"aten.{name}": _cloned for name in _VIEWS}, "aten.clone": _itself}


@settings(_QUIET, max_examples=40)
@given(**_RANDOM)
def test_replacements_in_random_programs_show_nothing(**case: Any) -> None:
    _check_each_replacement(**case)


@pytest.mark.sweep
@settings(_QUIET, max_examples=1000)
@given(**_RANDOM)
def test_replacements_in_many_random_programs_show_nothing(**case: Any) -> None:
    _check_each_replacement(**case)


@pytest.mark.sweep
def test_random_programs_find_the_absence_of_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxkit.analysis.editing._objection", lambda *_: None)

    @settings(_QUIET, max_examples=300, report_multiple_bugs=False)
    @given(**_RANDOM)
    def explore(**case: Any) -> None:
        _check_each_replacement(**case)

    with pytest.raises(AssertionError, match="differ"):
        explore()


def _noted(gm: fx.GraphModule, name: str) -> fx.Node:
    node = next(node for node in gm.graph.nodes if node.name == name)
    node.meta["stage"] = 3
    node.meta["custom"] = {"block": 1}
    return node


def _replaced(gm: fx.GraphModule, node: fx.Node) -> None:
    with fxkit.edit(gm) as e:
        e.replace(node, e.call(torch.cos, *node.args, before=node))


@pytest.mark.parametrize(
    "change",
    [
        _replaced,
        lambda gm, node: fxkit.rewrite(
            gm, fxkit.rule(lambda x: torch.sin(x), lambda x: torch.cos(x), exact=False)
        ),
        lambda gm, node: fxkit.rewrite(
            gm, fxkit.rule(lambda x: torch.sin(x), lambda x: torch.cos(x * 1), exact=False)
        ),
    ],
)
def test_what_users_note_on_a_node_goes_to_the_one_in_its_place(change: Any) -> None:
    gm = fxkit.symbolic_trace(lambda x: torch.sin(x) + 1)
    node = _noted(gm, "sin")
    fxkit.propagate_types(gm, (torch.ones(3),))
    node.meta["tensor_meta"] = node.meta["val"] = "of the old node"
    change(gm, node)
    new = fxkit.graph(gm).find(torch.cos)[0]
    assert new.meta["stage"] == 3
    assert new.meta["custom"] == {"block": 1}
    assert "tensor_meta" not in new.meta
    assert new.meta.get("val") != "of the old node"
    assert all("stage" not in n.meta for n in gm.graph.nodes if n is not new.fx_node)


def test_a_node_that_has_users_of_its_own_keeps_its_notes() -> None:
    gm = fxkit.symbolic_trace(lambda x: torch.sin(torch.neg(x)) + 1)
    sine, neg = _noted(gm, "sin"), fxkit.graph(gm)["neg"].fx_node
    with fxkit.edit(gm) as e:
        e.replace(sine, neg)
    assert "stage" not in neg.meta
