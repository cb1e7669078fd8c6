"""Rows of bfloat16 that are walked two elements at a time."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

import fxkit
from fxkit.lower import CompiledModule, to_cpp
from fxkit.lower.building.build import build
from fxkit.lower.cpp_printer import print_unit
from tests.lower.kernels import ALWAYS, kernel_of, text_of
from tests.sampling import one_in

Program = Callable[[Tensor, Tensor], Tensor]


def halves(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def all_numbers() -> Tensor:
    """Return each of the 65,536 bit patterns, NaNs and subnormal numbers included."""
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)


def same_bits(found: Tensor, expected: Tensor) -> bool:
    both_nan = found.isnan() & expected.isnan()
    return bool((both_nan | (found.view(torch.int16) == expected.view(torch.int16))).all())


def compiled_for(program: Program, x: Tensor, y: Tensor) -> CompiledModule:
    module = to_cpp(fx.symbolic_trace(program), (x, y), policy=ALWAYS)
    assert "fx_pairs(" in module.source
    return module


EXACT: dict[str, Program] = {
    "add": lambda x, y: x + y,
    "chain": lambda x, y: (x * y + 1.5) * y - x.abs(),
    "choice": lambda x, y: torch.where(x > y, -x, y * 2),
    "bounded": lambda x, y: torch.relu(x).clamp(max=3.0) + y,
    "kept": lambda x, y: torch.maximum(-x, y.abs()),
    "root": lambda x, y: x.abs().sqrt() / y,
}


@pytest.mark.parametrize("name", EXACT)
def test_every_number_is_rounded_as_in_eager(name: str) -> None:
    x = all_numbers()
    for y in (x.flip(0).roll(7).clone(), halves(2**16), torch.full_like(x, -0.0)):
        module = compiled_for(EXACT[name], x, y)
        assert same_bits(module(x, y), EXACT[name](x, y))


ROWS: dict[str, Program] = {
    "softmax": lambda x, y: torch.softmax(x * 2 + y, -1),
    "layer_norm": lambda x, y: F.layer_norm(x + y, x.shape[-1:]),
    "rms_norm": lambda x, y: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * y,
    "extrema": lambda x, y: x.amax(-1, keepdim=True) - (x * y).amin(-1, keepdim=True) + y,
    "column": lambda x, y: torch.sigmoid(x + y[:, :1]) * y[0],
    "waves": lambda x, y: torch.sin(x * 9) + torch.cos(y),
    "gelu": lambda x, y: F.gelu(x) * F.gelu(y),
}


@pytest.mark.parametrize(("length", "name"), one_in(3, [32, 64, 258, 1024, 1058, 5000], ROWS))
def test_rows_of_every_length(name: str, length: int) -> None:
    x, y = halves(5, length), halves(5, length, seed=1)
    x[3, -1], y[4, length // 2] = 1e9, -1e9
    found = compiled_for(ROWS[name], x, y)(x, y)
    expected = ROWS[name](x, y)
    exact = ROWS[name](x.double(), y.double())
    assert found.dtype == expected.dtype
    error, allowed = (found - exact).abs().max(), (expected - exact).abs().max()
    assert error <= 2 * allowed + 1e-3 * exact.abs().max()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("place", [0, 1, 510, 511])
@pytest.mark.parametrize("special", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_is_met_in_both_elements(place: int, special: float) -> None:
    x, y = halves(3, 512), halves(3, 512, seed=1)
    x[1, place] = special
    for name in ("softmax", "layer_norm", "rms_norm", "extrema"):
        found, expected = compiled_for(ROWS[name], x, y)(x, y), ROWS[name](x, y)
        assert torch.equal(found.isnan(), expected.isnan())
        assert torch.equal(found.isinf(), expected.isinf())


@pytest.mark.one_in(4)
@pytest.mark.parametrize("shift_x", [0, 1])
@pytest.mark.parametrize("shift_y", [0, 1])
@pytest.mark.parametrize("shift_out", [0, 1])
@pytest.mark.parametrize("shape", [(3, 512), (2, 4096 + 66), (1, 4096 + 333), (3, 2731)])
def test_rows_may_begin_between_words(
    shape: tuple[int, int], shift_x: int, shift_y: int, shift_out: int
) -> None:
    rows, length = shape
    x, y = halves(rows, length), halves(rows, length, seed=1)
    for program in (EXACT["chain"], EXACT["choice"], ROWS["softmax"]):
        if length % 2 and program is ROWS["softmax"]:
            continue
        text = print_unit({"k": kernel_of(program, x, y)}, None)
        assert "fx_pairs(" in text
        call = build(text).handle.k
        room = [torch.full((rows * length + 9,), 7.0).bfloat16() for _ in range(3)]
        shifts = (shift_x, shift_y, shift_out)
        parts = [r[4 + s : 4 + s + rows * length] for r, s in zip(room, shifts, strict=True)]
        parts[0].copy_(x.flatten())
        parts[1].copy_(y.flatten())
        call(*(ctypes.c_void_p(part.data_ptr()) for part in parts), ctypes.c_long(1))
        expected = compiled_for(program, x, y)(x, y)
        assert same_bits(parts[2].reshape(rows, length), expected)
        around = torch.cat([room[2][: 4 + shift_out], room[2][4 + shift_out + rows * length :]])
        assert bool((around == 7).all())


def test_views_that_begin_at_odd_elements() -> None:
    room = halves(4, 1026)
    x, y = room[:, 1:-1], room.flatten()[3 : 3 + 4 * 1024].view(4, 1024)
    for name in ("softmax", "layer_norm"):
        module = compiled_for(ROWS[name], x.contiguous(), y.contiguous())
        compiled = fxkit.compile(ROWS[name])
        compiled(x, y)  # runs the program itself
        assert same_bits(compiled(x, y), module(x.contiguous(), y.contiguous()))


def test_words_are_walked_where_all_that_varies_is_bfloat16() -> None:
    x = halves(8, 512)
    assert "fx_pairs(" in text_of(lambda x: x * 2 + 1, x)
    assert "fx_pairs(" in text_of(lambda x, y: x * y, x, torch.randn(8, 1).bfloat16())
    assert "fx_pairs(" in text_of(lambda x, y: (x * y).float().mean(-1), x, x)
    for program, args in (
        (lambda x: x * 2 + 1, (x.float(),)),
        (lambda x: x * 2 + 1, (x.half(),)),
        (lambda x: torch.softmax(x[:, :511], -1), (x,)),
        (lambda x: x.float() * 2, (x,)),
        (lambda x, y: x * y, (x, torch.randn(512))),
        (lambda x: x.flip(-1) * 2, (x,)),
        (lambda x: torch.softmax(x[:, ::2] * 2, -1), (x,)),
        (lambda x: torch.cumsum(x * 2, -1), (x,)),
        (lambda x: x * 2 > 1, (x,)),
        (lambda x: x * 2 + 1, (halves(9, 63),)),
        (lambda x: torch.softmax(x, -1), (torch.zeros(2, 40_000).bfloat16(),)),
    ):
        assert "fx_pair" not in text_of(program, *args)


def test_words_are_rounded_where_they_can_have_changed() -> None:
    x = halves(8, 64)
    assert "fx_paired(fx_upper_held_bf16(" in text_of(lambda x: torch.relu(x * 2), x)
    assert "fx_paired(fx_upper_quiet_bf16(" in text_of(lambda x: x * 3, x)
    scale = torch.randn(8, 1)
    text = text_of(lambda x, y: (x * y).bfloat16(), x, scale)
    assert "fx_paired(fx_upper_bf16(" in text  # a NaN of float32 may end in its lower half


def test_as_many_vectors_go_in_step_as_coefficients_leave_registers_for() -> None:
    x = halves(8, 512)
    many, few = text_of(lambda x: torch.sin(x), x), text_of(lambda x: F.silu(x), x)
    assert "FX_STEPS(unsigned short, " in many and " FX_SCHEDULED void" in many
    assert "FX_STEPS(unsigned char, " in few and " FX_SCHEDULED void" not in few
    assert "FX_STEPS(type" not in text_of(lambda x: x * 2, x)


@torch.no_grad()
def test_symbolic_sizes_and_none() -> None:
    compiled = fxkit.compile(ROWS["layer_norm"], dynamic=True)
    pointwise = fxkit.compile(EXACT["chain"], dynamic=True)
    for rows, length in (
        (3, 512),
        (7, 512),
        (64, 512),
        (64, 514),
        (5, 33),
        (9, 777),
        (0, 512),
        (1, 2),
    ):
        x, y = halves(rows, length), halves(rows, length, seed=1)
        expected = ROWS["layer_norm"](x, y)
        assert torch.allclose(compiled(x, y), expected, rtol=2e-2, atol=2e-2)
        assert same_bits(pointwise(x, y), EXACT["chain"](x, y))
    module = pointwise.compiled_modules[-1]
    assert isinstance(module, CompiledModule)
    assert "fx_pairs(" in module.source and "numbers[0]" in module.source
