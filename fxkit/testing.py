"""Proofs for pass and rule authors: does a rewrite keep the program's meaning?

fxkit.testing.prove(rule)                                    # a rule, on inputs made for it
fxkit.testing.assert_rewrites(rule, before, after)           # a rule, by example
fxkit.testing.assert_equivalent(before, after, args)         # two programs
"""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxkit.analysis.tensor_types import propagate_types
from fxkit.errors import NumericsError, RewriteError
from fxkit.ir.printer import format_graph, format_value
from fxkit.ir.types import TensorType
from fxkit.patterns.engine import rewrite
from fxkit.patterns.pattern import Capture, Constant, Operation
from fxkit.patterns.rewriting import Rule
from fxkit.tracing.symbolic import symbolic_trace

# How much worse than eager's, against float64, an error may be.
ERROR_RATIO = 2.0


@dataclass(frozen=True)
class Comparison:
    """How far two results are from float64.

    Attributes:
        error: Largest absolute error of the result, over the largest finite float64 value.
        eager_error: The same for what it is compared with.
    """

    error: float
    eager_error: float

    def is_within(self, dtype: torch.dtype) -> bool:
        """Tell whether the error is at most twice eager's, or as small as can be measured.

        That is two units in the last place; for float64, which is its own reference here, 32.
        """
        units = 32 if dtype == torch.float64 else 2
        floor = units * torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
        return self.error <= max(ERROR_RATIO * self.eager_error, floor)


def compare(got: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor) -> Comparison:
    """Measure two tensors against a float64 reference of the same shape."""
    scale = exact[exact.isfinite()].abs().max().item() if exact.isfinite().any() else 1.0
    scale = scale or 1.0

    def error(value: torch.Tensor) -> float:
        value = value.double()
        same = (value == exact) | (value.isnan() & exact.isnan())
        difference = torch.where(same, 0.0, (value - exact).abs()).nan_to_num(nan=torch.inf)
        return (difference.max().item() if difference.numel() else 0.0) / scale

    return Comparison(error(got), error(eager))


def assert_equivalent(
    before: Callable[..., Any],
    after: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    exact: bool = False,
    gradients: bool = True,
) -> None:
    """Check that two programs do the same to the same inputs.

    Compared are structure, shapes, dtypes, strides, values, what happens to the arguments, and the
    gradients of the inputs that require them.

    Args:
        before: The program to be equal to.
        after: The program to check.
        args: Inputs; each program gets its own copy.
        kwargs: Keyword inputs.
        exact: Require equal numbers; else an error against float64 of at most twice `before`'s.
        gradients: Compare gradients too.

    Raises:
        NumericsError: On the first difference.
    """
    inputs = (args, dict(kwargs or {}))
    runs = [_Run(program, inputs, gradients) for program in (before, after)]
    reference = None if exact else _Run(before, inputs, gradients, in_float64=True)
    for part in ("outputs", "arguments", "gradients"):
        expected, got = (getattr(run, part) for run in runs)
        truth = expected if reference is None else getattr(reference, part)
        _check_trees(part, expected, got, truth, exact)


class _Run:
    """One call of a program on copies of inputs, with what it changed and its gradients."""

    def __init__(
        self, program: Callable[..., Any], inputs: Any, gradients: bool, in_float64: bool = False
    ) -> None:
        program, inputs = (_in_float64(program), _widen(inputs)) if in_float64 else (
            program, pytree.tree_map(_clone, inputs)
        )  # fmt: skip
        leaves = [t for t in pytree.tree_leaves(inputs) if isinstance(t, torch.Tensor)]
        wanted = [t for t in leaves if t.requires_grad] if gradients else []
        args, kwargs = pytree.tree_map_only(torch.Tensor, _non_leaf, inputs) if wanted else inputs
        generator = torch.random.get_rng_state()
        try:
            self.outputs = program(*args, **kwargs)
        finally:
            torch.random.set_rng_state(generator)
        self.arguments = (args, kwargs)
        self.gradients = _gradients(self.outputs, wanted)


def _non_leaf(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that may be written in place although its gradient is wanted."""
    return tensor * 1 if tensor.requires_grad else tensor


# Stands for the gradient of a program that has none.
_NO_DERIVATIVE = "no derivative"


def _gradients(outputs: Any, wanted: list[torch.Tensor]) -> list[torch.Tensor | str | None]:
    results = [
        t for t in pytree.tree_leaves(outputs) if isinstance(t, torch.Tensor) and t.requires_grad
    ]
    if not wanted or not results:
        return []
    total = torch.stack([(r * torch.linspace(0.5, 1.5, r.numel()).reshape(r.shape)).sum().double()
                         for r in results]).sum()  # fmt: skip
    try:
        return list(torch.autograd.grad(total, wanted, allow_unused=True))
    except RuntimeError as error:
        if "is not implemented" not in str(error):
            raise
        return [_NO_DERIVATIVE] * len(wanted)


def _check_trees(part: str, expected: Any, got: Any, truth: Any, exact: bool) -> None:
    expected_leaves, expected_spec = pytree.tree_flatten(expected)
    got_leaves, got_spec = pytree.tree_flatten(got)
    if expected_spec != got_spec:
        raise NumericsError(f"expected {part} of the form {expected_spec}, got {got_spec}")
    for index, (e, g, t) in enumerate(
        zip(expected_leaves, got_leaves, pytree.tree_leaves(truth), strict=True)
    ):
        _check_leaf(f"{part}[{index}]", e, g, t, exact)


def _check_leaf(name: str, expected: Any, got: Any, truth: Any, exact: bool) -> None:
    if not isinstance(expected, torch.Tensor) or not isinstance(got, torch.Tensor):
        same = type(expected) is type(got) and (expected == got or expected != expected)
        if not same:
            raise NumericsError(f"expected {name} to be {expected!r}, got {got!r}")
        return
    want, have = TensorType.of(expected), TensorType.of(got)
    if want != have:
        raise NumericsError(
            f"expected {name} of type {want} stride {want.stride} requires_grad "
            f"{want.requires_grad}, got {have} stride {have.stride} requires_grad "
            f"{have.requires_grad}"
        )
    if exact or not expected.dtype.is_floating_point:
        if not torch.equal(expected.nan_to_num(nan=1.25), got.nan_to_num(nan=1.25)) or not (
            torch.equal(expected.isnan(), got.isnan())
        ):
            raise NumericsError(f"expected {name} to equal {_short(expected)}, got {_short(got)}")
        return
    with torch.no_grad():
        compared = compare(got, expected, truth.double())
    if not compared.is_within(expected.dtype):
        raise NumericsError(
            f"expected {name} with an error of at most twice {compared.eager_error:.3g}, "
            f"got {compared.error:.3g}, against float64"
        )


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
        NumericsError: With the inputs, when the two sides differ.
        RewriteError: When the rule accepted no input at all, so that nothing is proven.
    """
    generator = torch.Generator().manual_seed(seed)
    plainest, *others = _cases(rule)
    random.Random(seed).shuffle(others)
    cases = [plainest, *others[: trials - 1]]
    accepted = sum(_prove_on(rule, _operands(rule, *case, generator)) for case in cases)
    if not accepted:
        raise RewriteError(
            f"expected inputs that {rule.name} accepts, got none in {trials} trials",
            source=rule.file,
            hint="give samples= with the shapes and constants that its operands need",
        )
    return accepted


def _prove_on(rule: Rule, values: dict[str, Any]) -> bool:
    tensors = {name: v for name, v in values.items() if isinstance(v, torch.Tensor)}
    before = pattern_module(rule, values)
    args = tuple(tensors.values())
    try:
        before(*pytree.tree_map(_clone, args))
    except (RuntimeError, TypeError, IndexError):
        return False
    after = copy.deepcopy(before)
    propagate_types(after, args)
    if rewrite(after, rule, limit=1).count == 0:
        return False
    try:
        assert_equivalent(before, after, args, exact=rule.exact)
    except (NumericsError, RuntimeError, TypeError, IndexError) as error:
        what = error.message if isinstance(error, NumericsError) else f"it raises {error}"
        shown = ", ".join(f"{name}={_describe(value)}" for name, value in values.items())
        raise NumericsError(
            f"{rule.name} changes the result: {what}",
            node=format_graph(before).replace("\n", "\n         "),
            source=rule.file,
            hint=f"inputs: {shown}",
        ) from error
    return True


def pattern_module(rule: Rule, values: Mapping[str, Any]) -> fx.GraphModule:
    """Return a module that computes a rule's pattern, with the given constants filled in.

    Every tensor capture is cloned beforehand and every result afterwards, in a form that
    no rule touches, so that inputs and outputs of the pattern are values inside of the graph. The
    operands are returned after the results, as they are then.

    Args:
        rule: The rule.
        values: Capture → a tensor (becomes a parameter of the module) or a constant.
    """
    graph = fx.Graph()
    made: dict[Any, Any] = {}
    for name in rule.pattern.captures:
        value = values[name]
        is_tensor = isinstance(value, torch.Tensor)
        made[name] = graph.placeholder(name) if is_tensor else value
    for name, value in list(made.items()):
        if isinstance(value, fx.Node):
            made[name] = graph.call_function(torch.clone, (value,))
    for operation in rule.pattern.operations:
        overload = _overload_for(operation, made)
        kwargs = {
            key: _build(value, made)
            for key, value in operation.arguments.items()
            if not _is_default(overload, key, value)
        }
        made[operation] = graph.call_function(overload, (), kwargs)
    operands = [made[name] for name in rule.pattern.captures if isinstance(made[name], fx.Node)]
    results = [made[output] for output in rule.pattern.outputs]
    results += [graph.call_function(torch.detach, (operand,)) for operand in operands]
    results = [graph.call_function(torch.clone, (result,)) for result in results]
    graph.output(tuple(results))
    return fx.GraphModule(torch.nn.Module(), graph)


def _overload_for(operation: Operation, made: Mapping[Any, Any]) -> Any:
    """Return a callable for a pattern's operation: the ATen packet, which picks the overload."""
    name = operation.operator
    if name.startswith("aten."):
        return getattr(torch.ops.aten, name.removeprefix("aten."))
    raise RewriteError(
        f"expected a pattern of ATen operators, got {name}",
        source=operation.source or None,
        hint="prove rules over other callables with assert_rewrites and assert_equivalent",
    )


def _is_default(packet: Any, argument: str, value: Any) -> bool:
    if not isinstance(value, Constant):
        return False
    declared = _declared(packet, argument)
    return any(a.has_default_value() and a.default_value == value.value for a in declared)


def _declared(packet: Any, argument: str) -> list[Any]:
    """Return what the overloads of an operator declare of an argument."""
    overloads = (getattr(packet, name) for name in packet.overloads())
    return [a for o in overloads for a in o._schema.arguments if a.name == argument]


def _build(value: Any, made: Mapping[Any, Any]) -> Any:
    if isinstance(value, Capture):
        return made[value.name]
    if isinstance(value, Operation):
        return made[value]
    if isinstance(value, Constant):
        return value.value
    return [_build(item, made) for item in value]


_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32)
_SHAPES = ((3, 4), (2, 3, 5), (7,), (), (0, 4), (1, 1))
_BROADCAST = ((4,), (3, 1), ())  # beside others of (3, 4)
_SPECIALS = (float("nan"), float("inf"), float("-inf"), -0.0, 0.0)


_Case = tuple[Mapping[str, Any], torch.dtype, tuple[float, ...]]


def _cases(rule: Rule) -> list[_Case]:
    """Return what operands to try: sample, dtype and special values; the plainest comes first."""
    samples = rule.samples or tuple(_default_samples(rule))
    specials = _SPECIALS[3:] if rule.finite_only else _SPECIALS
    return list(itertools.product(samples, _DTYPES, ((), specials)))


def _operands(
    rule: Rule,
    sample: Mapping[str, Any],
    dtype: torch.dtype,
    specials: tuple[float, ...],
    generator: torch.Generator,
) -> dict[str, Any]:
    return {
        name: _operand(sample.get(name, (3, 4)), dtype, specials, generator)
        for name in rule.pattern.captures
    }


def _default_samples(rule: Rule) -> Iterator[dict[str, Any]]:
    constants = _constant_captures(rule)
    tensors = [name for name in rule.pattern.captures if name not in constants]
    for shape in _SHAPES:
        same_shape = _Constant(list(shape))
        sizes = {n: same_shape if c is _SAME_SHAPE else c for n, c in constants.items()}
        yield {**sizes, **dict.fromkeys(tensors, shape)}
    if len(tensors) > 1:
        for name, shape in itertools.product(tensors, _BROADCAST):
            yield {**constants, **dict.fromkeys(tensors, (3, 4)), name: shape}


def _constant_captures(rule: Rule) -> dict[str, Any]:
    """Guess constants for captures that stand where a schema takes no tensor."""
    guesses: dict[str, Any] = {}
    for operation in rule.pattern.operations:
        packet = getattr(torch.ops.aten, operation.operator.removeprefix("aten."), None)
        for key, value in operation.arguments.items():
            if isinstance(value, Capture) and packet is not None:
                kind = _schema_kind(packet, key)
                if kind in _GUESSES:
                    guesses.setdefault(value.name, _GUESSES[kind])
    return guesses


@dataclass(frozen=True)
class _Constant:
    value: Any


_SAME_SHAPE = _Constant("the shape of the operands")
_GUESSES = {
    "List[int]": _SAME_SHAPE,
    "int": _Constant(0),
    "float": _Constant(0.25),
    "bool": _Constant(False),
    "number": _Constant(2),
    "ScalarType": _Constant(torch.float32),
}


def _schema_kind(packet: Any, argument: str) -> str | None:
    for declared in _declared(packet, argument):
        text = str(declared.real_type)
        return text.removeprefix("Optional[")[:-1] if text.startswith("Optional[") else text
    return None


def _operand(
    sample: Any, dtype: torch.dtype, specials: tuple[float, ...], generator: torch.Generator
) -> Any:
    if isinstance(sample, _Constant):
        return sample.value
    if not isinstance(sample, tuple):
        return sample
    if not dtype.is_floating_point:
        return torch.randint(-5, 6, sample, generator=generator, dtype=dtype)
    tensor = torch.randn(sample, generator=generator, dtype=torch.float64).to(dtype)
    if specials and tensor.numel():
        flat = tensor.flatten()
        for index, special in enumerate(specials[: flat.numel()]):
            flat[index] = special
        tensor = flat.reshape(sample)
        if tensor.dim() > 1:
            tensor = tensor.transpose(0, 1).contiguous().transpose(0, 1)
    return tensor.requires_grad_(not specials)


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


def _clone(value: Any) -> Any:
    """Copy a tensor with its strides and its requires_grad."""
    if not isinstance(value, torch.Tensor):
        return value
    fresh = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    fresh.copy_(value.detach())
    return fresh.requires_grad_(value.requires_grad)


def _widen(value: Any) -> Any:
    def widen(tensor: torch.Tensor) -> torch.Tensor:
        wide = _clone(tensor).detach()
        wide = wide.double() if wide.dtype.is_floating_point else wide
        return wide.requires_grad_(tensor.requires_grad)

    return pytree.tree_map_only(torch.Tensor, widen, value)


def _in_float64(program: Callable[..., Any]) -> Callable[..., Any]:
    if isinstance(program, torch.nn.Module):
        return copy.deepcopy(program).double()
    return program


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        text = str(TensorType.of(value))
        return f"{text} stride {tuple(value.stride())}" if value.dim() else text
    return format_value(value)


def _short(tensor: torch.Tensor) -> str:
    return f"{tensor.flatten()[:6].tolist()}{'...' if tensor.numel() > 6 else ''}"
