"""Complex arithmetic between real numbers becomes real; all other stays."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import fxkit
from fxkit.ir.types import type_of
from fxkit.passes.complex_by_parts import ComplexByParts
from fxkit.passes.manager.manager import PassManager

X = torch.randn(2, 3, 5, 8, generator=torch.Generator().manual_seed(0))
TURN = torch.polar(torch.ones(5, 4), torch.randn(5, 4, generator=torch.Generator().manual_seed(1)))


def by_parts(program: Any, *args: Tensor) -> fx.GraphModule:
    gm = fxkit.capture(program, args).graph_module
    PassManager([ComplexByParts()], verify="numerics", args=args).run(gm)
    return gm


def is_complex(gm: fx.GraphModule) -> bool:
    """Tell whether a graph computes with complex numbers."""
    calls = [n for n in gm.graph.nodes if n.op.startswith("call") and "resolve_conj" not in n.name]
    known = [type_of(n) for n in calls if "fft" not in n.name]
    return any(t.dtype.is_complex for t in known)


def as_complex(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))


def turned(x: Tensor, turn: Tensor) -> Tensor:
    return (as_complex(x) * turn).abs()


def made_turns(x: Tensor, angles: Tensor) -> Tensor:
    turns = torch.polar(torch.ones_like(angles), angles)[None, :, None].expand(-1, -1, 5, -1)
    return (as_complex(x) * turns).imag + 1


REAL = {
    "turned": turned,
    "conjugates": lambda x, t: torch.angle(as_complex(x).conj() * t.conj()),
    "sums": lambda x, t: ((as_complex(x) + t - 2.5) * 3 - (1 - as_complex(x))).abs(),
    "numbers": lambda x, t: (as_complex(x) * (2 - 1j) + 1j).angle(),
    "sizes": lambda x, t: (-as_complex(x) * t).abs() + torch.angle(as_complex(x) * t),
    "parts": lambda x, t: (as_complex(x) * t).real * 2 + torch.imag(as_complex(x) * t),
    "made": lambda x, t: (torch.complex(x, x + 1) * torch.complex(x, -x)).abs(),
    "views": lambda x, t: (as_complex(x) * t).transpose(1, 2)[:, 1:, None].flatten(2).mT.abs(),
    "real factor": lambda x, t: (as_complex(x) * x[..., :4]).abs(),
    "given": lambda x, t: t.abs() * 2,
    "transformed": lambda x, t: torch.fft.rfft(x).abs(),
}


@pytest.mark.parametrize("name", REAL)
def test_between_real_numbers_all_is_real(name: str) -> None:
    program = REAL[name]
    gm = by_parts(program, X, TURN)
    assert not is_complex(gm)
    found, expected = gm(X, TURN), program(X, TURN)
    torch.testing.assert_close(found, expected)
    assert found.stride() == expected.stride()


def test_turns_that_are_made_on_the_way() -> None:
    angles = torch.randn(3, 4)
    gm = by_parts(made_turns, X, angles)
    assert not is_complex(gm)
    torch.testing.assert_close(gm(X, angles), made_turns(X, angles))


STAYS = {
    "returned": lambda x, t: as_complex(x) * t,
    "taken by another": lambda x, t: (as_complex(x) * t).exp().real * 2,
    "viewed as real": lambda x, t: torch.view_as_real(as_complex(x) * t),
    "a returned part": lambda x, t: (as_complex(x) * t).real,
    "divided": lambda x, t: (as_complex(x) / t).imag + 1,
}


@pytest.mark.parametrize("name", STAYS)
def test_what_is_seen_or_unknown_stays(name: str) -> None:
    gm = by_parts(STAYS[name], X, TURN)
    assert is_complex(gm)
    torch.testing.assert_close(gm(X, TURN), STAYS[name](X, TURN))
    assert gm(X, TURN).stride() == STAYS[name](X, TURN).stride()


def test_what_is_written_to_stays() -> None:
    def program(x: Tensor, t: Tensor) -> Tensor:
        z = as_complex(x) * t
        z.add_(1)
        return (z * 2).abs()

    gm = by_parts(program, X, TURN)
    assert is_complex(gm)
    torch.testing.assert_close(gm(X, TURN), program(X, TURN))


def test_infinities_and_nan_are_those_of_eager() -> None:
    special = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, 1e38, -2.0, 1e-40])
    x = torch.cartesian_prod(special, special).reshape(1, 1, 16, 8)
    turn = torch.view_as_complex(torch.cartesian_prod(special, special).reshape(16, 4, 2))
    for program in (turned, lambda x, t: (as_complex(x) * 2.0 + t).real + 1):
        gm = by_parts(program, x, turn)
        found, expected = gm(x, turn), program(x, turn)
        torch.testing.assert_close(found, expected, equal_nan=True)


def test_a_conjugate_that_is_given_is_resolved() -> None:
    gm = by_parts(turned, X, TURN)
    torch.testing.assert_close(gm(X, TURN.conj()), turned(X, TURN.conj()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_turns(dtype: torch.dtype) -> None:
    x = X.to(dtype)
    fast = fxkit.compile(turned)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(fast(x, TURN), turned(x, TURN))
    assert any(region.kernel for region in fast.compiled_modules[0].regions)


def test_gradients_are_eagers_also_where_a_size_is_zero() -> None:
    fast = fxkit.compile(turned)
    x, turn = X.clone(), TURN.clone().requires_grad_()
    x[0, 0] = 0
    x.requires_grad_()
    weights = torch.randn(2, 3, 5, 4)
    for call in (fast, fxkit.compile(turned, train=False)):
        found = torch.autograd.grad(call(x, turn), (x, turn), weights)
        expected = torch.autograd.grad(turned(x, turn), (x, turn), weights)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("times", [1, 2])
def test_angles_lie_in_memory_as_eager_lays_them_out(times: int):
    def program(x):
        return (x * times if times > 1 else x).angle()

    compiled = fxkit.compile(program)
    for x in (
        torch.randn(9, 33, dtype=torch.complex64).mT.contiguous().mT,
        torch.randn(2, 3, 4, 5, dtype=torch.complex64).to(memory_format=torch.channels_last),
        torch.randn(9, 1, dtype=torch.complex128).expand(9, 3),
    ):
        for _ in range(2):
            found = compiled(x)
            assert found.stride() == program(x).stride()
            assert torch.allclose(found, program(x))
