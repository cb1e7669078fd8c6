"""Operators that divide integers, also by zero."""

from __future__ import annotations

import math

import numpy as np
import torch

import fxkit


def _quotient(x, y):
    return x // y if y != 0 else -1, x % y, x // y


def test_integers_are_divided_by_zero_without_an_error() -> None:
    quotient = fxkit.operator(_quotient)
    x, y = torch.arange(-9, 11).view(4, 5), torch.tensor([0, 2, -3, 0, 7])
    numerators = x.numpy(), y.numpy()
    with np.errstate(divide="ignore"):
        whole, rest = numerators[0] // numerators[1], numerators[0] % numerators[1]
    for dtype in (torch.int64, torch.int32, torch.int8):
        guarded, mod, floor = quotient(x.to(dtype), y.to(dtype))
        assert floor.dtype == mod.dtype == dtype
        assert floor.tolist() == whole.tolist()
        assert mod.tolist() == rest.tolist()
        assert torch.equal(guarded, floor.where(y != 0, -1))
    program = fxkit.compile(lambda x, y: quotient(x + 1, y)[0] * 2)
    assert torch.equal(program(x, y), quotient(x + 1, y)[0] * 2)
    assert quotient(x, 0)[2].tolist() == [[0] * 5] * 4
    assert torch.equal(torch.vmap(quotient, (0, None))(x, y)[1], quotient(x, y)[1])
    floats = quotient(x.double(), y)[2]
    assert torch.equal(floats[:, 0], torch.tensor([-math.inf] * 2 + [math.inf] * 2).double())
