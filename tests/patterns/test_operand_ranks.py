"""Rules on operands of every rank, with axes of size one and none, and of other dtypes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

import fxkit
from fxkit.analysis.tensor_types import propagate_types
from fxkit.ir.printer import format_graph
from fxkit.passes.manager import PassManager
from fxkit.passes.pipelines import SIMPLIFY
from fxkit.patterns.engine import rewrite
from fxkit.patterns.inputs import captures_of, make_operands, operand_cases, pattern_module
from fxkit.patterns.rewriting import Rule
from fxkit.patterns.rules import RULES
from fxkit.patterns.variants import plain_variants
from fxkit.tracing.symbolic import symbolic_trace

_DTYPES = (torch.float32, torch.float64, torch.int64, torch.bool)
_MOST_AXES = 5


def reshaped(shape: tuple[int, ...], choices: random.Random) -> tuple[int, ...]:
    """Return a shape that broadcasts with the given one, or nearly: other axes, of 1 or 0."""
    kept = shape[choices.randint(0, len(shape)) :] if choices.random() < 0.6 else shape
    sizes = [choices.choice([size, size, size, 1, 0]) for size in kept]
    if choices.random() < 0.6:
        sizes = list(kept)
    more = [choices.choice([1, 2]) for _ in range(choices.randint(0, _MOST_AXES - len(sizes)))]
    return (*(more if choices.random() < 0.3 else ()), *sizes)


def check(rule: Rule, seed: int) -> bool:
    """Apply a rule to operands of other shapes and dtypes; tell whether it accepted them."""
    choices = random.Random(f"{rule.name} {seed}")
    generator = torch.Generator().manual_seed(seed)
    variant = choices.choice(plain_variants(rule.pattern))
    plain = replace(rule, pattern=variant)
    sample = choices.choice([case for case, *_ in operand_cases(plain)])
    dtype = choices.choice(_DTYPES)
    values = make_operands(plain, sample, dtype, (), generator)
    names = [n for n in captures_of(plain) if isinstance(values[n], torch.Tensor)]
    for name in choices.sample(names, choices.choice([1, 1, len(names)])):
        values[name] = _like(values[name], choices)
    gm, args = pattern_module(plain, values), tuple(values[n] for n in names)
    try:
        expected = gm(*args)
    except (RuntimeError, IndexError, TypeError, ValueError):
        return False  # shapes or dtypes that the operators do not take
    propagate_types(gm, args)
    if not rewrite(gm, rule, limit=1).count:
        return False
    torch.testing.assert_close(gm(*args), expected, equal_nan=True)
    return True


def _like(value: torch.Tensor, choices: random.Random) -> torch.Tensor:
    shape = reshaped(tuple(value.shape), choices)
    dtype = choices.choice(_DTYPES) if choices.random() < 0.2 else value.dtype
    made = torch.empty(shape, dtype=torch.float64)
    made = made.uniform_(-4, 4, generator=torch.Generator().manual_seed(choices.randint(0, 999)))
    return made.to(dtype)


@pytest.mark.parametrize("seed", range(1))
def test_rules_hold_on_operands_of_other_ranks(seed: int) -> None:
    accepted = sum(check(rule, seed) for _, rule in RULES.items())
    assert accepted > len(RULES) // 4


@pytest.mark.sweep
@pytest.mark.parametrize("name", list(RULES))
def test_each_rule_holds_on_operands_of_other_ranks(name: str) -> None:
    for seed in range(100):
        check(RULES[name], seed)


FLAT = {
    "a row": lambda q, k, v: torch.softmax(q @ k.mT + torch.arange(16.0) * -0.1, -1) @ v,
    "a number": lambda q, k, v: torch.softmax(q @ k.mT + torch.tensor(0.5), -1) @ v,
    "one in a row": lambda q, k, v: torch.softmax(q @ k.mT + torch.ones(1), -1) @ v,
    "in place": lambda q, k, v: torch.softmax((q @ k.mT).add_(torch.arange(16.0)), -1) @ v,
    "kept keys": lambda q, k, v: torch.softmax(
        q @ k.mT + (1 - (torch.arange(16) % 3 > 0).float()) * -1e4, -1
    ) @ v,
    "hidden keys": lambda q, k, v: torch.softmax(
        (q @ k.mT).masked_fill(torch.arange(16) % 3 == 0, -1e30), -1
    ) @ v,
}  # fmt: skip


@pytest.mark.parametrize("name", FLAT)
def test_attention_takes_masks_of_few_axes(name: str) -> None:
    args = tuple(torch.randn(2, 3, 16, 8) for _ in range(3))
    gm = symbolic_trace(FLAT[name])
    expected = gm(*args)
    PassManager(SIMPLIFY, args=args).run(gm)
    assert "aten.scaled_dot_product_attention" in format_graph(gm)
    torch.testing.assert_close(gm(*args), expected)
    with torch.no_grad():
        torch.testing.assert_close(fxkit.compile(FLAT[name])(*args), expected)
