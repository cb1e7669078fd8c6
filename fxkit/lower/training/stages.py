"""A trained graph in stages: where some results are computed from others, and around what is kept.

A caller may want the gradient at a result, keep it, or hang a hook on it, while another result is
computed from that one. Autograd sees nothing of what lies within one function. So the graph is cut
where such a result is used first, and what follows takes it as an input, as in eager.

A recurrent layer is a stage of its own, which eager runs. Spelled out, its steps would take a third
of a second each to differentiate and build, for less than eager's layers of long short-term memory.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from fxkit.analysis.effects import PURE, effects_of
from fxkit.ir.code_tracer import CodeTracer
from fxkit.ir.graph_copies import copy_nodes
from fxkit.ir.op import operator_of
from fxkit.ir.types import TensorType, type_of
from fxkit.lower.loops.policy import Policy
from fxkit.lower.running.kernel_stock import KernelStock
from fxkit.lower.training.training_module import TrainingModule, to_cpp_training
from fxkit.tracing.functional.observation import MODES
from fxkit.tracing.values.effects import write_text


@dataclass(frozen=True)
class Stage:
    """A part of a graph.

    Attributes:
        graph_module: What it computes.
        inputs: Names of the values that it takes, in the whole graph.
        outputs: Names of those that it gives.
    """

    graph_module: fx.GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class StagedModule(nn.Module):
    """Stages of one graph, each with a forward and a backward of its own.

    Attributes:
        graph_module: The whole graph.
        stages: Its parts, in order.
        parts: What was compiled of each: all but the first when they are called first.
    """

    def __init__(
        self, gm: fx.GraphModule, stages: list[Stage], compiled: list[TrainingModule]
    ) -> None:
        super().__init__()
        self.graph_module = gm
        self.stages = stages
        self.parts = tuple(compiled)
        self._inputs = [node.name for node in gm.graph.find_nodes(op="placeholder")]
        self._outputs: Any = gm.graph.output_node().args[0]
        self._has_run = False

    def forward(self, *args: torch.Tensor) -> Any:
        """Run the stages, each on what those before it gave."""
        values: dict[str, Any] = dict(zip(self._inputs, args, strict=True))
        for stage, module in zip(self.stages, self.parts, strict=True):
            results = module(*[values[name] for name in stage.inputs])
            values.update(zip(stage.outputs, results, strict=True))
        self._has_run = True

        def value_of(node: fx.Node) -> Any:
            if node.op == "get_attr":
                return operator.attrgetter(str(node.target))(self.graph_module)
            return values[node.name]

        results = fx.map_arg(self._outputs, value_of)
        return results if isinstance(self._outputs, fx.Node) else tuple(results)

    @property
    def leaves_calls(self) -> bool:
        """Whether it may leave calls to eager: any stage may, once it is built."""
        return True

    @property
    def calls_in_eager(self) -> int:
        """How many calls ran in eager in all stages."""
        return min(module.eager_calls for module in self.parts)

    def note_eager_call(self) -> None:
        """Count a call that the program itself has run in the place of all stages."""
        for module in self.parts:
            module.note_eager_call()

    def way_for(self, args: tuple[torch.Tensor, ...]) -> Callable[..., Any] | None:
        """Return what runs for inputs of just these types; None as long as nothing has run."""
        return self.forward if self._has_run else None


def to_cpp_in_stages(
    gm: fx.GraphModule,
    args: tuple[torch.Tensor, ...],
    *,
    policy: Policy | None = None,
    stock: KernelStock | None = None,
) -> TrainingModule | StagedModule:
    """Compile a captured graph and its gradient, in stages where it takes several.

    Args:
        gm: A captured graph. It is not changed.
        args: Inputs of the types to compile for.
        policy: When a kernel pays.
        stock: Kernels built for other sizes.

    Returns:
        A module that is called like `gm`. Where the graph can't be cut as it would have to be, one
        that is left to eager.
    """
    groups = _groups(gm.graph)
    reasons = [_WHOLE if any(map(is_recurrent, group)) else None for group in groups]
    if len(groups) < 2 and not any(reasons):
        return to_cpp_training(gm, args, policy=policy, stock=stock)
    if (reason := _objection(groups)) is not None:
        return TrainingModule(gm, policy, stock, reason=reason)
    stages = [_stage(gm, group) for group in groups]
    compiled = [
        TrainingModule(stage.graph_module, policy, stock, reason=reason)
        for stage, reason in zip(stages, reasons, strict=True)
    ]
    given = dict(zip((n.name for n in gm.graph.find_nodes(op="placeholder")), args, strict=True))
    compiled[0].build(tuple([given[name] for name in stages[0].inputs]))
    return StagedModule(gm, stages, compiled)


_WHOLE = "torch computes recurrent layers as a whole"


def is_recurrent(node: fx.Node) -> bool:
    """Tell whether a node is a recurrent layer, over all steps of its input."""
    called = operator_of(node)
    return called is not None and called.name in _RECURRENT


_RECURRENT = frozenset({"aten.lstm", "aten.gru", "aten.rnn_tanh", "aten.rnn_relu"})


def linked_results(graph: fx.Graph) -> set[fx.Node]:
    """Return the results with a gradient from which others with a gradient are computed."""
    output = graph.output_node()
    results = [n for n in output.all_input_nodes if n.op.startswith("call_") and _is_followed(n)]
    bits = {node: 1 << position for position, node in enumerate(dict.fromkeys(results))}
    behind: dict[fx.Node, int] = {}
    for node in graph.nodes:
        behind[node] = 0
        for operand in node.all_input_nodes:
            behind[node] |= behind[operand] | bits.get(operand, 0)
    needed = 0
    for node in bits:
        needed |= behind[node]
    return {node for node, bit in bits.items() if bit & needed}


def _is_followed(node: fx.Node) -> bool:
    known = type_of(node)
    return not isinstance(known, TensorType) or known.requires_grad is not False


def _groups(graph: fx.Graph) -> list[list[fx.Node]]:
    """Return the nodes of each stage, in order.

    What takes a recurrent layer's results apart stands with it, so that all stages give tensors,
    and so do the zeros that it begins with.
    """
    linked = linked_results(graph)
    groups: list[list[fx.Node]] = [[]]
    given: set[fx.Node] = set()
    for node in graph.nodes:
        if not node.op.startswith("call_") or _takes_apart(node) or _begins(node):
            continue
        if is_recurrent(node):
            begin = filter(_begins, dict.fromkeys(node.all_input_nodes))
            groups += [[*begin, node, *filter(_takes_apart, node.users)], []]
            given = set()
            continue
        if not given.isdisjoint(node.all_input_nodes):
            groups.append([])
            given = set()
        groups[-1].append(node)
        if node in linked:
            given.add(node)
    return [group for group in groups if group]


def _begins(node: fx.Node) -> bool:
    """Tell whether a node makes, of nothing, what only one recurrent layer takes."""
    is_made = node.op.startswith("call_") and not node.all_input_nodes
    return (
        is_made
        and [is_recurrent(user) for user in node.users] == [True]
        and effects_of(node) == PURE
    )


def _takes_apart(node: fx.Node) -> bool:
    if node.target is not operator.getitem:
        return False
    whole = node.args[0]
    return isinstance(whole, fx.Node) and is_recurrent(whole)


def _objection(groups: list[list[fx.Node]]) -> str | None:
    """Return why a graph can't be cut into groups of nodes, or None."""
    why = "the graph would have to be cut in stages, and can't be: "
    before: set[fx.Node] = set()
    is_followed, autocasts, has_effects = True, 0, False
    for group in groups:
        if autocasts or not is_followed:
            return f"{why}%{group[0].name} is in a mode that is set before"
        for node in group:
            if node.target in MODES:
                is_set = node.target is torch._C._set_grad_enabled
                is_followed = node.args[0] if is_set else is_followed
                autocasts += _AUTOCASTS.get(node.target, 0)
                continue
            effects = effects_of(node)
            if before and has_effects and effects.may_raise:
                return f"{why}%{node.name} {effects.describe()}, after effects before it"
            if not before.isdisjoint(effects.writes):
                return f"{why}%{node.name} {effects.describe()}"
            has_effects |= bool(effects.writes) or effects.is_random or node.target is write_text
        before.update(group)
    return None


_AUTOCASTS = {
    torch.amp.autocast_mode._enter_autocast: 1,
    torch.amp.autocast_mode._exit_autocast: -1,
}


def _stage(gm: fx.GraphModule, group: list[fx.Node]) -> Stage:
    inside = set(group)
    operands = dict.fromkeys(o for node in group for o in node.all_input_nodes if o not in inside)
    inputs = [o for o in operands if o.op != "get_attr"]
    outputs = [node for node in group if any(user not in inside for user in node.users)]
    graph = fx.Graph(tracer_cls=CodeTracer)
    values: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        values[node] = graph.placeholder(node.name)
        if node.op == "placeholder":
            values[node].meta = dict(node.meta)
    copy_nodes((*(o for o in operands if o.op == "get_attr"), *group), graph, values)
    graph.output(tuple(values[node] for node in outputs))
    names = tuple(node.name for node in inputs), tuple(node.name for node in outputs)
    return Stage(fx.GraphModule(gm, graph), *names)
