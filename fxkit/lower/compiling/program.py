"""From the lowered graph to a program of the C binding: one call for all of it.

The graph is split into steps: runs of kernels, and Python calls between them. A value that no other
step reads is never a tensor: it lies in scratch memory, or where a result is written later; memory
is planned by liveness.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fxkit.ir.types import TensorType, type_of
from fxkit.lower.compiling.piece import Key, Piece, is_one_of_several, kernel_of, key_of, results_of
from fxkit.lower.compiling.view_values import views_for_kernels
from fxkit.lower.runtime import binding
from fxkit.lower.runtime.kernel_call import KernelCall
from fxkit.lower.runtime.launcher import Launcher
from fxkit.lower.runtime.scratch import plan_scratch
from fxkit.lower.runtime.type_specs import is_plain, spec_of

# What the binding has room for on its stack.
MAX_VALUES = 120
_LONG_WORK = 100_000

# Values of fewer bytes are let go of at the end of a run.
_LARGE_BYTES = 1 << 16

Table = tuple[dict[str, Any], str]


@dataclass
class _Step:
    """Consecutive nodes of one kind.

    Attributes:
        nodes: The nodes.
        is_run: Whether they are kernels.
        values: How many values a run handles, at most.
    """

    nodes: list[fx.Node] = field(default_factory=list)
    is_run: bool = False
    values: int = 0


def make_program(gm: fx.GraphModule, graph: fx.Graph) -> Any | None:
    """Return a graph of kernel calls as a program of the binding.

    Args:
        gm: The module that owns the graph's attributes; they are read at each call.
        graph: Its kernels are built.

    Returns:
        A callable of the graph's tensors, which returns the binding's `MISS` where it does not
        hold; None where there is no binding, or the graph's inputs are no plain tensors.
    """
    native = binding.load()
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    if native is None or not all(is_plain(type_of(node)) for node in inputs):
        return None
    return _Planner(gm, graph, inputs).program(native)


class _Planner:
    def __init__(self, gm: fx.GraphModule, graph: fx.Graph, inputs: list[fx.Node]) -> None:
        self._gm = gm
        self._graph = graph
        self._inputs = inputs
        self._output = next(iter(reversed(graph.nodes)))
        self._slots: dict[Key, int] = {(node, 0): slot for slot, node in enumerate(inputs)}
        self._views = views_for_kernels(graph, lambda node: kernel_of(node) is not None)
        self._steps = self._cut()
        self._reads = {n: self._operands(n) for step in self._steps for n in step.nodes}
        self._home = {n: number for number, step in enumerate(self._steps) for n in step.nodes}
        self._last_use = self._find_last_uses()
        self._grads: dict[str, tuple[dict[str, Any], str, None]] = {}
        self._links: dict[tuple[int, str], tuple[dict[str, Any], str, Any]] = {}
        self._runs_with_grad = not any(node.op == "call_module" for node in graph.nodes)

    def program(self, native: Any) -> Any:
        """Return the program."""
        steps = tuple(self._step(number, step) for number, step in enumerate(self._steps))
        for node in self._graph.nodes:
            if node.op == "get_attr":
                self._table(str(node.target))
        returned = self._returned()
        outputs = (self._finished,) if returned is None else returned
        return native.Program(
            tuple([spec_of(type_of(node)) for node in self._inputs]),
            len(self._slots) + (returned is None),
            tuple(self._links.values()),
            tuple(self._grads.values()),
            self._runs_with_grad,
            steps,
            tuple(outputs),
            isinstance(self._output.args[0], fx.Node) or returned is None,
        )

    # Cutting.

    def _cut(self) -> list[_Step]:
        steps: list[_Step] = []
        for node in self._graph.nodes:
            is_silent = node in self._views or is_one_of_several(node)
            if node.op in ("placeholder", "get_attr") or is_silent:
                continue
            if node.op == "output" and self._is_flat(node.args[0]):
                continue
            call = kernel_of(node)
            values = len(call.inputs) + len(call.outputs) + 1 if call is not None else 0
            is_run = call is not None and values <= MAX_VALUES
            last = steps[-1] if steps else None
            if last is None or last.is_run != is_run or last.values + values > MAX_VALUES:
                last = _Step(is_run=is_run)
                steps.append(last)
            last.nodes.append(node)
            last.values += values
        return steps

    def _is_flat(self, returned: Any) -> bool:
        if isinstance(returned, fx.Node):
            return returned.op != "get_attr"
        is_tuple = isinstance(returned, tuple) and type(returned) is tuple
        return is_tuple and all(isinstance(n, fx.Node) and n.op != "get_attr" for n in returned)

    def _returned(self) -> tuple[int, ...] | None:
        """Return the slots of the results; None where a step builds what is returned."""
        value = self._output.args[0]
        if not self._is_flat(value):
            return None
        nodes = (value,) if isinstance(value, fx.Node) else value
        return tuple([self._slots[self._key(node)] for node in nodes])

    def _key(self, node: fx.Node) -> Key:
        """Return the value that a node stands for; that of a view is what it is a view of."""
        return key_of(self._views.get(node, node))

    def _operands(self, node: fx.Node) -> list[Key]:
        """Return what a node reads; of a kernel in order, once for each of its operands."""
        if kernel_of(node) is None:
            return [self._key(operand) for operand in node.all_input_nodes]
        return [self._key(operand) for operand in node.args if isinstance(operand, fx.Node)]

    def _find_last_uses(self) -> dict[Key, int]:
        last: dict[Key, int] = {}
        for number, step in enumerate(self._steps):
            for node in step.nodes:
                last.update([(key, number) for key in self._reads[node]])
        if self._is_flat(self._output.args[0]):
            last.update((key, len(self._steps)) for key in self._operands(self._output))
        return last

    # Steps.

    def _step(self, number: int, step: _Step) -> tuple[Any, ...]:
        made = list(dict.fromkeys([key for node in step.nodes for key in results_of(node)]))
        own = set(made)
        ins = [key for key in self._used(step) if key not in own and key[0].op != "get_attr"]
        outs = [key for key in made if self._last_use.get(key, -1) > number]
        for key in outs:
            self._slots[key] = len(self._slots)
        slots = tuple([self._slots[key] for key in ins])
        dead = tuple(
            slot
            for key, slot in zip(ins, slots, strict=True)
            if self._last_use[key] == number and key[0].op != "placeholder"
        )
        function = Piece(self._gm, step.nodes, ins, outs, self._views)
        if not step.is_run:
            function.prepare()
        is_last = step.nodes[-1] is self._output
        out_slots = (self._finished,) if is_last else tuple([self._slots[key] for key in outs])
        run = self._run(step, ins, outs, dead) if step.is_run else None
        return (function, self._gm, slots, out_slots, dead, run)

    @property
    def _finished(self) -> int:
        """The slot of what a step builds to be returned."""
        return len(self._slots)

    def _used(self, step: _Step) -> list[Key]:
        return list(dict.fromkeys([key for node in step.nodes for key in self._reads[node]]))

    def _run(
        self, step: _Step, ins: list[Key], outs: list[Key], dead: Sequence[int]
    ) -> tuple[Any, ...]:
        calls = [_kernel(node) for node in step.nodes]
        attributes = [key for key in self._used(step) if key[0].op == "get_attr"]
        made = set(outs)
        scratch = [key for node in step.nodes for key in results_of(node) if key not in made]
        order = {key: i for i, key in enumerate([*ins, *attributes, *outs, *scratch])}
        types = self._types(step)
        born = {key: i for i, node in enumerate(step.nodes) for key in results_of(node)}
        used = {key: i for i, node in enumerate(step.nodes) for key in self._reads[node]}
        lives = [
            (spec_of(types[key])[1], born[key], max(born[key], used.get(key, 0))) for key in scratch
        ]
        own = {i: call.scratch_bytes for i, call in enumerate(calls) if call.scratch_bytes}
        place = {i: len(order) + number for number, i in enumerate(own)}
        lives += [(count, i, i) for i, count in own.items()]
        results = [(spec_of(types[key])[1], born[key]) for key in outs]
        places = plan_scratch(lives, results)
        failing = max((i for i, call in enumerate(calls) if call.may_fail), default=0)
        freed: list[list[int]] = [[] for _ in calls]
        for key in ins:
            if self._slots[key] in dead and spec_of(types[key])[1] >= _LARGE_BYTES:
                freed[max(failing, used[key])].append(self._slots[key])
        kernels = tuple(
            (
                call.address,
                tuple(order[key] for key in (*self._reads[node], *results_of(node))),
                call.is_parallel,
                call.parameters,
                tuple(slots),
                place.get(i, -1),
            )
            for i, (node, call, slots) in enumerate(zip(step.nodes, calls, freed, strict=True))
        )
        launcher = calls[0].launcher
        return (
            tuple(spec_of(types[key]) for key in ins),
            tuple((*self._table(str(key[0].target)), spec_of(types[key])) for key in attributes),
            tuple(spec_of(types[key]) for key in outs),
            places.size,
            places.homes,
            places.offsets,
            kernels,
            launcher is not None or sum(call.work for call in calls) >= _LONG_WORK,
            None if launcher is None else _launching(launcher, places.size),
        )

    def _types(self, step: _Step) -> dict[Key, TensorType]:
        """Return the type of each value of a run, as its kernels take it for granted."""
        types: dict[Key, TensorType] = {}
        for node in step.nodes:
            call = _kernel(node)
            operands = [operand for operand in node.args if isinstance(operand, fx.Node)]
            for operand, known in zip(operands, call.inputs, strict=True):
                source = self._views.get(operand)
                types.setdefault(self._key(operand), known if source is None else type_of(source))
            types.update(zip(results_of(node), call.outputs, strict=True))
        return types

    def _table(self, path: str) -> Table:
        """Return where an attribute lies, and note what must stay so for it to lie there."""
        known = self._grads.get(path)
        if known is not None:
            return known[:2]
        owner: Any = self._gm
        *names, last = path.split(".")
        for name in names:
            self._link(vars(owner), "_modules", vars(owner)["_modules"])
            self._link(vars(owner)["_modules"], name, vars(owner)["_modules"][name])
            owner = vars(owner)["_modules"][name]
        for kind in ("_parameters", "_buffers"):
            table = vars(owner)[kind]
            if last in table:
                self._link(vars(owner), kind, table)
                break
        else:
            table = vars(owner)
        self._grads[path] = (table, last, None)
        return table, last

    def _link(self, table: dict[str, Any], key: str, value: Any) -> None:
        self._links[id(table), key] = (table, key, value)


def _launching(launcher: Launcher, scratch_bytes: int) -> tuple[Any, ...]:
    """Return how kernels are launched, with scratch memory of so many bytes, for the binding."""
    block = TensorType((scratch_bytes,), torch.uint8, (1,), launcher.device)
    spec = spec_of(block) if scratch_bytes else None
    return (launcher.stream, launcher.exchange, launcher.device.index, spec)


def _kernel(node: fx.Node) -> KernelCall:
    call = kernel_of(node)
    if call is None:
        raise LookupError(node.name)
    return call
