"""The graphs that the rewriting benchmark rewrites, and the ways to rewrite them.

A chain is add, relu, mul, add, relu, mul, ...; each relu(a + b) in it is to become one operator.
The operators are ATen overloads, since that is the one spelling that every contender can match.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

import fxkit
from fxkit.ir.op import operator_name
from fxkit.ir.types import TensorType, set_type

_ADD = torch.ops.aten.add.Tensor
RELU = torch.ops.aten.relu.default
NEG = torch.ops.aten.neg.default
_MUL = torch.ops.aten.mul.Tensor
_ADD_RELU = torch.ops.aten._add_relu.Tensor


class TimedModule(fx.GraphModule):
    """A GraphModule that knows how long it spent in `recompile`."""

    recompile_seconds = 0.0

    def recompile(self) -> Any:
        """Recompile as ever, and add up the time."""
        start = time.perf_counter()
        code = super().recompile()
        self.recompile_seconds += time.perf_counter() - start
        return code


def chain(nodes: int, *, fake: bool = False) -> TimedModule:
    """Return a typed chain of about so many nodes; every third ends a hit.

    Args:
        nodes: How many calls.
        fake: Whether to give each node a fake tensor under `val`, which Inductor asks for.
    """
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    value = x
    for _ in range(nodes // 3):
        value = graph.call_function(_ADD, (value, y))
        value = graph.call_function(RELU, (value,))
        value = graph.call_function(_MUL, (value, y))
    graph.output(value)
    known = TensorType.of(torch.empty(4))
    fakes = {"val": _fake_tensor()} if fake else {}
    for node in graph.nodes:
        if node.op != "output":
            set_type(node, known)
            node.meta.update(fakes)
    return TimedModule(torch.nn.Module(), graph)


def hits(nodes: int) -> int:
    """Return how many hits a chain has."""
    return nodes // 3


def _fake_tensor() -> Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.empty(4)


def searched(a: Any, b: Any) -> Any:
    """Compute what is looked for."""
    return RELU(_ADD(a, b))


def replacement(a: Any, b: Any) -> Any:
    """Compute the same in one operator."""
    return _ADD_RELU(a, b)


RULE = fxkit.rule(searched, replacement, name="add_relu")


def with_fxkit(gm: fx.GraphModule) -> int:
    """Rewrite by an fxkit rule."""
    return fxkit.rewrite(gm, RULE).count


def with_replace_pattern(gm: fx.GraphModule) -> int:
    """Rewrite by `torch.fx.replace_pattern`."""
    return len(fx.replace_pattern(gm, searched, replacement))


def with_inductor() -> Callable[[fx.GraphModule], int]:
    """Return a function that rewrites by a replacement registered with Inductor's matcher."""
    from torch._inductor import pattern_matcher

    patterns: Any = pattern_matcher.PatternMatcherPass()
    example = [torch.empty(4), torch.empty(4)]
    pattern_matcher.register_replacement(
        searched, replacement, example, pattern_matcher.fwd_only, patterns
    )

    def rewrite(gm: fx.GraphModule) -> int:
        count = patterns.apply(gm)
        gm.recompile()
        return count

    return rewrite


def by_hand(gm: fx.GraphModule) -> int:
    """Rewrite in a bare loop: no check of effects, types or order, no journal, no way back."""
    graph, count = gm.graph, 0
    for node in list(graph.nodes):
        if node.target is not RELU or node.args[0].target is not _ADD:
            continue
        inner = node.args[0]
        if len(inner.users) > 1:
            continue
        with graph.inserting_before(node):
            new = graph.call_function(_ADD_RELU, inner.args)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        graph.erase_node(inner)
        count += 1
    gm.recompile()
    return count


def rules_with_other_roots(count: int) -> list[Any]:
    """Return rules whose roots are not in a chain, each with a root of its own."""
    return [_rule(op, functools.partial(_outer, op)) for op in _unary_operators(count)]


def rules_with_the_same_root(count: int) -> list[Any]:
    """Return rules whose root is in a chain, above operators that are not."""
    return [_rule(op, functools.partial(_inner, op)) for op in _unary_operators(count)]


def _outer(operator: Any, a: Any, b: Any) -> Any:
    return operator(a + b)


def _inner(operator: Any, a: Any, b: Any) -> Any:
    return RELU(operator(a + b))


def _rule(operator: Any, make: Callable[[Any, Any], Any]) -> Any:
    def before(a: Any, b: Any) -> Any:
        return make(a, b)

    return fxkit.rule(before, lambda a, b: a - b, name=str(operator))


def _unary_operators(count: int) -> list[Any]:
    """Return ATen operators of one tensor that no chain holds, in the order of their names."""
    found: dict[str, Any] = {}
    for packet in _unary_packets():
        if packet is not torch.ops.aten.relu and "default" in packet.overloads():
            found.setdefault(operator_name(packet), packet.default)
    if len(found) < count:
        raise RuntimeError(f"expected {count} operators of one tensor, got {len(found)}")
    return list(found.values())[:count]


def _unary_packets() -> Iterator[Any]:
    schemas = torch._C._jit_get_all_schemas()
    for schema in sorted(schemas, key=lambda schema: schema.name):
        namespace, _, name = schema.name.partition("::")
        is_unary = [str(argument.type) for argument in schema.arguments] == ["Tensor"]
        gives_tensor = [str(result.type) for result in schema.returns] == ["Tensor"]
        if namespace == "aten" and is_unary and gives_tensor and name[0].isalpha():
            yield getattr(torch.ops.aten, name)
