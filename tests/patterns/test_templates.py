"""What can be a pattern, and what the pattern of a function is."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxkit.errors import PatternError
from fxkit.patterns.pattern_nodes import Capture, Constant, Operation, is_same_constant
from fxkit.patterns.rewriting import rule
from fxkit.patterns.templates import pattern


def test_parameters_are_captures_and_literals_are_constants() -> None:
    found = pattern(lambda x, y: torch.add(x, y, alpha=2))
    assert found.captures == ("x", "y")
    arguments = found.root.arguments
    assert found.root.operator == "aten.add"
    assert isinstance(arguments["self"], Capture)
    assert isinstance(arguments["alpha"], Constant)
    assert arguments["alpha"].value == 2


def test_a_value_used_twice_is_one_operation() -> None:
    def squared_relu(x: Any) -> Any:
        kept = torch.relu(x)
        return kept * kept

    found = pattern(squared_relu)
    assert len(found) == 2
    assert found.name == "squared_relu"
    assert found.root.arguments["self"] is found.root.arguments["other"]


def test_operations_come_operands_first_and_carry_their_line() -> None:
    found = pattern(lambda x: torch.exp(-x))
    assert [operation.operator for operation in found.operations] == ["aten.neg", "aten.exp"]
    assert all(operation.source.startswith("test_templates.py:") for operation in found.operations)


def test_several_results_end_with_the_root() -> None:
    found = pattern(lambda x: (torch.sin(x), torch.cos(x)))
    assert [output.operator for output in found.outputs] == ["aten.sin", "aten.cos"]
    assert found.root is found.outputs[-1]


def test_results_that_share_something_through_others_are_a_pattern() -> None:
    found = pattern(lambda x, y, z: (torch.relu(x), torch.tanh(z), x + y, y + z))
    assert len(found.outputs) == 4


def test_a_pattern_stays_itself() -> None:
    found = pattern(lambda x: torch.sin(x))
    assert pattern(found) is found


_MALFORMED: dict[str, tuple[Callable[..., Any], str]] = {
    "a placeholder": (lambda x: x, "got the parameter 'x'"),
    "one result is a placeholder": (lambda x, y: (torch.relu(y), x), "got the parameter 'x'"),
    "a constant": (lambda x: 3, "got a value"),
    "starred parameters": (lambda *args: torch.relu(args[0]), r"got \*args"),
    "starred keywords": (lambda **kwargs: torch.relu(kwargs["x"]), r"got \*kwargs"),
    "a branch": (lambda x: torch.relu(x) if x.sum() > 0 else x, "can't be traced"),
    "a loop over a tensor": (lambda x: sum(row for row in x), "can't be traced"),
}


@pytest.mark.parametrize("kind", sorted(_MALFORMED))
def test_malformed_pattern_is_refused(kind: str) -> None:
    function, message = _MALFORMED[kind]
    with pytest.raises(PatternError, match=message) as caught:
        pattern(function)
    assert caught.value.hint


@pytest.mark.parametrize("weight", [torch.ones(3), nn.Parameter(torch.ones(3))])
def test_tensor_from_outside_is_refused(weight: torch.Tensor) -> None:
    with pytest.raises(PatternError, match=r"expected (operations on|a function of tensor)"):
        pattern(lambda x: x * weight)


def _forgetful(x: Any) -> None:
    F.silu(x)


_BAD_RULES: dict[str, tuple[Callable[[], Any], str]] = {
    "unknown parameter": (lambda: rule(lambda x: torch.relu(x), lambda y: y), "got y"),
    "too many results": (lambda: rule(lambda x: torch.relu(x), lambda x: (x, x)), "has, 1, got 2"),
    "too few results": (lambda: rule(lambda x: (-x, x + 1), lambda x: x), "has, 2, got 1"),
    "one side": (lambda: rule(lambda x: torch.relu(x)), r"\(before, after\), got 1"),
    "pattern without replacement": (lambda: rule(pattern(lambda x: -x)), "got none"),
    "replacement without return": (lambda: rule(lambda x: torch.relu(x), _forgetful), "got None"),
    "one result is None": (lambda: rule(lambda x: (-x, x + 1), lambda x: (x, None)), "got None"),
    "rule without a replacement": (lambda: rule(lambda x: (torch.relu(x), None)), "got None"),
    "replacement with a branch": (
        lambda: rule(lambda x: torch.relu(x), lambda x: x if x.sum() > 0 else -x),
        "can't be traced",
    ),
}


@pytest.mark.parametrize("kind", sorted(_BAD_RULES))
def test_malformed_rule_is_refused(kind: str) -> None:
    make, message = _BAD_RULES[kind]
    with pytest.raises(PatternError, match=message) as caught:
        make()
    assert caught.value.hint


def test_rule_from_one_function_has_its_name_and_doc() -> None:
    @rule(benefit=4)
    def twice(x):
        """Say it once."""
        return torch.relu(torch.relu(x)), torch.relu(x)

    assert (twice.name, twice.doc, twice.benefit) == ("twice", "Say it once.", 4)
    assert twice.file == __file__


_COMMUTATIVE = [
    (lambda x, y: x + y, True),
    (lambda x, y: torch.add(x, y, alpha=1), True),
    (lambda x, y: torch.add(x, y, alpha=2), False),
    (lambda x, y: x * y, True),
    (lambda x, y: torch.maximum(x, y), True),
    (lambda x, y: x - y, False),
    (lambda x, y: x / y, False),
    (lambda x, y: x**y, False),
    (lambda x, y: x == y, True),
    (lambda x, y: x < y, False),
    (operator.and_, True),
    (lambda x, y: F.linear(x, y), False),
]


@pytest.mark.parametrize("case", range(len(_COMMUTATIVE)))
def test_operands_that_may_change_places(case: int) -> None:
    function, expected = _COMMUTATIVE[case]
    found = pattern(lambda x, y: function(x, y))
    assert isinstance(found.root, Operation)
    assert found.root.is_commutative is expected


@pytest.mark.parametrize(
    ("wanted", "got", "in_floating", "same"),
    [
        (1, 1, False, True),
        (1, 1.0, False, False),
        (1, 1.0, True, True),
        (1.0, 1, True, True),
        (1, 2.0, True, False),
        (True, 1, True, False),
        (float("nan"), float("nan"), False, True),
        (0.0, 0.0, False, True),
        (0.0, -0.0, True, False),
        (-0.0, 0, True, False),
        (0, 0.0, True, True),
        (10**400, 1.0, True, False),
        ([0.0], [-0.0], True, False),
        (complex(0, 0.0), complex(0, -0.0), True, False),
        (complex(0, -0.0), complex(0, -0.0), True, True),
        (complex("nan"), complex("nan"), True, True),
        ("none", "none", False, True),
        ("none", None, False, False),
        ([1, 2], (1, 2), False, True),
        ([1, 2], [1, 3], False, False),
        ([1, 2], [1, 2, 3], False, False),
        ([1.0], [1], True, True),
        (torch.float32, torch.float32, False, True),
        (torch.float32, torch.float64, False, False),
        (0, torch.zeros(()), True, False),
    ],
)
def test_equal_constants(wanted: Any, got: Any, in_floating: bool, same: bool) -> None:
    assert is_same_constant(wanted, got, in_floating) is same
