"""Proofs for pass and rule authors: does a rewrite keep the program's meaning?

fxkit.testing.prove(rule)                                    # a rule, on inputs made for it
fxkit.testing.lint_rules(rules)                              # rules that stand in one another's way
fxkit.testing.assert_rewrites(rule, before, after)           # a rule, by example
fxkit.testing.assert_equivalent(before, after, args)         # two programs
fxkit.testing.minify(gm, args, bad)                          # a small program that is still bad
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import PurePath
from typing import Any

import torch
from torch import fx

from fxkit.analysis.equivalence import Comparison, assert_equivalent, compare
from fxkit.analysis.reproducing.reduction import Minified, minify
from fxkit.analysis.reproducing.reproducer import write_reproducer
from fxkit.analysis.tensor_types import propagate_types
from fxkit.errors import RewriteError
from fxkit.ir.printer import format_graph
from fxkit.patterns.counterexamples import counterexample, tried, why_refused
from fxkit.patterns.engine import rewrite
from fxkit.patterns.inputs import captures_of, make_operands, operand_cases, pattern_module
from fxkit.patterns.lint import Finding, lint_rules
from fxkit.patterns.pattern_nodes import Pattern
from fxkit.patterns.rewriting import Rule
from fxkit.patterns.variants import plain_variants
from fxkit.tracing.symbolic import symbolic_trace

__all__ = [
    "Comparison",
    "Finding",
    "Minified",
    "assert_equivalent",
    "assert_rewrites",
    "compare",
    "lint_rules",
    "minify",
    "pattern_module",
    "prove",
    "write_reproducer",
]

# Of a pattern that can be read in many ways, how many inputs for each at least.
_FEWEST_TRIALS = 4


def prove(rule: Rule, *, trials: int = 60, seed: int = 0) -> int:
    """Check a rule on inputs made from its pattern.

    Pattern and replacement are compared in value, shape, dtype, stride, writes to operands and
    gradient over dtypes, ranks, broadcasting, non-contiguous, empty, NaN, Inf and signed zeros.
    Inputs that the rule's own predicate refuses are left out.

    Args:
        rule: The rule.
        trials: How many kinds of inputs to try, drawn at random; the plainest comes first.
        seed: Seed of the random numbers.

    Returns:
        How many inputs the rule accepted and were compared.

    Raises:
        CounterexampleError: When the two sides differ, with the smallest program and inputs found
            that show it, as text and as a script.
        RewriteError: When the rule accepted no input at all, so that nothing is proven.
    """
    variants = plain_variants(rule.pattern)
    each = max(trials // len(variants), min(trials, _FEWEST_TRIALS))
    return sum(_prove_variant(rule, variant, each, seed) for variant in variants)


def _prove_variant(rule: Rule, variant: Pattern, trials: int, seed: int) -> int:
    """Try one reading of a rule's pattern until enough inputs were accepted."""
    generator = torch.Generator().manual_seed(seed)
    plainest, *others = operand_cases(replace(rule, pattern=variant))
    random.Random(seed).shuffle(others)
    accepted, values = 0, {}
    for case in [plainest, *others]:
        if accepted == trials:
            break
        values = make_operands(rule, *case, generator)
        accepted += _prove_on(rule, replace(rule, pattern=variant), values)
    if not accepted:
        reading = " -> ".join(operation.operator for operation in variant.operations)
        program, operands = _program_of(replace(rule, pattern=variant), values)
        last = why_refused(rule, program, tuple(operands.values()))
        raise RewriteError(
            f"expected inputs that {rule.name} accepts, got none in {len(others) + 1} trials; of "
            f"the last: {last}",
            node=reading,
            source=PurePath(rule.file).name,
            hint="give samples= with the shapes and constants that its operands need",
        )
    return accepted


def _prove_on(rule: Rule, variant: Rule, values: dict[str, Any]) -> bool:
    before, tensors = _program_of(variant, values)
    args = tuple(tensors.values())
    accepted, difference = tried(rule, before, args)
    if difference is not None:
        used = captures_of(variant)
        constants = {n: v for n, v in values.items() if n not in tensors and n in used}
        raise counterexample(rule, before, args, difference, constants)
    return accepted


def _program_of(
    variant: Rule, values: dict[str, Any]
) -> tuple[fx.GraphModule, dict[str, torch.Tensor]]:
    """Return a reading of a rule's pattern as a program, and the tensors that it takes."""
    used = captures_of(variant)
    tensors = {n: v for n, v in values.items() if isinstance(v, torch.Tensor) and n in used}
    return pattern_module(variant, values), tensors


def assert_rewrites(
    rule: Rule,
    before: Callable[..., Any],
    after: Callable[..., Any] | None,
    args: tuple[Any, ...] | None = None,
) -> None:
    """Check by example what a rule makes of a program.

    Args:
        rule: The rule.
        before: A function to trace and rewrite.
        after: The function that has to come out, or None when nothing may be rewritten.
        args: Inputs, for rules that look at types.

    Raises:
        RewriteError: When something else came out.
    """
    gm = symbolic_trace(before)
    if args is not None:
        propagate_types(gm, args)
    report = rewrite(gm, rule)
    if after is None:
        if report.count:
            raise RewriteError(f"expected {rule.name} to leave it alone, got\n{format_graph(gm)}")
        return
    wanted = symbolic_trace(after)
    got_text, wanted_text = _shape_of(gm), _shape_of(wanted)
    if got_text != wanted_text:
        raise RewriteError(f"expected\n{wanted_text}\ngot\n{got_text}\n{report.table()}")


def _shape_of(gm: fx.GraphModule) -> str:
    """Return a graph's text without types and with nodes named by position, to compare graphs."""
    copied = copy.deepcopy(gm)
    for node in copied.graph.nodes:
        node.meta.clear()
    for index, node in enumerate(n for n in copied.graph.nodes if n.op != "output"):
        node.name = f"v{index}"
    return format_graph(copied)
