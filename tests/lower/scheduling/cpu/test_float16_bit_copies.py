"""Passes that only move halves, or sum them up."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fxkit.lower.codegen.cpp.text import float16_literal
from tests.lower.kernels import compiled_for, halves_of, text_of

Program = Callable[[Tensor, Tensor], Tensor]

MOVED: dict[str, Program] = {
    "copied": lambda x, y: x.clone(),
    "joined": lambda x, y: torch.cat([x, y, x], -1),
    "padded": lambda x, y: F.pad(x, (3, 2), value=1.5),
    "padded_with_less": lambda x, y: F.pad(x, (3, 2), value=-torch.inf),
    "flipped": lambda x, y: x.flip(-1),
    "indexed": lambda x, y: x[:, torch.arange(x.shape[1] - 1, -1, -1)],
    "rolled": lambda x, y: torch.roll(x, 3, -1),
    "repeated": lambda x, y: x[0, :9].repeat(64, 1, 3),
    "filled": lambda x, y: torch.cat([x, torch.zeros_like(y)], -1),
    "stacked": lambda x, y: torch.stack([x, y]),
}
SIGNED: dict[str, Program] = {
    "negated": lambda x, y: -x,
    "sizes": lambda x, y: torch.cat([x.abs(), -y.abs()], -1),
}
ALSO: dict[str, Program] = {
    "triangle": lambda x, y: torch.tril(x),
    "added": lambda x, y: torch.cat([x, y + 1], -1),
    "other": lambda x, y: torch.cat([x.bfloat16(), y.bfloat16()], -1),
}

PROGRAMS = {**MOVED, **SIGNED, **ALSO}


def every_half(*shape: int) -> Tensor:
    bits = torch.arange(-(2**15), 2**15)
    return bits.to(torch.int16)[: shape[0] * shape[1]].view(torch.float16).view(shape)


@pytest.mark.parametrize("name", PROGRAMS)
def test_bits_stay_as_they_are(name: str) -> None:
    program = PROGRAMS[name]
    x = every_half(16, 4096)
    y = x.flip(0).contiguous()
    found, expected = compiled_for(program, x, y)(x, y), program(x, y)
    assert found.dtype == expected.dtype and found.stride() == expected.stride()
    same = found.view(torch.int16) == expected.view(torch.int16)
    if name not in MOVED:
        same |= found.isnan() & expected.isnan()
    assert bool(same.all())


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_only_moved_is_not_converted(name: str) -> None:
    x = halves_of(8, 500)
    text = text_of(PROGRAMS[name], x, x)
    is_moved = not any(f"fx_{verb}" in text for verb in ("widen(&", "narrow(h", "from_f16(p"))
    assert is_moved == (name not in ALSO)


def test_an_index_out_of_range_is_found() -> None:
    x, index = halves_of(8, 500), torch.arange(500)
    module = compiled_for(lambda x, i: x[:, i], x, index)
    index[499] = 500
    with pytest.raises(IndexError):
        module(x, index)


def test_numbers_as_bits() -> None:
    found = [float16_literal(number) for number in (0.0, -0.0, 1.5, torch.inf)]
    assert found == [f"(unsigned short)0x{bits}" for bits in ("0000", "8000", "3e00", "7c00")]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("length", [2, 15, 33, 64, 100, 1023, 1025, 5000, 70_001])
def test_sums_of_halves(length: int) -> None:
    x = halves_of(3, length)
    rows = compiled_for(lambda x: x.sum(-1), x)
    assert ("v1 += fx_sum_halves(&p0[" in rows.source) == (length > 8)
    total, mean = compiled_for(lambda x: x.sum(), x), compiled_for(lambda x: x.mean(-1), x)
    exact = x.double()
    for found, expected in (
        (rows(x), exact.sum(-1)),
        (total(x), exact.sum()),
        (mean(x), exact.mean(-1)),
    ):
        assert found.dtype == torch.float16
        assert torch.allclose(found, expected.half(), rtol=1e-3, atol=1e-3)
    x[1, -1] = torch.nan
    assert rows(x).isnan().tolist() == [False, True, False]
    assert "fx_sum_halves(&" not in text_of(lambda x: (x * 3).sum(-1), x)
