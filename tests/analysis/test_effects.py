"""Effects against what really happens: shared storage, changed versions, drawn random numbers."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.utils import _pytree as pytree

from fxkit.analysis.effects import AliasSets, Effects, effects_of, written_attributes
from fxkit.ir.op import Attribute
from fxkit.tracing.symbolic import symbolic_trace
from tests.operator_samples import samples


def _storages(value: Any) -> set[int]:
    tensors = [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]
    return {t.untyped_storage()._cdata for t in tensors if t.layout == torch.strided and t.numel()}


def _check(part: int, parts: int) -> int:
    checked = 0
    for sample in samples(part, parts):
        state = torch.get_rng_state()
        try:
            result, tensors = sample.run()
        except (RuntimeError, TypeError, IndexError, AttributeError, ValueError):
            continue
        effects = effects_of(sample.node)
        shown = f"{sample.name}: {sample.node.format_node()}: {effects.describe()}"
        if not torch.equal(torch.get_rng_state(), state):
            assert effects.is_random, shown
        for node, tensor in tensors.items():
            if tensor._version != 1:  # each is a fresh copy, written once
                assert node in effects.writes, shown
            if _storages(tensor) & _storages(result):
                assert node in effects.aliases, shown
        checked += 1
    return checked


@pytest.mark.filterwarnings("ignore")
def test_effects_of_some_of_the_operators() -> None:
    assert _check(7, 40) > 75


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore")
def test_effects_of_all_operators() -> None:
    assert _check(0, 1) > 3000


def _heads(x: Any, dropout: float, training: bool) -> Any:
    options = (4, 2, x, None, None, None, False, dropout, x, None, training)
    return F.multi_head_attention_forward(x, x, x, *options)


_PURE: list[Callable[..., Any]] = [
    lambda x: x + 1, lambda x: torch.relu(x), lambda x: x.view(-1), lambda x: x[0],
    lambda x: F.dropout(x, 0.5, False), lambda x: F.dropout(x, 0.0, True), lambda x: x.to(x.dtype),
    lambda x: F.batch_norm(x, x, x), lambda x: F.layer_norm(x, (4,)), lambda x: x.shape,
    lambda x: F.interpolate(x, 4), lambda x: x.T, lambda x: x.split(2), lambda x: x.size(0),
    lambda x: torch.lstm(x, [x, x], [x], True, 1, 0.0, True, False, False),
    lambda x: _heads(x, 0.0, True), lambda x: _heads(x, 0.5, False),
]  # fmt: skip
_RANDOM: list[Callable[..., Any]] = [
    lambda x: torch.rand_like(x), lambda x: F.dropout(x, 0.5, True), lambda x: torch.bernoulli(x),
    lambda x: F.rrelu(x, training=True), lambda x: x.normal_(), lambda x: F.dropout2d(x),
    lambda x: torch.randn(3, device=x.device), lambda x: torch.multinomial(x, 2),
    lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
    lambda x: torch.lstm(x, [x, x], [x], True, 1, 0.5, True, False, False),
    lambda x: _heads(x, 0.5, True),
]  # fmt: skip
_WRITING: list[Callable[..., Any]] = [
    lambda x: x.add_(1), lambda x: F.relu(x, inplace=True), lambda x: torch.relu_(x),
    lambda x: operator.iadd(x, 1), lambda x: operator.setitem(x, 0, 1.0), lambda x: x.copy_(x),
    lambda x: torch.sin(x, out=x), lambda x: x.index_put_((x,), x), lambda x: x.zero_(),
    lambda x: F.dropout(x, 0.5, True, True),
    lambda x: F.batch_norm(x, x, x, training=True), lambda x: F.elu_(x),
    lambda x: F.instance_norm(x, x, x), lambda x: x.unsqueeze_(0), lambda x: x.transpose_(0, 1),
    lambda x: x.__setitem__(0, 1), lambda x: x.__iadd__(1),
]  # fmt: skip


def _call(function: Callable[..., Any]) -> fx.Node:
    gm = symbolic_trace(function)
    return [n for n in gm.graph.nodes if n.op not in ("placeholder", "output")][-1]


@pytest.mark.parametrize("index", range(len(_PURE)))
def test_pure(index: int) -> None:
    node = _call(_PURE[index])
    assert effects_of(node).is_pure, node.format_node()


@pytest.mark.parametrize("index", range(len(_RANDOM)))
def test_random(index: int) -> None:
    assert effects_of(_call(_RANDOM[index])).is_random


@pytest.mark.parametrize("index", range(len(_WRITING)))
def test_writing(index: int) -> None:
    node = _call(_WRITING[index])
    assert node.all_input_nodes[0] in effects_of(node).writes


def test_unknown_calls_may_do_anything() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(print, (x,))
    effects = effects_of(node)
    assert effects.is_opaque and effects.is_random and effects.writes == (x,)
    assert not effects.is_pure
    assert "nothing is known" in effects.describe()
    assert effects_of(x).describe() == "pure"


def test_the_check_of_inputs_of_an_exported_module_only_raises() -> None:
    gm = torch.export.export(nn.Linear(2, 2), (torch.randn(4, 2),)).module()
    (node,) = gm.graph.find_nodes(op="call_module", target="_guards_fn")
    assert effects_of(node) == Effects(may_raise=True)
    gm._guards_fn.register_forward_hook(lambda *_: None)
    assert effects_of(node).is_opaque


def test_training_batch_norm_writes_its_statistics() -> None:
    for training in (True, False):
        gm = symbolic_trace(nn.Sequential(nn.BatchNorm1d(4)).train(training))
        written = written_attributes(gm.graph.nodes)
        assert written == ({"0.running_mean", "0.running_var"} if training else set())


def _alias_sets(function: Any) -> tuple[AliasSets, dict[str, fx.Node]]:
    gm = symbolic_trace(function)
    return AliasSets(gm.graph), {node.name: node for node in gm.graph.nodes}


def test_alias_sets_follow_views_through_containers() -> None:
    def program(x: Any, y: Any) -> Any:
        first, second = x.chunk(2)
        row = second.t().view(-1)[0:1]
        copied = y.clone()
        row.add_(1)
        return first, row, copied

    aliases, nodes = _alias_sets(program)
    x, writer = nodes["x"], nodes["add_"]
    for name in ("chunk", "getitem", "getitem_1", "t", "view", "getitem_2", "add_"):
        assert aliases.may_alias(x, nodes[name]), name
        assert aliases.writers(nodes[name]) == [writer], name
    for name in ("y", "clone"):
        assert not aliases.may_alias(x, nodes[name])
        assert not aliases.is_written(nodes[name])


def test_tied_parameters_share_a_set() -> None:
    root = nn.Module()
    root.a = nn.Parameter(torch.ones(2, 3))
    root.b = root.a
    root.c = nn.Parameter(torch.ones(3))
    root.register_buffer("row", root.a.data[0])
    graph = fx.Graph()
    nodes = {name: graph.create_node("get_attr", name) for name in ("a", "b", "c", "row")}
    graph.output(tuple(nodes.values()))
    aliases = AliasSets(fx.GraphModule(root, graph).graph)
    assert aliases.may_alias(nodes["a"], nodes["b"])
    assert aliases.may_alias(nodes["a"], nodes["row"])
    assert not aliases.may_alias(nodes["a"], nodes["c"])


def test_nodes_taken_in_later() -> None:
    gm = symbolic_trace(nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4).eval()))
    output = next(iter(reversed(gm.graph.nodes)))
    aliases = AliasSets(gm.graph)
    assert aliases.writers(Attribute("0.running_mean")) == [gm.graph.find_nodes(
        op="call_module", target="0")[0]]  # fmt: skip
    assert aliases.writers(Attribute("1.running_mean")) == []
    with gm.graph.inserting_before(output):
        mean = gm.graph.create_node("get_attr", "0.running_mean")
        again = gm.graph.create_node("get_attr", "0.running_mean")
        view = gm.graph.call_method("view", (again, 2, 2))
        other = gm.graph.create_node("get_attr", "1.running_mean")
    for node in (mean, again, view, other):
        aliases.add(node)
    assert aliases.may_alias(mean, view)
    assert not aliases.may_alias(mean, other)
    assert len(aliases.writers(view)) == 1
    assert aliases.writers(other) == []
    with gm.graph.inserting_before(output):
        write = gm.graph.call_method("add_", (view, 1))
    aliases.add(write)
    assert aliases.writers(mean)[-1] is write


def test_operators_that_return_nothing_are_kept_for_what_else_they_do() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    check = graph.call_function(torch.ops.aten._assert_async.msg, (x, "x is zero"))
    write = graph.call_function(torch.ops.aten._foreach_add_.Scalar, ([x], 1))
    graph.output(x)
    assert not effects_of(check).is_pure
    assert effects_of(check).may_raise
    assert effects_of(write).writes == (x,)
    assert not effects_of(write).may_raise
