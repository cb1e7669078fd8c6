"""Edit sessions: each change, its undoing, and what stays when something raises."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

from fxkit.analysis.editing import edit
from fxkit.errors import InvalidGraphError, RewriteError
from fxkit.ir.printer import format_graph
from fxkit.ir.provenance import module_path, provenance_of, source_of
from fxkit.ir.session import EditSession
from fxkit.ir.types import TensorType, set_type, type_of
from fxkit.tracing.symbolic import symbolic_trace


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.linear(x)) * self.scale
        return hidden + y


def _traced() -> tuple[fx.GraphModule, dict[str, fx.Node]]:
    gm = symbolic_trace(_Model())
    return gm, {node.name: node for node in gm.graph.nodes}


def _snapshot(gm: fx.GraphModule) -> Any:
    """All that an edit may touch, with the names that would be generated next."""
    nodes = [(n, n.name, n.op, n.target, n.args, n.kwargs, dict(n.users), n.prev, n.next)
             for n in gm.graph.nodes]  # fmt: skip
    tables = {kind: list(gm.graph.find_nodes(op=kind)) for kind in ("get_attr", "placeholder")}
    functions = [gm.graph.find_nodes(op="call_function", target=t) for t in (torch.relu, torch.sin)]
    return (
        nodes, tables, functions, len(gm.graph.nodes), format_graph(gm, sources=True), gm.code,
        dict(gm.named_parameters()), dict(gm.named_buffers()), dict(gm.named_modules()),
        sorted(vars(gm)),
    )  # fmt: skip


def _next_names(gm: fx.GraphModule) -> list[str]:
    names = ("relu", "sin", "linear", "new", "hidden_2", "add", "scale", "x")
    return [gm.graph._graph_namespace.create_name(name, None) for name in names]


_CHANGES: dict[str, Callable[[EditSession, dict[str, fx.Node]], Any]] = {
    "call a function": lambda e, n: e.call(torch.sin, n["x"]),
    "call a method": lambda e, n: e.call(".view", n["relu"], -1, after=n["relu"]),
    "call a module": lambda e, n: e.call("linear", n["x"], before=n["add"]),
    "named": lambda e, n: e.call(torch.sin, n["x"], name="new"),
    "read an attribute": lambda e, n: e.get_attr("scale"),
    "copy": lambda e, n: e.copy(n["relu"], lambda node: node),
    "replace": lambda e, n: e.replace(n["relu"], e.call(torch.sin, n["linear"], before=n["relu"])),
    "replace uses": lambda e, n: e.replace_uses(n["mul"], n["relu"]),
    "erase": lambda e, n: (e.set_output(n["mul"]), e.erase(n["add"])),
    "arguments": lambda e, n: e.set_args(n["add"], (n["mul"], 2), {"alpha": 3}),
    "target": lambda e, n: e.set_target(n["relu"], torch.sin),
    "kind": lambda e, n: e.set_target(n["relu"], "sin", op="call_method"),
    "output": lambda e, n: e.set_output((n["mul"], [n["x"]])),
    "move": lambda e, n: e.move(n["scale"], before=n["linear"]),
    "move after": lambda e, n: e.move(n["scale"], after=n["linear"]),
    "rename": lambda e, n: e.rename(n["relu"], "rectified"),
    "rename to a taken name": lambda e, n: e.rename(n["relu"], "add"),
    "parameter": lambda e, n: e.add_attribute("weight", nn.Parameter(torch.ones(2))),
    "buffer": lambda e, n: e.add_attribute("scale", torch.ones(2), before=n["add"]),
    "module": lambda e, n: e.register("layer.inner", nn.ReLU()),
    "constant": lambda e, n: e.register("number", 3),
    "much": lambda e, n: [change(e, n) for name, change in _CHANGES.items()
                          if name in ("named", "rename", "buffer", "move", "arguments")],
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(_CHANGES))
def test_change_is_recorded_and_taken_back(name: str) -> None:
    gm, nodes = _traced()
    before = _snapshot(gm)
    with pytest.raises(KeyboardInterrupt), edit(gm) as session:
        _CHANGES[name](session, nodes)
        assert session.is_modified
        assert _snapshot(gm) != before
        raise KeyboardInterrupt
    assert _snapshot(gm) == before
    fresh, _ = _traced()
    assert _next_names(gm) == _next_names(fresh)


@pytest.mark.parametrize("name", sorted(_CHANGES))
def test_change_leaves_a_graph_that_runs(name: str) -> None:
    gm, nodes = _traced()
    with edit(gm) as session:
        _CHANGES[name](session, nodes)
    gm.graph.lint()
    if name not in ("call a module",):
        gm(torch.randn(2, 3), torch.randn(2, 3))


@pytest.mark.parametrize("name", sorted(_CHANGES))
def test_undo_to_a_mark(name: str) -> None:
    gm, nodes = _traced()
    with edit(gm) as session:
        session.rename(nodes["y"], "other")
        before = _snapshot(gm)
        mark = session.mark()
        _CHANGES[name](session, nodes)
        assert session.mark() > mark
        session.undo(mark)
        assert _snapshot(gm) == before
        assert [change.kind for change in session.journal] == ["rename"]
        session.undo()
        assert not session.is_modified


def test_a_second_change_after_undo() -> None:
    gm, nodes = _traced()
    with edit(gm) as session:
        session.call(torch.sin, nodes["x"])
        session.undo()
        sine = session.call(torch.sin, nodes["relu"])
        session.replace_uses(nodes["relu"], sine, where=lambda user: user.name == "mul")
    assert sine.name == "sin"
    assert nodes["mul"].args[0] is sine


def test_nothing_changed_is_not_recompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    gm, nodes = _traced()
    compiled: list[object] = []
    recompile = fx.GraphModule.recompile
    monkeypatch.setattr(
        fx.GraphModule, "recompile", lambda self: (compiled.append(self), recompile(self))[1]
    )
    with edit(gm):
        pass
    assert not compiled
    with edit(gm) as session:
        session.rename(nodes["relu"], "a")
        session.rename(nodes["mul"], "b")
    assert "a = " in gm.code
    assert compiled == [gm]
    assert "a = torch.relu" in gm.code


def test_a_move_to_where_a_node_is_changes_nothing() -> None:
    gm, nodes = _traced()
    with edit(gm) as session:
        session.move(nodes["relu"], before=nodes["relu"].next)
        session.move(nodes["relu"], after=nodes["relu"].prev)
        assert not session.is_modified


def test_the_journal_reads_like_the_graph() -> None:
    gm, nodes = _traced()
    with edit(gm, by="demo") as session:
        new = session.call(torch.sin, nodes["linear"], before=nodes["relu"])
        session.replace(nodes["relu"], new)
    assert session.diff().splitlines() == [
        "insert    %sin = aten.sin(%linear)    # demo",
        "rewire    %mul = aten.mul(%sin, %scale)    # demo",
        "erase     %relu = aten.relu(%linear)    # demo",
    ]


def test_a_node_goes_as_early_as_its_operands_allow() -> None:
    gm, nodes = _traced()
    with edit(gm) as session:
        early = session.call(torch.sin, nodes["x"])
        late = session.call(torch.add, nodes["x"], nodes["mul"])
        free = session.call(torch.zeros, 3)
    assert nodes["y"] < early < nodes["linear"]
    assert late.prev is nodes["mul"]
    assert nodes["y"] < free < nodes["add"]


_ERRORS: dict[str, tuple[Callable[[EditSession, dict[str, fx.Node]], Any], str]] = {
    "operand defined later": (lambda e, n: e.call(torch.sin, n["mul"], before=n["relu"]),
                              "expected operands defined before %relu, got %mul"),
    "used": (lambda e, n: e.erase(n["relu"]), "expected %relu to have no users, got %mul"),
    "user before the new node": (lambda e, n: e.replace_uses(n["x"], n["mul"]),
                                 "expected %mul before every user of %x, got %linear"),
    "wrapped": (lambda e, n: e.replace(n["relu"], e.call(torch.sin, n["relu"])),
                "expected a node that does without %relu in its place, got %sin, which uses it"),
    "no such attribute": (lambda e, n: e.unregister("linear.weight"),
                          "that the graph's module holds, got 'linear.weight'"),
    "moved before an operand": (lambda e, n: e.move(n["mul"], before=n["relu"]),
                                "expected %mul between its operands and its users"),
    "moved after a user": (lambda e, n: e.move(n["relu"], after=n["add"]),
                           "expected %relu between its operands and its users"),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(_ERRORS))
def test_error_names_the_nodes_and_changes_nothing(name: str) -> None:
    change, message = _ERRORS[name]
    gm, nodes = _traced()
    before = _snapshot(gm)
    with pytest.raises(RewriteError) as caught, edit(gm) as session:
        change(session, nodes)
    assert message in str(caught.value)
    assert caught.value.hint
    assert _snapshot(gm) == before


def test_an_invalid_result_is_refused() -> None:
    gm, _ = _traced()
    before = _snapshot(gm)
    refusal = pytest.raises(InvalidGraphError, match="expected the module to have 'missing'")
    with refusal, edit(gm) as session:
        session.get_attr("missing")
    assert _snapshot(gm) == before


def _behind_its_back(gm: fx.GraphModule) -> None:
    with gm.graph.inserting_before(next(iter(reversed(gm.graph.nodes)))):
        gm.graph.create_node("get_attr", "missing")


def _adopted(session: EditSession) -> None:
    other = fx.GraphModule(session.gm, fx.Graph())
    other.graph.output(None)
    other.graph.call_function(torch.relu, (None,))
    session.adopt(other)


def test_a_change_behind_the_sessions_back_is_checked_too() -> None:
    gm, _ = _traced()
    with pytest.raises(InvalidGraphError, match="'missing'"), edit(gm) as session:
        session.rename(next(n for n in gm.graph.nodes if n.op == "call_function"), "renamed")
        _behind_its_back(gm)


def test_an_adopted_graph_is_checked_wholly() -> None:
    gm, _ = _traced()
    before = _snapshot(gm)
    with pytest.raises(InvalidGraphError, match="one output, at the end"), edit(gm) as session:
        _adopted(session)
    assert _snapshot(gm) == before


def test_new_nodes_carry_source_module_type_and_provenance() -> None:
    gm, nodes = _traced()
    known = TensorType((2, 3), torch.float32, (3, 1), torch.device("cpu"))
    set_type(nodes["relu"], known)
    with edit(gm, by="swap") as session:
        new = session.call(torch.sin, nodes["linear"], before=nodes["relu"])
        session.replace(nodes["relu"], new)
    assert type_of(new) == known
    assert source_of(new) is not None
    assert source_of(new) == source_of(nodes["mul"])
    assert module_path(new) == ""
    assert provenance_of(new).replaced == ("relu",)
    assert provenance_of(new).by == ("swap",)
    with edit(gm) as session, session.on_behalf_of([new, nodes["mul"]], "fuse"):
        fused = session.call(operator.add, nodes["linear"], 1, before=nodes["add"])
    assert provenance_of(fused).replaced == ("relu", "mul")
    assert provenance_of(fused).by == ("swap", "fuse")


def test_attributes_get_free_names() -> None:
    gm, _ = _traced()
    with edit(gm) as session:
        first = session.add_attribute("scale", torch.ones(2))
        second = session.add_attribute("scale", torch.ones(4))
        assert session.register("linear.weight", torch.ones(1)) == "linear_weight"
    assert (first.target, second.target) == ("scale_1", "scale_2")
    assert type_of(second).shape == (4,)
    assert dict(gm.named_buffers())["scale_2"].shape == (4,)


def test_many_attributes_get_names_in_time_proportional_to_their_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gm, _ = _traced()
    asked: list[str] = []
    own = type(gm).__getattr__

    def counted(self: Any, name: str) -> Any:
        asked.append(name)
        return own(self, name)

    with edit(gm) as session:
        monkeypatch.setattr(nn.Module, "__getattr__", counted)
        names = [session.register("scale", torch.ones(1)) for _ in range(100)]
        monkeypatch.undo()
        assert names == [f"scale_{number}" for number in range(1, 101)]
        session.undo()
        assert session.register("scale", torch.ones(1)) == "scale_1"
    assert len(asked) < 1000


def test_an_attribute_that_is_read_stays() -> None:
    gm, _ = _traced()
    with pytest.raises(InvalidGraphError, match="'linear'"), edit(gm) as session:
        session.unregister("linear")
    assert gm(torch.ones(2, 3), torch.ones(3)).shape == (2, 3)


def test_attributes_come_back_to_their_places() -> None:
    gm, _ = _traced()
    for name in ("first", "second", "third"):
        gm.register_buffer(name, torch.ones(2), persistent=name != "first")
        gm.register_parameter(f"own_{name}", nn.Parameter(torch.ones(2)))
    before = list(gm.named_buffers()), list(gm.named_parameters()), list(gm.state_dict())
    with edit(gm) as session:
        for name in ("first", "second", "own_first", "own_third"):
            session.unregister(name)
        session.undo()
    after = list(gm.named_buffers()), list(gm.named_parameters()), list(gm.state_dict())
    assert str(after) == str(before)


def test_undo_after_the_session_brings_the_code_back_too() -> None:
    gm = symbolic_trace(lambda x: torch.relu(x) + 1)
    before, x = gm.code, torch.randn(3)
    with edit(gm) as e:
        relu = gm.graph.find_nodes(op="call_function", target=torch.relu)[0]
        e.set_target(relu, torch.tanh)
        mark = e.mark()
        e.rename(relu, "renamed")
    assert torch.equal(gm(x), torch.tanh(x) + 1)
    e.undo(mark)
    assert "renamed" not in gm.code and "tanh" in gm.code
    e.undo()
    assert gm.code == before
    assert torch.equal(gm(x), torch.relu(x) + 1)


def test_undo_after_another_session_is_refused_until_that_is_undone() -> None:
    gm = symbolic_trace(lambda x: torch.relu(x) + 1)
    before = gm.code
    relu = gm.graph.find_nodes(op="call_function", target=torch.relu)[0]
    with edit(gm) as first:
        first.set_target(relu, torch.tanh)
    with edit(gm) as second:
        second.set_target(relu, torch.sin)
        with pytest.raises(RewriteError, match="another session"):
            first.undo()
    with pytest.raises(RewriteError, match="undo the later session first"):
        first.undo()
    assert "sin" in gm.code
    second.undo()
    first.undo()
    assert gm.code == before
