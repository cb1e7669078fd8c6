"""What follows a user's kernel is fused with it, where the kernel has a hook."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fxkit
from fxkit.authoring.kernels import AuthoredKernel
from fxkit.errors import NumericsError
from fxkit.patterns.match_results import Match

PRODUCT = """
#include <cstdint>
template <class T>
void product(const T* a, const T* b, T* out, int64_t a_size_0, int64_t a_size_1, int64_t b_size_1,
             auto epilogue) {
  for (int64_t i = 0; i < a_size_0; ++i)
    for (int64_t j = 0; j < b_size_1; ++j) {
      double sum = 0;
      for (int64_t k = 0; k < a_size_1; ++k)
        sum += (double)a[i * a_size_1 + k] * (double)b[k * b_size_1 + j];
      const int64_t at = i * b_size_1 + j;
      out[at] = epilogue((T)sum, at);
    }
}
"""


def product(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


def are_matrices(match: Match) -> bool:
    return all(len(match.type(name).shape) == 2 for name in "ab")


SAMPLES = [{"a": (17, 33), "b": (33, 9)}, {"a": (1, 3), "b": (3, 1)}, {"a": (0, 4), "b": (4, 5)}]


def multiplying(cpp: str = PRODUCT, **options: Any) -> AuthoredKernel:
    return fxkit.kernel(product, cpp=cpp, where=are_matrices, samples=SAMPLES, **options)


@pytest.fixture(scope="module")
def kernel() -> AuthoredKernel:
    return multiplying(always=True)


def report_of(kernel: AuthoredKernel, fn: Callable[..., Any], *args: Tensor) -> str:
    program = fxkit.compile(fn, kernels=[kernel])
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(program(*args), fn(*args), equal_nan=True)
    return program.report()


BIAS = torch.randn(9)
FOLLOWING: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "bias and activation": (lambda y, r: F.gelu(y + BIAS), "add, gelu"),
    "a residual": (lambda y, r: torch.relu(y) * 0.5 + r, "relu, mul, add"),
    "one that is turned": (lambda y, r: y.sigmoid() - r.t().contiguous().t(), "sigmoid, sub"),
    "one for each row": (lambda y, r: y.tanh() * r[:, :1], "tanh, mul"),
    "one number": (lambda y, r: torch.where(y > 0, y, y.exp() - 1) + r[0, 0], "exp"),
}


@pytest.mark.parametrize("name", FOLLOWING)
def test_what_follows_a_product_is_computed_in_its_kernel(
    name: str, kernel: AuthoredKernel
) -> None:
    following, names = FOLLOWING[name]
    a, b, r = torch.randn(17, 33), torch.randn(33, 9), torch.randn(17, 9)
    a[3, 4] = float("nan")
    report = report_of(kernel, lambda a, b, r: following(a @ b, r), a, b, r)
    (line,) = [line for line in report.splitlines() if line.startswith("kernel product used at")]
    assert " behind it" in line and names in line


@pytest.mark.parametrize("name", FOLLOWING)
def test_infinities_behind_a_product_are_those_of_float64(
    name: str, kernel: AuthoredKernel
) -> None:
    following, _ = FOLLOWING[name]
    a, b, r = torch.randn(17, 33), torch.randn(33, 9), torch.randn(17, 9)
    a[5, 2] = float("inf")
    program = fxkit.compile(lambda a, b, r: following(a @ b, r), kernels=[kernel])
    with torch.no_grad():
        program(a, b, r)
        result = program(a, b, r)
        # F.gelu of float32 makes NaN of Inf in some of torch's kernels.
        expected = following((a @ b).double(), r.double()).float()
    torch.testing.assert_close(result, expected, equal_nan=True)


STEPS: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda y, r: y + r,
    lambda y, r: y * r[:1],
    lambda y, r: r[:, -1:] - y,
    lambda y, r: torch.relu(y),
    lambda y, r: F.silu(y),
    lambda y, r: y.clamp(-0.5, 0.75),
    lambda y, r: torch.maximum(y, r),
    lambda y, r: torch.where(r > 0, y, -y),
    lambda y, r: y / (1 + r * r),
]


def test_random_chains_behind_products(kernel: AuthoredKernel) -> None:
    for seed in range(6):
        draw = random.Random(seed)
        steps = draw.choices(STEPS, k=draw.randint(1, 5))
        m, k, n = (draw.choice([2, 3, 7, 16]) for _ in range(3))
        dtype = draw.choice([torch.float32, torch.float64])
        args = [torch.randn(size, dtype=dtype) for size in ((m, k), (k, n), (m, n))]

        def program(a: Tensor, b: Tensor, r: Tensor, steps: Any = steps) -> Tensor:
            y = a @ b
            for step in steps:
                y = step(y, r)
            return y

        assert " behind it" in report_of(kernel, program, *args), seed


def _read_twice(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    y = a @ b
    return torch.relu(y), y


def _written_between(a: Tensor, b: Tensor) -> Tensor:
    y = a @ b
    scale = a.clone()
    scale.add_(1)
    return torch.relu(y) * scale.sum()


APART: dict[str, Callable[..., Any]] = {
    "it is read elsewhere": _read_twice,
    "what follows reduces": lambda a, b: (a @ b).sum(1),
    "what follows turns it": lambda a, b: torch.relu((a @ b).t().contiguous()),
    "what follows is of another dtype": lambda a, b: (a @ b) > 0,
    "nothing follows": lambda a, b: a @ b,
    "others write in between": _written_between,
}


@pytest.mark.parametrize("name", APART)
def test_what_does_not_fit_stays_apart(name: str, kernel: AuthoredKernel) -> None:
    report = report_of(kernel, APART[name], torch.randn(5, 7), torch.randn(7, 6))
    assert "kernel product used at matmul" in report
    assert name == "others write in between" or " behind it" not in report


def test_a_trial_counts_what_follows_in_both(one_thread: None) -> None:
    slow = PRODUCT.replace(
        "double sum = 0;", "double sum = 0;\n      for (volatile int w = 0; w < 999;) w = w + 1;"
    )
    a, b = torch.randn(40, 64), torch.randn(64, 48)
    report = report_of(multiplying(slow), lambda a, b: torch.relu(a @ b) + 1, a, b)
    assert "kernel product left out at matmul" in report
    assert "fxkit's own kernels are faster" in report


WRONG = {
    "another position": ("at);", "at / b_size_1);"),
    "called twice": ("epilogue((T)sum, at)", "epilogue(epilogue((T)sum, at), at)"),
    "never called": ("epilogue((T)sum, at)", "(T)sum"),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_proof_finds_a_wrong_hook(name: str) -> None:
    wrong = multiplying(PRODUCT.replace(*WRONG[name]))
    with pytest.raises(NumericsError, match=r"to store epilogue\(value, index\) once for each"):
        wrong.prove()


def test_a_kernel_with_a_hook_runs_alone_too(kernel: AuthoredKernel) -> None:
    assert kernel.has_hook and kernel.prove() > 10
    a, b = torch.randn(4, 3), torch.randn(3, 2)
    torch.testing.assert_close(kernel(a, b), a @ b)
