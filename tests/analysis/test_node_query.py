"""What nodes are searched for: each part of a query alone and together."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxkit
from fxkit.analysis.node_query import NodeQuery
from fxkit.errors import FxkitError

GM = fxkit.symbolic_trace(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)))
fxkit.propagate_types(GM, (torch.ones(5, 4),))


def names(query: NodeQuery) -> list[str]:
    return [node.name for node in GM.graph.nodes if query.fits(node)]


@pytest.mark.parametrize(
    ("query", "found"),
    [
        (NodeQuery(), ["input_1", "_0", "_1", "_2", "output"]),
        (NodeQuery(nn.ReLU), ["_1"]),
        (NodeQuery(nn.ReLU()), ["_1"]),
        (NodeQuery("aten.linear"), ["_0", "_2"]),
        (NodeQuery(module="[12]"), ["_1", "_2"]),
        (NodeQuery(shape=(None, 3)), ["_0", "_1"]),
        (NodeQuery(shape=(5,)), []),
        (NodeQuery(dtype=torch.float64), []),
        (NodeQuery("aten.linear", module="2", dtype=torch.float32, shape=(5, 2)), ["_2"]),
        (NodeQuery(source="no_such_file.py:1"), []),
    ],
)
def test_a_query_finds_what_fits_all_of_it(query: NodeQuery, found: list[str]) -> None:
    assert names(query) == found


def test_what_is_no_operator_and_no_dtype_is_refused() -> None:
    with pytest.raises(FxkitError, match="expected an operator, got list"):
        NodeQuery([torch.relu])
    with pytest.raises(FxkitError, match=r"expected a torch\.dtype, got str") as told:
        NodeQuery(dtype="float16")  # type: ignore[arg-type]
    assert "write dtype=torch.float16" in str(told.value)
