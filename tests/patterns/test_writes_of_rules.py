"""Rules of which one side writes to an operand, and the other does not."""

from __future__ import annotations

import pytest
import torch

import fxkit

WITHOUT = fxkit.rule(lambda x: x.relu_() + 1, lambda x: x.clamp(min=0) + 1, name="without")
ADDING = fxkit.rule(lambda x: torch.relu(x) + 1, lambda x: x.relu_() + 1, name="adding")
KEEPING = fxkit.rule(lambda x: x.relu_() + 1, lambda x: 1 + x.relu_(), name="keeping")


@pytest.mark.parametrize(
    ("rule", "program", "count"),
    [
        (WITHOUT, lambda x: (x.relu_() + 1, x.sum()), 0),
        (WITHOUT, lambda x: ((x * 2).t().relu_() + 1, x), 0),
        (WITHOUT, lambda x: (x * 2).relu_() + 1, 1),
        (ADDING, lambda x: (torch.relu(x) + 1, x.sum()), 0),
        (ADDING, lambda x: torch.relu(x.t()) + 1, 0),
        (ADDING, lambda x: torch.relu(x * 2) + 1, 1),
        (KEEPING, lambda x: (x.relu_() + 1, x.sum()), 1),
    ],
)
def test_a_write_that_can_be_seen_neither_comes_nor_goes(rule, program, count):
    x = torch.randn(3, 4)
    gm = fxkit.symbolic_trace(program)
    report = fxkit.rewrite(gm, rule)
    assert report.count == count
    if not count:
        assert "alone would write to" in str(report.refusals)
    left, right = x.clone(), x.clone()
    expected, found = program(left), gm(right)
    torch.testing.assert_close(found, expected)
    assert torch.equal(left, right)
