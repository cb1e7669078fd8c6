"""Tests of sessions inside of sessions."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import fx, nn

import fxkit
from fxkit.analysis.editing import edit
from fxkit.analysis.slices import outline
from fxkit.errors import InvalidGraphError
from fxkit.ir.session import EditSession
from fxkit.passes import pass_function

_TO_SINE = fxkit.rule(lambda x: torch.relu(x), lambda x: torch.sin(x), name="to_sine", exact=False)


class _Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x)) + 1


@pytest.fixture
def gm() -> Iterator[fx.GraphModule]:
    gm = fxkit.symbolic_trace(_Network())
    yield gm
    x = torch.randn(2, 3)
    assert torch.equal(fx.GraphModule(gm, gm.graph)(x), gm(x))  # the code is that of the graph


def _seen(gm: fx.GraphModule) -> tuple[str, str, list[str]]:
    return str(gm.graph), gm.code, sorted(name for name, _ in gm.named_modules())


def _node(gm: fx.GraphModule, name: str) -> fx.Node:
    return next(node for node in gm.graph.nodes if node.name == name)


@pass_function(numerics="changed")
def _cosine(session: EditSession, context: Any) -> None:
    for node in session.graph.find_nodes(op="call_function", target=torch.relu):
        session.set_target(node, torch.cos)


def _by_session(gm: fx.GraphModule) -> None:
    with edit(gm, by="inner") as session:
        session.set_target(_node(gm, "relu"), torch.cos)


_CHANGES: dict[str, Callable[[fx.GraphModule], Any]] = {
    "session": _by_session,
    "rewrite": lambda gm: fxkit.rewrite(gm, _TO_SINE),
    "outline": lambda gm: outline(gm, [_node(gm, "linear"), _node(gm, "relu")], "part"),
    "manager": lambda gm: fxkit.PassManager([_cosine]).run(gm),
    "manager without checks": lambda gm: fxkit.PassManager([_cosine], verify="off").run(gm),
}


@pytest.mark.parametrize("name", sorted(_CHANGES))
def test_what_is_changed_inside_is_taken_back_with_the_rest(name: str, gm: fx.GraphModule) -> None:
    before = _seen(gm)
    with pytest.raises(KeyboardInterrupt), edit(gm) as session:
        session.rename(_node(gm, "add"), "other")
        _CHANGES[name](gm)
        assert len(session.journal) > 1
        session.rename(_node(gm, "other"), "another")
        raise KeyboardInterrupt
    assert _seen(gm) == before


@pytest.mark.parametrize("name", sorted(_CHANGES))
def test_what_is_changed_inside_is_in_the_code_at_its_end(name: str, gm: fx.GraphModule) -> None:
    with edit(gm) as session:
        session.rename(_node(gm, "add"), "other")
        _CHANGES[name](gm)
        assert "other = " in gm.code
        assert "torch.relu" not in gm.code
        session.undo()
        assert not session.is_modified
    assert "add = " in gm.code


@pytest.mark.parametrize("name", sorted(_CHANGES))
@pytest.mark.parametrize("verify", ["off", "structure", "each"])
def test_a_pass_that_fails_is_taken_back_wholly(name: str, verify: str, gm: fx.GraphModule) -> None:
    @pass_function(numerics="changed")
    def failing(session: EditSession, context: Any) -> None:
        _CHANGES[name](session.gm)
        raise ValueError("boom")

    before = _seen(gm)
    with pytest.raises(fxkit.errors.PassError, match="boom"):
        fxkit.PassManager([failing], verify=verify).run(gm)
    assert _seen(gm) == before


@pytest.mark.parametrize("name", sorted(_CHANGES))
@pytest.mark.parametrize("verify", ["off", "structure"])
def test_a_pass_is_known_to_have_changed_what_it_changed_inside(
    name: str, verify: str, gm: fx.GraphModule
) -> None:
    @pass_function(numerics="changed")
    def changing(session: EditSession, context: Any) -> None:
        _CHANGES[name](session.gm)

    result = fxkit.PassManager([changing], verify=verify).run(gm)
    assert result.modified
    assert str(result.records[0].changes[-1]) in result.diff()
    assert "torch.relu" not in gm.code


def test_rules_applied_inside_count_as_rewrites_of_the_run() -> None:
    @pass_function(numerics="changed")
    def changing(session: EditSession, context: Any) -> None:
        fxkit.rewrite(session.gm, _TO_SINE)

    gm = fxkit.symbolic_trace(lambda x: torch.relu(torch.relu(torch.relu(x))))
    result = fxkit.PassManager([changing]).run(gm, max_rewrites=2)
    assert [site.by for site in result.records[0].sites] == ["to_sine", "to_sine"]
    assert (gm.code.count("torch.sin"), gm.code.count("torch.relu")) == (2, 1)


def test_an_error_inside_takes_back_what_was_changed_inside(gm: fx.GraphModule) -> None:
    with edit(gm, by="outer") as session:
        session.rename(_node(gm, "add"), "other")
        with pytest.raises(KeyboardInterrupt), edit(gm, by="inner") as inner:
            inner.set_target(_node(gm, "relu"), torch.cos)
            raise KeyboardInterrupt
        session.rename(_node(gm, "relu"), "rectified")
    assert [(change.kind, change.by) for change in session.journal] == [("rename", "outer")] * 2
    assert "rectified = torch.relu" in gm.code


def test_what_is_changed_inside_is_checked_at_its_end(gm: fx.GraphModule) -> None:
    before = _seen(gm)
    with edit(gm):
        with pytest.raises(InvalidGraphError, match="'missing'"), edit(gm) as inner:
            inner.get_attr("missing")
        assert _seen(gm) == before


def test_undo_inside_ends_where_the_inner_block_begins(gm: fx.GraphModule) -> None:
    with edit(gm) as session:
        session.rename(_node(gm, "add"), "other")
        with edit(gm) as inner:
            inner.set_target(_node(gm, "relu"), torch.cos)
            inner.undo()
        assert [change.kind for change in session.journal] == ["rename"]


def test_another_thread_has_a_session_of_its_own(gm: fx.GraphModule) -> None:
    found: list[EditSession] = []

    def open_one() -> None:
        with edit(gm) as session:
            found.append(session)

    with edit(gm) as session:
        thread = threading.Thread(target=open_one)
        thread.start()
        thread.join()
        with edit(gm) as inner:
            assert inner is session
    assert found[0] is not session
    with edit(gm) as later:
        assert later is not session
