"""Sums over all rows beside rows that are reduced, of what nothing else in the kernel reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import layer_norm, softmax

import fxkit

PROGRAMS: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]] = {
    "softmax": lambda x, y, z: (softmax(x * y, -1), y.expand(x.shape).sum(0)),
    "layer norm": lambda x, y, z: (layer_norm(x * y, x.shape[1:]), y.expand(x.shape).sum(0)),
    "sum": lambda x, y, z: ((x * y).sum(-1), y[None].expand(x.shape).sum(0, keepdim=True)),
    "two sums": lambda x, y, z: (
        softmax(x * y, -1) * z,
        z.sum(0),
        y.expand(x.shape).sum(0),
        z[:, :1].expand(x.shape).sum(0),
    ),
    "other views": lambda x, y, z: ((x * y).amax(-1), z.flip(1).sum(0), z.t().sum(1)),
}


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("shape", [(33, 20), (7, 300)])
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_sums_equal_eager_and_inputs_stay(program, shape, requires_grad):
    torch.manual_seed(0)
    inputs = [torch.randn(shape, requires_grad=requires_grad), torch.randn(shape[1])]
    inputs.append(torch.randn(shape))
    before = [one.detach().clone() for one in inputs]
    compiled = fxkit.compile(program)
    for _ in range(3):  # the first call runs the program itself
        found = compiled(*inputs)
    for one, exact in zip(found, program(*(one.double() for one in before)), strict=True):
        torch.testing.assert_close(one.double(), exact, rtol=1e-5, atol=1e-5)
    assert all(map(torch.equal, inputs, before))


def test_inputs_are_passed_before_outputs():
    program = PROGRAMS["softmax"]
    compiled = fxkit.compile(program)
    x, y = torch.randn(33, 20), torch.randn(20)
    for _ in range(2):
        compiled(x, y, x)
    (kernel,) = compiled.compiled_modules[-1].kernels.values()
    assert [one.name for one in kernel.buffers] == ["in0", "in1", "in2", "out0", "out1"]
    with pytest.raises(ValueError, match="all inputs before all outputs, got out1, out0"):
        dataclasses.replace(kernel, buffers=kernel.buffers[::-1])
