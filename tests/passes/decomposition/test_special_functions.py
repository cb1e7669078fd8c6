"""Functions of scalars by core operators: their values are those of torch."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from fxkit.passes.decomposition import special_functions
from fxkit.passes.decomposition.unrecordable import Unrecordable

# How far results may be from float64's, in epsilons, relative to the result; of lgamma also to 1.
TOLERANCES = {"copysign": 0.0, "erfc": 8.0, "exp2": 2.0, "hypot": 2.0, "lgamma": 64.0,
              "nextafter": 0.0}  # fmt: skip
BINARY = ("copysign", "hypot", "nextafter")


def samples(dtype: torch.dtype, count: int) -> list[torch.Tensor]:
    about = torch.finfo(dtype)
    least = about.smallest_normal * about.eps
    found = [0.0, 1.0, 2.0, 0.5, 1.5, 5.0, 9.0, 27.0, 30.5, math.inf, about.max, least,
             about.smallest_normal, about.smallest_normal / 2]  # fmt: skip
    special = torch.tensor([*found, *(-x for x in found), math.nan], dtype=dtype)
    exponents = torch.randint(-140, 120, (2, 20_000)).to(dtype)
    random = [row.flatten() for row in torch.randn(2, 20_000, dtype=dtype) * exponents.exp2()]
    pairs = torch.meshgrid(special, special, indexing="ij")
    near = torch.randn(2, 20_000, dtype=dtype) * 6
    return [torch.cat([p.flatten(), r, n]) for p, r, n in zip(pairs, random, near)][:count]  # noqa: B905


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", TOLERANCES)
def test_values_are_those_of_torch(name: str, dtype: torch.dtype) -> None:
    operands = samples(dtype, 1 + (name in BINARY))
    found = getattr(special_functions, name)(*operands)
    expected = getattr(torch, name)(*operands)
    assert found.dtype == dtype
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.isinf(), expected.isinf())
    if name != "lgamma":  # which is zero within its error at 1 and 2
        signed = ~expected.isnan()
        assert torch.equal(found.signbit()[signed], expected.signbit()[signed])
    exact = (
        expected if name == "nextafter" else getattr(torch, name)(*(x.double() for x in operands))
    )
    is_finite = found.isfinite()
    least = 1.0 if name == "lgamma" else torch.finfo(dtype).smallest_normal
    error = (found.double() - exact)[is_finite].abs() / exact[is_finite].abs().clamp(min=least)
    assert error.max() <= TOLERANCES[name] * torch.finfo(dtype).eps


@pytest.mark.parametrize("name", ["copysign", "erfc", "exp2", "hypot", "lgamma"])
def test_other_dtypes(name: str) -> None:
    whole = [] if name == "hypot" else [torch.arange(1, 6)]  # torch has none of integers
    for operand in (*whole, torch.rand(9).bfloat16(), torch.rand(9).half()):
        operands = (operand,) * (1 + (name in BINARY))
        found = getattr(special_functions, name)(*operands)
        torch.testing.assert_close(found, getattr(torch, name)(*operands))


def test_signs_of_numbers() -> None:
    x = torch.randn(5)
    assert torch.equal(special_functions.copysign(x, -0.0), torch.copysign(x, -0.0))
    with pytest.raises(Unrecordable):
        special_functions.nextafter(x.half(), x.half())


@pytest.mark.parametrize(("is_max", "theirs"), [(True, torch.cummax), (False, torch.cummin)])
@pytest.mark.parametrize("size", [0, 1, 2, 3, 5, 8, 9])
def test_running_extremes(is_max: bool, theirs: Callable[..., tuple], size: int) -> None:
    x = torch.randint(-2, 3, (3, size, 2)).float()
    computed = special_functions.running_extreme(is_max)
    torch.testing.assert_close(computed(x.int(), -2), tuple(theirs(x.int(), -2)))
    x[torch.rand(x.shape) < 0.1] = math.nan
    torch.testing.assert_close(computed(x, 1), tuple(theirs(x, 1)), equal_nan=True)
    torch.testing.assert_close(computed(x.sum(), 0), tuple(theirs(x.sum(), 0)), equal_nan=True)
