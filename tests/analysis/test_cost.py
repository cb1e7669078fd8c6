"""Costs against formulas written by hand; what is not known is None."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from fxkit.analysis.cost import FREE, Cost, cost_of
from fxkit.analysis.tensor_types import propagate_types
from fxkit.tracing import capture
from fxkit.tracing.symbolic import symbolic_trace

_F32 = 4


def _cost(program: Callable[..., Any], *shapes: tuple[int, ...]) -> Cost:
    gm = symbolic_trace(program)
    propagate_types(gm, tuple(torch.empty(shape) for shape in shapes))
    return cost_of([n for n in gm.graph.nodes if n.op not in ("placeholder", "output")][-1])


# program, shapes of its operands, floating point operations, elements read and written
_FORMULAS: dict[str, tuple[Any, list[tuple[int, ...]], int, int]] = {
    "matmul": (lambda x, y: x @ y, [(3, 4), (4, 5)], 2 * 3 * 4 * 5, 12 + 20 + 15),
    "batched": (lambda x, y: x @ y, [(7, 3, 4), (7, 4, 5)], 7 * 2 * 60, 7 * (12 + 20 + 15)),
    "broadcast": (lambda x, y: x @ y, [(7, 3, 4), (4, 5)], 7 * 2 * 60, 7 * 12 + 20 + 7 * 15),
    "linear": (F.linear, [(6, 4), (5, 4)], 2 * 6 * 4 * 5, 24 + 20 + 30),
    "bmm": (torch.bmm, [(2, 3, 4), (2, 4, 5)], 2 * 2 * 60, 24 + 40 + 30),
    "conv1d": (F.conv1d, [(2, 3, 10), (5, 3, 3)], 2 * 2 * 5 * 8 * 3 * 3, 60 + 45 + 80),
    "conv2d": (F.conv2d, [(2, 3, 8, 8), (5, 3, 3, 3)], 2 * 2 * 5 * 36 * 27, 384 + 135 + 360),
    "grouped": (lambda x, w: F.conv2d(x, w, groups=2), [(1, 4, 8, 8), (6, 2, 3, 3)],
                2 * 6 * 36 * 2 * 9, 256 + 108 + 216),
    "attention": (F.scaled_dot_product_attention, [(2, 3, 5, 8)] * 3, 4 * 2 * 3 * 5 * 5 * 8,
                  4 * 240),
    "attention, narrow values": (F.scaled_dot_product_attention,
                                 [(2, 4, 7, 8), (2, 4, 9, 8), (2, 4, 9, 6)],
                                 2 * 2 * 4 * 7 * 9 * (8 + 6), 8 * (56 + 72 + 54 + 42)),
    "attention, shared keys": (
        lambda x, y, z: F.scaled_dot_product_attention(x, y, z, enable_gqa=True),
        [(2, 4, 7, 8), (2, 2, 9, 8), (2, 2, 9, 6)],
        2 * 2 * 4 * 7 * 9 * (8 + 6), 8 * 56 + 4 * 72 + 4 * 54 + 8 * 42),
    "pointwise": (lambda x, y: x + y, [(3, 4), (4,)], 12, 12 + 4 + 12),
    "unary": (torch.exp, [(3, 4)], 12, 24),
    "reduction": (lambda x: x.sum(1), [(3, 4)], 12, 12 + 3),
    "concatenation": (lambda x, y: torch.cat([x, y]), [(3, 4), (5, 4)], 0, 12 + 20 + 32),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(_FORMULAS))
def test_formula(name: str) -> None:
    program, shapes, flops, elements = _FORMULAS[name]
    parameters = ", ".join("xyz"[: len(shapes)])
    wrapped = eval(f"lambda {parameters}: program({parameters})", {"program": program})
    assert _cost(wrapped, *shapes) == Cost(flops, _F32 * elements)


_STEP = 2 * (4 * 6) * (5 + 6) + 13 * 6


@pytest.mark.parametrize(
    ("module", "shape", "flops"),
    [
        (nn.LSTM(5, 6), (3, 2, 5), 3 * 2 * _STEP),
        (nn.LSTM(5, 6, batch_first=True, bidirectional=True), (2, 3, 5), 2 * 3 * 2 * _STEP),
        (nn.LSTMCell(5, 6), (2, 5), 2 * _STEP),
        (nn.RNN(5, 6), (3, 2, 5), 3 * 2 * (2 * 6 * (5 + 6) + 2 * 6)),
        (nn.GRUCell(5, 6), (2, 5), 2 * (2 * 18 * (5 + 6) + 10 * 6)),
        (nn.BatchNorm2d(3).eval(), (2, 3, 4, 4), 4 * 96),
        (nn.BatchNorm2d(3), (2, 3, 4, 4), 8 * 96 + 1),
        (nn.Dropout(0.5), (3, 4), 3 * 12),
        (nn.Dropout(0.5).eval(), (3, 4), 0),
    ],
)
def test_modules_by_hand(module: nn.Module, shape: tuple[int, ...], flops: int) -> None:
    gm = capture(module, (torch.randn(shape),)).graph_module
    assert sum(cost_of(node).flops or 0 for node in gm.graph.nodes) == flops


@pytest.mark.parametrize(
    ("program", "flops", "elements"),
    [
        (lambda x: x.t().reshape(-1), 0, 24),
        (lambda x: x.reshape(-1), 0, 0),
        (lambda x: x.t().reshape(4, 3, 1), 0, 0),
        (lambda x: x.t().flatten(), 0, 24),
        (lambda x: x.t().contiguous(), 0, 24),
        (lambda x: x.contiguous(), 0, 0),
        (lambda x: x.t().to(torch.float32), 0, 0),
        (lambda x: x.clone(), 0, 24),
        (lambda x: x.clone().add_(1), 12, 24),
        (lambda x: torch.where(x > 0, x, x), 0, 36 + 3),
        (lambda x: operator.setitem(x.clone(), slice(1), 0.0), 0, 4),
        (lambda x: operator.setitem(x.clone(), 1, x[0]), 0, 8),
        (lambda x: x[torch.tensor([2, 0])], 0, 2 * 8 + 2 * 2),
        (lambda x: x[:, 1:], 0, 0),
        (lambda x: x[0] @ x.t(), 2 * 4 * 3, 4 + 12 + 3),
        (lambda x: torch.ops.aten._foreach_add.Scalar([x, x], 1.0), 24, 48),
    ],
)
def test_what_moves_elements_is_no_operation_and_no_view(
    program: Any, flops: int, elements: int
) -> None:
    assert _cost(program, (3, 4)) == Cost(flops, _F32 * elements)


@pytest.mark.parametrize(
    "view", [lambda x: x.view(-1), lambda x: x.t(), lambda x: x[0], lambda x: x.shape,
             lambda x: x.expand(2, 3, 4), lambda x: x.detach(), lambda x: x.size(0)]
)  # fmt: skip
def test_views_and_python_values_are_free(view: Any) -> None:
    assert _cost(lambda x: view(x), (3, 4)) == FREE


def test_bias_is_counted_with_a_module() -> None:
    assert _cost(nn.Sequential(nn.Linear(4, 5)), (6, 4)).bytes == _F32 * (24 + 20 + 5 + 30)


def test_unknown_is_none() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    assert cost_of(graph.call_function(torch.exp, (x,))) == Cost(None, None)
    assert cost_of(graph.call_function(print, (x,))) == Cost(None, None)
    assert Cost(3, 4) + Cost(None, 5) == Cost(None, 9)
    assert Cost(3, 4) + Cost(1, None) == Cost(4, None)
    assert cost_of(x) == FREE


def test_lookup_reads_the_rows_it_returns_and_no_more():
    gm = symbolic_trace(lambda i, w: F.embedding(i, w))
    propagate_types(gm, (torch.zeros(2, 3, dtype=torch.int64), torch.randn(1000, 8)))
    (node,) = gm.graph.find_nodes(op="call_function", target=F.embedding)
    assert cost_of(node).bytes == 2 * (2 * 3 * 8 * 4) + 2 * 3 * 8


# program, shape of its operand, operations by hand
_MORE: dict[str, tuple[Callable[..., Any], tuple[int, ...], int]] = {
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), (1, 3, 8, 8), 3 * 16 * 4),
    "max_pool2d_overlapping": (lambda x: F.max_pool2d(x, 3, 2, 1), (2, 3, 8, 8), 2 * 3 * 16 * 9),
    "max_pool1d": (lambda x: F.max_pool1d(x, 2), (1, 3, 8), 3 * 4 * 2),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, (2, 4)), (1, 3, 8, 8), 3 * 4 * 2 * 8),
    "avg_pool3d": (lambda x: F.avg_pool3d(x, 2), (1, 1, 4, 4, 4), 8 * 8),
    "adaptive_whole": (lambda x: F.adaptive_avg_pool2d(x, 1), (1, 3, 8, 8), 192),
    "adaptive_overlapping": (lambda x: F.adaptive_avg_pool2d(x, 3), (1, 1, 4, 4), 6 * 6),
    "cumsum": (lambda x: torch.cumsum(x, -1), (3, 8), 24),
    "dot": (lambda x: torch.dot(x, x), (8,), 16),
    "matrix_vector": (lambda x: x @ x[0], (8, 8), 128),
    "nearest": (lambda x: F.interpolate(x, scale_factor=2), (1, 3, 4, 4), 0),
    "bilinear": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), (1, 3, 4, 4),
                 7 * 192),
    "unfold": (lambda x: F.unfold(x, 2), (1, 3, 4, 4), 0),
    "reflection": (lambda x: F.pad(x, (1, 1), mode="reflect"), (1, 3, 4), 0),
    "mse": (lambda x: F.mse_loss(x, x), (3, 4), 36),
    "scatter_add": (lambda x: x.scatter_add(-1, torch.zeros(3, 4, dtype=torch.int64), x),
                    (3, 4), 12),
    "fft": (lambda x: torch.fft.fft(x), (8,), 5 * 8 * 3 // 2),
    "distances": (lambda x: torch.cdist(x, x), (4, 6), 3 * 16 * 6),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(_MORE))
def test_formula_by_hand(name: str) -> None:
    program, shape, flops = _MORE[name]
    assert _cost(lambda x: program(x), shape).flops == flops


def test_what_compares_by_the_data_is_not_guessed() -> None:
    assert _cost(lambda x: torch.sort(x), (3, 4)).flops is None


def test_a_size_that_is_an_expression_has_no_known_cost() -> None:
    gm = symbolic_trace(lambda x, y: (x.relu(), y.relu(), x @ y, x.t()))
    sizes = ({0: torch.export.Dim("n")}, None)
    propagate_types(gm, (torch.empty(5, 4), torch.empty(4, 3)), dynamic_shapes=sizes)
    costs = {str(n.target): cost_of(n) for n in gm.graph.nodes if n.op == "call_method"}
    unknown = Cost(None, None)
    relus = [cost_of(n) for n in gm.graph.nodes if n.target == "relu"]
    assert relus == [unknown, Cost(12, 2 * 12 * _F32)]
    assert costs["t"] == FREE
    (product,) = (n for n in gm.graph.nodes if n.op == "call_function")
    assert cost_of(product) == unknown
