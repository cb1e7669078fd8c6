"""`fxkit.compile`: capture, the simplifying passes, fused C++ kernels, behind one call."""

from __future__ import annotations

import copy
import functools
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any, Literal

import torch
from torch import fx

from fxkit import config
from fxkit.compiling.compile_dump import CompileDump
from fxkit.compiling.compiled_method import keep_program, kept_program
from fxkit.compiling.compiled_model import CompiledModel, as_model, program_of
from fxkit.compiling.own_faults import OwnFaults
from fxkit.errors import CaptureError, FxkitError, InvalidGraphError, UnsupportedError
from fxkit.gc_pause import paused_collector
from fxkit.ir.code_tracer import CodeTracer
from fxkit.ir.graph_copies import copy_nodes
from fxkit.ir.modes import has_dispatch_modes, has_function_modes, is_followed
from fxkit.ir.program_changes import GraphProgram, ProgramChange
from fxkit.lower import CompiledModule, Policy
from fxkit.lower.compiling.eager_module import eager_module
from fxkit.lower.compiling.kernel_cache import KernelCache
from fxkit.lower.compiling.lowering import cpp_target, to_cpp_as_recorded
from fxkit.lower.compiling.pipeline import Lowering, lower
from fxkit.lower.compiling.specialising import Specialiser, assumptions, holds_expressions
from fxkit.lower.dispatch.dispatch_cache import DispatchCache
from fxkit.lower.dispatch.eager_fallback import left_because
from fxkit.lower.dispatch.shape_cache import ShapeCache, has_free_sizes
from fxkit.lower.runtime import binding
from fxkit.lower.runtime.devices import is_on_gpu
from fxkit.lower.training.checkpoints import with_checkpoints
from fxkit.lower.training.custom_functions import with_custom_functions
from fxkit.lower.training.fused_step import FusedStep, is_step
from fxkit.lower.training.stages import StagedModule, to_cpp_in_stages
from fxkit.lower.training.training_module import TrainingModule
from fxkit.passes.base import Pass
from fxkit.passes.manager.groups import items_of, leaves
from fxkit.passes.manager.instruments import Instrument
from fxkit.passes.manager.manager import PassManager, check_passes, checked_instruments
from fxkit.passes.manager.passes_change import alters_results
from fxkit.passes.pipelines import LOWERING, LOWERING_FAST, LOWERING_TRAINING, TRAINING
from fxkit.torch_adapters.fake_tensors import why_untyped
from fxkit.torch_adapters.fx_graphs import codegen_of
from fxkit.tracing.captured import Captured, method_of
from fxkit.tracing.changed_program import Substitution
from fxkit.tracing.held_programs import callable_of
from fxkit.tracing.recorder.frames import source_text
from fxkit.tracing.recorder.recorder import active_recorder
from fxkit.tracing.recording.dynamic_inputs import Request
from fxkit.tracing.values.refusals import Failure


@dataclass(frozen=True)
class _FreeForms:
    """A graph of free sizes, from which the graph for certain sizes is made.

    Attributes:
        gm: The graph.
        captured: Makes it of the graph as it was captured; the passes are still to run.
        rewritten: Makes it of the graph that the passes have run on, where they could.
    """

    gm: fx.GraphModule
    captured: Specialiser
    rewritten: Specialiser | None

    def at(self, args: tuple[torch.Tensor, ...]) -> tuple[fx.GraphModule, bool]:
        """Return the graph for the sizes of some inputs, and whether the passes have run on it."""
        try:
            found = None if self.rewritten is None else self.rewritten.quickly_at(args)
            return (self.captured.at(args), False) if found is None else (found, True)
        except InvalidGraphError:  # of which the passes say the same
            return self.gm, False


# What runs in the place of a captured graph for certain sizes.
Lowered = CompiledModule | TrainingModule | StagedModule

_IN_MODE = Failure("a mode of torch is on around it, which is to see the program's calls", None)

# Makes a callable of a graph and of the tensors that it takes.
Backend = Callable[[fx.GraphModule, tuple[torch.Tensor, ...]], Callable[..., Any]]


class Compiled(GraphProgram):
    """A program that runs as fused kernels wherever it could be captured; made by `compile`.

    Attributes:
        captured: The captured program, with its guards and graphs.
        compiled_modules: What was compiled, one for each captured graph, and for one of free sizes
            one for each set of sizes that it ran with; one for each stage where results are
            computed from one another in training. The last one last.
    """

    _fxkit_stands_for = "captured"

    def __init__(
        self,
        fn: Callable[..., Any],
        passes: tuple[Pass, ...] | None = None,
        *,
        train: bool | None = None,
        dynamic: Request = None,
        tune: bool = False,
        fast: bool = False,
        backend: Backend | None = None,
        instruments: tuple[Instrument, ...] = (),
        dump: Path | None = None,
    ) -> None:
        self._options: dict[str, Any] = {
            "passes": passes,
            "train": train,
            "dynamic": dynamic,
            "tune": tune,
            "fast": fast,
            "backend": backend,
            "instruments": instruments,
            "dump": dump,
        }
        self._passes = passes
        self._fast = fast
        self._policy = Policy(rounds=not fast, splits=fast)
        self._other_backend = backend
        self._train = train
        self._tune = tune
        self._own_faults = OwnFaults()
        self._instruments = instruments
        self._dump = dump
        self.compiled_modules: list[CompiledModule | TrainingModule] = []
        self._stock = KernelCache()
        self._lowered_shapes: set[tuple[torch.Size, ...]] = set()  # by graphs without free sizes
        self._has_warned = False
        is_substitute = backend is not None or any(map(alters_results, _leaves(passes)))
        substitution = Substitution(self._note_unchanged, self._with_numbers)
        self.captured = Captured(
            fn,
            backend=self._backend,
            dynamic=dynamic,
            substitution=substitution if is_substitute else None,
        )
        self.captured.on_change(self._forget_entries)
        self._forget_entries()
        self._methods: dict[int, CompiledMethod] = {}
        if not isinstance(fn, torch.nn.Module):
            functools.update_wrapper(self, fn)

    def _forget_entries(self) -> None:
        """Learn anew which entries serve calls, such as when the graph was changed."""
        is_changed = bool(self._passes is not None or self.captured.changes)
        may_leave = not is_changed and self._other_backend is None
        self._dispatch = DispatchCache(self.captured, may_leave=may_leave)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run the program; the first call with inputs of a kind captures and compiles it."""
        last = self._dispatch.last
        if last is not None and not kwargs:
            result = last.entry(*args)
            if result is not last.miss:
                return result if last.finish is None else last.finish(result)
        return self._dispatched(args, kwargs)

    def _dispatched(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the program by another entry than the last time, or by capturing it."""
        dispatch = self._dispatch
        last, dispatch.last = dispatch.last, None
        if has_dispatch_modes() or has_function_modes():
            return self.captured.run_plain(_IN_MODE, args, kwargs)
        if kwargs:
            return self.captured(*args, **kwargs)
        for entry in dispatch.entries:
            result = entry.miss if entry is last else entry.entry(*args)
            if result is not entry.miss:
                dispatch.use(entry)
                return result if entry.finish is None else entry.finish(result)
        if active_recorder() is not None or is_followed():
            return self.captured(*args)  # which runs the program itself: nothing to learn
        binding.start()
        result = self.captured(*args)
        dispatch.learn(args)
        return result

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Bind the program to an instance where what it was made of would be bound.

        An instance has a program of its own, with guards on what this one is made of.
        """
        kept = kept_program(instance, id(self), self._methods)
        if kept is not None:
            return kept
        bound = method_of(self.captured.fn, instance, owner)
        if bound is None:
            return self
        if not (isinstance(instance, type) or active_recorder() is not None or is_followed()):
            kept = keep_program(instance, id(self), self._methods, CompiledMethod(self, bound))
        return MethodType(self, instance) if kept is None else kept

    def __copy__(self) -> Any:
        """Make a program of a shallow copy of what this one was made of."""
        fn = copy.copy(self.captured.fn)
        return _compiled_again(type(self), fn, self._options, self.captured.changes)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Make a program of a copy of what this one was made of; it compiles kernels of its own."""
        fn = copy.deepcopy(self.captured.fn, memo)
        return _compiled_again(type(self), fn, self._options, self.captured.changes)

    def __reduce__(self) -> Any:
        """Pickle what the program was made of, and its options; by name where that finds it."""
        fn: Any = self.captured.fn
        found = _named_like(fn)
        if found is self:
            return fn.__qualname__
        is_ours = isinstance(found, Compiled) and found.captured.fn is fn
        given = found if is_ours else fn
        return _compiled_again, (type(self), given, self._options, self.captured.changes)

    @property
    def graph_module(self) -> fx.GraphModule:
        """The graph that ran or was captured last, as it was captured."""
        return self.captured.graph_module

    @property
    def lowered(self) -> fx.GraphModule | None:
        """What was compiled last, a graph with kernels among its nodes; None where there is none.

        Views and the profiler look at this graph when they are given the program.
        """
        last = self.compiled_modules[-1] if self.compiled_modules else None
        return last.lowered if isinstance(last, CompiledModule) else None

    @property
    def builds(self) -> int:
        """How often kernels had to be built for graphs of free sizes.

        Sizes at which the kernels of earlier ones serve, with other numbers, add nothing to it.
        """
        return self._stock.builds

    def explain(self, *args: Any, **kwargs: Any) -> str:
        """Say whether a call would run compiled, or which guard stops it."""
        return self.captured.explain(*args, **kwargs)

    def report(self) -> str:
        """Return what was fused and what was not, for each compiled graph, as text."""
        if not self.compiled_modules:
            return "nothing has been compiled yet: call it first"
        return "\n\n".join(str(module.report()) for module in self.compiled_modules)

    def _backend(self, gm: fx.GraphModule, args: tuple[torch.Tensor, ...]) -> Callable[..., Any]:
        if self._other_backend is not None:
            run = self._other_backend(self._rewritten_or_recorded(gm, args), args)
            if not callable(run):
                raise UnsupportedError(
                    f"expected the backend to return something to call, got {type(run).__name__}",
                    hint="return gm to run the graph as it is, or leave backend out to get kernels",
                )
            return run
        reason = why_untyped() or left_because(gm, args)
        is_changed = self.captured.alters_results
        if reason is not None:
            copied = self._rewritten_or_recorded(gm, args) if is_changed else _copied(gm)
            return self._noted(eager_module(copied, reason))
        if not has_free_sizes(gm):
            return self._lower_as_it_is(gm, args)
        lower = functools.partial(self._lower_for_sizes, gm, {})
        run = ShapeCache(gm, lower, may_run_graph=not is_changed)
        run.prepare(*args)
        return run

    def _lower_as_it_is(self, gm: fx.GraphModule, args: tuple[torch.Tensor, ...]) -> Lowered:
        """Compile a graph for these sizes.

        A second one for the same may be the first with another number in it: its kernels read at
        run time what sets them apart from those in stock.
        """
        shapes = tuple(tensor.shape for tensor in args)
        is_first = shapes not in self._lowered_shapes
        module = self._lower(gm, args, None if is_first else self._stock)
        self._lowered_shapes.add(shapes)
        self._stock.see(args)
        if is_first and isinstance(module, CompiledModule):
            self._stock.note(module.kernels)
        return module

    def _lower_for_sizes(
        self, gm: fx.GraphModule, forms: dict[bool, _FreeForms], args: tuple[torch.Tensor, ...]
    ) -> Lowered:
        is_trained = self._is_trained(gm, args)
        if is_trained not in forms:
            forms[is_trained] = _FreeForms(gm, Specialiser(gm), self._rewritten_form(gm, args))
        self._stock.see(args)
        graph, is_rewritten = forms[is_trained].at(args)
        return self._lower(graph, args, self._stock, is_rewritten)

    def _rewritten_form(
        self, gm: fx.GraphModule, args: tuple[torch.Tensor, ...]
    ) -> Specialiser | None:
        """Run the default passes once for all sizes, if they can do without numbers."""
        if self._passes is not None:
            return None
        try:
            rewritten = self._rewritten(gm, args, has_free_sizes=True)
        except FxkitError:
            return None
        if holds_expressions(rewritten):
            return None
        return Specialiser(rewritten, assumptions(gm))

    def _lower(
        self,
        gm: fx.GraphModule,
        args: tuple[torch.Tensor, ...],
        stock: KernelCache | None = None,
        is_rewritten: bool = False,
    ) -> Lowered:
        policy = self._policy
        instruments = self._watching()
        for instrument in instruments:
            instrument.begin(gm)
        try:
            copied = gm if is_rewritten else self._rewritten(gm, args, instruments)
            is_trained = self._is_trained(gm, args)
            module = self._kernels_for(copied, args, is_trained, stock, instruments)
        except InvalidGraphError as error:
            copied = _copied(gm)
            module = to_cpp_as_recorded(copied, error.message, policy, instruments)
            is_fused = any(region.kernel is not None for region in module.regions)
            how = "is compiled as it was recorded" if is_fused else "runs in eager"
            warnings.warn(f"{error}\n  The captured graph {how}.", stacklevel=2)
        return self._noted(module)

    def _watching(self) -> tuple[Instrument, ...]:
        """Return what is told of the stages of a compile."""
        folders = [folder for folder in (self._dump, config.current().dump) if folder is not None]
        return (*self._instruments, *map(CompileDump, folders))

    def _kernels_for(
        self,
        gm: fx.GraphModule,
        args: tuple[torch.Tensor, ...],
        is_trained: bool,
        stock: KernelCache | None,
        instruments: tuple[Instrument, ...],
    ) -> Lowered:
        """Lower a graph that the passes have run on; in eager, with a warning, where that fails."""
        policy = self._policy
        try:
            if is_trained:
                return to_cpp_in_stages(
                    gm, args, policy=policy, stock=stock, instruments=instruments
                )
            if is_on_gpu(gm, args):
                from fxkit.lower.compiling.cuda_lowering import to_cuda

                return to_cuda(gm, args, policy=policy, instruments=instruments)
            return lower(
                Lowering(
                    gm,
                    args,
                    policy=policy,
                    target=cpp_target(gm, policy, stock),
                    tunes=self._tune,
                    packs=True,
                    on_failure=self._own_faults.leaves_out,
                    instruments=instruments,
                )
            )
        except (InvalidGraphError, Warning):
            raise
        except Exception as error:
            outcome = "The graph runs in eager."
            return eager_module(gm, self._own_faults.note("lowering", error, outcome))

    def _noted(self, module: Lowered) -> Lowered:
        """Take note of a module that was made for a captured graph."""
        is_same = self._passes is None and not self.captured.changes
        if module.leaves_calls and is_same:  # the default passes change no results
            self._dispatch.watch(module)
        for part in module.parts if self._train else ():
            if isinstance(part, TrainingModule) and part.reason is not None:
                warnings.warn(f"trained in eager: {part.reason}", stacklevel=2)
        self.compiled_modules += module.parts
        return module

    def _with_numbers(self, gm: fx.GraphModule) -> Callable[..., Any]:
        """Return what runs in the place of a graph that takes numbers, which no kernel does."""
        return self._rewritten(gm, (), has_free_sizes=True).forward

    def _note_unchanged(self, failure: Failure) -> None:
        """Warn once that a call runs the program without what passes change on purpose."""
        changing = [p for p in _leaves(self._passes) if p.numerics == "changed"]
        if self._has_warned or not changing:
            return
        self._has_warned = True
        error = CaptureError(
            f"expected a call that {', '.join(map(str, changing))} can change, got one where "
            f"{failure.reason}",
            source=source_text(failure.trace),
            hint=failure.hint,
        )
        warnings.warn(f"{error}\n  It runs the program as it was.", stacklevel=5)

    def _is_trained(self, gm: fx.GraphModule, args: tuple[torch.Tensor, ...]) -> bool:
        return self._train is not False and _asks_for_gradients(gm, args)

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
        has_free_sizes: bool = False,
    ) -> fx.GraphModule:
        """Return a copy of a captured graph that the passes have run on."""
        passes = self._passes
        if passes is None:
            inference, training = (
                (LOWERING_FAST, TRAINING) if self._fast else (LOWERING, LOWERING_TRAINING)
            )
            passes = training if self._is_trained(gm, args) else inference
        with paused_collector(keeps_all=False):
            copied = _copied(gm)
            example = None if has_free_sizes else args
            # Passes that can't do without sizes are no fault: they run again when sizes are known.
            on_failure = None if has_free_sizes else self._own_faults.leaves_out
            PassManager(
                passes,
                verify="structure",
                args=example,
                on_failure=on_failure,
                instruments=self._instruments if instruments is None else instruments,
            ).run(copied)
        return copied


class CompiledMethod(Compiled):
    """A compiled method of one instance.

    Args:
        function: What was compiled in the class.
        method: The method that it was made of, bound to the instance.

    Attributes:
        __self__: The instance.
        __func__: What was compiled in the class.
    """

    def __init__(self, function: Compiled, method: MethodType) -> None:
        super().__init__(method, **function._options)
        self.__self__ = method.__self__
        self.__func__ = function

    def __copy__(self) -> Any:
        """Return the program itself, as with a method that is not compiled."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return the method of a copy of the instance."""
        return _method(self.__func__, copy.deepcopy(self.__self__, memo))

    def __reduce__(self) -> Any:
        """Pickle the instance, and what was compiled in its class."""
        return _method, (self.__func__, self.__self__)


def _method(function: Compiled, instance: Any) -> Any:
    return function.__get__(instance, type(instance))


def _compiled_again(
    kind: type[Compiled], fn: Any, options: dict[str, Any], changes: tuple[ProgramChange, ...] = ()
) -> Any:
    made = kind(fn.captured.fn if isinstance(fn, Compiled) else fn, **options)
    made.captured.keep_changes(changes)
    return as_model(made)


def _leaves(passes: tuple[Any, ...] | None) -> list[Pass]:
    return list(leaves(items_of(passes or ())))


def _named_like(fn: Callable[..., Any]) -> Any:
    """Return what a function's name finds in its module, or None."""
    found: Any = sys.modules.get(getattr(fn, "__module__", None) or "")
    for name in getattr(fn, "__qualname__", "").split("."):
        found = getattr(found, name, None)
    return found


def _asks_for_gradients(gm: fx.GraphModule, args: tuple[torch.Tensor, ...]) -> bool:
    tensors = (*args, *gm.parameters(), *gm.buffers())
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def compile(
    fn: Any = None,
    *,
    passes: tuple[Pass, ...] | None = None,
    train: bool | None = None,
    dynamic: Request = None,
    tune: bool = False,
    fast: bool = False,
    backend: Backend | Literal["eager"] | None = None,
    instruments: Iterable[Instrument] = (),
    dump: str | Path | None = None,
) -> Any:
    """Make a program run as fused C++ kernels; works as a decorator and as a call.

    The first call with inputs of a kind runs the program once, records it, rewrites the graph by
    the simplifying passes and builds its kernels. Later calls run those as long as every guard
    holds; what can't be captured runs in Python. Where inputs are on a GPU, kernels are built by
    nvcc and run there. With gradients on and asked for, the graph is
    differentiated, and its forward and its backward both run as kernels under autograd.

    Where a pass, a rule or the lowering that fxkit runs by itself fails, that is left out with one
    warning, and the program runs without it. A pass or rule of the user's own raises.

    The bound `step` of a `torch.optim` SGD, Adam or AdamW becomes a `FusedStep`: one loop over all
    parameters.

    Args:
        fn: A function, module or bound method.
        passes: The passes to run before lowering; by default `LOWERING`, and `LOWERING_TRAINING`
            where gradients are asked for. What those change that change numbers on purpose shows
            in each call; where a call can't be captured, the program runs as it is, with one
            warning that says why.
        train: Whether to compile gradients: where they are asked for when left out; True also warns
            where a graph is trained in eager, with the reason; with False all are.
        dynamic: Which sizes of the arguments' tensors a captured graph leaves open, as
            `fxkit.capture` takes it. One build serves many sizes; another is made where a
            number in a kernel's text has to become one that is read at run time.
        tune: Whether to time each kernel against eager, with one thread and with all, and keep the
            fastest; compiling takes longer, once. Graphs with gradients are not tuned.
        fast: Whether results may be nearer to float64 than eager's. bf16 and f16 results stay
            float32 within a kernel, where by default each is rounded where eager rounds it; and the
            passes are `LOWERING_FAST` and `TRAINING`, whose rules may lose an Inf or a NaN that
            only a value in between has. Products of float32 may be computed from parts in bfloat16,
            where the processor has a unit for that and it is faster.
        backend: What makes a callable of each captured and rewritten graph, instead of kernels:
            `backend(gm, args)`, with the tensors that the graph takes. "eager" runs the graph as it
            is, which tells a fault of capture and passes from one of lowering.
        instruments: What is told of each pass, as `PassManager` takes them, and of each step of
            lowering.
        dump: A folder that every stage of each compile is written to, as text: graphs, regions,
            loop IR, schedules, C++ text and times. `FXKIT_DUMP` does it for all programs.

    Returns:
        A `Compiled`, callable like `fn`. For a module a `CompiledModel`: an instance of a subclass
        of its class, with its state, to use in its place. As a decorator with options, the
        decorator.

    Raises:
        UnsupportedError: When `fn` or the backend can't be called; at a call, when what the backend
            returns can't be.
        PassError: When `passes` is no list of passes, or something in `instruments` is none.

    Example:
        >>> import torch, fxkit
        >>> @fxkit.compile
        ... def f(x):
        ...     return torch.softmax(x * 2, -1)
        >>> with torch.no_grad():
        ...     y = f(torch.ones(4, 8))
    """
    options: dict[str, Any] = {
        "train": train,
        "dynamic": dynamic,
        "tune": tune,
        "fast": fast,
        "instruments": checked_instruments(instruments),
        "dump": None if dump is None else Path(dump),
    }
    chosen = _checked(passes)
    if fn is None:
        return functools.partial(compile, passes=chosen, backend=backend, **options)
    if not callable(fn):
        raise UnsupportedError(
            f"expected something to call, got {type(fn).__name__}",
            hint="pass a function or a module",
        )
    if isinstance(fn, CompiledModel):
        fn = program_of(fn).captured.fn
    fn = callable_of(fn)
    if is_step(fn):
        return FusedStep(fn.__self__)  # type: ignore[attr-defined]
    made_by = _run_graph if backend == "eager" else backend
    if made_by is not None and not callable(made_by):
        raise UnsupportedError(
            f"expected a function of a graph and its inputs, or 'eager', got {made_by!r}",
            hint="leave backend out to get kernels",
        )
    return as_model(Compiled(fn, chosen, backend=made_by, **options))


def _checked(passes: Any) -> tuple[Pass, ...] | None:
    """Return passes as a tuple, or None for the default ones."""
    if passes is None:
        return None
    check_passes(passes)
    return tuple(passes)


def _run_graph(gm: fx.GraphModule, args: tuple[torch.Tensor, ...]) -> Callable[..., Any]:
    """Run a graph as it is."""
    return gm


def dynamo_backend(
    gm: fx.GraphModule,
    example_inputs: list[Any],
    *,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile one graph of Dynamo's; registered as `torch.compile(fn, backend="fxkit")`.

    Where Dynamo leaves sizes free, one build serves many of them, as with `compile`. Graphs that
    need gradients get a compiled backward too.

    Args:
        gm: The graph that Dynamo has captured.
        example_inputs: Stand-ins for its inputs; kernels are built for those of the first call.
        options: `passes` to run other passes than the simplifying ones, `fast` as `compile` has it.

    Returns:
        What Dynamo calls in place of the graph.

    Raises:
        UnsupportedError: When there is no such option.
        PassError: When `passes` is no list of passes.
    """
    del example_inputs
    chosen = dict(options or {})
    passes, fast = chosen.pop("passes", None), bool(chosen.pop("fast", False))
    if chosen:
        raise UnsupportedError(
            f"expected no option but passes and fast, got {', '.join(chosen)}",
            hint='write torch.compile(fn, backend="fxkit", options={"passes": [...]})',
        )
    with_checkpoints(gm)
    with_custom_functions(gm)
    _ = gm.code  # Dynamo leaves it to the first call to generate it, which no graph could hold
    return Compiled(gm.forward, _checked(passes), fast=fast)


def _copied(gm: fx.GraphModule) -> fx.GraphModule:
    """Copy a graph with its types and provenance, so that a pipeline leaves the captured one."""
    graph = fx.Graph(tracer_cls=CodeTracer)
    copy_nodes(gm.graph.nodes, graph, {})
    if codegen_of(gm.graph) is None:
        raise CaptureError("expected a graph with code, got none")
    return fx.GraphModule(gm, graph)
