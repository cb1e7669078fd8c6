"""One sweep over a graph, node by node: from a key where one decides, else on live fake tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from fxkit.analysis.dependencies import ancestors
from fxkit.analysis.type_inference import type_errors
from fxkit.analysis.type_inference.declared_types import declared_type_of_call
from fxkit.analysis.type_inference.fake_calls import FakeCalls, filled
from fxkit.analysis.type_inference.fake_tensors import (
    entered,
    holds_constant,
    is_about_data,
)
from fxkit.analysis.type_inference.live_calls import LiveCalls
from fxkit.analysis.type_inference.real_runs import may_run, run_on_zeros
from fxkit.analysis.type_inference.symbolic_shapes import SymbolicShapes
from fxkit.analysis.type_inference.type_facts import (
    TypeFacts,
    concrete,
    data_symbols_in,
    facts_in,
    materialise,
    symbols_in,
    types_of,
    with_operands,
)
from fxkit.analysis.type_inference.type_keys import (
    Manner,
    NoKey,
    core_of,
    is_shared_target,
    itself,
    key_of_call,
    key_of_module,
    manner_of,
)
from fxkit.analysis.type_inference.type_memory import MORE, new_memory
from fxkit.analysis.type_inference.type_modes import TypeModes, leave_regions, read_modes
from fxkit.analysis.type_inference.type_observations import Observations
from fxkit.analysis.type_inference.type_records import NeedsLive, Record
from fxkit.errors import FxkitError
from fxkit.ir.attributes import find_attribute
from fxkit.ir.types import KEY, TensorType
from fxkit.torch_adapters import pytree
from fxkit.torch_adapters.fx_nodes import input_nodes_of

_ABSENT: Any = object()


class Evaluation:
    """The state of a sweep.

    Args:
        gm: The module.
        inputs: A value for each placeholder, by name; absent where the default is meant.
        modes: The modes at the beginning.
        live_nodes: The nodes to run on live tensors.
        observed: What was known before, for calls that can't run on fake tensors.
        symbolic: Symbolic sizes, if there are any, or if data decide some.

    Attributes:
        values: For each node visited what is known of its value.
        records: For each node visited what it was.
        switches: Nodes that changed the modes, and to what.
        origins: Name of a symbol → the node that found it in the data.
        constants: Nodes whose fake tensor knew its numbers, and lost them by not being live.
        visited: How many nodes were visited.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        inputs: Mapping[str, Any],
        modes: TypeModes,
        live_nodes: set[fx.Node],
        observed: Observations,
        symbolic: SymbolicShapes | None,
    ) -> None:
        self.memory = new_memory()
        self.modes = self.first_modes = modes
        self.live_nodes = live_nodes
        self.symbolic = symbolic
        self.values: dict[fx.Node, Any] = {}
        self.records: dict[fx.Node, Record] = {}
        self.switches: dict[fx.Node, TypeModes] = {}
        self.origins: dict[str, fx.Node] = {}
        self.constants: set[fx.Node] = set()
        self.visited = 0
        self._gm = gm
        self._inputs = inputs
        self._observed = observed
        mode = None if symbolic is None else symbolic.mode
        self._fakes = FakeCalls(gm, self.memory.table, mode)
        self._live = LiveCalls(
            self._fakes, self.memory.table, self.values, self.origins, observed, symbolic
        )

    def sweep(self) -> list[fx.Node]:
        """Visit every node in order.

        Returns:
            Nodes that should have run on live tensors and did not; then the types may be wrong.

        Raises:
            NeedsLive: When there is no way to go on.
        """
        missed: list[fx.Node] = []
        try:
            for node in self._gm.graph.nodes:
                self._visit_or_miss(node, missed)
        except BaseException as error:
            leave_regions(self._live.results)
            if missed and isinstance(error, FxkitError):
                return missed
            raise
        if self.symbolic is not None:
            self._settle()
        return missed

    def _visit_or_miss(self, node: fx.Node, missed: list[fx.Node]) -> None:
        try:
            self.visit(node)
        except NeedsLive as error:
            if node in self.live_nodes or (error.about_data and self.symbolic is None):
                raise
            missed.append(node)
            self._record(node, self._run_live(node), self.modes)

    def visit(self, node: fx.Node) -> None:
        """Find the type of a node whose operands were visited, and record it."""
        self.visited += 1
        modes = self.modes
        if node in self.live_nodes:
            value = self._run_live(node)
        elif node.op == "placeholder":
            value = self._input(node)
        elif node.op == "get_attr":
            value = self._attribute(node)
        elif node.op == "output":
            value = self._live.returned(node)
        else:
            value = self.call(node)
        self._record(node, value, modes)

    def modes_at(self, node: fx.Node) -> TypeModes:
        """Return the modes that a node runs in, told by the nodes before it."""
        while self.switches and node.op != "root":
            record = self.records.get(node)
            if record is not None:
                return self.switches.get(node, record.modes)
            node = node.prev
        return self.first_modes

    def constants_behind(self, node: fx.Node) -> list[fx.Node]:
        """Return the constants, and what is made of them alone, that a node is computed from."""
        found: dict[fx.Node, bool] = {}
        for each in sorted(ancestors([node])):
            operands = input_nodes_of(each)
            is_made = bool(operands) and all(found[o] for o in operands)
            found[each] = each in self.constants or is_made
        return [each for each, is_constant in found.items() if is_constant]

    def restore(self, node: fx.Node, record: Record | None) -> None:
        """Let a node be as it was before it was visited."""
        if record is None:
            self.records.pop(node, None)
            self.values.pop(node, None)
        else:
            self.records[node] = record
            self.values[node] = record.value

    def _record(self, node: fx.Node, value: Any, modes: TypeModes) -> None:
        self.values[node] = value
        self.records[node] = Record(node, value, modes)
        node.meta[KEY] = value.type if type(value) is TypeFacts else types_of(value)

    def _settle(self) -> None:
        """Write what was learnt of symbolic sizes since into all types."""
        assert self.symbolic is not None
        if not self.symbolic.learnt:
            return
        for node, value in self.values.items():
            if symbols_in(value):
                node.meta[KEY] = self.symbolic.simplify(types_of(value))

    # Inputs.

    def _input(self, node: fx.Node) -> Any:
        return self._known(node, self.memory.table.abstract(self._given(node)))

    def _given(self, node: fx.Node) -> Any:
        value = self._inputs.get(node.name, _ABSENT)
        if value is not _ABSENT:
            return value
        if not node.args:
            raise type_errors.missing_input(node)
        return node.args[0]

    def _attribute(self, node: fx.Node) -> Any:
        value = find_attribute(self._gm, str(node.target))
        return self._known(node, self.memory.table.abstract(value))

    def _known(self, node: fx.Node, value: Any) -> Any:
        if type(value) is TypeFacts and not value.core.is_plain:
            raise NeedsLive(node)
        return value

    # Calls by key.

    def call(self, node: fx.Node) -> Any:
        """Return what is known of the value of a call, from its operands' values."""
        if self._live.results:
            self._live.refresh(node)
        memory = self.memory
        try:
            key = self._key(node, core_of)
            found = memory.get(key)
            if found is MORE:
                key = self._key(node, itself)
                found = memory.get(key)
            if found is not None:
                return self._recalled(node, *found)
        except (NoKey, TypeError):
            key = None
        return self._find(node, key)

    def _recalled(self, node: fx.Node, value: Any, is_constant: bool) -> Any:
        if is_constant:
            self.constants.add(node)
        return self._of_data(node) if value is _ABSENT else value

    def _key(self, node: fx.Node, pick: Any) -> tuple[Any, ...]:
        target = node.target
        if node.op == "call_module":
            target = key_of_module(find_attribute(self._gm, str(target)), self.memory.table)
        return key_of_call(node, target, self.modes, self.values, pick, self.memory.table)

    def _find(self, node: fx.Node, key: Any) -> Any:
        """Find the result of a call like none before, and remember it."""
        operands = self._operands(node)
        manner = manner_of(node, operands, self.modes.grad, bool(self.switches))
        if manner is Manner.LIVE:
            raise NeedsLive(node)
        if self.modes is not read_modes():
            with self.modes.active():
                value, is_constant = self._run(node, operands)
        else:
            value, is_constant = self._run(node, operands)
        if self._observed.has_number_for(node, value):
            value = _ABSENT
        if key is not None and manner is not Manner.ALONE:
            self._remember(node, key, manner, operands, (value, is_constant))
        elif self.symbolic is not None and self._note_origins(node, value):
            raise NeedsLive(node, about_data=True)
        self._note_modes(node)
        return self._recalled(node, value, is_constant)

    def _of_data(self, node: fx.Node) -> Any:
        """Return the number that was read out of a tensor at capture."""
        number = self._observed.number_of(node)
        if number is None:
            raise NeedsLive(node, about_data=True)
        return number

    def _remember(
        self,
        node: fx.Node,
        key: Any,
        manner: Manner,
        operands: list[TypeFacts],
        found: tuple[Any, bool],
    ) -> None:
        memory = self.memory
        is_own = self.symbolic is not None or any(f.core.is_symbolic for f in operands)
        if is_own and self._note_origins(node, found[0]):
            raise NeedsLive(node, about_data=True)
        is_own = is_own or not is_shared_target(node.target)
        results = memory.own if is_own else memory.shared
        if manner is Manner.BY_FACTS and memory.get(key) is None:
            by_cores = self._key(node, core_of)
            key = self._key(node, itself)
            if by_cores != key:
                results[by_cores] = MORE
        results[key] = found

    def _run(self, node: fx.Node, operands: list[TypeFacts]) -> tuple[Any, bool]:
        """Run a call; return what is known of its result, and whether that knows its numbers."""
        rule = declared_type_of_call(node, self._gm)
        if rule is not None and not any(facts.core.is_symbolic for facts in operands):
            args, kwargs = filled(node, lambda n: types_of(self.values[n]))
            result = rule(*args, **kwargs)
            return pytree.tree_map_only(TensorType, self.memory.table.of_type, result), False
        if self.symbolic is None and self._may_run_for_real(node, operands):
            run = functools.partial(self._applied, node)
            found = run_on_zeros(run, self.memory.table, keep_grad=self.modes.grad)
            if found is not None:
                return found[0], False
        return self._run_on_copies(node, operands)

    def _may_run_for_real(self, node: fx.Node, operands: list[TypeFacts]) -> bool:
        observed = self._observed
        now = tuple(types_of(self.values[operand]) for operand in input_nodes_of(node))
        is_seen = now == observed.operands_of(node)
        return may_run(node, operands, observed.type_of(node) if is_seen else None)

    def _run_on_copies(self, node: fx.Node, operands: list[TypeFacts]) -> tuple[Any, bool]:
        """Run a call on fresh fake tensors; what their facts do not decide is left to live ones.

        Returns:
            What is known of the result, and whether a fake tensor in it knows its numbers.
        """
        made: list[tuple[torch.Tensor, TypeFacts]] = []

        def make(facts: TypeFacts) -> torch.Tensor:
            tensor = materialise(facts, keep_grad=self.modes.grad)
            made.append((tensor, facts))
            return tensor

        abstract = self.memory.table.abstract
        learnt = 0 if self.symbolic is None else self.symbolic.learnt
        with entered(self._fakes.mode):
            try:
                result = self._applied(node, make)
                results = pytree.tree_leaves(result)
                is_faithful = all(abstract(tensor).core is facts.core for tensor, facts in made)
            except FxkitError:
                raise
            except Exception as error:
                if is_about_data(error):
                    return _ABSENT, False
                if not operands and node.op != "call_module":
                    raise self._live.misfit(node, error) from error
                raise NeedsLive(node, is_about_data(error)) from error
        has_learnt = self.symbolic is not None and self.symbolic.learnt > learnt
        if not (is_faithful or has_learnt):
            raise NeedsLive(node)
        self._live.check_symbolic_sizes(node)
        value = abstract(with_operands(result, made))
        if any(not facts.core.is_plain for facts in facts_in(value)):
            raise NeedsLive(node)
        return value, any(map(holds_constant, results))

    def _applied(self, node: fx.Node, make: Callable[[TypeFacts], torch.Tensor]) -> Any:
        args, kwargs = filled(node, lambda n: concrete(self.values[n], make))
        return self._fakes.apply(node, args, kwargs)

    def _operands(self, node: fx.Node) -> list[TypeFacts]:
        return [facts for n in input_nodes_of(node) for facts in facts_in(self.values[n])]

    # Live tensors.

    def _run_live(self, node: fx.Node) -> Any:
        """Run a node of any kind on tensors that keep their memory and history."""
        if node.op == "output":
            return self._live.returned(node)
        if node.op == "placeholder":
            result = self._fakes.fakes_of(node, self._given(node))
        elif node.op == "get_attr":
            result = self._fakes.fakes_of(node, find_attribute(self._gm, str(node.target)))
        else:
            result = self._live.call(node)
        value = self._live.keep(node, result)
        self._note_modes(node)
        self._note_origins(node, value)
        return value

    def _note_modes(self, node: fx.Node) -> None:
        now = read_modes()
        if now is not self.modes:
            self.modes = self.switches[node] = now

    def _note_origins(self, node: fx.Node, value: Any) -> bool:
        """Note who found new symbols in the data; tell whether there were any."""
        known = {name for n in input_nodes_of(node) for name in data_symbols_in(self.values[n])}
        fresh = data_symbols_in(value) - known
        for name in fresh:
            self.origins.setdefault(name, node)
        return bool(fresh)
