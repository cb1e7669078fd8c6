"""AdaRound: each weight learns whether to be rounded up or down."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxkit import quantization as q
from fxkit.errors import UnsupportedError
from fxkit.quantization.affine import signal_to_noise
from fxkit.quantization.algorithms.weight_choice import weight_problems

MODELS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(32, 8), (60, 32)),
    "depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4), (3, 4, 9, 9)),
}


def case(name: str, spec: q.QuantizationSpec) -> tuple[nn.Module, Any, list[Any]]:
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model = make().eval()
    mixed = torch.randn(shape[-1], shape[-1]) / 3
    data: list[Any] = [((torch.randn(shape) @ mixed).cumsum(-1),) for _ in range(5)]
    return model, q.prepare(model, data[0], spec), data


def error(model: Any, prepared: Any, data: list[tuple[Tensor]]) -> float:
    quantized: Any = q.convert(prepared)
    with torch.no_grad():
        pairs = [(model(*batch), quantized(*batch)) for batch in data]
    exact, found = (torch.cat(one) for one in zip(*pairs, strict=True))
    return signal_to_noise(exact, found)


@pytest.mark.parametrize("name", MODELS)
def test_learnt_rounding_loses_less_than_the_nearest(name: str) -> None:
    weights = q.TensorSpec(torch.int8, -4, 3, "symmetric", "per_channel")
    model, prepared, data = case(name, q.QuantizationSpec(None, weights))
    nearest = error(model, prepared, data[3:])
    (row,) = q.ada_round(prepared, data[:3], steps=300)
    assert nearest < 20  # visibly off
    assert error(model, prepared, data[3:]) > nearest + 3
    assert row.after > row.before + 3


def test_weights_move_by_less_than_a_step() -> None:
    model, prepared, data = case("linear", q.int4_weight_only(16))
    q.ada_round(prepared, data, steps=100)
    (problem,) = weight_problems(prepared, data)
    scale, zeros = problem.steps()
    moved = (problem.start.integers[None] - zeros) - problem.matrix / scale
    inside = (problem.start.integers[None] > -8) & (problem.start.integers[None] < 7)
    assert float(moved[inside].abs().max()) <= 1 + 1e-5
    assert torch.equal(prepared(*data[0]), model(*data[0]))


def test_faults_of_the_caller() -> None:
    _, prepared, data = case("linear", q.int4_weight_only(16))
    with pytest.raises(UnsupportedError, match="at least 1 step"):
        q.ada_round(prepared, data, steps=0)
    with pytest.raises(UnsupportedError, match="got none"):
        q.ada_round(prepared, [])
