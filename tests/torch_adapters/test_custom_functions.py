"""Custom autograd functions are seen alike, whether `Function.apply` is written in Python or C."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fxkit
from fxkit.torch_adapters import custom_functions


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] * ctx.factor * 10, None


class ScaleWithContextLater(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor, factor: float = 3.0) -> torch.Tensor:  # type: ignore[override]
        return x * factor

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] * ctx.factor * 10, None


scale, scale_with_context_later = Scale.apply, ScaleWithContextLater.apply
PROGRAMS = {
    "looked up where it is called": lambda x: Scale.apply(x.sin(), 3.0).cos(),
    "looked up before": lambda x: scale(x.sin(), 3.0).cos(),
    "with setup_context": lambda x: ScaleWithContextLater.apply(x.sin()).cos(),
    "with setup_context, looked up before": lambda x: scale_with_context_later(x.sin()).cos(),
}


def gradient(program: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(program(x).sum(), x)[0]


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_backward_is_that_of_the_class(name: str) -> None:
    program, x = PROGRAMS[name], torch.randn(4, requires_grad=True)
    captured = fxkit.capture(program, (x,))
    assert any("Scale" in str(node.target) for node in captured.graph_module.graph.nodes)
    for _ in range(2):
        torch.testing.assert_close(captured(x), program(x), rtol=0, atol=0)
        torch.testing.assert_close(gradient(captured, x), gradient(program, x), rtol=0, atol=0)


@pytest.mark.parametrize("name", PROGRAMS)
def test_without_gradients_its_calls_are_recorded(name: str) -> None:
    captured = fxkit.capture(PROGRAMS[name], (torch.randn(4),))
    targets = [node.target for node in captured.graph_module.graph.nodes]
    assert "mul" in targets or torch.mul in targets
    x = torch.randn(4)
    torch.testing.assert_close(captured(x), PROGRAMS[name](x), rtol=0, atol=0)


def test_nothing_is_left_behind() -> None:
    before = torch.autograd.Function.__dict__["apply"]
    fxkit.capture(PROGRAMS["looked up before"], (torch.randn(4, requires_grad=True),))
    assert torch.autograd.Function.__dict__["apply"] is before


def test_an_apply_in_python_has_a_frame_of_its_class() -> None:
    seen = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            import sys

            frame = sys._getframe()
            while frame is not None and frame.f_code is not custom_functions.APPLY:
                frame = frame.f_back
            seen.append(None if frame is None else frame.f_locals["cls"])
            return x * 1

    with custom_functions.frames_of_apply(), custom_functions.frames_of_apply():
        Look.apply(torch.ones(1))
    assert seen == [Look]
