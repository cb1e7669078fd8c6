"""Compile a function, read what was fused, and compare with eager: numbers and time.

Run it: python examples/compile_and_compare.py
"""

from __future__ import annotations

import torch
from torch import Tensor

import fxkit
from fxkit.demo.judge import relative_error
from fxkit.timing import in_turn, machine


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Attention by hand: query, key, value float[B, H, T, C], mask float[T, T]."""
    scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
    return torch.softmax(scores + mask, dim=-1) @ value


def main() -> None:
    """Compile, call, compare."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(4, 8, 128, 32) for _ in range(3))
    mask = torch.full((128, 128), -torch.inf).triu(1)
    args = (query, key, value, mask)

    fast = fxkit.compile(attend)
    fast(*args)  # the first call runs the program itself, records it and builds kernels
    result = fast(*args)
    print(fast.report())

    exact = attend(*(tensor.double() for tensor in args))
    print(f"\nerror of eager {relative_error(attend(*args), exact):.1e}")
    print(f"error of fxkit {relative_error(result, exact):.1e}")

    times = in_turn({"eager": lambda: attend(*args), "fxkit": lambda: fast(*args)}, rounds=10)
    print(f"\n{machine()}")
    for name, seconds in times.items():
        print(f"{name}  {seconds * 1e3:.2f} ms")


if __name__ == "__main__":
    main()
