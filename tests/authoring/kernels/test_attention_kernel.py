"""A user's kernel of attention, and what follows it computed in its place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fxkit
from fxkit.authoring.kernels import AuthoredKernel
from fxkit.patterns.match_results import Match

SOURCE = """
#include <cmath>
#include <cstdint>
template <class T>
void attention(const T* q, const T* k, const T* v, T* out, int64_t heads, int64_t queries,
               int64_t keys, int64_t depth, int64_t width, double* workspace, auto epilogue) {
  for (int64_t h = 0; h < heads; ++h)
    for (int64_t i = 0; i < queries; ++i) {
      const T* row = q + (h * queries + i) * depth;
      double most = -INFINITY, sum = 0;
      for (int64_t j = 0; j < keys; ++j) {
        double score = 0;
        for (int64_t d = 0; d < depth; ++d)
          score += (double)row[d] * (double)k[(h * keys + j) * depth + d];
        workspace[j] = score;
        most = score > most || score != score ? score : most;
      }
      for (int64_t j = 0; j < keys; ++j) sum += workspace[j] = std::exp(workspace[j] - most);
      for (int64_t w = 0; w < width; ++w) {
        double value = 0;
        for (int64_t j = 0; j < keys; ++j)
          value += workspace[j] / sum * (double)v[(h * keys + j) * width + w];
        const int64_t at = (h * queries + i) * width + w;
        out[at] = epilogue((T)value, at);
      }
    }
}
"""


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2), -1) @ v


def fits(match: Match) -> bool:
    q, k, v = (match.type(name).shape for name in "qkv")
    return len(q) == len(k) == len(v) > 1 and q[:-2] == k[:-2] == v[:-2] and 0 not in (*q, *k, *v)


@pytest.fixture(scope="module")
def kernel() -> AuthoredKernel:
    return fxkit.kernel(
        attention,
        cpp=SOURCE,
        numbers={
            "heads": lambda q: q.numel() // (q.shape[-1] * q.shape[-2]),
            "queries": lambda q: q.shape[-2],
            "keys": lambda k: k.shape[-2],
            "depth": lambda q: q.shape[-1],
            "width": lambda v: v.shape[-1],
        },
        workspace=lambda k: 8 * k.shape[-2],
        where=fits,
        samples=[
            {"q": (5, 7), "k": (9, 7), "v": (9, 3)},
            {"q": (2, 3, 1, 8), "k": (2, 3, 17, 8), "v": (2, 3, 17, 5)},
        ],
        finite_only=True,  # a score that is infinite is NaN in eager's softmax
        always=True,
    )


def test_it_holds(kernel: AuthoredKernel) -> None:
    assert kernel.prove() > 10


RESIDUAL = torch.randn(2, 4, 6, 5)
FOLLOWING: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "a scale": (lambda y: y * 0.125, "mul"),
    "a residual": (lambda y: RESIDUAL + y, "add"),
    "gelu": (F.gelu, "gelu"),
    "all of them": (
        lambda y: F.gelu(y * 0.5 + RESIDUAL) + RESIDUAL[:1, :, :1],
        "mul_1, add, gelu, add_1",
    ),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", FOLLOWING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_follows_is_computed_in_its_place(
    kernel: AuthoredKernel, name: str, dtype: torch.dtype
) -> None:
    following, told = FOLLOWING[name]
    q, k, v = (torch.randn(2, 4, n, d, dtype=dtype) for n, d in ((6, 8), (9, 8), (9, 5)))

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return following(attention(q * 0.5, k, v))

    compiled = fxkit.compile(program, kernels=[kernel])
    with torch.no_grad():
        for _ in range(2):
            found = compiled(q, k, v)
        exact = program(q.double(), k.double(), v.double())
        torch.testing.assert_close(found, program(q, k, v))
    error = (found.double() - exact).abs().max()
    assert error <= 2 * (program(q, k, v).double() - exact).abs().max() + 1e-7
    (line,) = [line for line in compiled.report().splitlines() if "kernel attention used" in line]
    if dtype == torch.float32 or ("residual" not in name and "all" not in name):
        assert f"with {told}" in line and "behind it" in line


def test_a_layer_of_a_model_takes_it(kernel: AuthoredKernel) -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = torch.nn.Linear(24, 72)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.project(x).view(*x.shape[:2], 3, 3, 8).permute(2, 0, 3, 1, 4)
            heads = attention(q * 8**-0.5, k, v).transpose(1, 2)
            return x + F.gelu(heads.reshape(x.shape))

    layer, x = Layer().eval(), torch.randn(2, 11, 24)
    compiled = fxkit.compile(layer, kernels=[kernel])
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(compiled(x), layer(x))
    assert "kernel attention used" in compiled.report()
