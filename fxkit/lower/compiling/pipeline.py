"""Lowering, from top to bottom: the steps that make a compiled module of a graph.

`LOWERING_STEPS` lists them. Each reads what the steps before it have left in a `LoweringState`,
adds what it makes, and can print that: `step.show(state)`.
"""

from __future__ import annotations

import contextlib
import functools
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from fxkit import config
from fxkit.errors import PassError
from fxkit.gc_pause import paused_collector
from fxkit.ir.printer import format_graph
from fxkit.lower.compiling.compiled_module import CompiledModule
from fxkit.lower.compiling.convolve_integers import ConvolveIntegers
from fxkit.lower.compiling.eager_module import eager_module, module_without_kernels
from fxkit.lower.compiling.group_scales import SpellOutGroups
from fxkit.lower.compiling.inferred_types import typed
from fxkit.lower.compiling.kernel_builds import BuiltKernels, build_kernels
from fxkit.lower.compiling.multiply_activations import MultiplyActivations
from fxkit.lower.compiling.multiply_integers import MultiplyIntegers, multiply_integers
from fxkit.lower.compiling.pack_convolutions import pack_convolutions
from fxkit.lower.compiling.plan import Plan, make_plan
from fxkit.lower.compiling.tuning import TunedPolicy, choose_thread_counts, tuned
from fxkit.lower.compiling.whole_operators import Choices, Choosing, choose_kernels
from fxkit.lower.families.products.regions import continues_product
from fxkit.lower.fusion.kernel_faults import KernelFaults
from fxkit.lower.fusion.partitioner import FusionPlan, partition
from fxkit.lower.fusion.policy import Policy
from fxkit.lower.loop_ir.loop_ir import Kernel
from fxkit.lower.runtime.kernel_call import KernelCall
from fxkit.passes.base import Pass
from fxkit.passes.manager.instruments import Instrument, tell_of_step


@dataclass(frozen=True)
class KernelTarget:
    """What kernels are made for.

    Attributes:
        choosing: How to choose between a kernel and torch's library.
        make_call: Makes the call of a kernel.
        build: Schedules, prints and builds kernels.
        integer_passes: Make products of integers of a quantised graph.
        packs_convolutions: Whether the library takes packed weights.
    """

    choosing: Choosing
    make_call: Callable[..., KernelCall] = KernelCall
    build: Callable[[Mapping[str, Kernel]], BuiltKernels] = build_kernels
    integer_passes: tuple[Pass, ...] = (
        MultiplyIntegers(),
        MultiplyActivations(),
        ConvolveIntegers(),
        SpellOutGroups(),
    )
    packs_convolutions: bool = True


@dataclass
class LoweringState:
    """A graph on its way to a compiled module.

    Attributes:
        gm: The graph; its weights are packed, and its nodes get their types.
        args: Inputs to infer types for; None where nodes have their types.
        kwargs: Keyword inputs.
        policy: For which regions kernels are made, and on which device they run.
        target: How kernels are chosen, called and built.
        tunes: Whether kernels are timed against eager.
        packs: Whether passes may change the graph: pack weights, and multiply integers.
        on_failure: As `PassManager` takes it, for the passes that pack weights.
        instruments: Observers, called after each step.
        faults: Errors of single kernels, which torch computes then.
        partition: Which nodes share a kernel.
        choices: Which products, convolutions and attentions kernels compute.
        plan: The graph of kernel calls, and the loop IR of the kernels.
        built: The libraries.
        module: What came of it; the steps end once it is there.
    """

    gm: fx.GraphModule
    args: tuple[Any, ...] | None
    kwargs: Mapping[str, Any] | None = None
    policy: Policy = field(default_factory=Policy)
    target: KernelTarget = field(default_factory=lambda: KernelTarget(Choosing.by_speed()))
    tunes: bool = False
    packs: bool = False
    on_failure: Callable[[Pass, PassError], bool] | None = None
    instruments: tuple[Instrument, ...] = ()
    faults: KernelFaults = field(default_factory=KernelFaults)
    partition: FusionPlan | None = None
    choices: Choices | None = None
    plan: Plan | None = None
    built: BuiltKernels | None = None
    module: CompiledModule | None = None


@dataclass(frozen=True)
class LoweringStep:
    """One step of lowering.

    Attributes:
        name: Its name.
        does: What it makes of what.
        run: Runs it.
        show: Returns what it made, as text.
        sees_modes: Whether the modes of torch that are on, such as a default device, see the calls
            that it makes, as they see those of the program.
    """

    name: str
    does: str
    run: Callable[[LoweringState], None]
    show: Callable[[LoweringState], str]
    sees_modes: bool = False

    def __str__(self) -> str:
        return f"{self.name}: {self.does}"


def lower(state: LoweringState) -> CompiledModule:
    """Run the steps of `LOWERING_STEPS` until there is a module."""
    return _run(LOWERING_STEPS, state)


def _run(steps: Iterable[LoweringStep], state: LoweringState) -> CompiledModule:
    for step in steps:
        begin = time.perf_counter()
        with contextlib.nullcontext() if step.sees_modes else torch.DisableTorchFunction():
            step.run(state)
        seconds = time.perf_counter() - begin
        for instrument in state.instruments:
            tell_of_step(instrument, step, state, seconds)
        if state.module is not None:
            return state.module
    raise LookupError("expected the last step to make a module")


def _infer_types(state: LoweringState) -> None:
    """Find the type of each node, unless they are known."""
    if state.args is not None:
        typed(state.gm, state.args, state.kwargs)


def _pack_convolutions(state: LoweringState) -> None:
    """Pack the weights of convolutions, where the graph may change."""
    if state.packs and state.args is not None and state.target.packs_convolutions:
        pack_convolutions(state.gm, state.args, state.on_failure, state.instruments)


def _multiply_integers(state: LoweringState) -> None:
    """Multiply the integers of a quantised graph, where the graph may change."""
    if not state.packs or state.args is None:
        return
    passes = state.target.integer_passes
    if multiply_integers(state.gm, state.args, passes, state.on_failure, state.instruments):
        typed(state.gm, state.args, state.kwargs)


def _partition(state: LoweringState) -> None:
    """Find which nodes share a kernel. What a region costs is read off its loop IR: it is emitted
    here, once."""
    if config.current().backend == "eager":
        state.module = eager_module(state.gm, "FXKIT_BACKEND=eager turns kernels off")
        return
    with paused_collector(keeps_all=False):
        state.partition = partition(state.gm, state.policy, continues_product, state.faults)


def _choose_kernels(state: LoweringState) -> None:
    """Choose a kernel or torch's library for each product, convolution and attention."""
    assert state.partition is not None
    choosing = replace(state.target.choosing, allows_bf16x3=state.policy.allows_bf16x3)
    state.choices = choose_kernels(state.gm, state.partition.steps, choosing, state.faults)


def _plan(state: LoweringState) -> None:
    """Make the graph of kernel calls; biases and epilogues join the kernels beside them."""
    assert state.partition is not None
    with paused_collector(keeps_all=False):
        state.plan = make_plan(state.gm, state.partition, state.choices, state.target.make_call)


def _build(state: LoweringState) -> None:
    """Schedule, print and build the kernels; torch computes those that fail."""
    plan = state.plan
    assert plan is not None
    built = state.built = state.target.build(plan.kernels)
    if (error := built.general_failure) is not None and not built.libraries:
        _warn_once(str(error))
        state.module = eager_module(state.gm, error.message)
        return
    failed = _noted_failures(state.gm, plan, built, state.faults) if built.failures else {}
    built.bind(plan, failed)
    state.faults.warn()
    if built.failures and not (built.libraries or plan.has_packed):
        state.module = module_without_kernels(state.gm, plan.regions, "no kernel could be built")


def _tune(state: LoweringState) -> None:
    """Time kernels against eager; where eager wins, partition again without those regions."""
    assert state.plan is not None
    if state.tunes:
        state.policy, state.tunes = tuned(state.policy, state.plan), False
        if state.policy.refused:
            state.module = lower_typed(state.gm, state.policy, state.target, state.instruments)
            return
    choose_thread_counts(state.plan, state.policy)


def _assemble(state: LoweringState) -> None:
    """Make the module; its graph of kernel calls becomes one program of the C binding."""
    assert state.plan is not None and state.built is not None
    again = functools.partial(lower_typed, policy=state.policy, target=state.target)
    state.module = CompiledModule(state.gm, state.plan, state.built, again)


def _graph_text(state: LoweringState) -> str:
    return format_graph(state.gm, sources=True)


def _plan_text(state: LoweringState) -> str:
    plan = state.plan
    if plan is None:
        return ""
    kernels = [f"{name}:\n{kernel}" for name, kernel in plan.kernels.items()]
    return "\n\n".join([format_graph(plan.graph), *kernels])


def _tuned_text(state: LoweringState) -> str:
    if state.plan is None or not isinstance(state.policy, TunedPolicy):
        return ""
    ways = {True: "all threads", False: "one thread"}
    return "\n".join(f"{name}: {ways[c.is_parallel]}" for name, c in state.plan.calls.items())


def _report_text(state: LoweringState) -> str:
    return "" if state.module is None else str(state.module.report())


LOWERING_STEPS: tuple[LoweringStep, ...] = (
    LoweringStep(
        "infer_types", "graph, inputs → a type on each node", _infer_types, _graph_text, True
    ),
    LoweringStep(
        "pack_convolutions",
        "graph → graph whose convolutions have packed weights",
        _pack_convolutions,
        _graph_text,
        True,
    ),
    LoweringStep(
        "multiply_integers",
        "quantised graph → graph that multiplies its integers",
        _multiply_integers,
        _graph_text,
        True,
    ),
    LoweringStep(
        "partition",
        "typed graph → regions with their loop IR, and nodes that ATen runs",
        _partition,
        lambda state: str(state.partition),
    ),
    LoweringStep(
        "choose_kernels",
        "products, convolutions, attention → kernel or library",
        _choose_kernels,
        lambda state: str(state.choices),
    ),
    LoweringStep("plan", "regions, choices → graph of kernel calls, loop IR", _plan, _plan_text),
    LoweringStep(
        "build",
        "loop IR → schedule → text → libraries",
        _build,
        lambda state: "" if state.built is None else state.built.source,
    ),
    LoweringStep("tune", "kernels → those that are faster than eager", _tune, _tuned_text),
    LoweringStep("assemble", "graph of kernel calls, libraries → module", _assemble, _report_text),
)
"""The steps, in order."""


def lower_typed(
    gm: fx.GraphModule,
    policy: Policy | None = None,
    target: KernelTarget | None = None,
    instruments: tuple[Instrument, ...] = (),
) -> CompiledModule:
    """Compile a graph whose nodes have their types.

    Args:
        gm: The graph.
        policy: When a kernel pays, and on which device kernels run.
        target: How kernels are chosen, called and built; for the processor when left out.
        instruments: What is told of each step.
    """
    chosen = target or KernelTarget(Choosing.by_speed())
    return lower(
        LoweringState(gm, None, policy=policy or Policy(), target=chosen, instruments=instruments)
    )


def _noted_failures(
    gm: fx.GraphModule, plan: Plan, built: BuiltKernels, faults: KernelFaults
) -> dict[str, str]:
    """Take note of the kernels that could not be built; return for each of them why."""
    nodes = {node.name: node for node in gm.graph.nodes}
    reasons: dict[str, str] = {}
    for region in plan.regions:
        error = built.failures.get(region.kernel or "")
        if region.kernel is not None and error is not None:
            reasons[region.kernel] = faults.note([nodes[name] for name in region.nodes], error)
    return reasons


@functools.cache
def _warn_once(text: str) -> None:
    warnings.warn(f"{text}\n  The graph runs in eager.", stacklevel=3)
