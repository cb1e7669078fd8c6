"""Rules on operands of every rank, of axes of one and none, other dtypes and symbolic sizes."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import fx

import fxkit
from fxkit.analysis.tensor_types import propagate_types
from fxkit.errors import InvalidGraphError
from fxkit.ir.printer import format_graph
from fxkit.passes.manager.manager import PassManager
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


@dataclass(frozen=True)
class Drawn:
    """A reading of a rule's pattern as a program, and what it is called with."""

    gm: fx.GraphModule
    names: list[str]
    values: dict[str, Any]

    @property
    def args(self) -> tuple[torch.Tensor, ...]:
        return tuple(self.values[name].detach() for name in self.names)


def draw(rule: Rule, seed: int, dtypes: tuple[torch.dtype, ...]) -> tuple[Drawn, random.Random]:
    """Return a rule's pattern on operands some of which have another shape or dtype."""
    choices = random.Random(f"{rule.name} {seed}")
    generator = torch.Generator().manual_seed(seed)
    plain = replace(rule, pattern=choices.choice(plain_variants(rule.pattern)))
    sample = choices.choice([case for case, *_ in operand_cases(plain)])
    values = make_operands(plain, sample, choices.choice(dtypes), (), generator)
    names = [n for n in captures_of(plain) if isinstance(values[n], torch.Tensor)]
    for name in choices.sample(names, choices.choice([1, 1, len(names)])):
        values[name] = _like(values[name], choices)
    return Drawn(pattern_module(plain, values), names, values), choices


def run(program: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
    """Run a program; None where its operators do not take these shapes or dtypes."""
    try:
        return program(*args)
    except (RuntimeError, IndexError, TypeError, ValueError):
        return None


def check(rule: Rule, seed: int) -> bool:
    """Apply a rule to operands of other shapes and dtypes; tell whether it accepted them."""
    drawn, _ = draw(rule, seed, _DTYPES)
    gm, args = drawn.gm, drawn.args
    expected = run(gm, args)
    if expected is None:
        return False
    try:
        propagate_types(gm, args)
    except InvalidGraphError:  # eager takes operands of two dtypes where one has no elements
        assert not all(x.numel() for x in args)
        return False
    if not rewrite(gm, rule, limit=1).count:
        return False
    torch.testing.assert_close(gm(*args), expected, equal_nan=True)
    return True


def check_in_half(rule: Rule, seed: int) -> bool:
    """Apply a rule in half precision: it errs at most twice as much as before, by float64."""
    drawn, _ = draw(rule, seed, (torch.bfloat16, torch.float16))
    gm, args = drawn.gm, drawn.args
    exact, expected = copy.deepcopy(gm), run(gm, args)
    if expected is None:
        return False
    propagate_types(gm, args)
    if not rewrite(gm, rule, limit=1).count:
        return False
    got = gm(*args)
    truth = run(_in_double(exact), tuple(x.double() if x.is_floating_point() else x for x in args))
    for e, g, t in zip(expected, got, expected if truth is None else truth, strict=True):
        assert (e.dtype, e.shape) == (g.dtype, g.shape)
        assert not e.numel() or e.stride() == g.stride()  # those of no elements address nothing
        assert torch.equal(e.isnan(), g.isnan())
        if e.dtype == torch.float64:  # what is by hand is no nearer to the truth
            torch.testing.assert_close(g, e, equal_nan=True)
        elif not torch.equal(e.nan_to_num(), g.nan_to_num()):
            assert _error(g, t) <= 2 * _error(e, t) + torch.finfo(e.dtype).eps * _scale(t)
    return True


def _in_double(gm: fx.GraphModule) -> fx.GraphModule:
    """Make casts to narrower floating-point dtypes casts to float64."""

    def widened(value: Any) -> Any:
        is_narrow = isinstance(value, torch.dtype) and value.is_floating_point
        return torch.float64 if is_narrow else value

    for node in gm.graph.nodes:
        node.args = tuple(map(widened, node.args))
        node.kwargs = {key: widened(value) for key, value in node.kwargs.items()}
    gm.recompile()
    return gm


def _error(value: torch.Tensor, truth: torch.Tensor) -> float:
    difference = (value.double() - truth.double())[truth.isfinite()]
    return difference.nan_to_num(torch.inf).abs().max().item() if difference.numel() else 0.0


def _scale(truth: torch.Tensor) -> float:
    finite = truth.double()[truth.isfinite()]
    return finite.abs().max().item() if finite.numel() else 0.0


def check_with_symbolic_sizes(rule: Rule, seed: int) -> bool:
    """Apply a rule to a capture whose sizes are free, and call it at those and at others."""
    drawn, choices = draw(rule, seed, (torch.float32, torch.float64, torch.int64))
    if run(drawn.gm, drawn.args) is None:
        return False
    captured = fxkit.capture(drawn.gm, drawn.args, dynamic=True)
    if not rewrite(captured, rule, limit=1).count:
        return False
    larger: dict[int, int] = {}
    generator = torch.Generator().manual_seed(seed)

    def resized(x: torch.Tensor) -> torch.Tensor:
        sizes = [larger.setdefault(s, s + choices.choice([0, 1, 2])) for s in x.shape if s > 1]
        shape = [sizes.pop(0) if size > 1 else size for size in x.shape]
        return (
            torch.empty(shape, dtype=torch.float64).uniform_(-4, 4, generator=generator).to(x.dtype)
        )

    for args in (drawn.args, tuple(map(resized, drawn.args))):
        expected = run(drawn.gm, args)
        if expected is not None:
            torch.testing.assert_close(captured(*args), expected, equal_nan=True)
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


def test_rules_hold_in_half_precision() -> None:
    accepted = sum(check_in_half(rule, 0) for _, rule in RULES.items())
    assert accepted > len(RULES) // 4


def test_rules_hold_with_symbolic_sizes() -> None:
    accepted = [
        check_with_symbolic_sizes(rule, 0) for rule in [rule for _, rule in RULES.items()][::10]
    ]
    assert sum(accepted) > len(accepted) // 4


@pytest.mark.sweep
@pytest.mark.parametrize("name", list(RULES))
def test_each_rule_holds_in_half_precision_and_with_symbolic_sizes(name: str) -> None:
    for seed in range(10):
        check_in_half(RULES[name], seed)
        check_with_symbolic_sizes(RULES[name], seed)


@pytest.mark.sweep
@pytest.mark.parametrize("name", list(RULES))
def test_each_rule_holds_on_operands_of_other_ranks(name: str) -> None:
    for seed in range(100):
        check(RULES[name], seed)


def test_the_mean_over_a_symbolic_size_stays_a_sum() -> None:
    captured = fxkit.capture(lambda x: x.sum(-1) * 0.25, (torch.randn(3, 4),), dynamic=True)
    assert rewrite(captured, RULES["mean_by_sum"]).count == 0
    x = torch.randn(3, 5)
    torch.testing.assert_close(captured(x), x.sum(-1) * 0.25)


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


@pytest.mark.one_in(2)
@pytest.mark.parametrize("options", [{"dynamic": True}, {"fast": True}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_attention_with_a_bias_of_keys_compiles_with_all_options(
    dtype: torch.dtype, options: dict[str, bool]
) -> None:
    def program(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        bias = (torch.arange(16.0) * -0.1).to(q.dtype)
        return torch.softmax(q @ k.mT + bias, -1) @ v

    args = tuple(torch.randn(2, 3, 16, 8).to(dtype) for _ in range(3))
    with torch.no_grad():
        got = fxkit.compile(program, **options)(*args)
        truth = program(*(x.double() for x in args))
        error, eager = (_error(each, truth) for each in (got, program(*args)))
    assert error <= 2 * eager + torch.finfo(dtype).eps * _scale(truth)
