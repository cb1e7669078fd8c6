"""One run of a graph on fake tensors, to see what its values share and what it writes to."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxkit.analysis.effects import Effects, effects_of
from fxkit.analysis.type_inference.fake_tensors import without_log
from fxkit.torch_adapters.fake_tensors import mode_class
from fxkit.torch_adapters.grad_modes import enter_autocast, exit_autocast, set_grad_enabled
from fxkit.torch_adapters.tensors import impl_address_of, version_counter_of
from fxkit.tracing.functional.sized_runs import SizedRun, tensors_in
from fxkit.tracing.guarding.guards import check_value
from fxkit.tracing.recorder.data_dependence import META_KEY
from fxkit.tracing.values.effects import quietly, write_text
from fxkit.tracing.values.mode_scopes import RegionModes
from fxkit.tracing.values.refusals import Refusal, said

MODES = frozenset(
    {
        set_grad_enabled,
        enter_autocast,
        exit_autocast,
    }
)
SIDE_NODES = frozenset({check_value, write_text})


@dataclass(frozen=True, slots=True)
class Seen:
    """What was seen of the tensor or tensors that a node gives.

    Attributes:
        memories: A key for the memory of each.
        geometry: Shape, stride and offset of each.
        requires_grad: Whether autograd follows each, at first.
        has_grad_mode: Whether gradients were on.
        objects: A key for the identity of each.
        is_tensor: Whether it is one tensor and no nest of them.
    """

    memories: tuple[int, ...]
    geometry: tuple[Any, ...]
    requires_grad: tuple[bool, ...]
    has_grad_mode: bool
    objects: tuple[int, ...]
    is_tensor: bool = True


@dataclass(slots=True)
class GraphObservation:
    """What one run on fake tensors has shown.

    Attributes:
        seen: What was seen of each node's tensors.
        mutated: Positions of the inputs whose content is written.
        reshaped: Positions of the inputs whose shape or stride is changed in place.
        unnoticed: Those among them of which autograd is not told, such as running statistics.
        carrying: Those among them that autograd follows afterwards.
        followed: Nodes whose tensors autograd follows at the end.
        is_random: Whether random numbers are drawn.
        shape_changes: Key of a tensor's identity → the calls that change its shape in place.
    """

    seen: dict[fx.Node, Seen]
    mutated: tuple[int, ...]
    reshaped: tuple[int, ...]
    unnoticed: frozenset[int]
    carrying: frozenset[int]
    followed: frozenset[fx.Node]
    is_random: bool
    shape_changes: dict[int, list[fx.Node]]


def is_read(node: fx.Node) -> bool:
    """Tell whether a node gives a Python value that a guard in the graph checks."""
    return bool(node.users) and all(user.target is check_value for user in node.users)


def observe(gm: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> GraphObservation:
    """Run a graph whose inputs are all placeholders on fake tensors.

    Raises:
        Refusal: When it does what a functional graph can't hold.
    """
    effects = {node: effects_of(node) for node in gm.graph.nodes}
    for node, found in effects.items():
        _check(node, found)
    fakes, observer = _run(gm, inputs)
    seen = observer.seen
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    changes = observer.shape_changes
    changing = {node for nodes in changes.values() for node in nodes}
    written = {
        memory
        for node, found in effects.items()
        if node not in changing
        for target in (() if found.is_opaque else found.writes)
        if isinstance(target, fx.Node)
        for memory in seen[target].memories
    }
    mutated = tuple(
        i for i, node in enumerate(placeholders) if not written.isdisjoint(seen[node].memories)
    )
    reshaped = tuple(i for i, node in enumerate(placeholders) if seen[node].objects[0] in changes)
    _check_mutated(
        sorted({*mutated, *reshaped}), fakes, [seen[node] for node in placeholders], reshaped
    )
    is_random = any(found.is_random for found in effects.values())
    unnoticed = frozenset(i for i in mutated if version_counter_of(fakes[i]) == 0)
    carrying = frozenset(i for i in mutated if fakes[i].requires_grad)
    return GraphObservation(
        seen,
        mutated,
        reshaped,
        unnoticed,
        carrying,
        observer.followed(),
        is_random,
        changes,
    )


# Torch records the type of what it leaves out when no gradient is asked for.
_WITHOUT_VECTORS = frozenset({"linalg_eigvals"})


def _check(node: fx.Node, effects: Effects) -> None:
    if node.op not in ("placeholder", "output", "call_function", "call_method"):
        raise Refusal(f"%{node.name} is a {node.op}, which is not followed")
    if node.target in MODES or node.target in SIDE_NODES:
        return
    if (effects.is_opaque and not is_functional(node)) or effects.is_global:
        raise Refusal(f"%{node.name} is a call of {_name(node)}, which is not looked into")
    if getattr(node.target, "__name__", "") in _WITHOUT_VECTORS:
        raise Refusal(f"%{node.name} is traced without the vectors that its gradient needs")
    if node.meta.get(META_KEY):
        raise Refusal(f"the shape of %{node.name} depends on the numbers in a tensor")
    if node.target is setattr or node.target in ("requires_grad_", "detach_"):
        raise Refusal(f"%{node.name} changes what autograd knows of a tensor")


def is_functional(node: fx.Node) -> bool:
    """Tell whether a call is of a function that torch writes in Python and that only calls torch.

    What it may write to in spite of that, torch finds when it traces the graph.
    """
    name = getattr(node.target, "__name__", "")
    return getattr(torch.nn.functional, name, None) is node.target


def _name(node: fx.Node) -> str:
    return getattr(node.target, "__qualname__", str(node.target))


def _check_mutated(
    mutated: Sequence[int], fakes: list[Any], seen: list[Seen], reshaped: Sequence[int]
) -> None:
    for position in mutated:
        fake = fakes[position]
        if seen[position].requires_grad[0]:
            raise Refusal("a tensor whose gradient is wanted is written to in place")
        if (_geometry(fake),) != seen[position].geometry and position not in reshaped:
            raise Refusal("an input is given another shape or stride in place")
        memory = seen[position].memories[0]
        if sum(memory in other.memories for other in seen) > 1:
            raise Refusal("a tensor that is written to shares memory with another input")


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset()


class _Observer(SizedRun):
    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.seen: dict[fx.Node, Seen] = {}
        self.shape_changes: dict[int, list[fx.Node]] = {}

    def run_node(self, n: fx.Node) -> Any:
        if is_read(n) or n.target in SIDE_NODES:
            return None
        written = [] if n.op == "output" else effects_of(n).writes
        nodes = [w for w in written if isinstance(w, fx.Node)]
        before = [(w, t, _extent(t)) for w in nodes for t in tensors_in(self.env[w])]
        value = super().run_node(n)
        if n.op != "output":
            self.seen[n] = _see(value)
        for operand, tensor, extent in before:
            is_there = any(tensor is one for one in tensors_in(self.env[operand]))
            if is_there and _extent(tensor) != extent:
                self._note_shape_change(n, tensor, extent)
        return value

    def note_size(self, node: fx.Node) -> None:
        self.seen[node] = _see(self.env[node])

    def _note_shape_change(self, node: fx.Node, tensor: torch.Tensor, before: Any) -> None:
        """Take note of a call that lets a tensor show its memory with another shape."""
        is_same_memory = _extent(tensor)[1:] == before[1:]
        if not is_same_memory or len(node.all_input_nodes) > 1:
            raise Refusal(f"%{node.name} changes the shape of a tensor and its memory in place")
        self.shape_changes.setdefault(id(tensor), []).append(node)

    def followed(self) -> frozenset[fx.Node]:
        """Return the nodes whose tensors require a gradient by now."""
        return frozenset(
            node for node in self.seen if any(t.requires_grad for t in tensors_in(self.env[node]))
        )


def _extent(tensor: torch.Tensor) -> tuple[Any, int, int]:
    """Return how a tensor shows its memory, which memory that is, and its size."""
    storage = tensor.untyped_storage()
    return _geometry(tensor), impl_address_of(storage), storage.nbytes()


def _see(value: Any) -> Seen:
    tensors = list(tensors_in(value))
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            raise Refusal(f"a value is {tensor.layout}, which is not strided")
    return Seen(
        tuple(impl_address_of(tensor.untyped_storage()) for tensor in tensors),
        tuple(_geometry(tensor) for tensor in tensors),
        tuple(tensor.requires_grad for tensor in tensors),
        torch.is_grad_enabled(),
        tuple(id(tensor) for tensor in tensors),
        isinstance(value, torch.Tensor),
    )


def _run(gm: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> tuple[list[Any], _Observer]:
    observer = _Observer(gm)
    modes = RegionModes.now()
    try:
        fake_mode = mode_class()()
        with fake_mode, quietly(), without_log(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they were given when the program ran
            fakes: list[Any] = [fake_mode.from_tensor(t, static_shapes=True) for t in inputs]
            observer.run(*fakes)
    except Refusal:
        raise
    except Exception as error:  # whatever torch says of fake tensors, the graph can run as it is
        modes.restore(error)
        raise Refusal(f"it can't be followed: {said(error)}") from error
    return fakes, observer
