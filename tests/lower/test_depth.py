"""Models of many layers that are alike: each kernel is made once."""

from __future__ import annotations

import torch
from torch import nn

import fxkit


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def test_layers_that_are_alike_are_built_once() -> None:
    made = []
    x = torch.randn(5, 16)
    for depth in (3, 9):
        model = nn.Sequential(*(Layer() for _ in range(depth))).eval()
        compiled = fxkit.compile(model)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), model(x))
        (module,) = compiled.compiled_modules
        fused = [region for region in module.regions if region.kernel is not None]
        made.append((len(fused), len(module.kernels), len(module.source)))
    (few, *shallow), (many, *deep) = made
    assert many >= few + 6
    assert shallow == deep
