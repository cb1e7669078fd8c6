"""Kernels that read across the order in which they write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.lower.kernels import compile_all, difference, fused_names, text_of


def cases() -> list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]]:
    found = []
    for rows, columns in ((8, 8), (9, 8), (33, 130), (64, 256), (100, 17), (40, 129)):
        x, y = torch.randn(columns, rows), torch.randn(rows, columns)
        found.append((torch.add, (x.t(), y), {"alpha": 2}))
        found.append((torch.add, (x.to(torch.bfloat16).t(), y.to(torch.bfloat16)), {}))
        found.append((torch.add, (x.to(torch.float64).t(), y), {}))
        found.append((torch.add, ((x > 0).t(), y), {}))
        found.append((torch.mul, (x.to(torch.int8).t(), y.to(torch.int64)), {}))
        found.append((torch.add, (x.t(), y[0]), {}))
        found.append((torch.add, (x.t(), y[:, :1]), {}))
    wide = torch.randn(3, 12, 5, 20)
    for order in ((0, 2, 3, 1), (3, 2, 1, 0), (1, 0, 3, 2), (2, 3, 0, 1)):
        moved = wide.permute(order)
        found.append((torch.sub, (moved, torch.randn(moved.shape)), {}))
    found.append((torch.add, (torch.randn(40, 60)[::2, 1:51].t(), torch.randn(50, 20)), {}))
    return found


def test_every_element_arrives_where_it_belongs() -> None:
    compiled, inputs, nodes = compile_all(cases())
    assert {node.name for node in nodes} <= fused_names(compiled)
    assert "fx_transpose(" in compiled.source
    for found, expected in zip(compiled(*inputs), compiled.graph_module(*inputs), strict=True):
        assert difference(found, expected) == 0


def test_a_tile_is_taken_where_neighbours_lie_across_the_row() -> None:
    x, y = torch.randn(40, 30), torch.randn(30, 40)
    assert "fx_transpose(" not in text_of(lambda x: x * 2, x)
    assert "fx_transpose((" in text_of(lambda x, y: x.t() + y, x, y)
    assert "fx_transpose((" not in text_of(lambda x, y: x.t() + y, x[:, :4], y[:4])
