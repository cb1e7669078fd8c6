"""Tests of nodes with very many operands, whose operands are exchanged one by one."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

import fxkit
from fxkit.analysis.editing import edit
from fxkit.ir.many_operands import WIDE, is_flat
from fxkit.ir.op import operator_of, resolve
from fxkit.ir.session import EditSession
from fxkit.ir.types import set_type, type_of

COUNT = 2 * WIDE

_FORMS: dict[str, Callable[[fx.Graph, list[fx.Node]], Any]] = {
    "one list": lambda g, v: g.call_function(torch.stack, (v,), {"dim": 0}),
    "arguments": lambda g, v: g.call_function(_joined, tuple(v)),
    "many times": lambda g, v: g.call_function(torch.stack, ([*v, *v[:9], v[0]],)),
    "a list and an argument": lambda g, v: g.call_function(_joined, (v[0], tuple(v), 3, v[1:])),
    "a keyword": lambda g, v: g.call_function(torch.stack, (), {"tensors": v}),
    "nested": lambda g, v: g.call_function(_joined, (v[0], [v[1:], {"a": v[0]}])),
    "output": lambda g, v: [*v, v[3]],
}


def _joined(*values: Any) -> torch.Tensor:
    return torch.ones(2)


def _made(form: str) -> fx.GraphModule:
    graph = fx.Graph()
    x = graph.placeholder("x")
    values = [graph.call_function(torch.add, (x, float(i))) for i in range(COUNT)]
    graph.output(_FORMS[form](graph, values))
    return fx.GraphModule(nn.Module(), graph)


def _wide(gm: fx.GraphModule) -> Any:
    return max(gm.graph.nodes, key=lambda node: len(node._input_nodes))


def _seen(gm: fx.GraphModule) -> Any:
    """Return all that tells of operands, in order; of users in any."""
    return [(str(n), n.args, n.kwargs, n.all_input_nodes, set(n.users)) for n in gm.graph.nodes]


def _exchange_some(session: EditSession, seed: int) -> None:
    """Replace values by new ones, by one another, and by new ones for all."""
    draw = random.Random(seed)
    first, second, *rest = session.graph.find_nodes(op="call_function", target=torch.add)
    for node in draw.sample(rest, len(rest) // 2):
        session.replace(node, session.call(torch.sub, *node.args, before=node))
    for node in draw.sample(rest, len(rest) // 8):
        if not node._erased:
            session.replace_uses(node, draw.choice((first, second)))
    session.replace_uses(first, second)


@pytest.mark.parametrize("form", sorted(_FORMS))
def test_the_graph_is_as_torch_would_have_made_it(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gm, plain = _made(form), _made(form)
    with edit(gm) as session:
        _exchange_some(session, 1)
    monkeypatch.setattr(EditSession, "_exchange", lambda *_: False)
    with edit(plain) as other:
        _exchange_some(other, 1)
    assert _shown(gm) == _shown(plain)
    assert session.diff() == other.diff()
    gm.graph.lint()


def _shown(gm: fx.GraphModule) -> Any:
    return [
        (str(n), str(n.args), str(n.kwargs), str(n.all_input_nodes), sorted(map(str, n.users)))
        for n in gm.graph.nodes
    ]


@pytest.mark.parametrize("form", sorted(_FORMS))
def test_exchanges_are_taken_back(form: str) -> None:
    gm = _made(form)
    before = _seen(gm)
    with edit(gm) as session:
        _exchange_some(session, 2)
        middle, mark, text = _shown(gm), session.mark(), session.diff()
        wide = _wide(gm)
        if wide.op != "output":
            session.set_args(wide, tuple(reversed(wide.args)))
        _exchange_some(session, 3)
        session.undo(mark)
        assert session.diff() == text
        assert [row[:3] for row in _shown(gm)] == [row[:3] for row in middle]
        _exchange_some(session, 4)
        session.undo()
        assert _seen(gm) == before
    assert _seen(gm) == before
    gm.graph.lint()


@pytest.mark.parametrize("form", ["one list", "arguments"])
def test_the_journal_tells_what_the_operands_were(form: str) -> None:
    gm = _made(form)
    expected = []
    with edit(gm) as session:
        for node in gm.graph.find_nodes(op="call_function", target=torch.add)[:5]:
            session.replace(node, session.call(torch.sub, *node.args, before=node))
            expected.append(_wide(gm).args)
    rewired: list[Any] = [change.what for change in session.journal if change.kind == "rewire"]
    assert [record.args for record in rewired] == expected


def test_operands_nested_deeper_or_given_by_keyword_are_not_flat() -> None:
    flat = {form for form in _FORMS if is_flat(_wide(_made(form)))}
    assert flat == set(_FORMS) - {"a keyword", "nested"}


def test_the_operator_is_found_anew_when_an_operand_has_another_type(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gm = _made("one list")
    fxkit.propagate_types(gm, (torch.ones(2),))
    wide, node = _wide(gm), gm.graph.find_nodes(op="call_function", target=torch.add)[3]
    known, resolved = operator_of(wide), []
    monkeypatch.setattr("fxkit.ir.op.resolve", lambda n: (resolved.append(n), resolve(n))[1])
    with edit(gm) as session:
        same = session.call(torch.sub, *node.args, before=node)
        set_type(same, type_of(node))
        session.replace_uses(node, same)
        assert (operator_of(wide), resolved) == (known, [])
        number = session.call(len, next(iter(gm.graph.nodes)), before=node)
        set_type(number, 2)
        session.replace_uses(same, number)
        operator_of(wide)
        assert resolved == [wide]
        session.undo()


def test_rules_reach_every_operand() -> None:
    gm = _made("one list")
    x = torch.randn(3)
    expected = gm(x)
    to_sub = fxkit.rule(lambda x, n: torch.add(x, n), lambda x, n: torch.sub(x, -n), name="to_sub")
    report = fxkit.rewrite(gm, to_sub)
    assert report.count == COUNT
    assert torch.equal(gm(x), expected)
    assert [n.name for n in _wide(gm).all_input_nodes] == [n.name for n in _wide(gm).args[0]]


def test_an_exchange_looks_at_no_other_operand(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("all operands are looked at")

    gm = _made("one list")
    wide = _wide(gm)
    found = operator_of(wide)
    first, second, *_ = gm.graph.find_nodes(op="call_function", target=torch.add)
    with edit(gm) as session:
        new = session.call(torch.sub, *first.args, before=first)
        session.replace(first, new)
        with monkeypatch.context() as patch:  # at its end a session looks at what was changed
            patch.setattr(fx.Node, "replace_input_with", refuse)
            patch.setattr("fxkit.ir.op.resolve", refuse)
            patch.setattr("fxkit.ir.many_operands.is_flat", refuse)
            session.replace_uses(second, new)
            assert operator_of(wide) is found
