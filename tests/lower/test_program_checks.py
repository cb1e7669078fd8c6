"""What compares random programs finds what is wrong, and lets pass what is rounding."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
import torch
from torch import fx

from tests.lower.program_checks import compare, compare_calls, compare_sizes
from tests.lower.random_programs import random_program, together


def _program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    mean = x.mean(-1, keepdim=True)
    return (x - mean).exp(), x.argmax(-1), x.t()


GRAPH = fx.symbolic_trace(_program)
INPUTS = (torch.linspace(-1, 1, 42).reshape(6, 7),)

Wrong = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]


def _off(factor: float) -> Wrong:
    return lambda x: (_program(x)[0] * factor, *_program(x)[1:])


def _writes(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    result = _program(x.clone())
    x += 1
    return (*result[:2], x.t() - 1)


WRONG: dict[str, Wrong] = {
    "off": _off(1.00001),
    "infinite": _off(float("inf")),
    "position": lambda x: (_program(x)[0], _program(x)[1] - 1, x.t()),
    "layout": lambda x: (*_program(x)[:2], x.t().contiguous()),
    "dtype": lambda x: (_program(x)[0].double(), *_program(x)[1:]),
    "write": _writes,
}


def test_rounding_passes():
    compare(_off(1.0000001), GRAPH, INPUTS)


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_does_not(name: str):
    with pytest.raises(AssertionError):
        compare(WRONG[name], GRAPH, INPUTS)


def test_a_result_that_a_later_call_changes_is_found():
    kept: list[torch.Tensor] = []

    def reuses(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = _program(x)
        kept.append(found[0])
        return (kept[0].copy_(found[0]), *found[1:])

    with pytest.raises(AssertionError):
        compare_calls(reuses, GRAPH, INPUTS)


def test_a_program_for_one_size_is_found():
    graph = fx.symbolic_trace(lambda x: (x.reshape(7, -1) * 2,))

    def takes_all(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x.flatten()[:42].reshape(7, 6) * 2,)

    assert compare_sizes(graph, graph, INPUTS) == 1
    with pytest.raises(AssertionError, match="it takes what eager does not"):
        compare_sizes(takes_all, graph, INPUTS)


def test_programs_together_give_what_each_gives():
    programs = [random_program(Random(seed)) for seed in range(3)]
    graph, inputs = together(programs)
    with torch.no_grad():
        found = graph(*(t.clone() for t in inputs))
        alone = [t for gm, own in programs for t in gm(*(t.clone() for t in own))]
    assert len(found) == len(alone)
    assert all(
        torch.equal(a.nan_to_num(0), b.nan_to_num(0)) for a, b in zip(found, alone, strict=True)
    )
