"""Comparisons of float and quantised programs, operator by operator."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxkit import quantization as q
from fxkit.errors import UnsupportedError

SPECS = {
    "static": q.int8_static(),
    "dynamic": q.int8_dynamic(),
    "weights": q.int8_weight_only(),
    "four bits": q.int4_weight_only(16),
}


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 64)
        self.second = nn.Linear(64, 32)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return x + self.second(F.gelu(self.first(x) * scale))


def prepared_and_converted(spec: q.QuantizationSpec, model: nn.Module | None = None):
    torch.manual_seed(0)
    model = (model or Branches()).eval()
    batches = [(torch.randn(8, 32),) for _ in range(3)]
    prepared = q.prepare(model, batches[0], spec)
    q.calibrate(prepared, batches)
    return prepared, q.convert(prepared), batches


@pytest.mark.parametrize("spec", SPECS)
def test_each_operator_adds_and_carries(spec: str) -> None:
    prepared, converted, batches = prepared_and_converted(SPECS[spec])
    compared = q.compare(prepared, converted, batches)
    first, second = compared.rows
    assert (first.operator, second.operator) == ("aten.linear", "aten.linear")
    assert first.total == pytest.approx(first.added)  # nothing before it is quantised
    assert second.total < second.added
    assert (first.by_activations == math.inf) == (SPECS[spec].activations is None)
    assert min(first.by_activations, first.by_weight) >= first.added - 1
    assert compared.worst is not None and compared.worst.added == min(first.added, second.added)
    assert f"%{compared.worst.node} adds most" in str(compared)


def test_the_last_total_is_that_of_the_report() -> None:
    model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 8))
    prepared, converted, batches = prepared_and_converted(q.int8_static(), model)
    total = q.compare(prepared, converted, batches).rows[-1].total
    assert total == pytest.approx(q.report(converted, prepared, batches).sqnr[0])


def test_a_weight_with_one_large_row_is_told() -> None:
    model = Branches()
    with torch.no_grad():
        model.second.weight[3] *= 50
    prepared, converted, batches = prepared_and_converted(
        q.int8_static(weights="per_tensor"), model
    )
    worst = q.compare(prepared, converted, batches).worst
    assert worst is not None and worst.node == "linear_1"
    assert worst.by_weight < worst.by_activations - 5


def test_convolutions_products_and_keyword_inputs() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3)

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            seen = self.conv(image).flatten(2)
            return seen @ seen.transpose(1, 2)

    torch.manual_seed(0)
    batches = [{"image": torch.randn(2, 3, 9, 9)} for _ in range(2)]
    prepared = q.prepare(Mixed().eval(), (), q.int8_static(), kwargs=batches[0])
    q.calibrate(prepared, batches)
    compared = q.compare(prepared, q.convert(prepared), batches)
    assert [row.operator for row in compared.rows] == ["aten.conv2d", "aten.matmul"]
    assert all(20 < row.total <= row.added + 1e-6 for row in compared.rows)
    assert compared.rows[1].by_weight == math.inf


def test_what_can_not_be_compared_is_told() -> None:
    prepared, converted, batches = prepared_and_converted(q.int8_static())
    with pytest.raises(UnsupportedError, match="expected some batches"):
        q.compare(prepared, converted, [])
    with pytest.raises(UnsupportedError, match="operators in common"):
        q.compare(prepared, prepared.remake(), batches)
