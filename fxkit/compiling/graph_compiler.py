"""From a captured graph to what runs in its place: passes, then kernels, training or a backend."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from fxkit import config
from fxkit.authoring.kernels.definition import AuthoredKernel
from fxkit.authoring.kernels.registered import registered
from fxkit.authoring.kernels.substitution import use_kernels
from fxkit.authoring.kernels.trial import TrialOptions
from fxkit.compiling.compile_dump import CompileDump
from fxkit.compiling.own_faults import OwnFaults
from fxkit.errors import (
    FxkitError,
    InvalidGraphError,
    PassError,
    UnsupportedError,
)
from fxkit.gc_pause import paused_collector
from fxkit.ir.code_tracer import CodeTracer
from fxkit.ir.graph_copies import copy_nodes
from fxkit.lower import CompiledModule, Policy
from fxkit.lower.compiling.eager_module import eager_module
from fxkit.lower.compiling.kernel_cache import KernelCache
from fxkit.lower.compiling.lower_report import KernelTrial
from fxkit.lower.compiling.lowering import cpp_target, to_cpp_as_recorded
from fxkit.lower.compiling.pipeline import LoweringState, lower
from fxkit.lower.compiling.specialising import Specialiser, assumptions, holds_expressions
from fxkit.lower.dispatch.eager_fallback import left_because
from fxkit.lower.dispatch.shape_cache import ShapeCache, has_symbolic_sizes
from fxkit.lower.runtime.devices import is_on_gpu
from fxkit.lower.training.stages import StagedModule, to_cpp_in_stages
from fxkit.lower.training.training_module import TrainingModule
from fxkit.passes.base import Pass
from fxkit.passes.manager.instruments import Instrument, InstrumentError
from fxkit.passes.manager.manager import PassManager
from fxkit.passes.pipelines import LOWERING, LOWERING_FAST, LOWERING_TRAINING, TRAINING
from fxkit.torch_adapters.fake_tensors import why_untyped
from fxkit.tracing.recording.dynamic_inputs import Request


@dataclass(frozen=True)
class CompileOptions:
    """The options of `fxkit.compile`; see there.

    Attributes:
        passes: The passes to run; None for the default ones.
        train: Whether gradients are compiled.
        dynamic: Which sizes are symbolic.
        tune: Whether kernels are timed against eager.
        fast: Whether results may be rounded to 16 bits less often than in eager, and infinities and
            NaNs between operators be lost.
        backend: Makes a callable of each graph, in place of kernels; None for kernels.
        instruments: Observers of each pass and step of lowering.
        dump: A folder that every stage is written to as text, or None.
        kernels: Kernels of the user's own.
    """

    passes: tuple[Pass, ...] | None = None
    train: bool | None = None
    dynamic: Request = None
    tune: bool = False
    fast: bool = False
    backend: Backend | None = None
    instruments: tuple[Instrument, ...] = ()
    dump: Path | None = None
    kernels: tuple[AuthoredKernel, ...] = ()


@dataclass(frozen=True)
class _SymbolicForms:
    """A graph with symbolic sizes, which is specialised to the sizes of each call.

    Attributes:
        gm: The graph.
        captured: Specialises the graph as it was captured; passes are still to run on the result.
        rewritten: Specialises the graph after the passes; None where they need to know sizes.
    """

    gm: fx.GraphModule
    captured: Specialiser
    rewritten: Specialiser | None

    def at(self, args: tuple[torch.Tensor, ...]) -> tuple[fx.GraphModule, bool]:
        """Return the graph for the sizes of these inputs, and whether the passes have run on it."""
        try:
            found = None if self.rewritten is None else self.rewritten.quickly_at(args)
            return (self.captured.at(args), False) if found is None else (found, True)
        except InvalidGraphError:  # `_lower` handles it, when the passes on `gm` raise it again
            return self.gm, False


# What runs in the place of a captured graph for certain sizes.
CompiledResult = CompiledModule | TrainingModule | StagedModule

# Makes a callable of a graph and of the tensors that it takes.
Backend = Callable[[fx.GraphModule, tuple[torch.Tensor, ...]], Callable[..., Any]]


class GraphCompiler:
    """Compiles the captured graphs of one program.

    Args:
        options: The options of `fxkit.compile`.
        alters_results: Tells whether passes or edits of the user's may change the program's
            results: then the graph as it was recorded must not serve a call.
        note: Called with each module that is made for a captured graph.

    Attributes:
        modules: All compiled modules, in the order of compilation.
        kernel_cache: Cache of kernels, which other sizes and other Python numbers use again.
    """

    def __init__(
        self,
        options: CompileOptions,
        alters_results: Callable[[], bool],
        note: Callable[[CompiledResult], None],
    ) -> None:
        self._options = options
        self._alters_results = alters_results
        self._note = note
        self._policy = Policy(rounds=not options.fast, allows_bf16x3=options.fast)
        self._own_faults = OwnFaults()
        self._trials: tuple[KernelTrial, ...] = ()
        self.modules: list[CompiledModule | TrainingModule] = []
        self.kernel_cache = KernelCache()
        self._lowered_shapes: set[tuple[torch.Size, ...]] = (
            set()
        )  # of graphs without symbolic sizes

    def backend(self, gm: fx.GraphModule, args: tuple[torch.Tensor, ...]) -> Callable[..., Any]:
        """Return what runs in the place of a captured graph."""
        if self._options.backend is not None:
            run = self._options.backend(self._rewritten_or_recorded(gm, args), args)
            if not callable(run):
                raise UnsupportedError(
                    f"expected the backend to return something to call, got {type(run).__name__}",
                    hint="return gm to run the graph as it is, or leave backend out to get kernels",
                )
            return run
        reason = why_untyped() or left_because(gm, args)
        is_changed = self._alters_results()
        if reason is not None:
            copied = self._rewritten_or_recorded(gm, args) if is_changed else _copied(gm)
            return self._noted(eager_module(copied, reason))
        if not has_symbolic_sizes(gm):
            return self._lower_as_it_is(gm, args)
        lower = functools.partial(self._lower_for_sizes, gm, {})
        run = ShapeCache(gm, lower, may_run_graph=not is_changed)
        run.prepare(*args)
        return run

    def _lower_as_it_is(self, gm: fx.GraphModule, args: tuple[torch.Tensor, ...]) -> CompiledResult:
        """Compile a graph for these sizes.

        A second graph for the same sizes may differ from the first in a Python number alone: where
        its kernels differ from those in `kernel_cache`, they read the number as a parameter.
        """
        shapes = tuple(tensor.shape for tensor in args)
        is_first = shapes not in self._lowered_shapes
        module = self._lower(gm, args, None if is_first else self.kernel_cache)
        self._lowered_shapes.add(shapes)
        self.kernel_cache.see(args)
        if is_first and isinstance(module, CompiledModule):
            self.kernel_cache.note(module.kernels)
        return module

    def _lower_for_sizes(
        self, gm: fx.GraphModule, forms: dict[bool, _SymbolicForms], args: tuple[torch.Tensor, ...]
    ) -> CompiledResult:
        is_trained = self._is_trained(gm, args)
        if is_trained not in forms:
            forms[is_trained] = _SymbolicForms(gm, Specialiser(gm), self._rewritten_form(gm, args))
        self.kernel_cache.see(args)
        graph, is_rewritten = forms[is_trained].at(args)
        return self._lower(graph, args, self.kernel_cache, is_rewritten)

    def _rewritten_form(
        self, gm: fx.GraphModule, args: tuple[torch.Tensor, ...]
    ) -> Specialiser | None:
        """Run the default passes once for all sizes, if they can do without numbers."""
        if self._options.passes is not None:
            return None
        try:
            rewritten = self._rewritten(gm, args, has_symbolic_sizes=True)
        except FxkitError:
            return None
        if holds_expressions(rewritten):
            return None
        return Specialiser(rewritten, assumptions(gm))

    def _lower(
        self,
        gm: fx.GraphModule,
        args: tuple[torch.Tensor, ...],
        kernel_cache: KernelCache | None = None,
        is_rewritten: bool = False,
    ) -> CompiledResult:
        policy = self._policy
        instruments = self._watching()
        for instrument in instruments:
            instrument.begin(gm)
        try:
            copied = gm if is_rewritten else self._rewritten(gm, args, instruments)
            is_trained = self._is_trained(gm, args)
            module = self._kernels_for(copied, args, is_trained, kernel_cache, instruments)
        except InvalidGraphError as error:
            copied = _copied(gm)
            module = to_cpp_as_recorded(copied, error.message, policy, instruments)
            is_fused = any(region.kernel is not None for region in module.regions)
            how = "is compiled as it was recorded" if is_fused else "runs in eager"
            warnings.warn(f"{error}\n  The captured graph {how}.", stacklevel=2)
        return self._noted(module)

    def _watching(self) -> tuple[Instrument, ...]:
        """Return the instruments of a compile, which are called after each stage."""
        options = self._options
        folders = [f for f in (options.dump, config.current().dump) if f is not None]
        return (*options.instruments, *map(CompileDump, folders))

    def _kernels_for(
        self,
        gm: fx.GraphModule,
        args: tuple[torch.Tensor, ...],
        is_trained: bool,
        kernel_cache: KernelCache | None,
        instruments: tuple[Instrument, ...],
    ) -> CompiledResult:
        """Lower a graph that the passes have run on; in eager, with a warning, where that fails."""
        policy = self._policy
        try:
            if is_trained:
                return to_cpp_in_stages(
                    gm, args, policy=policy, kernel_cache=kernel_cache, instruments=instruments
                )
            if is_on_gpu(gm, args):
                from fxkit.lower.compiling.cuda_lowering import changed_to_cuda

                leave_out = self._own_faults.leaves_out
                return changed_to_cuda(gm, args, policy, leave_out, instruments)
            return lower(
                LoweringState(
                    gm,
                    args,
                    policy=policy,
                    target=cpp_target(gm, policy, kernel_cache),
                    tunes=self._options.tune,
                    packs=True,
                    on_failure=self._own_faults.leaves_out,
                    instruments=instruments,
                )
            )
        except (InvalidGraphError, InstrumentError, Warning):
            raise
        except Exception as error:
            outcome = "The graph runs in eager."
            return eager_module(gm, self._own_faults.note("lowering", error, outcome))

    def _noted(self, module: CompiledResult) -> CompiledResult:
        """Take note of a module that was made for a captured graph."""
        self._note(module)
        for part in module.parts if self._options.train else ():
            if isinstance(part, TrainingModule) and part.reason is not None:
                warnings.warn(f"trained in eager: {part.reason}", stacklevel=2)
        for part in module.parts:
            part.trials = self._trials
        self.modules += module.parts
        return module

    def with_numbers(self, gm: fx.GraphModule) -> Callable[..., Any]:
        """Return what runs a graph that takes Python numbers: eager, after the passes."""
        return self._rewritten(gm, (), has_symbolic_sizes=True).forward

    def _is_trained(self, gm: fx.GraphModule, args: tuple[torch.Tensor, ...]) -> bool:
        return self._options.train is not False and _asks_for_gradients(gm, args)

    def _rewritten_or_recorded(
        self, gm: fx.GraphModule, args: tuple[torch.Tensor, ...]
    ) -> fx.GraphModule:
        try:
            return self._rewritten(gm, args)
        except InvalidGraphError as error:
            warnings.warn(f"{error}\n  The graph stays as it was recorded.", stacklevel=2)
            return _copied(gm)

    def _rewritten(
        self,
        gm: fx.GraphModule,
        args: tuple[torch.Tensor, ...],
        instruments: tuple[Instrument, ...] | None = None,
        *,
        has_symbolic_sizes: bool = False,
    ) -> fx.GraphModule:
        """Return a copy of a captured graph that the passes have run on."""
        passes = self._options.passes
        if passes is None:
            inference, training = (
                (LOWERING_FAST, TRAINING) if self._options.fast else (LOWERING, LOWERING_TRAINING)
            )
            passes = training if self._is_trained(gm, args) else inference
        with paused_collector(keeps_all=False):
            copied = _copied(gm)
            example = None if has_symbolic_sizes else args
            # Passes that can't do without sizes are no fault: they run again when sizes are known.
            on_failure = None if has_symbolic_sizes else self._own_faults.leaves_out
            told = self._options.instruments if instruments is None else instruments
            self._use_kernels(copied, example, passes, on_failure, told)
            PassManager(
                passes,
                verify="structure",
                args=example,
                on_failure=on_failure,
                instruments=told,
            ).run(copied)
        return copied

    def _use_kernels(
        self,
        gm: fx.GraphModule,
        args: tuple[torch.Tensor, ...] | None,
        passes: tuple[Pass, ...],
        on_failure: Callable[[Pass, PassError], bool] | None,
        instruments: tuple[Instrument, ...],
    ) -> None:
        """Put kernels of the user's own into a graph, where there are any."""
        kernels = (*self._options.kernels, *registered())
        self._trials = ()
        if kernels:
            how = TrialOptions(passes, self._policy)
            self._trials = use_kernels(gm, args, kernels, how, on_failure, instruments)


def _asks_for_gradients(gm: fx.GraphModule, args: tuple[torch.Tensor, ...]) -> bool:
    tensors = (*args, *gm.parameters(), *gm.buffers())
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _copied(gm: fx.GraphModule) -> fx.GraphModule:
    """Copy a graph with its types and provenance, so that a pipeline leaves the captured one."""
    graph = fx.Graph(tracer_cls=CodeTracer)
    copy_nodes(gm.graph.nodes, graph, {})
    return fx.GraphModule(gm, graph)
