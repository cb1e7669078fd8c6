"""What the demo judges by: errors and neighbours of small examples worked out by hand."""

from __future__ import annotations

import pytest
import torch

from fxkit.demo import judge


def test_the_reference_is_float64_and_leaves_the_module_alone() -> None:
    module = torch.nn.Linear(2, 2)
    exact = judge.reference(module, (torch.ones(1, 2, dtype=torch.float64),))
    assert exact.dtype is torch.float64
    assert module.weight.dtype is torch.float32


def test_the_relative_error_is_of_norms() -> None:
    exact = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert judge.relative_error(exact + torch.tensor([0.0, 0.5]), exact) == pytest.approx(0.1)


def test_neighbours_come_nearest_first_and_leave_out_oneself() -> None:
    angles = torch.tensor([0.0, 0.1, 0.3, 2.0])
    rows = judge.nearest(torch.stack([angles.cos(), angles.sin()], dim=1), 2)
    assert [[n.index for n in row] for row in rows] == [[1, 2], [0, 2], [1, 0], [2, 1]]
    assert rows[0][0].similarity == pytest.approx(0.995, abs=1e-3)


def test_same_neighbours_counts_rows_in_the_same_order() -> None:
    angles = torch.tensor([0.0, 0.1, 0.3, 2.0])
    rows = judge.nearest(torch.stack([angles.cos(), angles.sin()], dim=1), 2)
    assert judge.same_neighbours(rows, rows) == 4
    assert judge.same_neighbours(rows, [rows[0][::-1], *rows[1:]]) == 3
