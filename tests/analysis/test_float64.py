"""The reference in float64: what programs do that would leave it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxkit
from fxkit import quantization as q
from fxkit.analysis.equivalence import assert_equivalent
from fxkit.analysis.float64 import widened
from fxkit.errors import NumericsError

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
W = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))


def run(program):
    return widened(program)(X.double())


CASES = {
    "float": (lambda x: (x / 3).float() / 7, lambda x: x / 3 / 7),
    "to": (lambda x: (x / 3).to(torch.bfloat16).to(dtype=torch.float32), lambda x: x / 3),
    "half product": (lambda x: x.half() @ W.half().float().half(), lambda x: x @ W.double()),
    "dtype of a sum": (lambda x: x.sum(0, dtype=torch.float32), lambda x: x.sum(0)),
    "softmax": (lambda x: F.softmax(x, -1, dtype=torch.float32), lambda x: F.softmax(x, -1)),
    "made": (lambda x: torch.ones(3, 3, dtype=torch.float32) @ x, lambda x: x.sum(0).expand(3, 4)),
    "made by default": (lambda x: torch.eye(3) @ x, lambda x: x),
    "integers": (lambda x: x * (torch.arange(4) / 3), lambda x: x * (torch.arange(4).double() / 3)),
    "captured constant": (lambda x: x @ W, lambda x: x @ W.double()),
    "written": (lambda x: torch.zeros(3, 4).add_(x).mul_(2), lambda x: x * 2),
    "autocast": (lambda x: _autocast(x), lambda x: x @ W.double()),
}  # fmt: skip


def _autocast(x):
    with torch.autocast("cpu", torch.bfloat16):
        return x @ W


@pytest.mark.parametrize("name", CASES)
def test_each_operator_computes_in_float64(name):
    program, exact = CASES[name]
    found = run(program)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, exact(X.double()), rtol=1e-14, atol=1e-14)


def test_bits_are_those_of_the_program():
    program = lambda x: (x.view(torch.int32) & 0x7FFFFFFF).view(torch.float32)  # noqa: E731
    assert torch.equal(run(program), X.abs().double())


def test_random_numbers_are_those_of_the_program():
    def program(x):
        torch.manual_seed(3)
        return F.dropout(x, 0.5), torch.randn(40, dtype=torch.float32), torch.rand_like(x)

    for found, wanted in zip(run(program), program(X), strict=True):
        assert found.dtype == torch.float64
        torch.testing.assert_close(found, wanted.double(), rtol=1e-6, atol=0)


def test_what_has_no_float64_runs_as_it_is():
    @torch.library.custom_op("fxkit_tests::only_float32", mutates_args=())
    def only_float32(x: torch.Tensor) -> torch.Tensor:
        if x.dtype != torch.float32:
            raise RuntimeError("not implemented for 'Double'")
        return x * 2

    assert torch.equal(run(only_float32), X.double() * 2)


def test_an_error_of_the_program_is_raised():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        run(lambda x: x @ x)


class Casting(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.table = W.clone()  # neither parameter nor buffer

    def forward(self, x):
        return torch.where(x > 0, self.fc(x).float(), torch.ones(1)) @ self.table


def test_modules_are_widened_whole_and_left_as_they_are():
    module = Casting()
    exact = run(module)
    assert exact.dtype == torch.float64 and module.table.dtype == torch.float32
    assert 0 < (exact - module(X)).abs().max() < 1e-5
    gm = fxkit.capture(module, (X,)).graph_module
    assert torch.equal(run(gm), exact)


def test_a_graph_that_checks_numbers_runs_too():
    program = lambda x: x * 2 if x.sum().item() == X.sum().item() else x * 3  # noqa: E731
    gm = fxkit.capture(program, (X,)).graph_module
    assert "check_value" in gm.code
    assert torch.equal(run(gm), X.double() * 2)
    with pytest.raises(fxkit.errors.CaptureError):
        gm(X + 1)


def test_equivalence_through_casts_with_gradients():
    x = X.clone().requires_grad_()
    by_sum = lambda x: (x.float() @ W).float().mean(1)  # noqa: E731
    by_mean = lambda x: (x @ W).sum(1) / 4  # noqa: E731
    assert_equivalent(by_sum, by_mean, (x,))
    with pytest.raises(NumericsError, match="outputs"):
        assert_equivalent(by_sum, lambda x: (x @ W).bfloat16().float().mean(1), (x,))


class Detached(nn.Module):
    def __init__(self, detach, extra=False):
        super().__init__()
        self.fc, self.detach = nn.Linear(4, 4), detach
        nn.init.constant_(self.fc.weight, 0.5)
        nn.init.zeros_(self.fc.bias)
        if extra:
            self.register_buffer("extra", torch.zeros(1))

    def forward(self, x):
        weight = self.fc.weight
        return F.linear(x, weight.detach() if self.detach else weight, self.fc.bias)


@pytest.mark.parametrize("exact", [True, False])
def test_gradients_of_parameters_are_compared(exact):
    before = Detached(False)
    assert_equivalent(before, Detached(False), (X,), exact=exact)
    with pytest.raises(NumericsError, match=r"the gradient of fc\.weight"):
        assert_equivalent(before, Detached(True), (X,), exact=exact)
    assert_equivalent(before, Detached(True), (X,), exact=exact, gradients=False)


def test_a_program_that_takes_parameters_as_constants_has_other_gradients():
    assert_equivalent(Detached(False), Detached(True, extra=True), (X,))


@pytest.mark.parametrize("make", [q.int8_static, q.int8_dynamic, q.int8_weight_only])
def test_passes_over_quantised_graphs_are_verified(make: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    x, model = torch.randn(4, 16), nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
    quantized = fxkit.quantize(model.eval(), make(), [(x,)])
    passes = fxkit.passes.pipelines.SIMPLIFY
    with warnings.catch_warnings():  # quantising operators of torch have no kernel for gradients
        warnings.filterwarnings("ignore", "quantized_decomposed", UserWarning)
        result = fxkit.PassManager(passes, args=(x,), verify="numerics").run(quantized)
    assert len(result.records) == len(passes)
