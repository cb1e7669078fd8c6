"""Random graphs of pointwise operators, reductions, views and matmuls, against eager."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import fx, nn

from fxkit.lower import to_cpp

UNARY = [torch.sigmoid, torch.tanh, torch.relu, torch.abs, torch.neg, F.gelu, F.silu, torch.sin]
BINARY = [torch.add, torch.sub, torch.mul, torch.maximum, torch.minimum]
SHAPES = [(6, 20), (3, 6, 20), (6, 1), (20,), (1, 20), (3, 1, 20)]


@st.composite
def programs(draw: st.DrawFn) -> tuple[fx.GraphModule, tuple[torch.Tensor, ...]]:
    """Draw a graph and inputs; each node takes any earlier values whose shapes allow it."""
    seed = draw(st.integers(0, 2**20))
    torch.manual_seed(seed)
    graph = fx.Graph()
    inputs = tuple(torch.randn(draw(st.sampled_from(SHAPES))) for _ in range(3))
    values: list[tuple[fx.Node, torch.Tensor]] = [
        (graph.placeholder(f"x{i}"), x) for i, x in enumerate(inputs)
    ]

    def apply(function: Any, operands: list[int], *args: Any, **kwargs: Any) -> None:
        nodes, tensors = zip(*(values[o] for o in operands), strict=True)
        result = function(*tensors, *args, **kwargs)
        if result.numel() <= 2000:
            values.append((graph.call_function(function, (*nodes, *args), kwargs), result))

    for _ in range(draw(st.integers(3, 14))):
        kind = draw(st.sampled_from("ubbbrnvw"))
        first = draw(st.integers(0, len(values) - 1))
        x = values[first][1]
        if kind == "u" and x.dtype == torch.float32:
            apply(draw(st.sampled_from(UNARY)), [first])
        elif kind == "b":
            second = draw(st.integers(0, len(values) - 1))
            if _broadcast(x, values[second][1]):
                apply(draw(st.sampled_from(BINARY)), [first, second])
        elif kind == "w":
            second = draw(st.integers(0, len(values) - 1))
            if _broadcast(x, values[second][1]):
                apply(torch.lt, [first, second])
                apply(torch.where, [len(values) - 1, first, second])
        elif x.dim() and x.dtype == torch.float32:
            dim = draw(st.integers(-x.dim(), x.dim() - 1))
            if kind == "r":
                function = draw(st.sampled_from([torch.mean, torch.sum, torch.amax]))
                apply(function, [first], dim=dim, keepdim=draw(st.booleans()))
            elif kind == "n":
                apply(draw(st.sampled_from([F.softmax, F.log_softmax])), [first], dim=dim)
            else:
                name = draw(st.sampled_from(["unsqueeze", "transpose", "squeeze"]))
                args = (dim, -1) if name == "transpose" else (dim,)
                apply(getattr(torch, name), [first], *args)
    outputs = [value for value in values[3:] if draw(st.booleans())] or values[-1:]
    graph.output(tuple(node for node, _ in outputs))
    return fx.GraphModule(nn.Module(), graph), inputs


def _broadcast(x: torch.Tensor, y: torch.Tensor) -> bool:
    if x.dtype != y.dtype or x.dtype != torch.float32:
        return False
    pairs = zip(reversed(x.shape), reversed(y.shape), strict=False)
    return all(a == b or 1 in (a, b) for a, b in pairs)


@settings(
    max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
@given(programs())
def test_kernels_agree_with_eager(
    program: tuple[fx.GraphModule, tuple[torch.Tensor, ...]],
) -> None:
    gm, inputs = program
    compiled = to_cpp(gm, inputs)
    found, expected = compiled(*inputs), gm(*inputs)
    for a, b in zip(found, expected, strict=True):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-5, equal_nan=True)
