"""Types of what is held within bounds that are tensors, whatever their layouts."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from fxkit import symbolic_trace
from fxkit.analysis.tensor_types import propagate_types
from fxkit.ir.types import TensorType
from fxkit.lower import to_cpp
from tests.lower.kernels import ALWAYS

LAYOUTS = {
    "dense": torch.randn(2, 3),
    "turned": torch.randn(3, 2).t(),
    "rows expanded": torch.randn(1, 3).expand(2, 3),
    "columns expanded": torch.randn(2, 1).expand(2, 3),
    "a row": torch.randn(3),
}
TRIPLES = list(itertools.product(LAYOUTS, repeat=3))[::3]


@pytest.mark.parametrize(
    "program",
    [
        torch.clamp,
        torch.ops.aten.clamp.Tensor,
        lambda x, low, high: x.clip(low, high),
        lambda x, low, high: torch.clamp(x, max=high, min=low),
    ],
)
def test_strides_are_those_of_eager(program: Callable[..., Tensor]) -> None:
    gm = symbolic_trace(lambda x, low, high: program(x, low, high))
    args = (LAYOUTS["rows expanded"], LAYOUTS["a row"], LAYOUTS["turned"])
    known: Any = propagate_types(gm, args)
    assert isinstance(known, TensorType)
    assert (known.shape, known.stride) == ((2, 3), torch.clamp(*args).stride()) == ((2, 3), (1, 2))


def test_kernels_lay_out_their_results_as_eager() -> None:
    def program(*tensors: Tensor) -> tuple[Tensor, ...]:
        known = dict(zip(LAYOUTS, tensors, strict=True))
        return tuple(torch.clamp(known[a], known[b], known[c]) + 0 for a, b, c in TRIPLES)

    graph = fx.Graph()
    places = {name: graph.placeholder(f"x{i}") for i, name in enumerate(LAYOUTS)}
    graph.output(tuple(
        graph.call_function(torch.clamp, tuple(places[name] for name in triple))
        for triple in TRIPLES
    ))  # fmt: skip
    args = tuple(LAYOUTS.values())
    lowered = to_cpp(fx.GraphModule(torch.nn.Module(), graph), args, policy=ALWAYS)
    for found, expected in zip(lowered(*args), program(*args), strict=True):
        assert found.stride() == expected.stride()
        torch.testing.assert_close(found, expected)


def test_gradients_are_followed_as_before() -> None:
    x = LAYOUTS["rows expanded"].detach().requires_grad_()
    gm = symbolic_trace(lambda x, a, b: torch.clamp(x, a, b))
    known: Any = propagate_types(gm, (x, LAYOUTS["dense"], LAYOUTS["turned"]))
    assert known.requires_grad
