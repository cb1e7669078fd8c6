"""Rules out of what was written for other pattern matchers.

from_replace_pattern([(pattern, replacement)])       # for torch.fx.replace_pattern
from_inductor(search_fn, replace_fn, ...)            # for Inductor's register_replacement
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from fxkit.errors import PatternError
from fxkit.ir.types import TensorType, type_of
from fxkit.patterns.language import operand
from fxkit.patterns.match_results import Match
from fxkit.patterns.pattern_nodes import Pattern
from fxkit.patterns.rewriting import Rule, Template, Where, check_sides
from fxkit.patterns.templates import PatternBuilder, output_values, trace_template
from fxkit.torch_adapters.fake_tensors import mode_class
from fxkit.tracing.symbolic import symbolic_trace

Side = Callable[..., Any] | nn.Module


def from_replace_pattern(pairs: Iterable[tuple[Side, Side]], *, exact: bool = False) -> list[Rule]:
    """Make rules of pairs that were written for `torch.fx.replace_pattern`.

    The parameters of the two sides correspond by position, whatever they are called. Unlike there,
    a literal matches by value and type, an argument left out is required to have its default, and
    a match that effects around it forbid is left alone.

    Args:
        pairs: (pattern, replacement): functions, GraphModules or other modules.
        exact: Whether the replacements give the very same numbers.

    Raises:
        PatternError: When a side can't be traced, reads parameters of its own, or the sides do not
            agree in the number of parameters or results.

    Example:
        >>> rules = from_replace_pattern([(lambda a, b: a + b * 2, lambda x, y: x.add(y, alpha=2))])
    """
    return [
        _rule(before, after, f"imported_{index}", exact=exact)
        for index, (before, after) in enumerate(pairs)
    ]


def from_inductor(
    search_fn: Callable[..., Any],
    replace_fn: Callable[..., Any],
    example_inputs: Sequence[Any] | None = None,
    scalar_workaround: Mapping[str, float] | None = None,
    extra_check: Callable[[Any], bool] | None = None,
    *,
    exact: bool = False,
) -> Rule:
    """Make a rule of what people pass to Inductor's `register_replacement`.

    The functions are traced by name and not decomposed, so that a pattern of `torch.softmax`
    matches softmax, and not what it is lowered to. `example_inputs` become samples for the proof.

    Args:
        search_fn: Computes what to look for.
        replace_fn: Computes the replacement; its parameters correspond by position.
        example_inputs: Inputs of the functions, in order.
        scalar_workaround: Parameter that stands for a number → an example of it. Such a parameter
            matches numbers only.
        extra_check: Predicate over the match. It gets `kwargs` (parameter → node or number, with
            `meta["val"]` for tensors of known types), `nodes` and `output_node()`.
        exact: Whether the replacement gives the very same numbers.

    Raises:
        PatternError: As `from_replace_pattern`.
    """
    scalars = dict(scalar_workaround or {})
    names = list(inspect.signature(search_fn).parameters)
    unknown = [name for name in scalars if name not in names]
    if unknown:
        raise PatternError(
            f"expected parameters of {_name_of(search_fn)} in scalar_workaround, got {unknown}",
            hint=f"its parameters are {', '.join(names)}",
        )
    tensors = [name for name in names if name not in scalars]
    sample = {
        name: tuple(value.shape) if isinstance(value, torch.Tensor) else value
        for name, value in zip(tensors, example_inputs or (), strict=False)
    }
    return _rule(
        search_fn,
        replace_fn,
        "imported",
        exact=exact,
        operands={name: operand(constant=True, value=_is_number) for name in scalars},
        samples=({**sample, **scalars},) if sample or scalars else (),
        where=None if extra_check is None else _checked(extra_check),
    )


def _rule(
    before: Side, after: Side, name: str, operands: Mapping[str, Any] | None = None, **options: Any
) -> Rule:
    searched, replacing = _graph_of(before), _graph_of(after)
    names = [str(node.target) for node in searched.find_nodes(op="placeholder")]
    places = replacing.find_nodes(op="placeholder")
    if len(places) != len(names):
        raise PatternError(
            f"expected a replacement of {len(names)} parameter(s) ({', '.join(names)}), "
            f"got {len(places)}",
            hint="the parameters of the two sides correspond by position",
        )
    for node, parameter in zip(places, names, strict=True):
        node.target = parameter
    shown = _name_of(before)
    builder = PatternBuilder(searched)
    outputs = builder.outputs(output_values(searched))
    template = Template(replacing, output_values(replacing))
    shown = shown if shown.isidentifier() else name
    found = Pattern(outputs, tuple(builder.captures), shown, operands or {})
    check_sides(found, template)
    function = before.forward if isinstance(before, nn.Module) else before
    return Rule(
        name=shown,
        pattern=found,
        template=template,
        file=getattr(getattr(function, "__code__", None), "co_filename", ""),
        doc=inspect.getdoc(function) or "",
        **options,
    )


def _graph_of(side: Side) -> fx.Graph:
    """Return a graph of a side, which the caller may change."""
    if isinstance(side, fx.GraphModule):
        graph = copy.deepcopy(side.graph)
        graph.owning_module = side
        return graph
    if isinstance(side, nn.Module):
        return symbolic_trace(side).graph
    return trace_template(side)


def _name_of(side: Side) -> str:
    return getattr(side, "__name__", type(side).__name__)


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float))


@dataclass(frozen=True)
class _InductorMatch:
    """What a check that was written for Inductor reads of a match."""

    match: Match

    @property
    def kwargs(self) -> dict[str, Any]:
        return dict(self.match.bindings)

    @property
    def args(self) -> list[Any]:
        return []

    @property
    def nodes(self) -> list[fx.Node]:
        return list(self.match.nodes.values())

    @property
    def graph(self) -> fx.Graph:
        return self.match.root.graph

    def output_nodes(self) -> list[fx.Node | None]:
        return list(self.match.outputs)

    def output_node(self) -> fx.Node:
        return self.match.root


def _checked(extra_check: Callable[[Any], bool]) -> Where:
    """Make a predicate of a check of Inductor's."""

    def accept(match: Match) -> bool | str:
        operands = [value for value in match.bindings.values() if isinstance(value, fx.Node)]
        with _with_values([*match.nodes.values(), *operands]):
            verdict = extra_check(_InductorMatch(match))
        return True if verdict else f"{_name_of(extra_check)} says no"

    return accept


@contextlib.contextmanager
def _with_values(nodes: Sequence[fx.Node]) -> Iterator[None]:
    """Give nodes of known types a fake tensor in `meta["val"]`, where such checks look for it."""
    given: list[fx.Node] = []
    mode = mode_class()()
    try:
        for node in nodes:
            known = type_of(node)
            if "val" in node.meta or not isinstance(known, TensorType) or known.stride is None:
                continue
            with mode:
                node.meta["val"] = torch.empty_strided(
                    known.shape, known.stride, dtype=known.dtype, device=known.device,
                    requires_grad=known.requires_grad,
                )  # fmt: skip
            given.append(node)
        yield
    finally:
        for node in given:
            del node.meta["val"]
