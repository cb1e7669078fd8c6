"""What fails in fxkit itself is left out of a compiled program, with one warning."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxkit
from fxkit import quantization
from fxkit.compiling import graph_compiler
from fxkit.errors import PassError
from fxkit.lower.compiling.convolve_integers import ConvolveIntegers
from fxkit.lower.compiling.group_scales import SpellOutGroups
from fxkit.lower.compiling.multiply_activations import MultiplyActivations
from fxkit.lower.compiling.multiply_integers import MultiplyIntegers
from fxkit.passes import Pass
from fxkit.passes.canonicalise import Canonicalise
from fxkit.passes.common_subexpression_elimination import CommonSubexpressionElimination
from fxkit.passes.constant_folding import ConstantFolding
from fxkit.passes.dead_code_elimination import DeadCodeElimination
from fxkit.passes.decompose_for_kernels import DecomposeForKernels
from fxkit.passes.pipelines import LOWERING
from fxkit.passes.recompose import Recompose
from fxkit.passes.remove_inference_no_ops import RemoveInferenceNoOps
from fxkit.patterns.replacer import Replacer
from fxkit.patterns.rules import RULES

PASSES = (
    DecomposeForKernels, Canonicalise, Recompose, ConstantFolding, CommonSubexpressionElimination,
    DeadCodeElimination, RemoveInferenceNoOps,
)  # fmt: skip


class Wanted(Exception):
    """Raised on purpose."""


def attends(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = (q * 1) @ k.transpose(-2, -1) / 2.0
    return torch.softmax(scores, -1) @ v + torch.relu(torch.relu(q))


STEPS: list[Callable[..., torch.Tensor]] = [
    lambda x, y: torch.relu(torch.relu(x)),
    lambda x, y: x * 1 + y,
    lambda x, y: torch.neg(-x) * y,
    lambda x, y: torch.softmax(x @ y.transpose(-2, -1) / 2.0, -1) @ y,
    lambda x, y: torch.tanh(x + 0) - y,
    lambda x, y: F.dropout(x, 0.5, False) * y.sigmoid(),
    lambda x, y: x.transpose(2, 3).transpose(2, 3) + (y + 1) * (y + 1),
    lambda x, y: x * torch.sigmoid(x) + torch.arange(4.0) * 2,
    lambda x, y: F.layer_norm(x, (4,)) / 1,
]


def random_program(seed: int) -> Callable[..., torch.Tensor]:
    """Return a program of three tensors whose steps rules and passes find work in."""
    choices = random.Random(seed)
    plan = [(choices.choice(STEPS), choices.random(), choices.random()) for _ in range(5)]

    def program(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        values = [q, k, v]
        for step, one, other in plan:
            values.append(step(*(values[int(pick * len(values))] for pick in (one, other))))
        return values[-1] + values[-2]

    return program


def inputs() -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(1, 2, 4, 4) for _ in range(3))


@contextmanager
def failing_rule(name: str, is_late: bool) -> Iterator[str]:
    """Let a rule raise: in its predicate, or when half of its replacement is made."""
    insert = Replacer.insert

    def raises(match: Any) -> bool:
        raise Wanted

    def insert_and_raise(replacer: Any, candidate: Any, *rest: Any) -> Any:
        made = insert(replacer, candidate, *rest)
        if candidate.name == name:
            raise Wanted
        return made

    with pytest.MonkeyPatch.context() as patch:
        if is_late:
            patch.setattr(Replacer, "insert", insert_and_raise)
        else:
            patch.setitem(RULES[name].__dict__, "where", raises)
        yield name


@contextmanager
def failing_pass(kind: type[Pass], is_late: bool) -> Iterator[str]:
    """Let a pass raise: at once, or when all of its changes are made."""
    apply = kind.apply

    def raises(self: Any, edit: Any, context: Any) -> None:
        if is_late:
            apply(self, edit, context)
        raise Wanted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "apply", raises)
        yield kind().name


def rules_used(program: Callable[..., Any], args: tuple[torch.Tensor, ...]) -> list[str]:
    """Return the rules that find work in a program when it is compiled."""
    gm = fxkit.capture(program, args).graph_module
    done = fxkit.PassManager(LOWERING, verify="structure").run(gm)
    return sorted({name for record in done.records for name in record.rewrites})


def check_one_fault(seed: int) -> None:
    """Compile a random program while something fails; it is right, with one warning."""
    choices = random.Random(seed)
    torch.manual_seed(seed)
    program, args = random_program(seed), inputs()
    used = rules_used(program, args)
    is_late = choices.random() < 0.5
    if used and choices.random() < 0.6:
        failing = failing_rule(choices.choice(used), is_late)
    else:
        failing = failing_pass(choices.choice(PASSES), is_late)
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught, failing as name:
        warnings.simplefilter("always")
        compiled = fxkit.compile(program)
        results = [compiled(*args), compiled(*args)]
        wanted = program(*args)
    for result in results:
        torch.testing.assert_close(result, wanted)
    (warning,) = caught
    assert name in str(warning.message) and "Please report it" in str(warning.message)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("seed", range(4))
def test_a_fault_of_our_own_is_left_out_with_one_warning(seed: int) -> None:
    check_one_fault(seed)


@pytest.mark.sweep
def test_faults_of_our_own_are_left_out_of_500_programs() -> None:
    for seed in range(100, 600):
        check_one_fault(seed)


def test_the_other_rules_of_the_pass_go_on() -> None:
    args = inputs()
    with torch.no_grad(), failing_rule("relu_of_relu", is_late=False):
        compiled = fxkit.compile(attends)
        with pytest.warns(UserWarning, match="rule relu_of_relu of the pass canonicalise failed"):
            compiled(*args)
    (module,) = compiled.compiled_modules
    nodes = [node for region in module.regions for node in region.nodes]
    assert "mul" not in nodes and "relu" in nodes and "relu_1" in nodes
    torch.testing.assert_close(compiled(*args), attends(*args))


def convolution() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(nn.Conv2d(8, 16, 3), nn.ReLU()), torch.randn(2, 8, 9, 9)


def layer() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU()), torch.randn(8, 64)


class Products(nn.Module):
    """Multiplies two activations."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x @ x.mT, -1) @ x


def products() -> tuple[nn.Module, torch.Tensor]:
    return Products(), torch.randn(8, 64)


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize(
    ("kind", "make", "spec"),
    [
        (MultiplyIntegers, layer, quantization.int8_static()),
        (MultiplyIntegers, layer, quantization.int8_dynamic()),
        (MultiplyActivations, products, quantization.int8_static()),
        (ConvolveIntegers, convolution, quantization.int8_static()),
        (SpellOutGroups, layer, quantization.int4_weight_only(32)),
    ],
)
def test_passes_over_quantised_programs_are_left_out_alone(
    kind: type[Pass], make: Callable[[], tuple[nn.Module, torch.Tensor]], spec: Any, is_late: bool
) -> None:
    model, x = make()
    prepared = quantization.prepare(model.eval(), (x,), spec)
    prepared(x)
    quantized = quantization.convert(prepared)
    with torch.no_grad(), failing_pass(kind, is_late) as name:
        compiled = fxkit.compile(quantized)
        with pytest.warns(UserWarning, match=f"the pass {name}.* failed") as caught:
            results = [compiled(x), compiled(x)]
        wanted = quantized(x)
    for result in results:
        torch.testing.assert_close(result, wanted, atol=0.05, rtol=0.05)
    assert len(caught) == 1
    (module,) = compiled.compiled_modules
    assert any(region.kernel is not None for region in module.regions)


def test_faults_in_training_are_left_out() -> None:
    args = tuple(x.requires_grad_() for x in inputs())
    with failing_pass(Recompose, is_late=True):
        compiled = fxkit.compile(attends)
        with pytest.warns(UserWarning, match=r"the pass recompose.* failed"):
            gradient = torch.autograd.grad(compiled(*args).sum(), args)
            again = torch.autograd.grad(compiled(*args).sum(), args)
    wanted = torch.autograd.grad(attends(*args).sum(), args)
    torch.testing.assert_close(gradient, wanted)
    torch.testing.assert_close(again, wanted)


def test_a_graph_that_lowering_fails_at_runs_in_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(*_: Any, **__: Any) -> None:
        raise Wanted("no kernels")

    monkeypatch.setattr(graph_compiler, "lower", raises)
    args, compiled = inputs(), fxkit.compile(attends)
    with (
        torch.no_grad(),
        pytest.warns(UserWarning, match="lowering failed: Wanted: no kernels") as caught,
    ):
        torch.testing.assert_close(compiled(*args), attends(*args))
        torch.testing.assert_close(compiled(*args), attends(*args))
    assert len(caught) == 1 and "Please report it" in str(caught[0].message)


@dataclass(frozen=True)
class Mine(Pass):
    """A pass of the user's that raises."""

    def apply(self, edit: Any, context: Any) -> None:
        raise Wanted("mine")


def test_a_pass_of_the_users_raises() -> None:
    with torch.no_grad(), pytest.raises(PassError, match="expected mine to run, got Wanted: mine"):
        fxkit.compile(attends, passes=(*LOWERING, Mine()))(*inputs())


@dataclass(frozen=True)
class Applies(Pass):
    """A pass of the user's that applies a rule of the user's that raises."""

    def apply(self, edit: Any, context: Any) -> None:
        def raises(match: Any) -> bool:
            raise Wanted("my rule")

        context.rewrite(edit, [fxkit.rule(lambda x: x.relu(), lambda x: x, where=raises)])


def test_a_rule_of_the_users_raises() -> None:
    with torch.no_grad(), pytest.raises(PassError, match="Wanted: my rule"):
        fxkit.compile(attends, passes=(Applies(),))(*inputs())


def test_our_passes_in_a_list_of_the_users_are_left_out_too() -> None:
    args = inputs()
    with torch.no_grad(), failing_pass(Canonicalise, is_late=True):
        compiled = fxkit.compile(attends, passes=(Canonicalise(), DeadCodeElimination()))
        with pytest.warns(UserWarning, match="the pass canonicalise failed"):
            torch.testing.assert_close(compiled(*args), attends(*args))
