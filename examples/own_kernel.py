"""A C++ kernel of your own in the place of a pattern: proven, timed, and used where it wins.

Run it: python examples/own_kernel.py
"""

from __future__ import annotations

import torch
from torch import Tensor

import fxkit

SOURCE = """
#include <cstdint>

// Runs down the rows once, with the sums of all columns in the workspace.
void running_mean(const float* x, float* out, int64_t x_size_0, int64_t columns,
                  double* workspace) {
  for (int64_t j = 0; j < columns; ++j) workspace[j] = 0;
  for (int64_t i = 0; i < x_size_0; ++i)
    for (int64_t j = 0; j < columns; ++j) {
      workspace[j] += x[i * columns + j];
      out[i * columns + j] = (float)(workspace[j] / (double)(i + 1));
    }
}
"""


def running_mean(x: Tensor) -> Tensor:
    """Return the mean of each row and all before it: float[rows, columns]."""
    counts = torch.ones_like(x).cumsum(0)
    return x.cumsum(0) / counts


kernel = fxkit.kernel(
    running_mean,
    cpp=SOURCE,
    where={"x": fxkit.patterns.language.operand(rank=2)},
    numbers={"columns": lambda x: x.shape[1]},
    workspace=lambda x: 8 * x.shape[1],
)


def main() -> None:
    """Prove the kernel, and compile a program with it."""
    print(f"held to its pattern on {kernel.prove()} inputs")
    x = torch.randn(512, 96)
    fast = fxkit.compile(lambda x: running_mean(x).tanh(), kernels=[kernel])
    with torch.no_grad():
        for _ in range(2):  # the first call records the program
            torch.testing.assert_close(fast(x), running_mean(x).tanh())
    print(fast.report())


if __name__ == "__main__":
    main()
