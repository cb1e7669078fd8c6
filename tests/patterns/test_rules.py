"""Each shipped rule: proven, done as documented, and a place where it must not act."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from fxkit.analysis.tensor_types import propagate_types
from fxkit.ir.printer import format_graph
from fxkit.patterns.engine import rewrite
from fxkit.patterns.rewriting import Rule
from fxkit.patterns.rules import RULES, rules_in
from fxkit.testing import assert_rewrites, prove
from fxkit.tracing.symbolic import symbolic_trace

_MATRIX = torch.randn(3, 4)
_INTEGERS = torch.arange(12).reshape(3, 4)

# Operands for the documented rewritings: by rule, else by the name of the parameter.
_CONSTANTS: dict[str, Any] = {
    "a": 0, "b": 1, "dim": 1, "shape": (3, 4), "dtype": torch.float32, "p": 0.25,
}  # fmt: skip
_OPERANDS: dict[str, dict[str, Any]] = {
    "linear_by_matmul": {"x": _MATRIX, "w": torch.randn(5, 4), "b": torch.randn(5)},
}


@dataclass(frozen=True)
class NoMatch:
    """A program that looks like a rule's and must stay as it is."""

    program: Callable[..., Any]
    args: tuple[Any, ...] = (_MATRIX,)


_MUST_NOT_MATCH: dict[str, NoMatch] = {
    "gelu_by_erf": NoMatch(lambda x: x * 0.5 * (1.0 + torch.erf(x / 1.4142))),
    "gelu_by_tanh": NoMatch(
        lambda x: 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.0447 * x**3)))
    ),
    "silu_by_sigmoid": NoMatch(lambda x, y: x * torch.sigmoid(y), (_MATRIX, _MATRIX + 1)),
    "sigmoid_by_exp": NoMatch(lambda x: 1 / (1 + torch.exp(x))),
    "multiply_by_one": NoMatch(lambda x: x * 1.0, (_INTEGERS,)),
    "divide_by_one": NoMatch(lambda x: x / 1, (_INTEGERS,)),
    "subtract_zero": NoMatch(lambda x: torch.sub(x, 0.0), (_INTEGERS,)),
    "power_of_one": NoMatch(lambda x: x**1.0, (_INTEGERS,)),
    "square_as_product": NoMatch(lambda x: torch.sqrt(x)),
    "double_negation": NoMatch(lambda x: -(-x + 1)),
    "relu_of_relu": NoMatch(lambda x: F.relu(torch.relu(x), inplace=True)),
    "absolute_of_absolute": NoMatch(lambda x: torch.abs(torch.relu(x))),
    "cast_to_same": NoMatch(lambda x: x.to(torch.float64), (_MATRIX,)),
    "dropout_in_eval": NoMatch(lambda x: F.dropout(x, 0.25, training=True)),
    "linear_by_matmul": NoMatch(
        lambda x, w, b: x @ w.t() + b, (torch.randn(3, 4), torch.randn(5, 4), torch.randn(3, 1))
    ),
    "transpose_of_transpose": NoMatch(
        lambda x: x.transpose(0, 1).transpose(0, 2), (torch.randn(2, 3, 4),)
    ),
    "reshape_to_same": NoMatch(lambda x: x.reshape(4, 3)),
    "view_as_same": NoMatch(lambda x: x.view(12)),
    "contiguous_of_contiguous": NoMatch(lambda x: x.contiguous(), (_MATRIX.t(),)),
    "expand_to_same": NoMatch(lambda x: x.expand(2, 3, 4)),
    "unsqueeze_then_squeeze": NoMatch(lambda x: x.unsqueeze(0).squeeze(1)),
}


@pytest.fixture(params=sorted(RULES))
def rule(request: pytest.FixtureRequest) -> Rule:
    return RULES[request.param]


def test_every_rule_has_a_place_where_it_must_not_act() -> None:
    assert set(_MUST_NOT_MATCH) == set(RULES)


def test_rules_are_found_by_their_module() -> None:
    names = [rule.name for rule in rules_in("shapes")]
    assert names[0] == "transpose_of_transpose"
    assert "relu_of_relu" not in names


def test_rule_is_proven(rule: Rule) -> None:
    assert prove(rule) >= 2


def test_rule_leaves_alone_what_only_looks_like_its_pattern(rule: Rule) -> None:
    case = _MUST_NOT_MATCH[rule.name]
    names = list(inspect.signature(case.program).parameters)
    inside: dict[str, Any] = {"program": case.program, "torch": torch}
    program = eval(f"lambda {', '.join(names)}: torch.tan(program({', '.join(names)}))", inside)
    assert_rewrites(rule, program, None, case.args)


def test_rule_with_a_predicate_waits_for_types(rule: Rule) -> None:
    """A rule that depends on types must not guess them."""
    if rule.where is None:
        return
    parameters, before, _ = _documented(rule)
    gm = _trace(parameters, before)
    assert rewrite(gm, rule).count == 0


def test_rule_does_what_its_docstring_says(rule: Rule) -> None:
    """`before  →  after`, both evaluated as Python over the rule's parameters."""
    parameters, before, after = _documented(rule)
    gm, wanted = _trace(parameters, before), _trace(parameters, after)
    operands = _OPERANDS.get(rule.name, {})
    propagate_types(gm, tuple(operands.get(p, _MATRIX) for p in _tensors(parameters)))
    assert rewrite(gm, rule).count == 1
    assert _plain(gm) == _plain(wanted)


def test_documented_rewriting_is_read_over_several_lines() -> None:
    parameters, before, after = _documented(RULES["gelu_by_tanh"])
    assert parameters == ["x"]
    assert before.endswith("x**3)))")
    assert after == 'F.gelu(x, approximate="tanh")'


def _documented(rule: Rule) -> tuple[list[str], str, str]:
    text = inspect.cleandoc(rule.doc).partition("Rewrites:\n")[2]
    block = re.split(r"\n\s*\n|\n(?=\S)", text)[0]
    before, arrow, after = (" ".join(part.split()) for part in block.partition("→"))
    assert arrow, f"{rule.name} has no `before  →  after` in its docstring"
    return list(rule.pattern.captures), before, after


def _tensors(parameters: list[str]) -> list[str]:
    """The parameters that hold tensors: `b` is a constant beside `a`, a tensor beside `w`."""
    return [p for p in parameters if p not in _CONSTANTS or (p == "b" and "w" in parameters)]


def _trace(parameters: list[str], expression: str) -> fx.GraphModule:
    tensors = _tensors(parameters)
    scope: dict[str, Any] = {"torch": torch, "F": F}
    scope.update({k: v for k, v in _CONSTANTS.items() if k not in tensors})
    # The result is used further on: a caller may not get an operand in place of a fresh tensor.
    return symbolic_trace(eval(f"lambda {', '.join(tensors)}: torch.tan({expression})", scope))


def _plain(gm: fx.GraphModule) -> str:
    """The graph's text without types, nodes named by position."""
    for index, node in enumerate(node for node in gm.graph.nodes if node.op != "output"):
        node.meta.clear()
        node.name = f"v{index}"
    return format_graph(gm)
