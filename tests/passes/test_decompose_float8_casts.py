"""Casts of float8 by arithmetic on bits: every number, and what they leave alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx

import fxkit
from fxkit.passes import DecomposeFloat8Casts
from fxkit.passes.manager.manager import PassManager

FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]


def every_number(dtype: torch.dtype) -> Tensor:
    return torch.arange(256, dtype=torch.uint8).view(dtype).reshape(16, 16)


def targets(gm: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in gm.graph.nodes]


@pytest.mark.parametrize("dtype", FLOAT8)
@pytest.mark.parametrize("view", [lambda x: x, lambda x: x.t(), lambda x: x[::3, 1:]])
def test_every_number_is_the_same(dtype, view):
    args = (view(every_number(dtype)),)
    gm = fxkit.capture(lambda x: x.to(torch.float32), args).graph_module
    expected = args[0].to(torch.float32)
    result = PassManager([DecomposeFloat8Casts()], verify="structure", args=args).run(gm)
    assert result.modified and not any(target == "to" for target in targets(gm))
    assert any("bitwise_left_shift" in target for target in targets(gm))
    found, numbers = gm(*args), ~expected.isnan()
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(found.signbit()[numbers], expected.signbit()[numbers])  # also of zeros
    assert found.stride() == expected.stride()


@pytest.mark.parametrize("dtype", FLOAT8)
def test_compiled_casts_are_those_of_eager(dtype):
    x, scale = every_number(dtype), torch.rand(16, 1)

    def widened(x: Tensor, scale: Tensor) -> Tensor:
        return x.float() * scale

    compiled = fxkit.compile(widened)
    for _ in range(2):
        found = compiled(x, scale)
    torch.testing.assert_close(found, widened(x, scale), rtol=0, atol=0, equal_nan=True)
    report = compiled.compiled_modules[-1].report()
    assert report.fused == report.candidates >= 14 and len(report.regions) == 1


@pytest.mark.parametrize("made", [torch.float64, torch.bfloat16, torch.int32])
def test_other_casts_stay(made):
    args = (every_number(torch.float8_e5m2)[:2],)
    gm = fxkit.capture(lambda x: x.to(made), args).graph_module
    assert not PassManager([DecomposeFloat8Casts()], args=args).run(gm).modified
    other = (torch.randn(3).bfloat16(),)
    gm = fxkit.capture(lambda x: x.to(torch.float32), other).graph_module
    assert not PassManager([DecomposeFloat8Casts()], args=other).run(gm).modified


def test_gradients_flow_through_the_cast():
    x = every_number(torch.float8_e5m2).clone().requires_grad_()
    gm = fxkit.capture(lambda x: x.to(torch.float32), (x,)).graph_module
    assert not PassManager([DecomposeFloat8Casts()], args=(x,)).run(gm).modified
