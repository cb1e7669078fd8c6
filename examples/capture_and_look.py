"""Capture a small transformer block, then look at it: graph, modules, costs, a drawing.

Run it: python examples/capture_and_look.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fxkit


class Block(nn.Module):
    """A residual block: normalise, widen, narrow."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """x: float[B, T, C] → float[B, T, C]."""
        return x + self.narrow(nn.functional.gelu(self.widen(self.norm(x))))


def main() -> None:
    """Capture and print."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(64), Block(64)).eval()
    args = (torch.randn(4, 16, 64),)

    captured = fxkit.capture(model, args)
    gm = captured.graph_module
    print(fxkit.tree(gm))

    # Read-only objects over the same nodes: search by operator, follow operands and users.
    graph = fxkit.graph(gm)
    for found in graph.find(torch.nn.functional.gelu):
        print(f"\n{found}\n  reads {found.producers}\n  is read by {found.users}")

    print(f"\n{fxkit.profile(gm, args, iters=5).table(group_by='op')}")
    print(f"\nwritten: {fxkit.draw(gm).save('block.svg')}")

    # What the graph takes for granted is guarded: another dtype is captured anew.
    print(f"\n{captured.explain(args[0].double())}")


if __name__ == "__main__":
    main()
