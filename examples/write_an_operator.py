"""Write an operator: from a definition to its gradient, into a model, fused and exported.

Run it: python examples/write_an_operator.py
"""

from __future__ import annotations

import math

import torch
from torch import nn

import fxkit


@fxkit.operator
def squareplus(x, b=4.0):
    """A smooth relu that needs no exponential: (x + √(x² + b)) / 2."""
    return 0.5 * (x + math.sqrt(x * x + b))


@fxkit.row_operator
def rms_norm(row, weight, eps=1e-6):
    """Scale a row to a mean square of one."""
    scale = 1 / math.sqrt(sum(x * x for x in row) / len(row) + eps)
    return [x * scale * w for x, w in zip(row, weight, strict=True)]


class Block(nn.Module):
    """A layer with both."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return float[B, width] for x: float[B, width]."""
        return squareplus(self.linear(rms_norm(x, self.weight))) + x


def main() -> None:
    """Check the operators, compile a model that calls them, and export it."""
    wide = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    print("first and second derivatives:", torch.autograd.gradcheck(squareplus, wide),
          torch.autograd.gradgradcheck(squareplus, wide))  # fmt: skip

    model, x = Block(64).eval().requires_grad_(False), torch.randn(128, 64)
    fast = fxkit.compile(model)
    torch.testing.assert_close(fast(x), model(x))
    print(fxkit.graph(fast.graph_module))
    for region in fast.compiled_modules[0].regions:
        print(region.nodes, region.reason or "in one kernel")

    exported = torch.export.export(model, (x,))
    torch.testing.assert_close(exported.module()(x), model(x))
    print([str(node.target) for node in exported.graph.nodes if "authored" in str(node.target)])


if __name__ == "__main__":
    main()
