"""What torch has no decomposition of, and is made of core operators here."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fxkit
from fxkit.passes import DecomposeToAten, DecomposeToCore
from fxkit.passes.decomposition.core_operators import is_core


def hold(program: Callable[..., Tensor], *args: Tensor, exact: bool = True) -> None:
    """Lower a program to core operators alone, and compare."""
    expected = program(*args)
    gm = fxkit.capture(program, args).graph_module
    fxkit.PassManager([DecomposeToAten(), DecomposeToCore()], args=args, verify="structure").run(gm)
    targets = [n.target for n in gm.graph.nodes if n.op == "call_function"]
    assert [t for t in targets if not is_core(t)] == []
    found = gm(*args)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    tolerances = {"rtol": 0, "atol": 0} if exact else {}
    torch.testing.assert_close(found, expected, equal_nan=True, **tolerances)


def test_histograms() -> None:
    for seed in range(40):
        draw = random.Random(seed)
        torch.manual_seed(seed)
        shape = draw.choice([(50,), (7, 9), (0,), (1,), (3, 1, 4)])
        x = torch.randn(shape, dtype=draw.choice([torch.float32, torch.float64]))
        x = (x * draw.choice([1, 5])).round() if draw.random() < 0.3 else x
        bins = draw.choice([1, 3, 4, 10, 100])
        low, high = draw.choice([(0, 0), (-1, 1), (0.1, 0.7), (0, 3), (-2.5, 2.5), (1, 1)])
        if low != high and x.numel() > 2:
            x.view(-1)[0] = draw.choice([float("nan"), float("inf"), high, low])
        x = x.transpose(0, -1) if draw.random() < 0.3 else x
        hold(lambda x, n=bins, a=low, b=high: torch.histc(x, bins=n, min=a, max=b), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_extremes_of_a_whole_tensor(dtype: torch.dtype) -> None:
    x = (torch.randn(3, 4) * 5).to(dtype)
    for given in (x, x.t(), x[:1, 0], x[0, 0]):
        hold(lambda x: x.max(), given)
        hold(lambda x: x.min(), given)
    if dtype.is_floating_point:
        x[1, 2] = float("nan")
        hold(lambda x: x.max(), x)


@pytest.mark.parametrize("beta", [0, 1, 0.5])
@pytest.mark.parametrize("alpha", [1, -2.0])
def test_sums_of_a_batch_of_products(beta: float, alpha: float) -> None:
    a, b = torch.randn(3, 2, 5), torch.randn(3, 5, 4)
    for x in (torch.randn(2, 4), torch.randn(4), torch.full((2, 1), float("nan"))):
        hold(lambda x, a, b: torch.addbmm(x, a, b, beta=beta, alpha=alpha), x, a, b, exact=False)


def test_conjugates() -> None:
    x = torch.randn(3, 4, dtype=torch.complex64)
    hold(lambda x: torch.view_as_real((x.conj() * 2).resolve_conj()), x)
    hold(lambda x: torch.view_as_real(torch.fft.ifft(x.conj())), x, exact=False)


def _converted(x: Any) -> Any:
    return x.to(torch.float64) * 2


def test_what_says_the_type_of_a_tensor_is_left_out() -> None:
    x = torch.randn(3)
    gm = fxkit.capture(_converted, (x,), mode="aten").module()
    assert "_assert_tensor_metadata" in gm.code
    fxkit.PassManager([DecomposeToAten(), DecomposeToCore()], args=(x,)).run(gm)
    assert "_assert_tensor_metadata" not in gm.code
    assert torch.equal(gm(x), _converted(x))
