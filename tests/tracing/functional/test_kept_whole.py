"""Operators that tracing leaves whole, since eager has kernels for them."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fxkit
from fxkit.lower.training import training_module
from fxkit.tracing.functional.kept_whole import kept_whole
from tests.sampling import one_in

HALVES = [torch.float16, torch.bfloat16]


def gradients(program: Callable[[Tensor], Tensor], x: Tensor, tangent: Tensor) -> Tensor:
    leaf = x.detach().requires_grad_()
    (found,) = torch.autograd.grad(program(leaf), leaf, tangent)
    return found


@pytest.mark.parametrize(("dtype", "function"), one_in(
    4,
    [*HALVES, torch.float32, torch.float64],
    [F.silu, F.mish, F.hardshrink, F.softshrink, F.threshold, F.hardtanh, F.relu6,
     F.hardswish, F.hardsigmoid, F.leaky_relu, F.elu, F.celu, F.softplus],
))  # fmt: skip
def test_gradients_at_knots_and_where_there_is_no_number(
    function: Callable[..., Tensor], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_module, "CALL_SECONDS", -1.0)  # every kernel pays
    knots = [0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 3.0, -3.0, 6.0, 20.0, -20.0, 1e-7, 100.0, -100.0]
    special = torch.tensor([*knots, math.inf, -math.inf, math.nan], dtype=torch.float64).to(dtype)
    slopes = torch.tensor([1.0, -0.5, 0.0, -0.0, math.inf, -math.inf], dtype=dtype)
    # Eager's vectors and its rests of vectors differ at NaN: these are vectors alone.
    x, tangent = special.repeat_interleave(32 * 6), slopes.repeat(17 * 32)
    program = (lambda x: F.threshold(x, 0.5, 2)) if function is F.threshold else function
    compiled = fxkit.compile(program, train=True)
    gradients(compiled, x, tangent)
    found, expected = gradients(compiled, x, tangent), gradients(program, x, tangent)
    tolerance = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=1e-12, equal_nan=True)


def test_torch_is_as_it_was_before() -> None:
    operators = [torch.ops.aten.silu_backward.default, torch.ops.aten.hardshrink.default]
    before = [dict(operator.py_kernels) for operator in operators]
    inside, done = threading.Event(), threading.Event()

    def other() -> None:
        with kept_whole():
            inside.set()
            done.wait(10)

    thread = threading.Thread(target=other)
    with kept_whole():
        thread.start()
        inside.wait(10)
    assert all(set(o.py_kernels) != set(b) for o, b in zip(operators, before, strict=True))
    done.set()
    thread.join()
    assert [dict(operator.py_kernels) for operator in operators] == before
