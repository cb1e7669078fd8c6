"""Calls that say the same are one: defaults written out, and numbers of either type."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

import fxkit
from fxkit.ir.op import resolve
from fxkit.ir.printer import format_graph
from fxkit.patterns.matcher import is_floating
from fxkit.patterns.pattern_nodes import is_same_constant
from tests.operator_samples import Sample, is_same, samples

Form = tuple[tuple[Any, ...], dict[str, Any]]


def written_out(sample: Sample) -> Iterator[Form]:
    """Yield a call with each default written out, and with each number of the other type."""
    args, kwargs = sample.node.args, dict(sample.node.kwargs)
    for name, default in defaults(sample):
        if name not in kwargs:
            yield args, {**kwargs, name: default}
            for other in of_other_type(default):
                yield args, {**kwargs, name: other}
    for name, value in kwargs.items():
        yield from ((args, {**kwargs, name: other}) for other in of_other_type(value))
    for place, value in enumerate(args):
        for other in of_other_type(value):
            yield (*args[:place], other, *args[place + 1 :]), kwargs


def defaults(sample: Sample) -> Iterator[tuple[str, Any]]:
    """Yield the parameters that a call leaves out, with what they are then."""
    call, target = resolve(sample.node), sample.node.target
    if inspect.isfunction(target):
        parameters = list(inspect.signature(target).parameters.values())
        given = len(sample.node.args)
        yield from ((p.name, p.default) for p in parameters[given:] if p.default is not p.empty)
    elif call is not None and call.operator.overload is not None:
        arguments = call.operator.schema.arguments
        for position, argument in enumerate(arguments):
            is_given = position < len(sample.node.args) and not argument.kwarg_only
            if argument.has_default_value() and not is_given:
                yield argument.name, argument.default_value


def of_other_type(value: Any) -> list[Any]:
    if type(value) is int:
        return [float(value)]
    return [int(value)] if type(value) is float and value.is_integer() else []


def outcome(sample: Sample, form: Form) -> Any:
    """Return what a call gives, or None where torch refuses it."""
    copies = sample.copies()
    args, kwargs = sample.fill(form, copies)
    torch.manual_seed(0)
    try:
        return sample.node.target(*args, **kwargs)  # type: ignore[operator]
    except Exception:
        return None


def misses(part: int, parts: int) -> tuple[int, list[str]]:
    """Return how many calls that give the same were compared, and which are held to differ."""
    count, found = 0, []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for sample in samples(part, parts):
            call = resolve(sample.node)
            if sample.node.op != "call_function" or call is None or call.name.startswith("python."):
                continue
            wanted = outcome(sample, (sample.node.args, sample.node.kwargs))
            for form in written_out(sample):
                got = None if wanted is None else outcome(sample, form)
                if got is None or not is_same(wanted, got):
                    continue
                other = sample.node.graph.create_node("call_function", sample.node.target, *form)
                count += 1
                if not is_taken_for(call, resolve(other), is_floating(sample.node)):
                    found.append(f"{sample.name}: {call} and {resolve(other)}")
    return count, found


def is_taken_for(call: Any, other: Any, in_floating: bool) -> bool:
    """Tell whether a pattern that is one call matches another one."""
    if (call.name, call.arguments.keys()) != (other.name, other.arguments.keys()):
        return False
    pairs = ((value, other.arguments[name]) for name, value in call.arguments.items())
    return all(a is b or is_same_constant(a, b, in_floating) or a == b for a, b in pairs)


@pytest.mark.parametrize("part", [7])
def test_some_operators_are_told_alike(part: int) -> None:
    count, found = misses(part, 60)
    assert count > 10 and not found, "\n".join(found)


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(6))
def test_all_operators_are_told_alike(part: int) -> None:
    count, found = misses(part, 6)
    assert count > 200 and not found, "\n".join(found)


FORMS = [
    (lambda x: F.elu(x), lambda x: F.elu(x, alpha=1)),
    (lambda x: F.elu(x), lambda x: torch.ops.aten.elu(x)),
    (lambda x: F.elu(x, 2), lambda x: F.elu(x, alpha=2.0)),
    (lambda x: F.hardtanh(x), lambda x: F.hardtanh(x, -1, 1)),
    (lambda x: F.leaky_relu(x, 1), lambda x: F.leaky_relu(x, 1.0)),
    (lambda x: F.layer_norm(x, (3,), eps=1), lambda x: F.layer_norm(x, (3,), eps=1.0)),
    (lambda x: F.normalize(x), lambda x: F.normalize(x, 2, dim=1, eps=1e-12)),
    (lambda x: F.interpolate(x, None, 2), lambda x: F.interpolate(x, scale_factor=2)),
    (lambda x: x.norm(), lambda x: torch.norm(x, "fro", keepdim=False)),
    (lambda x: x.unique(), lambda x: torch.unique(x, sorted=True)),
    (lambda x: torch.cdist(x, x), lambda x: torch.cdist(x, x, p=2)),
    (lambda x: F.max_unpool2d(x, x, 2), lambda x: F.max_unpool2d(x, x, 2, padding=0)),
]


@pytest.mark.parametrize(("pattern", "program"), FORMS)
def test_a_number_of_either_type_matches_where_no_dtype_hangs_on_it(
    pattern: Any, program: Any
) -> None:
    for one, other in ((pattern, program), (program, pattern)):
        gm = fxkit.symbolic_trace(other)
        fxkit.rewrite(gm, [fxkit.rule(one, lambda x: torch.sin(x))])
        assert "torch.sin" in gm.code


def test_the_number_of_one_call_is_not_taken_for_that_of_another() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    calls = [resolve(graph.call_function(F.elu, (x, alpha))) for alpha in (1, 2, 3.5, 2**60)]
    assert [call and call.arguments["alpha"] for call in calls] == [1.0, 2.0, 3.5, 2**60]


def test_defaults_of_functions_without_schema_are_not_printed() -> None:
    gm = fxkit.symbolic_trace(lambda x: F.normalize(x, 2, dim=0) + x.norm(p=2.0))
    assert "torch.nn.functional.normalize(%x, dim=0)" in format_graph(gm)
    assert "torch.norm(%x, p=2.0)" in format_graph(gm)


def test_a_number_that_decides_a_dtype_keeps_its_type() -> None:
    gm = fxkit.symbolic_trace(lambda x: x * 2.0)
    fxkit.rewrite(gm, [fxkit.rule(lambda x: x * 2, lambda x: torch.sin(x))])
    assert "torch.sin" not in gm.code
