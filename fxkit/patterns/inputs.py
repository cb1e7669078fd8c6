"""Make inputs for a rule from its pattern: a module that computes it, and operands that fit.

Proofs and the lint of rules run rules on them.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fxkit.errors import RewriteError
from fxkit.patterns.pattern_nodes import Capture, Constant, Operation, slice_parts
from fxkit.patterns.rewriting import Rule
from fxkit.patterns.variants import plain_variants
from fxkit.torch_adapters.operators import schema_of


def pattern_module(rule: Rule, values: Mapping[str, Any]) -> fx.GraphModule:
    """Return a module that computes a rule's pattern, with the given constants filled in.

    Of a pattern with alternatives, the first; of a chain, the shortest.

    Every tensor capture is cloned beforehand and every result afterwards, in a form that
    no rule touches, so that inputs and outputs of the pattern are values inside of the graph. The
    operands are returned after the results, as they are then.

    Args:
        rule: The rule.
        values: Capture → a tensor (becomes a parameter of the module) or a constant.
    """
    rule = replace(rule, pattern=plain_variants(rule.pattern)[0])
    graph = fx.Graph()
    made: dict[Any, Any] = {}
    used = captures_of(rule)
    for name in used:
        value = values[name]
        is_tensor = isinstance(value, torch.Tensor)
        made[name] = graph.placeholder(name) if is_tensor else value
    for name, value in list(made.items()):
        if isinstance(value, fx.Node):
            made[name] = graph.call_function(torch.clone, (value,))
    for operation in rule.pattern.operations:
        made[operation] = _call(graph, operation, made)
        if operation.operator == "python.getattr":
            _return_fields(made[operation].args[0])
    operands = [made[name] for name in used if isinstance(made[name], fx.Node)]
    results = [made[output] for output in rule.pattern.outputs]
    results += [graph.call_function(torch.detach, (operand,)) for operand in operands]
    results = [graph.call_function(torch.clone, (result,)) for result in results]
    graph.output(tuple(results))
    return fx.GraphModule(torch.nn.Module(), graph)


def captures_of(rule: Rule) -> list[str]:
    """Return the captures that a plain pattern has, in order: an alternative may lack some."""
    met: set[str] = set()

    def visit(value: Any) -> None:
        if isinstance(value, Capture):
            met.add(value.name)
        elif isinstance(value, slice):
            visit(slice_parts(value))
        elif isinstance(value, (list, tuple)):
            for item in value:
                visit(item)

    for operation in rule.pattern.operations:
        visit(list(operation.arguments.values()))
    return [name for name in rule.pattern.captures if name in met]


def _call(graph: fx.Graph, operation: Operation, made: Mapping[Any, Any]) -> fx.Node:
    """Call a pattern's operation: the ATen packet, which picks the overload, or Python's own."""
    if operation.operator in _PYTHON_OPERATORS:
        built = (_build(value, made) for value in operation.arguments.values())
        args = tuple(tuple(value) if isinstance(value, list) else value for value in built)
        return graph.call_function(_PYTHON_OPERATORS[operation.operator], args)
    packet = _packet_of(operation)
    kwargs = {
        key: _build(value, made)
        for key, value in operation.arguments.items()
        if not _is_default(packet, key, value)
    }
    return graph.call_function(packet, (), kwargs)


def _return_fields(node: Any) -> None:
    """Make a call of a packet, which returns a plain tuple, one of a method, which names fields."""
    if callable(node.target) and "self" in node.kwargs:  # else it is a copy of an operand
        kwargs = dict(node.kwargs)
        packet, node.op = node.target, "call_method"
        node.args, node.kwargs = (kwargs.pop("self"),), kwargs
        node.target = packet.__name__


_PYTHON_OPERATORS = {"python.getitem": operator.getitem, "python.getattr": getattr}


def _packet_of(operation: Operation) -> Any:
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
    return [a for o in overloads for a in schema_of(o).arguments if a.name == argument]


def _build(value: Any, made: Mapping[Any, Any]) -> Any:
    if isinstance(value, Capture):
        return made[value.name]
    if isinstance(value, Operation):
        return made[value]
    if isinstance(value, Constant):
        return value.value
    if isinstance(value, slice):
        return slice(*(_build(part, made) for part in slice_parts(value)))
    return [_build(item, made) for item in value]


_DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)
_SHAPES = ((3, 4), (2, 3, 5), (7,), (), (0, 4), (1, 1))
_BROADCAST = ((4,), (3, 1), ())  # beside others of (3, 4)
_SPECIALS = (float("nan"), float("inf"), float("-inf"), -0.0, 0.0)


Case = tuple[Mapping[str, Any], torch.dtype, tuple[float, ...]]


def operand_cases(rule: Rule) -> list[Case]:
    """Return what operands to try: sample, dtype and special values; the plainest comes first."""
    samples = [full for sample in rule.samples or ({},) for full in _filled_in(rule, sample)]
    specials = _SPECIALS[3:] if rule.finite_only else _SPECIALS
    return list(itertools.product(samples, _DTYPES, ((), specials)))


def _filled_in(rule: Rule, sample: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a sample that tells shapes as it is, one of constants alone with all kinds of shapes.

    Constants that it does not tell are guessed.
    """
    if any(isinstance(value, tuple) for value in sample.values()):
        yield {**_constant_captures(rule), **sample}
        return
    for default in _default_samples(rule, sample):
        yield {**default, **sample}


def make_operands(
    rule: Rule,
    sample: Mapping[str, Any],
    dtype: torch.dtype,
    specials: tuple[float, ...],
    generator: torch.Generator,
) -> dict[str, Any]:
    return {
        name: _operand(sample.get(name, (3, 4)), _demanded(rule, name, dtype), specials, generator)
        for name in rule.pattern.captures
    }


def _demanded(rule: Rule, name: str, dtype: torch.dtype) -> torch.dtype:
    """Return a dtype that the rule wants an operand to have, the given one if it may be."""
    operand = rule.pattern.operands.get(name)
    if operand is None or not operand.dtypes or dtype in operand.dtypes:
        return dtype
    return operand.dtypes[0]


def _default_samples(rule: Rule, given: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    constants = {**_constant_captures(rule), **given}
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
            is_axis = isinstance(value, list) and len(value) == 1  # one, where several may be
            value = value[0] if is_axis else value
            if isinstance(value, Capture) and packet is not None:
                kind = _schema_kind(packet, key)
                kind = "int" if is_axis and kind == "List[int]" else kind
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
    "Device": _Constant(torch.device("cpu")),
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
        return torch.randint(-5, 6, sample, generator=generator).to(dtype)
    tensor = torch.randn(sample, generator=generator, dtype=torch.float64).to(dtype)
    if specials and tensor.numel():
        flat = tensor.flatten()
        for index, special in enumerate(specials[: flat.numel()]):
            flat[index] = special
        tensor = flat.reshape(sample)
        if tensor.dim() > 1:
            tensor = tensor.transpose(0, 1).contiguous().transpose(0, 1)
    return tensor.requires_grad_(not specials)
