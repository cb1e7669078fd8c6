"""What people give to sessions and graph objects: views, nodes, names; what else is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxkit
from fxkit.analysis.slices import inline, outline
from fxkit.errors import FxkitError, RewriteError
from fxkit.ir.session import EditSession
from fxkit.passes.base import Pass, PassContext

X = torch.ones(2, 4)


def _module() -> torch.fx.GraphModule:
    return fxkit.symbolic_trace(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)))


def test_a_session_takes_the_objects_of_a_graph():
    gm = _module()
    g = fxkit.graph(gm)
    with fxkit.edit(gm) as e:
        silu = e.call(F.silu, *g["_1"].producers, before=g["_1"])
        e.replace(g["_1"], silu)
        pair = e.call(torch.stack, [g["_0"], silu], dim=0)
        e.set_output({"last": g["_2"], "pair": [pair, g["_0"]]})
        e.move(pair, after=g["_2"])
        e.rename(g["_0"], "first")
    got = gm(X)
    first = gm.get_submodule("0")(X)
    assert torch.equal(got["last"], gm.get_submodule("2")(F.silu(first)))
    assert torch.equal(got["pair"][0], torch.stack([first, F.silu(first)]))
    fxkit.verify(gm)


def test_a_function_as_target_makes_it_a_call_of_a_function():
    gm = _module()
    with fxkit.edit(gm) as e:
        e.set_target(fxkit.graph(gm)["_1"], torch.tanh)
    assert torch.equal(gm(X), gm.get_submodule("2")(torch.tanh(gm.get_submodule("0")(X))))


Misuse = Callable[[Any, Any], Any]
OTHER = _module()
MISUSES: dict[str, tuple[Misuse, str, str]] = {
    "a number for a node": (lambda e, g: e.replace(g["_1"], 2.0), "a node, got float 2.0", "graph"),
    "a node for itself": (lambda e, g: e.replace(g["_1"], g["_1"]), "got itself", "leave"),
    "a foreign operand": (
        lambda e, g: e.call(F.relu, fxkit.graph(OTHER)["_1"]),
        "%_1 of another one",
        "edit.copy",
    ),
    "a foreign node": (
        lambda e, g: e.erase(fxkit.graph(OTHER)["_2"]),
        "%_2 of another one",
        "edit.copy",
    ),
    "an erased node": (
        lambda e, g: (e.replace(g["_1"], g["_0"]), e.call(F.relu, g["_1"])),
        "%_1, which was erased",
        "took its place",
    ),
    "the output": (lambda e, g: e.erase(g["output"]), "got the output", "set_output"),
    "a tensor": (lambda e, g: e.call(torch.add, g["_0"], X), "got a Tensor", "add_attribute"),
    "a module": (lambda e, g: e.call(nn.ReLU(), g["_0"]), "got the module ReLU", "register"),
    "a module's class": (lambda e, g: e.call(nn.ReLU, g["_0"]), "the module ReLU", "register"),
    "no function": (lambda e, g: e.call(3, g["_0"]), "got int 3", "a function"),
    "no kind": (lambda e, g: e.insert("call", F.relu), "got 'call'", "call_function"),
    "a method without its dot": (lambda e, g: e.call("relu", g["_0"]), "got 'relu'", "'.relu'"),
    "no such module": (lambda e, g: e.call("a.b", g["_0"]), "got 'a.b'", "register"),
    "two places": (
        lambda e, g: e.call(F.relu, g["_0"], before=g["_2"], after=g["_1"]),
        "got before %_2 and after %_1",
        "leave one",
    ),
    "behind the end": (
        lambda e, g: e.call(F.relu, g["_0"], after=g["output"]),
        "one after its output",
        "before=",
    ),
    "no place to move to": (lambda e, g: e.move(g["_1"]), "got none", "before="),
}


@pytest.mark.parametrize("name", MISUSES)
def test_a_misuse_is_told_with_a_remedy_and_changes_nothing(name: str):
    misuse, message, hint = MISUSES[name]
    gm = _module()
    before = str(gm.graph)
    with pytest.raises(RewriteError) as caught, fxkit.edit(gm) as e:
        misuse(e, fxkit.graph(gm))
    assert message in caught.value.message and hint in str(caught.value.hint)
    assert str(gm.graph) == before and gm(X).shape == (2, 4)


def test_a_session_that_has_ended_takes_no_changes():
    gm = _module()
    with fxkit.edit(gm) as e:
        pass
    for change in (
        lambda: e.call(F.relu, fxkit.graph(gm)["_0"]),
        lambda: e.insert("placeholder", "z"),
        lambda: e.rename(fxkit.graph(gm)["_0"], "first"),
    ):
        with pytest.raises(RewriteError, match="got one that has ended"):
            change()
    assert len(fxkit.graph(gm)) == 5


def test_graph_objects_take_names_and_nodes():
    gm = _module()
    g = fxkit.graph(gm)
    for first, last in (("_0", "_2"), (g["_0"].fx_node, g["_2"].fx_node), (g["_0"], "_2")):
        assert g.between(first, last) == [g["_1"]] and g.distance(first, last) == 2
        assert g.paths(first, last) == [[g["_0"], g["_1"], g["_2"]]]
        assert g.cut([first], [last]) and not g.is_convex([first, last])
        assert g.boundary([first])[1] == [g["_0"]]
        assert not g.may_merge(first, last)
    assert g[g["_0"].fx_node] == g["_0"] and g["_0"].between("_2") == [g["_1"]]
    assert torch.equal(g.extract(["_0", "_1"])(X), F.gelu(gm.get_submodule("0")(X)))
    assert g.find(nn.GELU()) == g.find(nn.GELU)
    for wrong in (3, "_7", None):
        with pytest.raises(FxkitError, match=r"expected (a node|the name of a node)"):
            g.between(wrong, "_2")


def test_parts_and_explanations_take_them_too():
    gm = _module()
    expected = gm(X)
    g = fxkit.graph(gm)
    call = outline(gm, [g["_0"], g["_1"]], "part")
    assert torch.equal(gm(X), expected)
    inline(gm, fxkit.graph(gm)[call])
    assert torch.equal(gm(X), expected)
    rule = fxkit.rule(lambda x: F.relu(x), lambda x: F.silu(x), exact=False)
    gelu = fxkit.graph(gm).find(F.gelu)[0]
    told = {str(fxkit.explain(gm, rule, at=at)) for at in (gelu.name, gelu, gelu.fx_node)}
    assert len(told) == 1


@pytest.mark.parametrize("name", [3, "", None])
def test_a_name_is_a_text(name: Any) -> None:
    gm = fxkit.symbolic_trace(nn.ReLU())
    relu = fxkit.graph(gm).find(torch.relu)[0].fx_node
    refused = pytest.raises(RewriteError, match="expected a name, got")
    with refused, fxkit.edit(gm) as e:
        e.rename(relu, name)
    with refused, fxkit.edit(gm) as e:
        e.add_attribute(name, torch.ones(1))
    if name is not None:
        with refused, fxkit.edit(gm) as e:
            e.call(torch.neg, relu, name=name)
    assert torch.equal(gm(torch.ones(1)), torch.ones(1))


def test_an_operand_is_something_that_code_can_say() -> None:
    gm = fxkit.symbolic_trace(nn.ReLU())
    for operand in (object(), [1, object()], {"a": object()}):
        with (
            pytest.raises(RewriteError, match="got <object object") as refused,
            fxkit.edit(gm) as e,
        ):
            e.call(torch.relu, operand)
        assert refused.value.hint


def test_an_attribute_has_no_keyword_for_a_name() -> None:
    gm = fxkit.symbolic_trace(nn.ReLU())
    relu = fxkit.graph(gm).find(torch.relu)[0].fx_node
    with fxkit.edit(gm) as e:
        one = e.add_attribute("class", torch.ones(1), before=relu)
        made = e.call(torch.add, relu, one, after=relu)
        e.set_output(made)
    assert one.target == "class_1"
    assert torch.equal(gm(torch.ones(1)), torch.tensor([2.0]))


def _on_behalf(e: Any, node: Any) -> None:
    with e.on_behalf_of([node], "helper"):
        e.call(torch.rand, 2, before=node)


# Each method that asks for a node, with the very node that it is given.
METHODS: dict[str, Callable[[Any, Any], Any]] = {
    "insert": lambda e, n: e.insert("call_function", torch.rand, (2,), after=n),
    "call": lambda e, n: e.call(torch.rand, 2, before=n),
    "get_attr": lambda e, n: e.get_attr("0.weight", before=n),
    "replace": lambda e, n: e.replace(n, e.call(F.silu, fxkit.graph(e.gm)["_0"], before=n)),
    "replace by": lambda e, n: e.replace(e.call(torch.rand, 2, after="_0"), n),
    "replace_uses": lambda e, n: e.replace_uses(n, "_0"),
    "erase": lambda e, n: (e.replace_uses(n, "_0"), e.erase(n)),
    "set_args": lambda e, n: e.set_args(n, (fxkit.graph(e.gm)["input_1"],)),
    "set_target": lambda e, n: e.set_target(n, torch.tanh),
    "move": lambda e, n: (made := e.call(torch.rand, 2, before="_0"), e.move(made, after=n)),
    "move it": lambda e, n: (e.call(torch.rand, 2, after=n), e.move(n, before="_2")),
    "rename": lambda e, n: e.rename(n, "activation"),
    "retype": lambda e, n: e.retype(n, None),
    "add_attribute": lambda e, n: e.add_attribute("scale", torch.ones(2), before=n),
    "on_behalf_of": _on_behalf,
}


KINDS_OF_NODE: dict[str, Callable[[Any], Any]] = {
    "node": lambda gm: fxkit.graph(gm)["_1"].fx_node,
    "view": lambda gm: fxkit.graph(gm)["_1"],
    "name": lambda gm: "_1",
}


class Acting(Pass):
    def __init__(self, act: Callable[[Any], None]) -> None:
        object.__setattr__(self, "act", act)

    def apply(self, edit: EditSession, context: PassContext) -> None:
        self.act(edit)


def _in_a_session(gm: torch.fx.GraphModule, act: Callable[[Any], None]) -> None:
    with fxkit.edit(gm) as e:
        act(e)


def _in_a_nested_one(gm: torch.fx.GraphModule, act: Callable[[Any], None]) -> None:
    with fxkit.edit(gm) as outer, fxkit.edit(outer.gm) as e:
        act(e)


def _in_a_pass(gm: torch.fx.GraphModule, act: Callable[[Any], None]) -> None:
    fxkit.PassManager([Acting(act)], verify="structure").run(gm)


def _in_a_session_in_a_pass(gm: torch.fx.GraphModule, act: Callable[[Any], None]) -> None:
    fxkit.PassManager([Acting(lambda e: _in_a_session(e.gm, act))], verify="structure").run(gm)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", KINDS_OF_NODE)
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(
    "enter", [_in_a_session, _in_a_nested_one, _in_a_pass, _in_a_session_in_a_pass]
)
def test_each_method_takes_each_kind_of_node(enter: Any, name: str, kind: str) -> None:
    expected, gm = _module(), _module()
    _in_a_session(expected, lambda e: METHODS[name](e, KINDS_OF_NODE["node"](e.gm)))
    enter(gm, lambda e: METHODS[name](e, KINDS_OF_NODE[kind](e.gm)))
    assert gm.code == expected.code
    fxkit.verify(gm)


def test_a_copy_may_be_of_a_view_of_another_graph() -> None:
    gm, other = _module(), fxkit.graph(_module())
    with fxkit.edit(gm) as e:
        new = e.copy(other["_1"], lambda node: fxkit.graph(gm)[node.name], after="_1")
    assert fxkit.graph(gm)[new].producers == [fxkit.graph(gm)["_0"]]


def test_a_name_that_is_none_is_refused() -> None:
    with (
        pytest.raises(RewriteError, match=r"got '_11'(.|\n)*did you mean"),
        fxkit.edit(_module()) as e,
    ):
        e.erase("_11")
