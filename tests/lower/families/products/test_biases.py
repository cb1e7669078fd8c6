"""Biases of products that torch's library computes, added by the kernels that read the products."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import fxkit
from fxkit.lower import to_cpp
from fxkit.lower.compiling import whole_operators
from tests.lower.kernels import beside_float64, rand

PRODUCTS = (F.linear, torch.mm, torch.addmm)


@pytest.fixture(autouse=True)
def _in_library(monkeypatch):
    """Leave each product to torch's library."""
    monkeypatch.setattr(whole_operators, "objection", lambda *_: "the library is faster")


def lowered(program, *args):
    """Lower a program, hold it to float64; return it, and how many biases the library adds."""
    compiled, found, eager, exact = beside_float64(program, *args)
    assert (found - exact).norm() <= 2 * (eager - exact).norm() + 1e-6 * exact.norm()
    products = [n for n in compiled._plan.graph.nodes if n.target in PRODUCTS]
    assert products
    return compiled, sum(len(n.args) + len(n.kwargs) == 3 for n in products)


CASES = {
    "linear": (lambda x, w, b: F.gelu(F.linear(x, w, b)), (7, 40), (60, 40), (60,)),
    "rows of one number": (lambda x, w, b: F.linear(x, w, b).exp() * 2, (7, 40), (1, 40), (1,)),
    "a vector": (lambda x, w, b: F.gelu(F.linear(x, w, b)), (40,), (60, 40), (60,)),
    "of a batch": (lambda x, w, b: F.linear(x, w, b) * 2 + 1, (2, 3, 5, 40), (50, 40), (50,)),
    "addmm": (lambda x, w, b: torch.tanh(torch.addmm(b, x, w)), (7, 40), (40, 9), (9,)),
    "normed": (
        lambda x, w, b: F.layer_norm(F.linear(x, w, b) + x, (40,)), (7, 40), (40, 40), (40,)
    ),
    "strided bias": (
        lambda x, w, b: torch.relu(F.linear(x, w, b[::2])) + 1, (7, 40), (60, 40), (120,)
    ),
    "summed over rows": (lambda x, w, b: F.linear(x, w, b).exp().sum(0), (7, 40), (6, 40), (6,)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_region_adds_the_bias(name):
    program, *shapes = CASES[name]
    assert lowered(program, *[rand(*shape) for shape in shapes])[1] == 0


def test_two_products_of_one_region():
    _, biased = lowered(
        lambda x, w, b, v, c: F.silu(F.linear(x, w, b)) * F.linear(x, v, c),
        rand(5, 16), rand(24, 16), rand(24), rand(24, 16), rand(24),
    )  # fmt: skip
    assert biased == 0


@pytest.mark.parametrize(
    "program",
    [
        lambda x, w, b: (lambda y: (y, F.gelu(y) * 2))(F.linear(x, w, b)),  # it is returned
        lambda x, w, b: torch.exp(F.linear(x, w, b).t()) * 2,  # a view of it is read
        lambda x, w, b: F.gelu(F.linear(x.bfloat16(), w.bfloat16(), b.bfloat16())) * 2,  # rounded
    ],
)
def test_else_the_library_adds_it(program):
    args = rand(7, 40), rand(60, 40), rand(60)
    gm = fx.symbolic_trace(program)
    compiled = to_cpp(gm, args)
    for found, expected in zip(_flat(compiled(*args)), _flat(program(*args)), strict=True):
        torch.testing.assert_close(found, expected)
    linear = next(n for n in compiled._plan.graph.nodes if "linear" in n.name)
    assert len(linear.args) + len(linear.kwargs) == 3


def _flat(result):
    return result if isinstance(result, tuple) else (result,)


def test_a_bias_that_is_written_in_between_is_added_before():
    def program(x, w, b):
        y = F.linear(x, w, b)
        b.zero_()
        return F.gelu(y) * 2

    args = rand(7, 40), rand(60, 40), rand(60)
    compiled = fxkit.compile(program)
    with torch.no_grad():
        expected = program(args[0], args[1], args[2].clone())
        torch.testing.assert_close(compiled(args[0], args[1], args[2].clone()), expected)


def test_eager_adds_it_in_the_place_of_a_kernel():
    compiled, _ = lowered(
        lambda x, w, b: F.gelu(F.linear(x, w, b)), rand(7, 40), rand(60, 40), rand(60)
    )
    (call,) = compiled._plan.calls.values()
    product, bias = rand(7, 60), rand(60)
    torch.testing.assert_close(call.in_eager(product, bias), F.gelu(product + bias))


def test_a_module_reads_its_bias_at_each_call():
    module = nn.Sequential(nn.Linear(16, 24), nn.GELU()).eval()
    compiled = fxkit.compile(module)
    x = rand(5, 16)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), module(x))
        module[0].bias.add_(1)
        torch.testing.assert_close(compiled(x), module(x))


def test_gradients_flow_through_it():
    module = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.GELU())
    x = rand(512, 64)
    expected = torch.autograd.grad(module(x).square().sum(), list(module.parameters()))
    compiled = fxkit.compile(module)
    found = torch.autograd.grad(compiled(x).square().sum(), list(module.parameters()))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
