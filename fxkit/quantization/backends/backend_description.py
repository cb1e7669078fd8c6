"""What an accelerator computes with integers, as data: a config and a partition follow from it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from fxkit.analysis.objects import GraphNode
from fxkit.errors import UnsupportedError
from fxkit.ir.op import Call, operator_name, resolve
from fxkit.quantization.backends.stored_forms import StoredForm, stored_form
from fxkit.quantization.config import QuantizationConfig
from fxkit.quantization.operand_table import OPERATORS
from fxkit.quantization.specs import QuantizationSpec, TensorSpec

Limit = Callable[[Call], str | None]

_NAMESPACE = "quantized_decomposed."


@dataclass(frozen=True)
class BackendDescription:
    """What an accelerator takes of a quantised graph.

    `config()` quantises a model as it asks for, and `fxkit.passes.Partition(description)` hands the
    parts that it takes to it, with the quantise and dequantise nodes around them.

    Attributes:
        name: What it is called.
        specs: For each operator that multiplies, such as `aten.linear`, the ways in which its
            operands may be stored: types, ranges, schemes and granularities; the first is what
            `config` asks for.
        fused: Operators that may follow a product before its result is quantised again.
        moves: Operators that it computes on integers as they are, such as `aten.max_pool2d`:
            between a dequantise node and quantise nodes, or a product and what quantises it.
        floats: Operators that it computes in floating point.
        limits: For some operators a function of the call that returns why it is not taken, or None.
        gives_floats: Whether results may leave it in floating point; else they are quantised again,
            and products whose results are not stay.
        make: Returns what runs a region, from it and the types of its inputs; the region itself
            runs where left out.

    Raises:
        UnsupportedError: When an operator of `specs` can't be quantised, or a row is none or stores
            weights in floating point.
    """

    name: str
    specs: Mapping[str, tuple[QuantizationSpec, ...]]
    fused: frozenset[str] = frozenset()
    moves: frozenset[str] = frozenset()
    floats: frozenset[str] = frozenset()
    limits: Mapping[str, Limit] = field(default_factory=dict)
    gives_floats: bool = True
    make: Callable[[fx.GraphModule, tuple[Any, ...]], Callable[..., Any]] | None = None

    def __post_init__(self) -> None:
        """Check that the operators are known."""
        for operator, ways in self.specs.items():
            if operator not in OPERATORS or not ways:
                raise UnsupportedError(
                    f"expected specs of operators that can be quantised, got {operator!r}: {ways}",
                    hint=f"these can be: {', '.join(OPERATORS)}",
                )
            is_row = isinstance(ways, (tuple, list))
            if not (is_row and all(isinstance(way, QuantizationSpec) for way in ways)):
                raise UnsupportedError(
                    f"expected a tuple of QuantizationSpec for {operator}, got {ways!r}",
                    hint=f'specs={{"{operator}": (int8_static(),)}}',
                )
            floats = [way.weights for way in ways if way.weights.is_float]
            if floats:
                raise UnsupportedError(
                    f"expected ways of {operator} that store weights as integers, got {floats[0]}",
                    hint="weights of floats are casts and products, which name no way of storage",
                )
        for field_name in ("fused", "moves", "floats"):
            object.__setattr__(self, field_name, _names(field_name, getattr(self, field_name)))
        for operator, limit in self.limits.items():
            known = {*self.specs, *self.fused, *self.moves, *self.floats}
            if operator not in known or not callable(limit):
                raise UnsupportedError(
                    f"expected limits= to be functions for operators that {self.name} takes, got "
                    f"{operator!r}: {limit!r}",
                    hint=f"it takes: {', '.join(sorted(known))}",
                )

    def config(self) -> QuantizationConfig:
        """Return the config that quantises what the accelerator takes, and nothing else."""
        by_operator = {operator: ways[0] for operator, ways in self.specs.items()}
        return QuantizationConfig(None, by_operator=by_operator, where=self._is_within_limits)

    def supports(self, node: fx.Node) -> str | None:
        """Return why a node of a quantised graph stays, or None where the accelerator takes it."""
        if node.op == "get_attr":
            is_stored = bool(node.users) and all(map(_is_of_quantization, node.users))
            return None if is_stored else "it is no integer or scale of a weight"
        call = resolve(node)
        if call is None:
            return f"{self.name} has no row for it"
        refused = self._limit(call)
        if refused is not None:
            return refused
        if _is_of_quantization(node):
            return self._conversion(node, call)
        if call.name in self.specs:
            return self._product(node, call)
        if call.name in self.fused | self.moves and self._follows_product(node):
            return self._ends(node)
        if call.name in self.moves and self._is_between(node):
            return None
        if call.name in self.floats or call.name == "python.getitem":
            return None
        if call.name in self.fused:
            return "it takes no product, or one that has other users"
        if call.name in self.moves:
            return "what it moves are no integers"
        return f"{self.name} has no row for {call.name}"

    def compile(self, region: fx.GraphModule, types: tuple[Any, ...]) -> Callable[..., Any]:
        """Return what runs a region, for `Partition`."""
        made = region if self.make is None else self.make(region, types)
        if not callable(made):
            raise UnsupportedError(f"expected make= to return what runs the region, got {made!r}")
        return made

    def _limit(self, call: Call) -> str | None:
        limit = self.limits.get(call.name)
        reason = None if limit is None else limit(call)
        if reason is None or isinstance(reason, str):
            return reason
        raise UnsupportedError(
            f"expected the limit of {call.name} to return a reason or None, got {reason!r}"
        )

    def _is_within_limits(self, node: GraphNode) -> bool:
        call = resolve(node.fx_node)
        return call is not None and self._limit(call) is None

    def _conversion(self, node: fx.Node, call: Call) -> str | None:
        """Tell whether some spec has integers of a quantise or dequantise node."""
        ways = [way for ways in self.specs.values() for way in ways]
        wanted = [way.activations for way in ways] + [way.weights for way in ways]
        if call.name.partition(".")[2].startswith("choose_qparams"):
            is_dynamic = any(one is not None and one.is_dynamic for one in wanted)
            return None if is_dynamic else f"{self.name} computes no scales"
        form = stored_form(node)
        if form is None:
            return f"{self.name} has no row for {call.name}"
        if not any(form.is_of(one) for one in wanted if one is not None):
            return f"{self.name} stores no {form}"
        takers = [node] if _is_quantise(node) else list(node.users)
        if any(map(self._computes, takers)):
            return None
        return f"nothing that takes it runs on {self.name}"

    def _computes(self, node: fx.Node) -> bool:
        """Tell whether it runs here; a quantise node does at an end of what does."""
        if not _is_quantise(node):
            return self.supports(node) is None
        ends = [*node.all_input_nodes, *(user for one in node.users for user in one.users)]
        return any(self.supports(one) is None for one in ends if not _is_of_quantization(one))

    def _product(self, node: fx.Node, call: Call) -> str | None:
        row = OPERATORS[call.name]
        weight = _form_of(call.arguments.get(row.weight or ""))
        inputs = [
            _form_of(value)
            for name in row.activations
            if isinstance(value := call.arguments.get(name), fx.Node)
            and (row.weight != name or weight is None)
        ]
        for way in self.specs[call.name]:
            takes_weight = row.weight is None or (weight is not None and weight.is_of(way.weights))
            if takes_weight and all(_is_stored(form, way.activations) for form in inputs):
                return self._ends(node)
        forms = ", ".join(str(form or "float") for form in (*inputs, weight))
        return f"{self.name} multiplies no {forms}"

    def _follows_product(self, node: fx.Node) -> bool:
        producers = node.all_input_nodes
        if len(producers) != 1 or len(producers[0].users) != 1:
            return False
        call = resolve(producers[0])
        if call is None:
            return False
        if call.name in self.fused | self.moves:
            return self._follows_product(producers[0])
        return call.name in self.specs and self.supports(producers[0]) is None

    def _ends(self, node: fx.Node) -> str | None:
        """Tell why the result of a product, or of what is fused with it, can't leave."""
        if self.gives_floats:
            return None
        users = list(node.users)
        if users and all(map(_is_quantise, users)):
            return None
        call = resolve(users[0]) if len(users) == 1 else None
        if call is not None and call.name in self.fused | self.moves:
            return self._ends(users[0])
        return f"its result is not quantised again, and {self.name} gives no floats"

    def _is_between(self, node: fx.Node) -> bool:
        forms = [_form_of(one) for one in node.all_input_nodes]
        return all(form is not None for form in forms) and all(map(_is_quantise, node.users))


def _names(field_name: str, given: Collection[Any]) -> frozenset[str]:
    """Return names of operators, once it is sure that there are such operators."""
    spellings = [given] if isinstance(given, str) else list(given)
    names = [operator_name(one) for one in spellings]
    unknown = [one for one, name in zip(spellings, names, strict=True) if _is_unknown(one, name)]
    if isinstance(given, str) or unknown:
        raise UnsupportedError(
            f"expected {field_name}= to be a set of operators, got {(unknown or spellings)[0]!r}",
            hint='names are those of reports: frozenset(("aten.relu", "aten.gelu"))',
        )
    return frozenset(names)


def _is_unknown(spelling: Any, name: str) -> bool:
    if not isinstance(spelling, str):
        return False
    is_aten = name.startswith("aten.")
    return "." not in name or (is_aten and operator_name(name.removeprefix("aten.")) != name)


def _is_stored(form: StoredForm | None, spec: TensorSpec | None) -> bool:
    if spec is None or form is None:
        return spec is None and form is None
    return form.is_of(spec)


def _form_of(value: Any) -> StoredForm | None:
    """Return how an operand was stored before it was dequantised, or None for floats."""
    is_node = isinstance(value, fx.Node) and _is_of_quantization(value)
    return stored_form(value) if is_node and not _is_quantise(value) else None


def _is_of_quantization(node: fx.Node) -> bool:
    call = resolve(node)
    return call is not None and call.name.startswith(_NAMESPACE)


def _is_quantise(node: fx.Node) -> bool:
    call = resolve(node)
    return call is not None and call.name.startswith(f"{_NAMESPACE}quantize")
