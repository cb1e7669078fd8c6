"""Which node of which graph an observer looks at, where a program has several graphs."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate

from fxkit.errors import FxkitError, UnsupportedError
from fxkit.ir.attributes import find_attribute
from fxkit.ir.op import resolve
from fxkit.ir.printer import format_source
from fxkit.ir.provenance import module_path
from fxkit.quantization.observers import OBSERVERS, RangeObserver
from fxkit.quantization.placement import QuantizedOperator
from fxkit.quantization.specs import TensorSpec

KEPT = "fxkit_observed_place"
"""Names what a node was in its metadata, once a pass has changed what it reads."""


class ObservedPlaces:
    """The observers of a program, and where each looks.

    Graphs of one program for other sizes or modes have nodes of the same names, which share an
    observer. Graphs of other branches may use the name for something else: that has its own.

    With gradients a program may compute in other nodes what it computes without, as
    `nn.MultiheadAttention` does: see `keys_in_other_mode`.

    Attributes:
        observers: By the names of the nodes that they look at; one may look at several. A node of a
            later graph that is not what has its name in the first one has a suffix: `mul@3f2a1c`.
        specs: How what an observer sees is going to be quantised, by the same names.
    """

    def __init__(self) -> None:
        self.observers: dict[str, RangeObserver] = {}
        self.specs: dict[str, TensorSpec] = {}
        self._first: dict[str, tuple[Any, ...]] = {}
        self._operands: dict[bool, dict[OperandPlace, str]] = {False: {}, True: {}}

    def named_alike(self) -> ObservedPlaces:
        """Return places without observers where nodes have the same names as here."""
        other = ObservedPlaces()
        other._first, other._operands = self._first, self._operands
        return other

    def begin(self, gm: fx.GraphModule) -> None:
        """Let nodes of the first graph go by their plain names."""
        if not self._first:
            self._first |= {node.name: _identity(node) for node in gm.graph.nodes}

    def key_of(self, node: fx.Node) -> str:
        """Return the name of a node, with a suffix where it is not what the first graph has."""
        identity = _identity(node)
        first = self._first.get(node.name)
        if first is not None and _is_same(first, identity):
            return node.name
        return f"{node.name}@{hashlib.sha256(repr(identity).encode()).hexdigest()[:6]}"

    def add(self, key: str, spec: TensorSpec, observer: RangeObserver) -> None:
        """Let an observer look at what has a key."""
        self.observers[key] = observer
        self.specs[key] = spec

    def note_operands(self, gm: fx.GraphModule, decided: Iterable[QuantizedOperator]) -> None:
        """Note the operands of the first graph that is captured with gradients on, or off."""
        known = self._operands[torch.is_grad_enabled()]
        if not known:
            nodes = {node.name: node for node in gm.graph.nodes}
            places = operand_places(nodes, decided)
            known |= {place: self.key_of(nodes[producer]) for place, producer in places.items()}

    def keys_in_other_mode(
        self, gm: fx.GraphModule, decided: Iterable[QuantizedOperator]
    ) -> dict[str, str]:
        """Return the keys of nodes in the other mode of gradients, by those in the one that is on.

        Args:
            gm: The program's graph for the inputs that its first graph is of.
            decided: What is quantised in it.
        """
        nodes = {node.name: node for node in gm.graph.nodes}
        known = self._operands[not torch.is_grad_enabled()]
        places = operand_places(nodes, decided)
        pairs = {name: known[place] for place, name in places.items() if place in known}
        return {self.key_of(nodes[name]): key for name, key in pairs.items()}


OperandPlace = tuple[str, str, int, int]
"""The module that an operator ran in, its name, which one of these it is there, which operand."""


def operand_places(
    nodes: Mapping[str, fx.Node], decided: Iterable[QuantizedOperator]
) -> dict[OperandPlace, str]:
    """Return the names of activations whose range is needed, by which operands they are."""
    found: dict[OperandPlace, str] = {}
    counts = Counter[tuple[str, str]]()
    for placement in decided:
        where = module_path(nodes[placement.node]), placement.operator
        for position, operand in enumerate(placement.operands):
            if not operand.is_weight and not operand.spec.is_dynamic:
                found[*where, counts[where], position] = operand.producer
        counts[where] += 1
    return found


def new_observer(spec: TensorSpec) -> RangeObserver:
    """Return a new observer of the kind that a spec asks for.

    Raises:
        FxkitError: When no observer has the name.
        UnsupportedError: When the class can't be made an observer of.
    """
    kind = OBSERVERS[spec.observer] if isinstance(spec.observer, str) else spec.observer
    try:
        observer = kind(bits=spec.bits)
    except FxkitError:
        raise
    except Exception as error:
        raise _not_made(kind, f"{type(error).__name__}: {error}") from error
    if not hasattr(observer, "not_finite"):
        raise _not_made(kind, "one whose __init__ does not call that of RangeObserver")
    return observer


def _not_made(kind: type[RangeObserver], got: str) -> UnsupportedError:
    return UnsupportedError(
        f"expected observer={kind.__name__} to be made with bits= and axis=, got {got}",
        hint="def __init__(self, bits=8, axis=None): super().__init__(bits, axis)",
    )


def observed(decided: Iterable[QuantizedOperator]) -> dict[str, TensorSpec]:
    """Return the activations whose range calibration has to find, by the names of their nodes."""
    return {
        operand.producer: operand.spec
        for placement in decided
        for operand in placement.operands
        if not operand.is_weight and not operand.spec.is_dynamic
    }


def keep_identities(graph: fx.Graph) -> None:
    """Note on nodes what they are, for a pass that is about to change what they read."""
    for node, identity in [(node, _identity(node)) for node in graph.nodes]:
        node.meta[KEPT] = identity


def _identity(node: fx.Node) -> tuple[Any, ...]:
    """Return what a node has in common with those of its name for other sizes and modes.

    That is its operator, its line, its floats, and the parameters that it and its users read.
    """
    if KEPT in node.meta:
        return node.meta[KEPT]
    call = resolve(node)
    operator = node.op if call is None else call.name
    floats: list[Any] = []
    map_aggregate((node.args, dict(node.kwargs)), floats.append)
    gm = node.graph.owning_module
    reads = {
        str(operand.target)
        for one in (node, *node.users)
        for operand in one.all_input_nodes
        if operand.op == "get_attr"
        and gm is not None
        and isinstance(find_attribute(gm, str(operand.target)), nn.Parameter)
    }
    # A batch norm's momentum may differ from call to call.
    kept = tuple(v for v in floats if isinstance(v, float) and operator != "aten.batch_norm")
    return operator, format_source(node), kept, tuple(sorted(reads))


def _is_same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Tell whether two nodes of one name are the same, though one may have further users."""
    *ours, reads = one
    *theirs, read = other
    return ours == theirs and (reads == read or not set(reads).isdisjoint(read))
