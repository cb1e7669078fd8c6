"""Graphs as text, exactly."""

from __future__ import annotations

import operator
from typing import Any

import expecttest
import torch
from torch import fx, nn

from fxkit.analysis.tensor_types import propagate_types
from fxkit.ir.printer import format_graph, format_node, format_type, format_value
from fxkit.ir.types import TensorType
from fxkit.tracing.symbolic import symbolic_trace


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.project = nn.Linear(4, 12)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
        q, k, v = self.project(self.norm(x)).chunk(3, dim=-1)
        mixed = q @ k.mT @ v * self.scale
        mixed.add_(1, alpha=2)
        return mixed[:, 0], [x.shape[0], mixed.float().sum(dim=(0, 1), keepdim=True)]


class TestPrinter(expecttest.TestCase):
    def test_graph_without_types(self) -> None:
        self.assertExpectedInline(
            format_graph(symbolic_trace(_Attention())),
            """\
graph(%x):
  %norm = aten.layer_norm(%x, [4], weight=self.norm.weight, bias=self.norm.bias)
  %project = aten.linear(%norm, self.project.weight, bias=self.project.bias)
  %chunk = aten.chunk(%project, 3, dim=-1)
  %getitem = python.getitem(%chunk, 0)
  %getitem_1 = python.getitem(%chunk, 1)
  %getitem_2 = python.getitem(%chunk, 2)
  %getattr_1 = aten.transpose(%getitem_1, -2, -1)
  %matmul = aten.matmul(%getitem, %getattr_1)
  %matmul_1 = aten.matmul(%matmul, %getitem_2)
  %scale = self.scale
  %mul = aten.mul(%matmul_1, %scale)
  %add_ = aten.add_(%mul, 1, alpha=2)
  %getitem_3 = python.getitem(%mul, (:, 0))
  %getattr_2 = python.getattr(%x, 'shape')
  %getitem_4 = python.getitem(%getattr_2, 0)
  %float_1 = aten.to(%mul, f32)
  %sum_1 = aten.sum(%float_1, [0, 1], keepdim=True)
  return (%getitem_3, [%getitem_4, %sum_1])""",
        )

    def test_graph_with_types(self) -> None:
        gm = symbolic_trace(_Attention())
        propagate_types(gm, (torch.randn(2, 3, 4),))
        self.assertExpectedInline(
            format_graph(gm),
            """\
graph(%x: f32[2,3,4]):
  %norm: f32[2,3,4] = aten.layer_norm(%x, [4], weight=self.norm.weight, bias=self.norm.bias)
  %project: f32[2,3,12] = aten.linear(%norm, self.project.weight, bias=self.project.bias)
  %chunk: (f32[2,3,4], f32[2,3,4], f32[2,3,4]) = aten.chunk(%project, 3, dim=-1)
  %getitem: f32[2,3,4] = python.getitem(%chunk, 0)
  %getitem_1: f32[2,3,4] = python.getitem(%chunk, 1)
  %getitem_2: f32[2,3,4] = python.getitem(%chunk, 2)
  %getattr_1: f32[2,4,3] = aten.transpose(%getitem_1, -2, -1)
  %matmul: f32[2,3,3] = aten.matmul(%getitem, %getattr_1)
  %matmul_1: f32[2,3,4] = aten.matmul(%matmul, %getitem_2)
  %scale: f32[4] = self.scale
  %mul: f32[2,3,4] = aten.mul(%matmul_1, %scale)
  %add_: f32[2,3,4] = aten.add_(%mul, 1, alpha=2)
  %getitem_3: f32[2,4] = python.getitem(%mul, (:, 0))
  %getattr_2: (int 2, int 3, int 4) = python.getattr(%x, 'shape')
  %getitem_4: int 2 = python.getitem(%getattr_2, 0)
  %float_1: f32[2,3,4] = aten.to(%mul, f32)
  %sum_1: f32[1,1,4] = aten.sum(%float_1, [0, 1], keepdim=True)
  return (%getitem_3, [%getitem_4, %sum_1])""",
        )

    def test_opaque_and_python_calls(self) -> None:
        graph = fx.Graph()
        x = graph.placeholder("x")
        graph.call_function(print, (x,), {"end": ""})
        size = graph.call_function(operator.getitem, (graph.call_method("size", (x,)), 0))
        graph.call_function(operator.setitem, (x, (slice(None), slice(1, None, 2)), 0.5))
        graph.call_method("view", (x, size, -1))
        graph.output({"x": x, "n": None})
        self.assertExpectedInline(
            format_graph(graph),
            """\
graph(%x):
  %print_1 = opaque.print(%x, end='')
  %size = python.getattr(%x, 'shape')
  %getitem = python.getitem(%size, 0)
  %setitem = python.setitem(%x, (:, 1::2), 0.5)
  %view = aten.view(%x, [%getitem, -1])
  return {'x': %x, 'n': None}""",
        )


def test_printing_twice_gives_the_same() -> None:
    first, second = (format_graph(symbolic_trace(_Attention())) for _ in range(2))
    assert first == second


def test_sources_follow_the_nodes() -> None:
    text = format_graph(symbolic_trace(nn.Sequential(_Attention())), sources=True)
    line = next(line for line in text.splitlines() if "aten.linear" in line)
    assert "    # 0" in line
    assert "test_printer.py:" in line
    assert line.endswith("in forward")


def test_values() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    cases = {
        "%x": x,
        "[%x, 1]": [x, 1],
        "(2, None)": (2, None),
        "'text'": "text",
        "bf16": torch.bfloat16,
        "1:2": slice(1, 2),
        ":": slice(None),
        "1::2": slice(1, None, 2),
        "tensor f32[2,3]": torch.zeros(2, 3),
        "{'a': %x}": {"a": x},
        "[0, 1, 2, 3, 4, 5, 6, 7, … 20 in all]": list(range(20)),
    }
    assert {format_value(value): value for value in cases.values()}.keys() == cases.keys()
    assert len(format_value("y" * 200)) == 80
    assert format_node(x) == "%x"


def test_types() -> None:
    matrix = TensorType((2, 3), torch.float16, (3, 1), torch.device("cpu"))
    assert format_type(matrix) == "f16[2,3]"
    assert format_type((matrix, 3, None)) == "(f16[2,3], int 3, ?)"
    assert format_type({"a": matrix}) == "{a: f16[2,3]}"
    assert format_type(object()) == "object"  # and not where it lies
    assert format_type(torch.Size([2])) == "(int 2)"
