"""A run with stand-ins leaves no trace, however it ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fxkit.tracing.captured import Captured

SEEN: dict[str, Any] = {}


def _notes_stand_ins(x: torch.Tensor, log: list[str]) -> torch.Tensor:
    rows = x.shape[0]
    if type(rows) is not int:
        SEEN["kind"] = str(type(rows))
        log.append("a stand-in")
        raise TypeError("a size that is no int")
    return x * rows


def _notes_numbers(x: torch.Tensor, log: list[str], step: int) -> torch.Tensor:
    if step.__class__ is not int or hasattr(step, "fx_node"):
        SEEN["step"] = "a stand-in"
        log.append("a stand-in")
        raise TypeError("a number that is no int")
    return x * step


def test_a_run_that_raises_for_sizes_leaves_state_and_arguments_as_they_are() -> None:
    captured, log = Captured(_notes_stand_ins, dynamic=True), ["first"]
    x = torch.ones(3, 2)
    torch.testing.assert_close(captured(x, log), x * 3)
    assert SEEN == {} and log == ["first"]
    captured(torch.ones(4, 2), log)
    assert "with stand-ins for sizes it raises TypeError: a size that is no int" in (
        captured.explain(torch.ones(5, 2), log)
    )


def test_a_run_that_raises_for_numbers_leaves_state_and_arguments_as_they_are() -> None:
    captured, log = Captured(_notes_numbers), ["first"]
    x = torch.ones(3, 2)
    for step in (1, 2, 3):
        torch.testing.assert_close(captured(x, log, step), x * step)
        assert SEEN == {} and log == ["first"]


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_side_that_raises_leaves_state_and_arguments_as_they_are(sign: float) -> None:
    def program(x: torch.Tensor, log: list[str]) -> torch.Tensor:
        if x.sum() * sign > 0:
            return x + 1
        SEEN["side"] = 1
        log.append("other")
        raise ValueError("the other side")

    captured, log = Captured(program, control_flow=True), ["first"]
    x = torch.full((3,), sign)
    torch.testing.assert_close(captured(x, log), x + 1)
    assert SEEN == {} and log == ["first"]
    assert "a side of it raises ValueError: the other side" in captured.explain(-x, log)
