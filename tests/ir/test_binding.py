"""The operator and arguments that a call resolves to compute what the call computes."""

from __future__ import annotations

import pytest
import torch

from fxkit.ir.op import resolve
from tests.operator_samples import is_same, samples

# Their results are not determined by their arguments, or differ in the last place by design:
# `1 / x` is x.reciprocal() * 1 in Python and a division for the operator.
_UNDETERMINED = ("empty", "new_empty", "resize", "__rdiv__", "linalg.lstsq", "geqrf", "svd",
                 "linalg.eig", "eigh", "linalg.svd", "qr")  # fmt: skip


def _check(part: int, parts: int) -> int:
    compared = 0
    for sample in samples(part, parts):
        state = torch.get_rng_state()
        try:
            expected, _ = sample.run()
        except (RuntimeError, TypeError, IndexError, AttributeError, ValueError):
            continue
        call = resolve(sample.node)
        assert call is not None
        if call.operator.overload is None or any(name in sample.name for name in _UNDETERMINED):
            continue
        torch.set_rng_state(state)
        arguments = sample.fill(dict(call.arguments), sample.copies())
        got = call.operator.overload(**arguments)
        assert is_same(expected, got), f"{sample.name}: {sample.node.format_node()} is not {call}"
        compared += 1
    return compared


@pytest.mark.filterwarnings("ignore")
def test_some_of_the_operators_are_bound_right() -> None:
    assert _check(3, 40) > 75


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore")
def test_all_operators_are_bound_right() -> None:
    assert _check(0, 1) > 3000


def test_names_of_dimensions_bind_to_nothing_that_takes_numbers() -> None:
    graph = torch.fx.Graph()
    x, out = graph.placeholder("x"), graph.placeholder("out")
    for function in (torch.sum, torch.mean, torch.logsumexp, torch.std):
        for kwargs in ({}, {"out": out}):
            call = resolve(graph.call_function(function, (x, 1), kwargs))
            assert call is not None and call.operator.overload is not None
            kinds = [str(argument.real_type) for argument in call.operator.schema.arguments]
            assert not any("str" in kind for kind in kinds), call
