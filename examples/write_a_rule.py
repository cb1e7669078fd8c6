"""Write a rule, prove it, apply it, and ask why it did not apply elsewhere.

Run it: python examples/write_a_rule.py
"""

from __future__ import annotations

import torch
from torch import Tensor

import fxkit


@fxkit.rule(exact=False)
def rms_norm_by_hand(x, weight):
    """Spelled out, a root-mean-square norm is five operators; torch has one.

    Rewrites:
        x * rsqrt(mean(x ** 2, -1) + 1e-6) * weight  →  rms_norm(x, [64], weight, 1e-6)
    """
    norm = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return x * norm * weight, torch.nn.functional.rms_norm(x, [64], weight, 1e-6)


def model(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Normalise twice; the second time the norm itself is returned too."""
    first = weight * (x * torch.rsqrt((x**2).mean(dim=-1, keepdim=True) + 1e-6))
    norm = torch.rsqrt((first**2).mean(dim=-1, keepdim=True) + 1e-6)
    return first * norm * weight, norm


def main() -> None:
    """Rewrite and compare."""
    torch.manual_seed(0)
    args = (torch.randn(8, 64), torch.randn(64))
    before = fxkit.capture(model, args).graph_module
    after = fxkit.capture(model, args).graph_module

    print(fxkit.rewrite(after, rms_norm_by_hand).table())
    print(f"\n{fxkit.diff(before, after)}")

    # The second one stays: its inner value is an output of the program.
    print(f"\n{fxkit.explain(after, rms_norm_by_hand)}")

    fxkit.testing.assert_equivalent(before, after, args)
    print("\nthe same outputs, within twice the error of the program before")


if __name__ == "__main__":
    main()
