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
from fxkit.patterns.lint import examples_of
from fxkit.patterns.rewriting import Rule
from fxkit.patterns.rules import RULES, rules_in
from fxkit.testing import assert_rewrites, prove
from fxkit.tracing.symbolic import symbolic_trace

_MATRIX = torch.randn(3, 4)
_INTEGERS = torch.arange(12).reshape(3, 4)

_NAN = torch.tensor([[torch.nan, 1.0]])
_WANTS_GRADIENT = torch.randn(3, 4, requires_grad=True)
_BITS = torch.tensor([True, False])
_HEADS = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 6, 4), torch.randn(1, 2, 6, 3)
_QUERY, _KEY, _VALUE = torch.randn(2, 5, 4), torch.randn(2, 6, 4), torch.randn(2, 6, 3)

# Operands for the documented rewritings: by rule, else from the rule's first sample, else by the
# name of the parameter, else a matrix.
_CONSTANTS: dict[str, Any] = {
    "a": 0, "b": 1, "dim": 1, "shape": (3, 4), "dtype": torch.float32, "p": 0.25,
}  # fmt: skip
_ARE_INTEGERS = {"x": _INTEGERS, "y": _INTEGERS + 1}
_OPERANDS: dict[str, dict[str, Any]] = {
    "double_not": {"x": _INTEGERS},
    "negated_less": _ARE_INTEGERS,
    "negated_less_or_equal": _ARE_INTEGERS,
    "negated_greater": _ARE_INTEGERS,
    "negated_greater_or_equal": _ARE_INTEGERS,
    "layer_norm_by_hand": {"last_size": [8]},
    "rms_norm_by_hand": {"last_size": [8]},
    "squeeze_of_nothing": {"x": _MATRIX},
    "softmax_in_float32": {"x": _MATRIX.bfloat16()},
}


@dataclass(frozen=True)
class NoMatch:
    """A program that looks like a rule's and must stay as it is."""

    program: Callable[..., Any]
    args: tuple[Any, ...] = (_MATRIX,)


_MUST_NOT_MATCH: dict[str, NoMatch] = {
    # activations
    "gelu_by_erf": NoMatch(lambda x: x * 0.5 * (1.0 + torch.erf(x / 1.4142))),
    "gelu_by_tanh": NoMatch(
        lambda x: 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.0447 * x**3)))
    ),
    "silu_by_sigmoid": NoMatch(lambda x, y: x * torch.sigmoid(y), (_MATRIX, _MATRIX + 1)),
    "sigmoid_by_exp": NoMatch(lambda x: 1 / (1 + torch.exp(x))),
    "softplus_by_log": NoMatch(lambda x: torch.log(2 + torch.exp(x))),
    "mish_by_softplus": NoMatch(lambda x: x * torch.tanh(F.softplus(x, beta=2))),
    "relu_by_mask": NoMatch(lambda x: x * (x >= 1)),
    "relu_by_maximum": NoMatch(lambda x: torch.maximum(x, torch.zeros_like(x)), (_WANTS_GRADIENT,)),
    "leaky_relu_by_choice": NoMatch(lambda x: torch.where(x >= 0, x, x * 0.1)),
    "elu_by_choice": NoMatch(lambda x: torch.where(x > 0, x, torch.exp(x) - 2)),
    "hard_sigmoid_by_bounds": NoMatch(lambda x: F.relu6(x + 3) / 6, (_WANTS_GRADIENT,)),
    "hard_swish_by_bounds": NoMatch(lambda x, y: y * F.relu6(x + 3) / 6, (_MATRIX, _MATRIX)),
    # algebra
    "multiply_by_one": NoMatch(lambda x: x * 1.0, (_INTEGERS,)),
    "divide_by_one": NoMatch(lambda x: x / 1, (_INTEGERS,)),
    "subtract_zero": NoMatch(lambda x: torch.sub(x, 0.0), (_INTEGERS,)),
    "power_of_one": NoMatch(lambda x: x**1.0, (_INTEGERS,)),
    "square_as_product": NoMatch(lambda x: torch.square(x), (_BITS,)),
    "double_negation": NoMatch(lambda x: -(-x + 1)),
    "add_negated": NoMatch(lambda x, y: x + -y, (_MATRIX, _INTEGERS)),
    "subtract_negated": NoMatch(lambda x, y: x - (-y), (_INTEGERS, _INTEGERS.int())),
    "product_of_negations": NoMatch(lambda x, y: -x * y, (_MATRIX, _MATRIX)),
    "quotient_of_negations": NoMatch(lambda x, y: -x / -y, (_INTEGERS, _INTEGERS + 1)),
    "absolute_of_negation": NoMatch(lambda x: torch.abs(-x), (_INTEGERS.byte(),)),
    "absolute_of_absolute": NoMatch(lambda x: torch.abs(torch.relu(x))),
    "absolute_of_positive": NoMatch(lambda x: torch.abs(torch.tanh(x))),
    "multiply_by_minus_one": NoMatch(lambda x: x * -1.0, (_INTEGERS,)),
    "scale_of_negation": NoMatch(lambda x: -x * 3, (_INTEGERS,)),
    "negation_of_scale": NoMatch(lambda x: -(x * 3), (_INTEGERS,)),
    "divide_by_power_of_two": NoMatch(lambda x: x / 6.0),
    "where_of_same": NoMatch(lambda x, y: torch.where(x > 0, x, y), (_MATRIX, _MATRIX)),
    "double_not": NoMatch(lambda x: torch.logical_not(torch.logical_not(x)), (_INTEGERS,)),
    # attention
    "attention_by_hand": NoMatch(
        lambda q, k, v: torch.softmax(q @ k.transpose(1, 2), -1) @ v, (_QUERY, _KEY, _VALUE)
    ),
    "attention_with_a_bias_of_keys": NoMatch(
        lambda q, k, v, m: torch.softmax(q @ k.mT + m, -1) @ v, (*_HEADS, torch.zeros(5, 6))
    ),
    "attention_with_hidden_keys": NoMatch(
        lambda q, k, v, m: torch.softmax((q @ k.mT).masked_fill(m, -9.0), -1) @ v,
        (*_HEADS, torch.ones(5, 6) > 0),
    ),
    "attention_with_kept_keys": NoMatch(
        lambda q, k, v, m: torch.softmax(torch.where(m, q @ k.mT, -torch.inf), -1) @ v,
        (*_HEADS, torch.ones(5, 6) > 0),
    ),
    "masked_attention_with_kept_keys": NoMatch(
        lambda q, k, v, m, n: torch.softmax(torch.where(m, q @ k.mT, -1e30) + n, -1) @ v,
        (_HEADS[0].clone().requires_grad_(), *_HEADS[1:], torch.ones(5, 6) > 0, torch.zeros(6)),
    ),
    "attention_with_two_masks": NoMatch(
        lambda q, k, v: (
            torch.softmax(
                q @ k.mT
                + torch.zeros(5, 6).masked_fill(torch.ones(5, 6).triu(1) > 0, -torch.inf)
                + torch.zeros(5, 6).masked_fill(torch.ones(5, 6).tril() > 0, -torch.inf),
                -1,
            )
            @ v
        ),
        _HEADS,
    ),
    "masked_attention_with_hidden_keys": NoMatch(
        lambda q, k, v, bias, drop: (
            torch.softmax((q @ k.mT + bias).masked_fill(drop, -9.0), -1) @ v
        ),
        (*_HEADS, torch.randn(5, 6), torch.ones(5, 6) > 0),
    ),
    "attention_of_matrices": NoMatch(
        lambda q, k, v: torch.bmm(torch.softmax(torch.bmm(q, k.mT), 1), v), (_QUERY, _KEY, _VALUE)
    ),
    "masked_attention_of_matrices": NoMatch(
        lambda q, k, v: torch.bmm(
            torch.softmax(torch.bmm(q, k.mT) + torch.full((6,), -torch.inf), -1), v
        ),
        (_QUERY, _KEY, _VALUE),
    ),
    "attention_of_matrices_with_hidden_keys": NoMatch(
        lambda q, k, v, drop: torch.bmm(
            torch.softmax(torch.bmm(q, k.mT).masked_fill(drop, -torch.inf), -1), v
        ),
        (_QUERY, _KEY, _VALUE, torch.ones(5, 6) > 0),
    ),
    "matmul_with_swapped_axes": NoMatch(
        lambda q, k: q @ k.permute(1, 0, 2), (torch.randn(4, 4, 4), torch.randn(4, 4, 4))
    ),
    "matmul_with_columns": NoMatch(
        lambda q, k: q @ k.permute(0, 2, 1, 3),
        (torch.randn(2, 4, 4, 4), torch.randn(2, 4, 4, 4)),
    ),
    "matmul_with_scaled_columns": NoMatch(
        lambda q, k: q @ (k.permute(0, 2, 1, 3) * 0.5),
        (torch.randn(2, 4, 4, 4), torch.randn(2, 4, 4, 4)),
    ),
    "scores_by_einsum": NoMatch(
        lambda x, y: torch.einsum("bthd,bshd->bhst", x, y),
        (torch.randn(2, 5, 3, 4), torch.randn(2, 6, 3, 4)),
    ),
    "values_by_einsum": NoMatch(
        lambda w, v: torch.einsum("bhts,bshd->bhtd", w, v),
        (torch.randn(2, 3, 5, 6), torch.randn(2, 6, 3, 4)),
    ),
    "attention_less_a_mask": NoMatch(
        lambda q, k, v: torch.softmax(q @ k.mT - torch.full((5, 6), torch.inf), -1) @ v, _HEADS
    ),
    "fill_by_expanded_mask": NoMatch(
        lambda x, mask: x.masked_fill(mask.expand(3, 4), -1.0), (_MATRIX, torch.ones(1, 4) > 0)
    ),
    "attention_with_repeated_heads": NoMatch(
        lambda q, k, v: F.scaled_dot_product_attention(q, k.repeat(1, 2, 1, 1), v),
        (torch.randn(1, 2, 5, 4), torch.randn(1, 1, 6, 4), torch.randn(1, 2, 6, 4)),
    ),
    # bounds
    "relu_of_relu": NoMatch(lambda x: F.relu(torch.relu(x), inplace=True)),
    "relu_of_positive": NoMatch(lambda x: torch.relu(torch.tanh(x))),
    "relu_by_clamp": NoMatch(lambda x: torch.clamp(x, min=0), (_WANTS_GRADIENT,)),
    "clamp_from_below_then_above": NoMatch(lambda x: x.clamp(min=1, max=2).clamp(max=3)),
    "clamp_from_above_then_below": NoMatch(lambda x: x.clamp(max=1).clamp(min=2)),
    "clamp_of_relu": NoMatch(lambda x: torch.relu(x).clamp(max=-1)),
    "clamp_of_clamp": NoMatch(lambda x: x.clamp(0, 1).clamp(2, 3)),
    # casts
    "cast_to_same": NoMatch(lambda x: x.to(torch.float64), (_MATRIX,)),
    "cast_like_same": NoMatch(lambda x, y: x.type_as(y), (_MATRIX, _INTEGERS)),
    "move_to_same": NoMatch(lambda x: x.to("meta")),
    "cast_of_wider_cast": NoMatch(lambda x: x.to(torch.bfloat16).to(torch.float32)),
    # comparisons
    "negated_equal": NoMatch(lambda x, y: ~(x <= y), (_INTEGERS, _INTEGERS)),
    "negated_not_equal": NoMatch(lambda x, y: ~(x > y), (_INTEGERS, _INTEGERS)),
    "negated_less": NoMatch(lambda x, y: ~(x < y), (_NAN, _NAN)),
    "negated_less_or_equal": NoMatch(lambda x: ~(x <= 1.5), (_INTEGERS,)),
    "negated_greater": NoMatch(lambda x, y: ~(x > y), (_INTEGERS, _MATRIX)),
    "negated_greater_or_equal": NoMatch(lambda x: ~(x >= 0), (_NAN,)),
    # convolution
    "bias_of_convolution_1d": NoMatch(
        lambda x, w, b: F.conv1d(x, w) + b,
        (torch.ones(2, 3, 8), torch.ones(6, 3, 3), torch.ones(6)),
    ),
    "bias_of_convolution_2d": NoMatch(
        lambda x, w, b: F.conv2d(x, w) + b,
        (torch.ones(2, 3, 4, 4), torch.ones(2, 3, 3, 3), torch.ones(2, 1)),
    ),
    "bias_of_convolution_3d": NoMatch(
        lambda x, w, b: F.conv3d(x, w, b) + b.reshape(2, 1, 1, 1),
        (torch.ones(1, 3, 4, 4, 4), torch.ones(2, 3, 3, 3, 3), torch.ones(2)),
    ),
    "padding_of_convolution_1d": NoMatch(
        lambda x, w: F.conv1d(F.pad(x, (2, 0)), w), (torch.ones(2, 3, 8), torch.ones(6, 3, 3))
    ),
    "padding_of_convolution_2d": NoMatch(
        lambda x, w: F.conv2d(F.pad(x, (1, 1, 1, 1), value=1.0), w),
        (torch.ones(2, 3, 4, 4), torch.ones(2, 3, 3, 3)),
    ),
    # elementary
    "add_zero": NoMatch(lambda x: x + 0.0, (_INTEGERS,)),
    "negated_difference": NoMatch(lambda x, y: -(x + y), (_MATRIX, _MATRIX)),
    "scale_of_scale": NoMatch(lambda x: x * 1e-20 * 1e-20),
    "multiply_by_reciprocal": NoMatch(lambda x, y: x * (1 / y), (_MATRIX, torch.randn(3, 1))),
    "square_root_by_power": NoMatch(lambda x: x**0.25),
    "reciprocal_by_power": NoMatch(lambda x: x**-1.0, (_INTEGERS + 1,)),
    "reciprocal_root": NoMatch(lambda x: 2 / torch.sqrt(x)),
    "root_of_square": NoMatch(lambda x: torch.sqrt(x * x), (_INTEGERS,)),
    "exponential_minus_one": NoMatch(lambda x: 1 - torch.exp(x)),
    "logarithm_of_one_plus": NoMatch(lambda x: torch.log(2 + x)),
    "logarithm_of_sigmoid": NoMatch(lambda x: torch.log(torch.sigmoid(x).t())),
    "complement_of_sigmoid": NoMatch(lambda x: torch.sigmoid(x) - 1),
    "hyperbolic_tangent_by_sigmoid": NoMatch(lambda x: 2 * torch.sigmoid(x) - 1),
    "power_of_two": NoMatch(lambda x: x**2),
    # inference
    "dropout_in_eval": NoMatch(lambda x: F.dropout(x, 0.25, training=True)),
    "random_relu_in_eval": NoMatch(lambda x: F.rrelu(x, 0.1, 0.3, training=True)),
    # joins
    "concatenation_of_one": NoMatch(lambda x: torch.cat([x], 0), (_MATRIX.t(),)),
    "concatenation_of_parts": NoMatch(lambda x: torch.cat(x.chunk(2, 1), 0)),
    "concatenation_of_halves": NoMatch(
        lambda x: torch.cat([x.split(2, 1)[0], x.split(2, 1)[1]], 1), (torch.randn(3, 6),)
    ),
    "stack_of_slices": NoMatch(lambda x: torch.stack(x.unbind(0), 1), (torch.randn(3, 3),)),
    # linear
    "linear_by_matmul": NoMatch(
        lambda x, w, b: x @ w.t() + b, (torch.randn(3, 4), torch.randn(5, 4), torch.randn(3, 1))
    ),
    "linear_without_bias": NoMatch(lambda x, w: x @ w, (_MATRIX, torch.randn(4, 4))),
    "linear_then_bias": NoMatch(
        lambda x, w, b: F.linear(x, w) + b, (_MATRIX, torch.randn(3, 4), torch.randn(3, 1))
    ),
    "linear_by_addmm": NoMatch(
        lambda x, w, b: torch.addmm(b, x, w.t(), alpha=2),
        (_MATRIX, torch.randn(5, 4), torch.randn(5)),
    ),
    "sum_with_product": NoMatch(
        lambda x, y, b: x @ y + b, (_MATRIX, torch.randn(4, 3), torch.randn(2, 1, 3))
    ),
    "matmul_by_einsum": NoMatch(
        lambda x, y: torch.einsum("ij,jk->ki", x, y), (_MATRIX, torch.randn(4, 3))
    ),
    "transposed_matmul_by_einsum": NoMatch(
        lambda x, y: torch.einsum("bid,cjd->bij", x, y), (_QUERY, _KEY)
    ),
    "linear_by_einsum": NoMatch(
        lambda x, w: torch.einsum("ik,jk->ji", x, w), (_MATRIX, torch.randn(5, 4))
    ),
    # normalisation
    "layer_norm_by_hand": NoMatch(
        lambda x: (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True) + 1e-5)
    ),
    "layer_norm_with_weight": NoMatch(
        lambda x, w, b: F.layer_norm(x, (4,)) * w + b, (_MATRIX, torch.ones(3, 1), torch.ones(4))
    ),
    "rms_norm_by_hand": NoMatch(lambda x: x * torch.rsqrt((x * x).mean(0, keepdim=True) + 1e-5)),
    "rms_norm_with_weight": NoMatch(
        lambda x, w: F.rms_norm(x, (4,), None, 1e-5) * w, (_MATRIX, torch.ones(3, 4))
    ),
    "softmax_by_exp": NoMatch(
        lambda x: torch.exp(x) / torch.exp(x).sum(-1, keepdim=True), (_MATRIX.t(),)
    ),
    "log_softmax_by_softmax": NoMatch(lambda x: torch.log(torch.softmax(x, -1, torch.float64))),
    "softmax_in_same_dtype": NoMatch(lambda x: torch.softmax(x, -1, dtype=torch.float64)),
    "softmax_in_float32": NoMatch(
        lambda x: torch.softmax(x, -1, dtype=torch.float32).to(torch.float16), (_MATRIX.bfloat16(),)
    ),
    "logarithm_of_summed_exp": NoMatch(lambda x: torch.log(torch.exp(x).mean(-1))),
    "mean_by_sum": NoMatch(lambda x: x.sum(-1) / 3),
    "variance_by_hand": NoMatch(lambda x: (x - x.mean(1, keepdim=True)).square().mean(0)),
    # shapes
    "transpose_of_transpose": NoMatch(
        lambda x: x.transpose(0, 1).transpose(0, 2), (torch.randn(2, 3, 4),)
    ),
    "flip_of_matrix_back": NoMatch(lambda x: x.t().exp().t()),
    "permute_of_permute": NoMatch(lambda x: x.permute(1, 0).exp().permute(1, 0)),
    "permute_to_same": NoMatch(lambda x: x.permute(1, 0), (torch.randn(1, 1),)),
    "reshape_to_same": NoMatch(lambda x: x.reshape(4, 3)),
    "view_as_same": NoMatch(lambda x: x.view(12)),
    "flatten_to_same": NoMatch(lambda x: x.flatten(0, 1)),
    "shape_as_same": NoMatch(lambda x, y: x.view_as(y), (_MATRIX, torch.randn(4, 3))),
    "reshape_of_reshape": NoMatch(lambda x: x.reshape(12).reshape(4, 3), (_MATRIX.t(),)),
    "view_of_view": NoMatch(lambda x: x.view(12).exp().view(4, 3)),
    "contiguous_of_contiguous": NoMatch(lambda x: x.contiguous(), (_MATRIX.t(),)),
    "expand_to_same": NoMatch(lambda x: x.expand(2, 3, 4)),
    "expand_of_expand": NoMatch(lambda x: x.expand(3, 4).expand(2, -1, 4), (torch.randn(1, 4),)),
    "unsqueeze_then_squeeze": NoMatch(lambda x: x.unsqueeze(0).squeeze(1)),
    "squeeze_then_unsqueeze": NoMatch(lambda x: x.squeeze(1).unsqueeze(0), (torch.randn(3, 1),)),
    "squeeze_of_nothing": NoMatch(lambda x: x.squeeze(1), (torch.randn(3, 1),)),
    "repeat_once": NoMatch(lambda x: x.repeat(1, 1, 1)),
    "reverse_of_reverse": NoMatch(lambda x: x.flip(0).flip(1)),
    "pad_by_nothing": NoMatch(lambda x: F.pad(x, (0, 1))),
    "narrow_of_narrow": NoMatch(lambda x: x.narrow(0, 1, 2).narrow(1, 0, 2)),
    "sum_then_squeeze": NoMatch(lambda x: x.sum(1, keepdim=True).squeeze(0)),
    "mean_then_squeeze": NoMatch(lambda x: x.mean(1, keepdim=True).squeeze()),
}


@pytest.fixture(params=sorted(RULES))
def rule(request: pytest.FixtureRequest) -> Rule:
    return RULES[request.param]


def test_every_rule_has_a_place_where_it_must_not_act() -> None:
    missing = sorted(set(RULES) - set(_MUST_NOT_MATCH))
    assert not missing, "add a program that each must leave alone to _MUST_NOT_MATCH"
    assert set(_MUST_NOT_MATCH) == set(RULES)


def test_rules_are_found_by_their_module() -> None:
    names = [rule.name for rule in rules_in("shapes")]
    assert names[0] == "transpose_of_transpose"
    assert "relu_of_relu" not in names


# One rule of attention takes as long to prove as most others together.
_PROVEN_IN_SWEEPS = {name for name in RULES if "attention" in name} - {"attention_by_hand"}


@pytest.mark.parametrize("name", sorted(set(RULES) - _PROVEN_IN_SWEEPS))
def test_rule_is_proven(name: str) -> None:
    assert prove(RULES[name], trials=2) >= 2


@pytest.mark.sweep
@pytest.mark.parametrize("name", RULES)
def test_rule_is_proven_on_more_inputs(name: str) -> None:
    assert prove(RULES[name], trials=24) >= 2


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
    _, before, _ = _documented(rule)
    assert rewrite(_trace(rule, before), rule).count == 0


def test_rule_does_what_its_docstring_says(rule: Rule) -> None:
    """`before  →  after`, both evaluated as Python over the rule's parameters."""
    _, before, after = _documented(rule)
    gm, wanted = _trace(rule, before), _trace(rule, after)
    propagate_types(gm, tuple(_tensors(_operands_of(rule)).values()))
    assert rewrite(gm, rule).count == 1
    assert _plain(gm) == _plain(wanted)


def test_inexact_rule_finds_what_the_exact_ones_left(rule: Rule) -> None:
    """The pipeline runs the exact rules first; they may not take a pattern apart."""
    if rule.exact:
        return
    exact = [other for _, other in RULES.items() if other.exact]
    inexact = [other for _, other in RULES.items() if not other.exact]
    for example in examples_of(rule):
        rewrite(example.module, exact)
        assert rule.name in rewrite(example.module, inexact).hits, format_graph(example.module)


def test_documented_rewriting_is_read_over_several_lines() -> None:
    parameters, before, after = _documented(RULES["rms_norm_by_hand"])
    assert parameters == ["x", "eps"]
    assert before.endswith("keepdim=True) + eps)")
    assert after == "F.rms_norm(x, last_size, None, eps)"


def _documented(rule: Rule) -> tuple[list[str], str, str]:
    text = inspect.cleandoc(rule.doc).partition("Rewrites:\n")[2]
    block = re.split(r"\n\s*\n|\n(?=\S)", text)[0]
    before, arrow, after = (" ".join(part.split()) for part in block.partition("→"))
    assert arrow, f"{rule.name} has no `before  →  after` in its docstring"
    return list(rule.pattern.captures), before, after


def _operands_of(rule: Rule) -> dict[str, Any]:
    """Operands for a rule's parameters, and what else its docstring names."""
    sample = rule.samples[0] if rule.samples else {}
    found = dict(_OPERANDS.get(rule.name, {}))
    for name in rule.pattern.captures:
        if name in found:
            continue
        if name in sample:
            value = sample[name]
            found[name] = torch.randn(value) if isinstance(value, tuple) else value
        else:
            found[name] = _CONSTANTS.get(name, _MATRIX)
        demand = rule.pattern.operands.get(name)
        if isinstance(found[name], torch.Tensor) and demand is not None and demand.dtypes:
            found[name] = found[name].to(demand.dtypes[0])
    return {**{n: found.pop(n) for n in rule.pattern.captures}, **found}


def _tensors(operands: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in operands.items() if isinstance(value, torch.Tensor)}


def _trace(rule: Rule, expression: str) -> fx.GraphModule:
    operands = _operands_of(rule)
    tensors = _tensors(operands)
    scope: dict[str, Any] = {"torch": torch, "F": F, **operands}
    # The result is used further on: a caller may not get an operand in place of a fresh tensor.
    return symbolic_trace(eval(f"lambda {', '.join(tensors)}: torch.tan({expression})", scope))


def _plain(gm: fx.GraphModule) -> str:
    """The graph's text without types, nodes named by position."""
    for index, node in enumerate(node for node in gm.graph.nodes if node.op != "output"):
        node.meta.clear()
        node.name = f"v{index}"
    return format_graph(gm)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("name", "by_hand", "low"),
    [
        ("sigmoid_by_exp", lambda x: 1 / (1 + torch.exp(-x)), 6.0),
        ("hyperbolic_tangent_by_sigmoid", lambda x: 2 * torch.sigmoid(2 * x) - 1, -10.0),
    ],
)
def test_gradients_of_saturated_units_err_at_most_twice_as_much(
    name: str, by_hand: Callable[..., Any], low: float, dtype: torch.dtype
) -> None:
    x = torch.linspace(low, low + 2, 99).to(dtype).requires_grad_()
    double = x.detach().double().requires_grad_()
    (truth,) = torch.autograd.grad(by_hand(double).sum(), double)
    (eager,) = torch.autograd.grad(by_hand(x).sum(), x)
    gm = symbolic_trace(by_hand)
    propagate_types(gm, (x,))
    rewrite(gm, RULES[name])
    (got,) = torch.autograd.grad(gm(x).sum(), x)
    assert (got - truth).abs().max() <= 2 * (eager - truth).abs().max()
    propagate_types(gm, (x.detach(),))
    assert rewrite(gm, RULES[name]).count == 1


def test_a_lower_bound_of_minus_zero_is_no_relu() -> None:
    gm = symbolic_trace(lambda x: torch.clamp(x, min=-0.0))
    propagate_types(gm, (_MATRIX,))
    assert rewrite(gm, rules_in("bounds")).count == 0
    assert torch.signbit(gm(-_MATRIX.abs())).all()
