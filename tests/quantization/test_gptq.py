"""GPTQ: integers whose errors make up for each other."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxkit import quantization as q
from fxkit.errors import UnsupportedError
from fxkit.quantization.affine import signal_to_noise
from fxkit.quantization.algorithms.gptq import rounded
from fxkit.quantization.algorithms.weight_choice import weight_problems


def correlated(count: int, rows: int, width: int) -> list[tuple[Tensor]]:
    """Inputs of a few hidden causes: what real activations are like."""
    torch.manual_seed(1)
    causes = torch.randn(width // 4, width)
    made = (torch.randn(rows, width // 4) @ causes for _ in range(count))
    return [(one + 0.1 * torch.randn(rows, width),) for one in made]


def error(model: Any, prepared: q.PreparedProgram, data: list[tuple[Tensor]]) -> float:
    quantized: Any = q.convert(prepared)
    with torch.no_grad():
        pairs = [(model(*batch), quantized(*batch)) for batch in data]
    exact, found = (torch.cat(one) for one in zip(*pairs, strict=True))
    return signal_to_noise(exact, found)


def test_four_bits_lose_less_than_the_nearest_integers() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32)).eval()
    data = correlated(6, 100, 64)
    prepared = q.prepare(model, data[0], q.int4_weight_only(32, scheme="symmetric"))
    nearest = error(model, prepared, data[4:])
    before = [parameter.detach().clone() for parameter in model.parameters()]
    rows = q.gptq(prepared, data[:4])
    assert nearest < 20  # visibly off
    assert error(model, prepared, data[4:]) > nearest + 4
    assert [row.path for row in rows] == ["0.weight", "2.weight"]
    assert all(row.after > row.before + 3 for row in rows)
    assert all(map(torch.equal, before, model.parameters()))
    assert torch.equal(prepared(*data[0]), model(*data[0]))  # it computes what it did


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", ["linear", "depthwise", "grouped", "product"])
@pytest.mark.parametrize("granularity", ["per_channel", "per_tensor"])
def test_layers_of_all_kinds_gain(kind: str, granularity: str) -> None:
    torch.manual_seed(0)
    model, shape = {
        "linear": (nn.Linear(32, 24), (40, 32)),
        "depthwise": (nn.Conv2d(8, 8, 5, groups=8, padding=2), (2, 8, 9, 9)),
        "grouped": (nn.Conv1d(8, 12, 4, groups=2, stride=2), (4, 8, 30)),
        "product": (Product(), (40, 32)),
    }[kind]
    data = [(torch.randn(shape).cumsum(-1) / 3,) for _ in range(5)]
    weights = q.TensorSpec(torch.int8, -8, 7, "symmetric", granularity)
    prepared = q.prepare(model.eval(), data[0], q.QuantizationSpec(None, weights))
    nearest = error(model, prepared, data[3:])
    (row,) = q.gptq(prepared, data[:3])
    assert row.after > row.before
    assert error(model, prepared, data[3:]) > nearest
    (stored,) = prepared.choices.weights.values()
    assert stored.integers.min() >= -8 and stored.integers.max() <= 7


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(32, 24))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w


def test_no_choice_is_better_than_the_best_of_all() -> None:
    torch.manual_seed(0)
    model = nn.Linear(5, 1, bias=False).eval()
    data = [(torch.randn(30, 5) @ torch.randn(5, 5),)]
    weights = q.TensorSpec(torch.int8, -2, 1, "symmetric", "per_channel")
    prepared = q.prepare(model, data[0], q.QuantizationSpec(None, weights))
    (problem,) = weight_problems(prepared, data)
    every = [
        float(problem.error(replace(problem.start, integers=torch.tensor([one]))).sum())
        for one in itertools.product(range(-2, 2), repeat=5)
    ]
    found = float(problem.error(rounded(problem, 1e-6)).sum())
    assert min(every) <= found + 1e-9
    assert found <= sorted(every)[len(every) // 50]  # among the best of a thousand


def test_inputs_that_are_never_there_and_weights_that_are_shared() -> None:
    torch.manual_seed(0)

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(torch.relu(self.layer(x)))

    model = Tied().eval()
    data = [(torch.randn(50, 16) * (torch.arange(16) > 3),) for _ in range(2)]
    prepared = q.prepare(model, data[0], q.int4_weight_only(16))
    rows = q.gptq(prepared, data)
    assert [row.path for row in rows] == ["layer.weight"]
    nothing = [(torch.zeros(3, 16),)]
    q.gptq(q.prepare(nn.Linear(16, 4).eval(), nothing[0], q.int4_weight_only(16)), nothing)


def test_faults_of_the_caller() -> None:
    model, x = nn.Linear(8, 4).eval(), torch.randn(3, 8)
    prepared = q.prepare(model, (x,), q.int4_weight_only(8))
    with pytest.raises(UnsupportedError, match="got none"):
        q.gptq(prepared, [])
    with pytest.raises(UnsupportedError, match="positive damping"):
        q.gptq(prepared, [(x,)], damping=0)
    assert not prepared.choices.weights


class Deep(nn.Module):
    """Convolutions and linear layers in a row, one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(4, 16, 3, padding=1), nn.Conv1d(16, 16, 3, groups=2)
        self.twice, self.last = nn.Linear(14, 14), nn.Linear(16 * 14, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.second(torch.relu(self.first(x))))
        return self.last(torch.relu(self.twice(torch.relu(self.twice(y)))).flatten(1))


def test_layers_in_turn_make_up_for_those_before() -> None:
    torch.manual_seed(0)
    model = Deep().eval()
    data = [(torch.randn(32, 4, 16).cumsum(-1) / 2,) for _ in range(10)]
    weights = q.TensorSpec(torch.int8, -4, 3, "symmetric", "per_channel")
    errors = []
    for in_turn in (False, True):
        prepared = q.prepare(model, data[0], q.QuantizationSpec(None, weights))
        nearest = error(model, prepared, data[8:])
        rows = q.gptq(prepared, data[:8], in_turn=in_turn)
        errors.append(error(model, prepared, data[8:]))
        paths = ["first.weight", "second.weight", "twice.weight", "last.weight"]
        assert [row.path for row in rows] == paths
        assert all(row.after >= row.before for row in rows)
        assert torch.equal(prepared(*data[0]), model(*data[0]))
    print(nearest, errors)
    assert errors[1] > errors[0] + 1 > nearest + 3
    prepared = q.prepare(model, data[0], q.QuantizationSpec(None, weights))
    with pytest.raises(UnsupportedError, match="got none"):
        q.gptq(prepared, [], in_turn=True)
    assert not prepared.choices.weights


def _odd(problem: q.WeightProblem, **changes: Any) -> q.StoredWeight:
    return replace(problem.start, **changes)


def _scaled(problem: q.WeightProblem, factor: float) -> q.StoredWeight:
    old = problem.start.parameters
    return _odd(problem, parameters=q.QuantizationParameters(old.scale * factor, old.zero_point))


@pytest.mark.parametrize(
    ("choose", "told"),
    [
        (lambda problem: None, "StoredWeight for 0.weight, got NoneType"),
        (lambda problem: problem.weight, "got Tensor"),
        (lambda problem: _odd(problem, integers=problem.start.integers.float()), r"f32\[3,8\]"),
        (lambda problem: _odd(problem, integers=problem.start.integers[:2]), r"i8\[2,8\]"),
        (lambda problem: _odd(problem, integers=problem.start.integers * 0 - 128), "-127 to 127"),
        (lambda problem: _scaled(problem, torch.nan), "not finite and above 0"),
        (lambda problem: _scaled(problem, -1.0), "not finite and above 0"),
        (lambda problem: 1 / 0, "integers for 0.weight, got ZeroDivisionError"),
    ],
)
def test_what_is_no_choice_is_refused(choose: Any, told: str) -> None:
    data = [(torch.rand(16, 8),)]
    prepared = q.prepare(nn.Sequential(nn.Linear(8, 3)).eval(), data[0], q.int8_weight_only())
    with pytest.raises(UnsupportedError, match=told):
        q.choose_weights(prepared, data, choose)
    assert not prepared.choices.weights
