"""Named properties of graphs: what passes require, ensure and preserve.

A property is a function that yields a complaint, a node and what is wrong with it, for each place
where it does not hold. The functions below are all there are; a decorator adds one of your own:

    @graph_property
    def no_softmax(gm):
        \"\"\"There is no softmax.\"\"\"
        for node in fxkit.graph(gm).find(torch.softmax):
            yield node.fx_node, "is a softmax"

Each costs time linear in the graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

from fxkit.analysis.effects import Effects, effects_of
from fxkit.errors import PassError
from fxkit.ir.attributes import find_attribute, type_of_operand
from fxkit.ir.op import Call, resolve
from fxkit.ir.printer import format_node, format_source
from fxkit.ir.types import KEY as TYPE_KEY
from fxkit.ir.types import TensorType, type_of
from fxkit.passes.decomposition.core_operators import is_core
from fxkit.passes.decomposition.functional_forms import write_back
from fxkit.passes.stored_floats import is_widened
from fxkit.torch_adapters.operators import HigherOrderOperator, OpOverload

Complaint = tuple[fx.Node, str]
Predicate = Callable[[fx.GraphModule], Iterable[Complaint]]

_SHOWN = 3


@dataclass(frozen=True)
class Violation:
    """Why a property does not hold.

    Attributes:
        name: The property's name.
        nodes: Names of the first nodes that it does not hold at.
        reasons: One reason for each of them.
        lines: Those nodes as text.
        sources: The user's lines that made them; None where it is not known.
        has_more: Whether it does not hold at other nodes either.
    """

    name: str
    nodes: tuple[str, ...]
    reasons: tuple[str, ...]
    lines: tuple[str, ...]
    sources: tuple[str | None, ...]
    has_more: bool = False

    @property
    def reason(self) -> str:
        """All reasons in one line."""
        told = [f"%{n} {r}" for n, r in zip(self.nodes, self.reasons, strict=True)]
        return "; ".join([*told, *(["and more"] if self.has_more else [])])

    def __str__(self) -> str:
        return f"not {self.name}: {self.reason}"


@dataclass(frozen=True)
class Property:
    """A named property of graphs.

    Attributes:
        name: What passes call it.
        predicate: Yields `(node, what is wrong with it)` for each place where it does not hold.
    """

    name: str
    predicate: Predicate

    @property
    def summary(self) -> str:
        """The first line of the predicate's docstring."""
        return (self.predicate.__doc__ or "").strip().partition("\n")[0]

    def check(self, gm: fx.GraphModule) -> Violation | None:
        """Return why it does not hold for a graph, or None when it does.

        Raises:
            PassError: When its predicate raises.
        """
        try:
            found = list(itertools.islice(self.predicate(gm), _SHOWN + 1))
        except Exception as error:
            raise PassError(
                f"expected the property {self.name} to answer, got {type(error).__name__}: {error}",
                hint="it yields each node where it does not hold, with the reason",
            ) from error
        if not found:
            return None
        shown = found[:_SHOWN]
        return Violation(
            self.name,
            nodes=tuple(node.name for node, _ in shown),
            reasons=tuple(reason for _, reason in shown),
            lines=tuple(format_node(node) for node, _ in shown),
            sources=tuple(format_source(node) for node, _ in shown),
            has_more=len(found) > _SHOWN,
        )


PROPERTIES: dict[str, Property] = {}


def graph_property(predicate: Predicate) -> Predicate:
    """Make a function a property that passes can name, under the function's own name.

    Args:
        predicate: Takes a `GraphModule`; yields `(node, what is wrong with it)`. Its docstring's
            first line is the property's description.

    Raises:
        PassError: When the name is taken by another function.
    """
    name = getattr(predicate, "__name__", type(predicate).__name__)
    known = PROPERTIES.get(name)
    if known is not None and _home(known.predicate) != _home(predicate):
        raise PassError(
            f"expected one property named {name!r}, got two: {_home(known.predicate)} and "
            f"{_home(predicate)}",
            hint="rename one of them",
        )
    PROPERTIES[name] = Property(name, predicate)
    return predicate


def property_named(name: str) -> Property:
    """Return a property by its name.

    Raises:
        PassError: When there is none.
    """
    if name not in PROPERTIES:
        raise PassError(
            f"expected the name of a property, got {name!r}",
            hint=f"the known ones are {', '.join(PROPERTIES)}; graph_property adds one",
        )
    return PROPERTIES[name]


def _home(predicate: Predicate) -> tuple[Any, Any]:
    return getattr(predicate, "__module__", None), getattr(predicate, "__qualname__", None)


def _calls(gm: fx.GraphModule) -> Iterator[tuple[fx.Node, Call]]:
    for node in gm.graph.nodes:
        call = resolve(node)
        if call is not None:
            yield node, call


@graph_property
def functional(gm: fx.GraphModule) -> Iterator[Complaint]:
    """Nothing is written to, but for inputs and attributes by `copy_` at the very end.

    There an input may also be given another shape, by calls such as `t_`.
    """
    epilogue = write_back(gm.graph)
    for node in gm.graph.nodes:
        effects = effects_of(node)
        if effects.is_opaque and not effects.is_global:
            yield node, "may write to anything: nothing is known of it"
        elif effects.writes and node not in epilogue:
            yield node, _first_write(effects)


def _first_write(effects: Effects) -> str:
    return next(part for part in effects.describe().split("; ") if part.startswith("writes"))


_OVERLOADS = (OpOverload, HigherOrderOperator)


@graph_property
def aten(gm: fx.GraphModule) -> Iterator[Complaint]:
    """Every call of a known operator is one of its overload, such as `aten.add.Tensor`.

    Of what nothing is known, `known_operators` tells.
    """
    for node, call in _calls(gm):
        if isinstance(node.target, _OVERLOADS) or call.operator.is_opaque:
            continue
        if not _is_left_as_it_is(node, call):
            yield node, f"calls {_spelling(node)}, no overload"


@graph_property
def core_aten(gm: fx.GraphModule) -> Iterator[Complaint]:
    """Every call of a known operator is in the core set (`decomposition/core_operators.py`).

    At the end, inputs may be given other shapes in place.
    """
    epilogue = write_back(gm.graph)
    for node, call in _calls(gm):
        if call.operator.is_opaque or node in epilogue or _is_left_as_it_is(node, call):
            continue
        target = node.target
        if not isinstance(target, OpOverload):
            yield node, f"calls {_spelling(node)}, no overload"
        elif not is_core(target):
            yield node, f"calls {target}, which is not in the core set"


def _is_left_as_it_is(node: fx.Node, call: Call) -> bool:
    """Tell whether a call has no overload to be spelled as: of plain Python, or a check."""
    if node.op == "call_module":
        return call.name.startswith("guard.")
    return node.op == "call_function" and _is_plain_python(call)


def _is_plain_python(call: Call) -> bool:
    return call.name.partition(".")[0] in ("python", "guard") and not _indexes_tensor(call)


def _indexes_tensor(call: Call) -> bool:
    """Tell whether a call is Python's indexing of a tensor, or an assignment to an index of one."""
    if call.name not in ("python.getitem", "python.setitem"):
        return False
    indexed = call.arguments.get("0")
    return isinstance(indexed, fx.Node) and isinstance(type_of(indexed), TensorType)


def _spelling(node: fx.Node) -> str:
    if node.op == "call_module":
        return f"the module {node.target}"
    if node.op == "call_method":
        return f"the method .{node.target}"
    return getattr(node.target, "__name__", None) or str(node.target)


@graph_property
def normalized(gm: fx.GraphModule) -> Iterator[Complaint]:
    """Every known operator is a called function, with its keyword-only operands by keyword."""
    for node, call in _calls(gm):
        if call.operator.is_opaque or _is_plain_python(call):
            continue
        if node.op != "call_function":
            yield node, f"calls {_spelling(node)}, no function"
        elif call.operator.schema is not None and not _is_in_schema_order(node, call):
            yield node, "has an operand by keyword that goes by position"


def _is_in_schema_order(node: fx.Node, call: Call) -> bool:
    keyword_only = {a.name for a in call.operator.schema.arguments if a.kwarg_only}
    has_default = {a.name for a in call.operator.schema.arguments if a.has_default_value()}
    return all(key in keyword_only or key in has_default for key in node.kwargs)


@graph_property
def known_operators(gm: fx.GraphModule) -> Iterator[Complaint]:
    """Every call is one of an operator that fxkit knows."""
    for node, call in _calls(gm):
        if call.operator.is_opaque:
            yield node, f"calls {_spelling(node)}, of which nothing is known"


@graph_property
def shapes_known(gm: fx.GraphModule) -> Iterator[Complaint]:
    """Every node has a recorded type."""
    for node in gm.graph.nodes:
        if node.op != "output" and TYPE_KEY not in node.meta and type_of(node) is None:
            yield node, "has no recorded type"


@graph_property
def no_views(gm: fx.GraphModule) -> Iterator[Complaint]:
    """No result of an operator shares memory with an operand."""
    for node, call in _calls(gm):
        if call.operator.overload is None and not call.operator.is_opaque:
            continue
        effects = effects_of(node)
        if effects.aliases and not effects.writes:
            shared = ", ".join(f"%{alias.name}" for alias in effects.aliases)
            yield node, f"may share memory with {shared}"


@graph_property
def deterministic(gm: fx.GraphModule) -> Iterator[Complaint]:
    """Nothing draws random numbers."""
    for node in gm.graph.nodes:
        if effects_of(node).is_random:
            yield node, "may draw random numbers"


_TRAINING_FLAGS = ("training", "train", "use_input_stats")


@graph_property
def inference(gm: fx.GraphModule) -> Iterator[Complaint]:
    """No operator runs in training mode."""
    for node, call in _calls(gm):
        flags = [f for f in _TRAINING_FLAGS if call.arguments.get(f) not in (None, False)]
        if flags:
            yield node, f"runs with {flags[0]}={call.arguments[flags[0]]!r}"
        elif node.op == "call_module" and call.operator.is_opaque:
            module = find_attribute(gm, str(node.target))
            if getattr(module, "training", False):
                yield node, f"calls the module {node.target}, which is in training mode"


_SPATIAL = ("aten.conv2d", "aten.convolution", "aten.conv_transpose2d", "aten.batch_norm",
            "aten.max_pool2d", "aten.avg_pool2d", "aten.adaptive_avg_pool2d")  # fmt: skip


@graph_property
def channels_last(gm: fx.GraphModule) -> Iterator[Complaint]:
    """Images have their channels innermost wherever they are convolved, pooled or normalised."""
    for node, call in _calls(gm):
        if call.name not in _SPATIAL:
            continue
        image = call.arguments.get("input", call.arguments.get("self"))
        types = {"operand": type_of_operand(image, gm.graph), "result": type_of(node)}
        for what, held in types.items():
            if not isinstance(held, TensorType):
                yield node, f"has a {what} of unknown type"
            elif len(held.shape) == 4 and not _is_channels_last(held):
                yield node, f"has a {what} of {held} with strides {held.stride}"


def _is_channels_last(held: TensorType) -> bool:
    if held.stride is None:
        return False
    _, channels, height, width = held.shape
    wanted = (channels * height * width, 1, width * channels, channels)
    axes = zip(held.shape, held.stride, wanted, strict=True)
    return all(size == 1 or have == want for size, have, want in axes)


_PRODUCTS = {
    "aten.linear": ("input", "weight"),
    "aten.conv1d": ("input", "weight"),
    "aten.conv2d": ("input", "weight"),
    "aten.conv3d": ("input", "weight"),
    "aten.convolution": ("input", "weight"),
    "aten.addmm": ("mat1", "mat2"),
    "aten.mm": ("self", "mat2"),
    "aten.bmm": ("self", "mat2"),
    "aten.matmul": ("self", "other"),
}


@graph_property
def quantized(gm: fx.GraphModule) -> Iterator[Complaint]:
    """Linear maps and convolutions take dequantised operands, or are quantised operators."""
    for node, call in _calls(gm):
        for name in _PRODUCTS.get(call.name, ()):
            operand = call.arguments.get(name)
            if not isinstance(operand, fx.Node) or not is_dequantised(operand):
                yield node, f"takes its {name} in floating point"
                break


def is_dequantised(node: fx.Node) -> bool:
    """Tell whether a node turns stored integers, or floats of fewer bits, into floating point."""
    call = resolve(node)
    if call is None:
        return False
    return call.name.rpartition(".")[2].startswith("dequantize") or is_widened(node)
