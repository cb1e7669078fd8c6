"""A trained graph in stages: apart where results need different parts, and around what is kept.

A caller may want the gradient at a result, keep it, or hang a hook on it, and may compute a loss
from some results only. Autograd sees nothing of what lies within one function. So what reaches
other results is another stage, which takes what those before it give as inputs, as in eager.

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

from fxkit.analysis.effects import effects_of
from fxkit.ir.code_tracer import CodeTracer
from fxkit.ir.graph_copies import copy_nodes
from fxkit.lower.compiling.kernel_cache import KernelCache
from fxkit.lower.fusion.policy import Policy
from fxkit.lower.training.grouping import groups_of, is_no_tensor, is_recurrent, writes_of
from fxkit.lower.training.modes_of_calls import Mode, ModeSetter, modes_of
from fxkit.lower.training.training_module import TrainingModule, to_cpp_training
from fxkit.passes.manager.instruments import Instrument
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
            results = module.forward(*[values[name] for name in stage.inputs])
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
    kernel_cache: KernelCache | None = None,
    instruments: tuple[Instrument, ...] = (),
) -> TrainingModule | StagedModule:
    """Compile a captured graph and its gradient, in stages where it takes several.

    Args:
        gm: A captured graph. It is not changed.
        args: Inputs of the types to compile for.
        policy: When a kernel pays.
        kernel_cache: Kernels built for other sizes.
        instruments: What is told of the steps of lowering.

    Returns:
        A module that is called like `gm`. Where the graph can't be cut as it would have to be, one
        that is left to eager.
    """
    groups = groups_of(gm.graph)
    reasons = [_WHOLE if any(map(is_recurrent, group)) else None for group in groups]
    if len(groups) < 2 and not any(reasons):
        return to_cpp_training(
            gm, args, policy=policy, kernel_cache=kernel_cache, instruments=instruments
        )
    if (reason := _objection(groups)) is not None:
        return TrainingModule(gm, policy, kernel_cache, reason=reason)
    modes = modes_of(gm.graph)
    stages = [_stage(gm, group, modes) for group in groups]
    compiled = [
        TrainingModule(stage.graph_module, policy, kernel_cache, instruments, reason=reason)
        for stage, reason in zip(stages, reasons, strict=True)
    ]
    given = dict(zip((n.name for n in gm.graph.find_nodes(op="placeholder")), args, strict=True))
    compiled[0].build(tuple([given[name] for name in stages[0].inputs]))
    return StagedModule(gm, stages, compiled)


_WHOLE = "torch computes recurrent layers as a whole"


def _objection(groups: list[list[fx.Node]]) -> str | None:
    """Return why a graph can't be cut into groups of nodes, or None."""
    why = "the graph would have to be cut in stages, and can't be: "
    before: set[fx.Node] = set()
    has_effects = False
    for group in groups:
        inside = set(group)
        for node in group:
            effects = effects_of(node)
            may_raise = effects.may_raise and node.target is not write_text
            if before and has_effects and may_raise:
                return f"{why}%{node.name} {effects.describe()}, after effects before it"
            if effects.is_global or not before.isdisjoint(writes_of(node)):
                return f"{why}%{node.name} {effects.describe()}"
            if is_no_tensor(node) and not inside.issuperset(node.users):
                return f"{why}%{node.name} is no tensor, and used in several"
            has_effects |= bool(effects.writes) or effects.is_random or node.target is write_text
        before.update(group)
    return None


def _stage(gm: fx.GraphModule, group: list[fx.Node], modes: dict[fx.Node, Mode]) -> Stage:
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
    copy_nodes((o for o in operands if o.op == "get_attr"), graph, values)
    setter = ModeSetter(graph)
    for node in group:
        setter.switch(modes[node])
        copy_nodes((node,), graph, values)
    setter.switch(Mode())
    graph.output(tuple(values[node] for node in outputs))
    names = tuple(node.name for node in inputs), tuple(node.name for node in outputs)
    return Stage(fx.GraphModule(gm, graph), *names)
