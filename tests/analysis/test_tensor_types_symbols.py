"""Sizes as expressions, sizes that the data decide, and what is said where they do not fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.export import Dim

from fxkit.analysis.editing import edit
from fxkit.analysis.objects import graph
from fxkit.analysis.tensor_types import TypeAnalysis, infer_type, propagate_types
from fxkit.analysis.type_inference.declared_types import declare_type
from fxkit.errors import InvalidGraphError, UnsupportedError
from fxkit.ir.printer import format_type
from fxkit.ir.types import KEY, set_type, type_of, type_of_value
from fxkit.tracing.symbolic import symbolic_trace


def _output(function: Callable[..., Any], *args: Any, shapes: Any = None) -> str:
    gm = symbolic_trace(function)
    return format_type(propagate_types(gm, args, dynamic_shapes=shapes))


_BATCH = Dim("batch")
_LENGTH = Dim("s0")


def test_expressions_of_symbolic_sizes() -> None:
    shapes = {"x": {0: _BATCH, 1: _LENGTH}, "y": {0: _BATCH, 1: 2 * _LENGTH + 1}}
    args = torch.randn(3, 4), torch.randn(3, 9)
    assert _output(lambda x, y: y, *args, shapes=shapes) == "f32[batch,2*s0+1]"
    joined = _output(lambda x, y: torch.cat([x, y], 1).relu(), *args, shapes=shapes)
    assert joined == "f32[batch,3*s0+1]"
    assert _output(lambda x, y: x.shape[1] * 2 - 1, *args, shapes=shapes) == "int 2*s0-1"


@pytest.mark.parametrize(
    "shapes",
    [
        ({0: _BATCH},),
        [[_BATCH, None]],
        {"x": {0: _BATCH, 1: Dim.STATIC}},
        {"x": {-2: "batch", 1: 3}},
    ],
)
def test_the_notations_of_export(shapes: Any) -> None:
    assert _output(lambda x: x.t(), torch.randn(2, 3), shapes=shapes) == "f32[3,batch]"


def test_nested_inputs() -> None:
    gm = symbolic_trace(lambda x: x["a"][0] + 1)
    shapes = {"x": {"a": [{0: Dim("n")}], "b": None}}
    known = propagate_types(gm, ({"a": [torch.randn(2)], "b": 1},), dynamic_shapes=shapes)
    assert str(known) == "f32[n]"


@pytest.mark.parametrize("size", [0, 1, 2])
def test_an_example_of_size_zero_or_one_stays_free(size: int) -> None:
    known = _output(lambda x: x + torch.ones(3), torch.randn(size, 3), shapes={"x": {0: _BATCH}})
    assert known == "f32[batch,3]"


def test_sizes_known_by_hint_alone_get_numbers() -> None:
    shapes = {"x": {0: Dim.DYNAMIC}, "y": {0: Dim.AUTO}}
    args = torch.randn(3), torch.randn(4)
    assert _output(lambda x, y: torch.cat([x, y]), *args, shapes=shapes) == "f32[s0+s1]"


def test_strides_are_expressions_in_the_order_of_the_example() -> None:
    gm = symbolic_trace(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()))
    x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    known = propagate_types(gm, (x,), dynamic_shapes=({0: _BATCH, 3: Dim("w")},))
    assert str(known) == "f32[batch,4,8,w]"
    assert known.memory_format == torch.channels_last
    assert [str(stride) for stride in known.stride] == ["32*w", "1", "4*w", "4"]


def test_equal_sizes_are_one_symbol_and_the_assumption_is_told() -> None:
    gm = symbolic_trace(lambda x, y: x + y)
    shapes = {"x": {0: Dim("a")}, "y": {0: Dim("b")}}
    types = TypeAnalysis(gm, (torch.randn(3), torch.randn(3)), dynamic_shapes=shapes)
    assert type_of(graph(gm)["x"].fx_node) == type_of(graph(gm)["y"].fx_node)
    assert types.assumptions == ("a == b",)


def test_a_size_that_can_have_one_value_only_is_an_error() -> None:
    with pytest.raises(InvalidGraphError) as caught:
        _output(lambda x: x @ torch.ones(6, 3), torch.randn(2, 6), shapes={"x": {1: _BATCH}})
    assert "matmul to work for every batch, got one that needs batch = 6" in str(caught.value)
    assert "test_tensor_types_symbols.py:" in str(caught.value)


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        ({"y": None}, "names of inputs"),
        ({"x": {2: _BATCH}}, "that fit x"),
        ({"x": {0: 7}}, "size 7 at x.shape"),
        ({"x": {0: _BATCH, 1: _BATCH}}, "same batch everywhere, got 2 and 3"),
        ({"x": {1: 2 * _BATCH}}, "that fit x.shape"),
        (3, "that fit the inputs"),
    ],
)
def test_notations_that_do_not_fit(shapes: Any, said: str) -> None:
    with pytest.raises(UnsupportedError, match=said):
        _output(lambda x: x, torch.randn(2, 3), shapes=shapes)


def test_updates_keep_expressions() -> None:
    gm = symbolic_trace(lambda x: torch.relu(x.sin()).cos().sum(0))
    types = TypeAnalysis(gm, (torch.randn(2, 3),), dynamic_shapes={"x": {0: _BATCH}})
    relu = graph(gm)["relu"].fx_node
    with edit(gm) as e:
        e.replace(relu, e.call(torch.stack, [*relu.args, *relu.args], 1, before=relu))
    assert types.update(e.journal) == 4
    assert str(type_of(graph(gm)["cos"].fx_node)) == "f32[batch,2,3]"
    cosine = graph(gm)["cos"].fx_node
    known = cosine.meta.pop(KEY)
    assert infer_type(cosine) == known


def test_unknown_arithmetic_says_so() -> None:
    gm = symbolic_trace(lambda x: x)
    known = propagate_types(gm, (torch.randn(2, 3),), dynamic_shapes={"x": {0: _BATCH}})
    assert str(known.numel) == "3*batch"
    assert str(known.nbytes) == "12*batch"
    with pytest.raises(UnsupportedError, match="expected a number, got the expression batch"):
        max(known.shape[0], 1)


# What the data decide.


@pytest.mark.parametrize(
    ("function", "known"),
    [
        (lambda x: x.nonzero(), "i64[u0,2]"),
        (lambda x: torch.masked_select(x, x > 0), "f32[u0]"),
        (lambda x: torch.unique(x), "f32[u0]"),
        (lambda x: x[0].sum().int().item() + 1, "int u0+1"),
        (lambda x: x.sum().item(), "float zuf0"),
        (lambda x: x.data_ptr() + 1, "int u0+1"),
        (lambda x: x.untyped_storage().data_ptr() + 1, "int u0+1"),
        (lambda x: torch.cat([x.nonzero(), x.nonzero()]), "i64[2*u0,2]"),
        (lambda x: x.view(-1)[(x > 0).view(-1)].relu() * 2, "f32[u0]"),
    ],
)
def test_sizes_that_the_data_decide(function: Callable[..., Any], known: str) -> None:
    assert _output(function, torch.randn(3, 4)) == known


@pytest.mark.parametrize("batch_first", [False, True])
def test_lengths_decide_what_is_packed(batch_first: bool) -> None:
    def packed(x: torch.Tensor, lengths: torch.Tensor) -> Any:
        return torch._VF._pack_padded_sequence(x, lengths, batch_first)

    known = _output(packed, torch.randn(3, 3, 5, dtype=torch.float64), torch.tensor([3, 2, 1]))
    assert known == "(f64[u1,5], i64[u0])"


def test_who_finds_a_size_is_told() -> None:
    gm = symbolic_trace(lambda x: x.nonzero().sum(1))
    types = TypeAnalysis(gm, (torch.randn(3, 4),))
    assert types.origins["u0"].startswith("found in the data by %nonzero (test_tensor_types_symb")


def test_one_mask_decides_one_size() -> None:
    assert _output(lambda x, m: x[m] + (x * 2)[m], torch.randn(5), torch.ones(5) > 0) == "f32[u0]"


def test_a_number_recorded_at_capture_stays() -> None:
    gm = symbolic_trace(lambda x, y: torch.full((y.item(), 2), 1.0) + x[0])
    set_type(graph(gm)["item"].fx_node, 7)
    assert str(propagate_types(gm, (torch.randn(3, 2), torch.tensor(7)))) == "f32[7,2]"


def test_a_decision_about_unknown_data_names_node_size_and_finder() -> None:
    gm = symbolic_trace(lambda x: x.nonzero().chunk(2))
    with pytest.raises(InvalidGraphError) as caught:
        propagate_types(gm, (torch.randn(5),))
    text = str(caught.value)
    assert "known without the data for chunk, got %nonzero: i64[u0,1]" in text
    assert "u0 is found in the data by %nonzero" in text


# Calls that can't run without numbers.


def _through_numpy(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(x.detach().numpy()[::2].copy())


def _calls_numpy() -> fx.GraphModule:
    made = fx.Graph()
    x = made.placeholder("x")
    half = made.call_function(_through_numpy, (x,))
    made.output(made.call_function(torch.relu, (half,)))
    return fx.GraphModule(nn.Module(), made)


def test_an_opaque_call_has_the_type_it_was_seen_with() -> None:
    gm = _calls_numpy()
    x = torch.randn(4, 3)
    x_node, half, *_ = gm.graph.nodes
    set_type(x_node, type_of_value(x))
    set_type(half, type_of_value(_through_numpy(x)))
    assert str(propagate_types(gm, (x,))) == "f32[2,3]"
    for _ in range(2):
        with pytest.raises(InvalidGraphError) as caught:
            propagate_types(gm, (torch.randn(6, 3),))
        text = str(caught.value)
        assert "captured with, (f32[4,3]), got (f32[6,3])" in text
        assert "hint:  declare what it returns with fxkit.declare_type" in text
    assert str(propagate_types(gm, (x,))) == "f32[2,3]"


def test_an_opaque_call_never_seen_is_an_error() -> None:
    wanted = "whose type can be told without memory, got _through_numpy of %x"
    with pytest.raises(InvalidGraphError, match=wanted) as caught:
        propagate_types(_calls_numpy(), (torch.randn(4, 3),))
    assert "declare what it returns with fxkit.declare_type" in str(caught.value)


def test_a_declared_type_goes_through_an_opaque_call() -> None:
    def halve(x: torch.Tensor) -> torch.Tensor:
        return _through_numpy(x)

    gm = _calls_numpy()
    half = next(n for n in gm.graph.nodes if n.op == "call_function")
    half.target = halve

    @declare_type(halve)
    def _(x: Any) -> Any:
        return dataclasses.replace(x, shape=((x.shape[0] + 1) // 2, *x.shape[1:]))

    assert str(propagate_types(gm, (torch.randn(5, 3),))) == "f32[3,3]"


def test_torch_says_nothing_beside_the_error(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    gm = symbolic_trace(lambda x, y: torch.ops.aten.mm(x, y))
    propagate_types(gm, (torch.randn(2, 3), torch.randn(3, 4)))
    node = graph(gm)["mm"].fx_node
    set_type(graph(gm)["y"].fx_node, type_of_value(torch.randn(5, 5)))
    assert infer_type(node) is None
    with pytest.raises(InvalidGraphError):
        propagate_types(gm, (torch.randn(2, 3), torch.randn(5, 4)))
    assert caplog.text == capfd.readouterr().err == ""
