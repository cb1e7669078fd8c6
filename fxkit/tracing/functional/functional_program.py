"""A captured graph that runs as functional ATen, forward alone or forward and backward."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx

from fxkit.analysis.effects import effects_of
from fxkit.errors import UnsupportedError
from fxkit.ir.modes import has_modes, is_followed
from fxkit.ir.types import TensorType, type_of
from fxkit.torch_adapters.autograd_state import unversioned, version_kept
from fxkit.torch_adapters.fx_nodes import rename_node
from fxkit.torch_adapters.layers import buffers_of, parameters_of
from fxkit.tracing.functional.aot_autograd import Decompositions, partition, trace_functional
from fxkit.tracing.functional.differentiation import Backward, Differentiable, without_autocast
from fxkit.tracing.functional.distinct_results import keep_apart, memories_of
from fxkit.tracing.functional.flat_program import TAIL, VALUE, FlatProgram, flatten
from fxkit.tracing.functional.module_form import as_module
from fxkit.tracing.functional.observation import SIDE_NODES
from fxkit.tracing.recorder.state_restore import random_states, set_random_states
from fxkit.tracing.values.refusals import Refusal

Run = Callable[..., Any]
Step = Callable[[], None]


class FunctionalProgram:
    """Runs a captured graph through its functional form, and does around it what that can't hold.

    Written inputs get their new content, views are views of what they were views of, guards on
    values are checked and texts are written.

    Args:
        gm: The captured graph; parameters and buffers are read from it at each call.
        args: Inputs of the types that the functional form is for.
        decompositions: Operator → how to compute it by others.
        train: Whether there is a backward.

    Attributes:
        graph_module: The captured graph.
        forward: The functional graph, over the inputs and then the parameters and buffers.
        backward: The graph of the gradients, over what the forward kept and the tangents; None
            without one.
        is_altered: Whether the graphs were changed, so that the captured graph may not run instead.

    Raises:
        Refusal: When there is no functional form, with the reason.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        args: Sequence[torch.Tensor],
        decompositions: Decompositions | None = None,
        *,
        train: bool = False,
    ) -> None:
        self.graph_module = gm
        placeholders = gm.graph.find_nodes(op="placeholder")
        args = [_as_on_entry(*pair) for pair in zip(args, placeholders, strict=True)]
        self._flat = flat = flatten(gm, args)
        self._places = _places(gm, flat.attributes)
        inputs = [*args, *(table[name] for table, name in self._places)]
        self._is_differentiable = any(flat.is_differentiable) or bool(flat.observation.carrying)
        self._count = len(flat.values) + len(flat.read) + len(flat.mutated)
        self.forward, self.backward = _trace(
            flat, inputs, decompositions, train and self._is_differentiable
        )
        self._is_followed_alone = self.backward is not None and _is_followed_alone(flat)
        self._first = flat.results[0].index if flat.results else 0
        self.is_altered = False
        self.run_forward: Run = _current(self.forward)
        if self.backward is not None:
            self._backward = Backward(self.backward, flat)
            self._backward.run = _current(self.backward)
            reached = self._backward.reached
            followed = [i for i, tensor in enumerate(inputs) if tensor.requires_grad]
            apart = [i for i in followed if not reached[i]]
            # Results have a gradient, be it none that reaches an input: one has to be shown.
            self._apart = apart if len(apart) < len(followed) else []

    def bind(self, forward: Run, backward: Run | None = None) -> None:
        """Take what runs in place of the graphs."""
        self.run_forward = forward
        if backward is not None:
            self._backward.run = backward

    @property
    def attributes(self) -> tuple[str, ...]:
        """Names of the tensors that the graph takes behind the arguments."""
        return self._flat.attributes

    @property
    def differentiated_again(self) -> int:
        """How often a gradient was itself differentiated, so that the captured graph ran again."""
        return 0 if self.backward is None else self._backward.again

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors that the graph takes behind the arguments, as they are now."""
        return [table[name] for table, name in self._places]

    def module(self) -> fx.GraphModule:
        """Return the program as a module that holds its parameters and writes what it writes."""
        return as_module(self.forward, self.graph_module, self._flat)

    def __call__(self, *args: torch.Tensor) -> Any:
        """Run the program."""
        flat = self._flat
        objection = self._objection()
        if objection is not None:
            return self._run_captured(objection, args)
        inputs = self.inputs(args)
        if self._is_followed_alone and torch.is_grad_enabled():
            computed = self._differentiable(inputs)
            return (
                computed[self._first]
                if flat.is_single
                else tuple([computed[result.index] for result in flat.results])
            )
        computed = self._compute(inputs)
        count = len(flat.values)
        if flat.reshape is not None:
            flat.reshape(*inputs)
        written = computed[count + len(flat.read) :]
        for position, value in zip(flat.mutated, written, strict=True):
            _write(inputs[position], value, position in flat.observation.unnoticed)
        values = computed[:count]
        tail = () if flat.tail is None else flat.tail(*inputs, *values)
        sources = {VALUE: values, TAIL: tail}
        results = [sources.get(r.kind, inputs)[r.index] for r in flat.results]
        return results[0] if flat.is_single else tuple(results)

    def inputs(self, args: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return what the graph is given: the arguments, and the tensors of the program."""
        return (*args, *self.tensors)

    def _run_captured(self, objection: str, args: tuple[torch.Tensor, ...]) -> Any:
        if self.is_altered:
            raise UnsupportedError(
                f"expected a call that the changed graph can serve, got one where {objection}",
                hint="leave the mode, or capture with train=True where gradients are asked for",
            )
        return self.graph_module(*args)

    def both_ways(self, args: Sequence[torch.Tensor]) -> tuple[Step, Step] | None:
        """Return one step, forward and backward, as it runs here, and as it runs in eager.

        Both work on copies and leave no trace but in the state of random numbers. None where that
        can't be had.
        """
        flat, nodes = self._flat, self.graph_module.graph.nodes
        given = [*args, *self.tensors]
        if flat.checks is not None or any(n.target in SIDE_NODES for n in nodes):
            return None
        if flat.reshape is not None:
            return None
        if self.backward is None or not all(t.is_leaf for t in given):
            return None
        twin = copy.deepcopy(self.graph_module)
        own = [t.detach().clone().requires_grad_(t.requires_grad) for t in args]
        inputs = [*own, *(table[name] for table, name in _places(twin, flat.attributes))]
        wanted = [t for t in inputs if t.requires_grad]

        def step(results: Any) -> None:
            tensors = results if isinstance(results, (tuple, list)) else [results]
            followed = [t for t in tensors if isinstance(t, torch.Tensor) and t.requires_grad]
            weights = [torch.ones_like(t) for t in followed]
            torch.autograd.grad(followed, wanted, weights, allow_unused=True)

        def ours() -> None:
            step(self._differentiable(inputs))

        return ours, lambda: step(twin(*own))

    def _objection(self) -> str | None:
        """Return why the captured graph itself has to run, or None."""
        if is_followed():
            return "a function transform or a tracer is active"
        if has_modes():
            return "a torch mode is active"
        if self.backward is None and torch.is_grad_enabled() and self._is_differentiable:
            return "gradients are asked for"
        return None

    def _differentiable(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Run the forward under autograd, which is shown no input without a gradient."""
        if self._apart:
            shown = list(inputs)
            for position in self._apart:
                shown[position] = shown[position].detach()
            inputs = shown
        return Differentiable.apply(self.run_forward, self._backward, *inputs)

    def _compute(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        flat = self._flat
        state = random_states() if flat.checks and flat.observation.is_random else None
        if self.backward is None or not torch.is_grad_enabled():
            with torch.no_grad(), without_autocast():
                computed = tuple(self.run_forward(*inputs))[: self._count]
        else:
            computed = self._differentiable(inputs)
        if flat.checks is None:
            return computed
        try:
            with torch.no_grad():
                flat.checks(*inputs, *computed[: len(flat.values) + len(flat.read)])
        except BaseException:
            if state is not None:
                set_random_states(state)
            raise
        return computed

    def __deepcopy__(self, memo: dict[int, Any]) -> FunctionalProgram:
        """Copy the program with the module whose parameters it reads; graphs are shared."""
        twin = copy.copy(self)
        twin.graph_module = copy.deepcopy(self.graph_module, memo)
        twin._places = _places(twin.graph_module, self._flat.attributes)
        if self.backward is not None:  # what it runs may be bound anew, and counts its calls
            twin._backward = copy.copy(self._backward)
        return twin


def _current(gm: fx.GraphModule) -> Run:
    """Return what runs a graph as it is at each call; it may be changed."""
    return lambda *inputs: gm.forward(*inputs)


def _is_followed_alone(flat: FlatProgram) -> bool:
    """Tell whether nothing is done around the functional graph: its values are the results."""
    around = flat.copied or flat.checks is not None or flat.tail is not None or flat.read
    return not around and all(result.kind == VALUE for result in flat.results)


def _as_on_entry(tensor: torch.Tensor, node: fx.Node) -> torch.Tensor:
    """Return a tensor as autograd saw it on entry to the program, which may have written it."""
    known = type_of(node)
    if not isinstance(known, TensorType) or tensor.requires_grad == known.requires_grad:
        return tensor
    return tensor.detach().requires_grad_(known.requires_grad)


def _places(gm: fx.GraphModule, names: Sequence[str]) -> list[tuple[dict[str, Any], str]]:
    """Return where parameters and buffers lie: a table of a module, and the name in it."""
    found: list[tuple[dict[str, Any], str]] = []
    for name in names:
        path, _, leaf = name.rpartition(".")
        owner = gm.get_submodule(path)
        tables = (parameters_of(owner), buffers_of(owner), owner.__dict__)
        found.append((next(table for table in tables if leaf in table), leaf))
    return found


def _write(target: torch.Tensor, value: torch.Tensor, is_unnoticed: bool) -> None:
    if value.requires_grad:
        target.copy_(value)
        return
    # A tensor's version tells autograd of writes; torch's own batch norm leaves it as it is.
    with torch.no_grad(), version_kept(target) if is_unnoticed else nullcontext():
        (unversioned(target) if is_unnoticed else target).copy_(value)


def _trace(
    flat: FlatProgram,
    inputs: list[torch.Tensor],
    decompositions: Decompositions | None,
    train: bool,
) -> tuple[fx.GraphModule, fx.GraphModule | None]:
    if not train:
        plain = [tensor.detach() for tensor in inputs]
        forward = trace_functional(flat.functional, plain, decompositions)
        _check_inputs(flat, forward)
        _drop_copies(forward, flat)
        _name_inputs(flat, forward)
        return forward, None
    joint = trace_functional(flat.functional, inputs, decompositions, train=True)
    count = len(flat.values) + len(flat.read) + len(flat.mutated)
    memories = memories_of(joint.graph, count)
    forward, backward = partition(joint, count)
    _check_inputs(flat, forward)
    _drop_copies(forward, flat)
    keep_apart(forward, memories)
    _name_inputs(flat, forward, backward)
    return forward, backward


def _check_inputs(flat: FlatProgram, forward: fx.GraphModule) -> None:
    """Refuse a program to which torch's tracing has added inputs.

    Those are tokens, which keep in order what may raise, as the check of an inverse may.
    """
    wanted = flat.graph_module.graph.find_nodes(op="placeholder")
    if len(forward.graph.find_nodes(op="placeholder")) != len(wanted):
        raise Refusal("it calls operators whose effects torch's tracing keeps in order by tokens")


def _name_inputs(flat: FlatProgram, *graphs: fx.GraphModule) -> None:
    """Call inputs in both graphs as the captured graph does."""
    wanted = [node.name for node in flat.graph_module.graph.find_nodes(op="placeholder")]
    given = [node.name for node in graphs[0].graph.find_nodes(op="placeholder")]
    names = dict(zip(given, wanted, strict=True))
    for gm in graphs:
        for node in gm.graph.find_nodes(op="placeholder"):
            if node.name in names:
                rename_node(node, names[node.name])
                node.target = node.name
        gm.recompile()


def _drop_copies(forward: fx.GraphModule, flat: FlatProgram) -> None:
    """Drop the copies of written inputs and of results that only torch's tracing wants."""
    inputs = list(forward.graph.find_nodes(op="placeholder"))
    for position in flat.copied:
        for user in list(inputs[position].users) if position < len(inputs) else ():
            if user.target is _CLONE and not any(_may_keep(other) for other in user.users):
                _replace(user, inputs[position])
    _own_results(forward, len(flat.values))
    forward.recompile()


def _own_results(forward: fx.GraphModule, count: int) -> None:
    """Give each result its own memory, without a copy where nothing else has it."""
    output = forward.graph.output_node()
    taken: set[fx.Node] = set()
    for position in range(count):
        outputs: list[Any] = list(output.args[0])  # type: ignore[arg-type]
        node = outputs[position]
        if node.target is _CLONE:
            source = node.args[0]
            if source.op != "placeholder" and source not in {*taken, *outputs[:count]}:
                _replace(node, source)
                node = source
        if node in taken:  # torch has merged what computes the same
            with forward.graph.inserting_before(output):
                twin = forward.graph.call_function(_CLONE, (node,))
            twin.meta.update(node.meta)
            outputs[position] = node = twin
            output.args = (tuple(outputs),)
        taken.add(node)


def _replace(copied: fx.Node, source: fx.Node) -> None:
    copied.replace_all_uses_with(source)
    copied.graph.erase_node(copied)


def _may_keep(user: fx.Node) -> bool:
    return user.op == "output" or bool(effects_of(user).aliases)


_CLONE = torch.ops.aten.clone.default
