"""Entries of operators of one's own in torch's table, used as torch's own tests use them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import fxkit
from fxkit.authoring.operators.elementwise import ElementwiseOperator


@fxkit.operator(namespace="samples")
def stretched(x, y, scale=2.0, *, twice=False):
    return math.tanh(x * scale) * y * (2.0 if twice else 1.0)


@fxkit.operator(namespace="samples")
def entropy(p):
    return -p * math.log(p)


@fxkit.operator(namespace="samples")
def flipped(x, y):
    return (x ^ y) & 3


@fxkit.row_operator(namespace="samples")
def weighted(row, weight, factor: float, eps=1e-3):
    scale = factor / (row.sum(abs) + eps)
    return [x * w * scale for x, w in zip(row, weight, strict=True)], scale


ENTRIES = [stretched.opinfo(), entropy.opinfo(low=0.2, high=3.0), flipped.opinfo(),
           weighted.opinfo()]  # fmt: skip
SOME = [
    pytest.param(entry, dtype, marks=() if place % 6 == 0 else pytest.mark.sweep)
    for place, (entry, dtype) in enumerate(
        (entry, dtype) for entry in ENTRIES for dtype in sorted(entry.dtypes, key=str)
    )
]


def wide(x: torch.Tensor) -> torch.Tensor:
    return x.double() if x.is_floating_point() else x


def several(found: Any) -> tuple[Any, ...]:
    return found if isinstance(found, tuple) else (found,)


@pytest.mark.parametrize(("entry", "dtype"), SOME, ids=lambda v: getattr(v, "name", str(v)))
def test_results_are_those_of_the_reference(entry: Any, dtype: torch.dtype) -> None:
    samples = list(entry.sample_inputs("cpu", dtype))
    assert len(samples) >= 7
    for sample in samples:
        found = several(entry.op(sample.input, *sample.args, **sample.kwargs))
        arrays = [
            x.double().numpy() if x.is_floating_point() else x.numpy()
            for x in (sample.input, *sample.args)
        ]
        expected = several(entry.ref(*arrays, **sample.kwargs))
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.shape == theirs.shape
            precision = 2e-2 if dtype in (torch.bfloat16, torch.float16) else 2e-5
            np.testing.assert_allclose(ours.double().numpy(), theirs, precision, precision)


@pytest.mark.one_in(2)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # by forward mode
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_samples_ask_for_gradients(entry: Any) -> None:
    if torch.float64 not in entry.dtypes:
        pytest.skip("it is of integers")
    for sample in entry.sample_inputs("cpu", torch.float64, requires_grad=True):
        operands = (sample.input, *sample.args)
        if all(x.numel() for x in operands):
            call = lambda *xs, s=sample: entry.op(*xs, **s.kwargs)  # noqa: E731
            assert torch.autograd.gradcheck(call, operands, check_forward_ad=True)


def test_operands_of_bits_are_no_floats() -> None:
    assert torch.float32 not in ENTRIES[2].dtypes
    assert torch.int32 in ENTRIES[2].dtypes


def test_samples_hold_numbers_and_names() -> None:
    found = [kwargs for _, kwargs in stretched.samples()]
    assert found[-1] == {"scale": 3.0, "twice": True}
    assert all(not kwargs for kwargs in found[:-1])
    assert isinstance(stretched, ElementwiseOperator)
