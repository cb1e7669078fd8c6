"""`fxkit.compile`: capture, the simplifying passes, fused C++ kernels, behind one call."""

from __future__ import annotations

import copy
import functools
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from types import MethodType
from typing import Any, Literal

import torch
from torch import fx

from fxkit.authoring.kernels.definition import AuthoredKernel
from fxkit.authoring.kernels.registered import check_kernels
from fxkit.compiling.compiled_method import keep_program, kept_program
from fxkit.compiling.compiled_model import CompiledModel, as_model, program_of
from fxkit.compiling.graph_compiler import Backend, CompiledResult, CompileOptions, GraphCompiler
from fxkit.errors import CaptureError, UnsupportedError
from fxkit.ir.modes import has_dispatch_modes, has_function_modes, is_followed
from fxkit.ir.program_changes import GraphProgram, ProgramChange, changes_for_copy
from fxkit.lower import CompiledModule
from fxkit.lower.dispatch.dispatch_cache import DispatchCache
from fxkit.lower.runtime import binding
from fxkit.lower.training.checkpoints import with_checkpoints
from fxkit.lower.training.custom_functions import with_custom_functions
from fxkit.lower.training.fused_step import FusedStep, is_step
from fxkit.lower.training.training_module import TrainingModule
from fxkit.passes.base import Pass
from fxkit.passes.manager.groups import items_of, leaves
from fxkit.passes.manager.instruments import Instrument
from fxkit.passes.manager.manager import check_passes, checked_instruments
from fxkit.passes.manager.passes_change import alters_results
from fxkit.tracing.captured import Captured, method_of
from fxkit.tracing.changed_program import Substitution
from fxkit.tracing.held_programs import callable_of
from fxkit.tracing.recorder.frames import source_text
from fxkit.tracing.recorder.recorder import active_recorder
from fxkit.tracing.recording.dynamic_inputs import Request
from fxkit.tracing.values.refusals import Failure

_IN_MODE = Failure("a mode of torch is on around it, which is to see the program's calls", None)


class Compiled(GraphProgram):
    """A program that runs as fused kernels wherever it could be captured; made by `compile`.

    Attributes:
        captured: The captured program, with its guards and graphs.
    """

    _fxkit_stands_for = "captured"

    def __init__(self, fn: Callable[..., Any], options: CompileOptions) -> None:
        if not isinstance(fn, torch.nn.Module):
            functools.update_wrapper(self, fn)  # first: it takes over attributes of any name
        self._options = options
        self._has_warned = False
        self._compiler = GraphCompiler(options, lambda: self.captured.alters_results, self._noted)
        changing = any(map(alters_results, _leaves(options.passes)))
        substitution = Substitution(self._note_unchanged, self._compiler.with_numbers)
        self.captured = Captured(
            fn,
            backend=self._compiler.backend,
            dynamic=options.dynamic,
            substitution=substitution if changing or options.backend is not None else None,
        )
        self.captured.on_change(self._forget_entries)
        self._forget_entries()
        self._methods: dict[int, CompiledMethod] = {}

    @property
    def compiled_modules(self) -> list[CompiledModule | TrainingModule]:
        """All compiled modules, in the order of compilation.

        There is one for each captured graph; one for each set of sizes where the graph has symbolic
        sizes; one for each stage where results are computed from one another in training.
        """
        return self._compiler.modules

    def _noted(self, module: CompiledResult) -> None:
        """Take note of a module that was made for a captured graph."""
        is_same = self._options.passes is None and not self.captured.changes
        if module.leaves_calls and is_same:  # the default passes change no results
            self._dispatch.watch(module)

    def _forget_entries(self) -> None:
        """Learn anew which entries serve calls, such as when the graph was changed."""
        is_changed = bool(self._options.passes is not None or self.captured.changes)
        may_leave = not is_changed and self._options.backend is None
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
        changes = changes_for_copy(self.captured.changes, memo)
        return _compiled_again(type(self), fn, self._options, changes)

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
        """How often kernels had to be built for graphs of symbolic sizes.

        Sizes at which the kernels of earlier ones serve, with other numbers, add nothing to it.
        """
        return self._compiler.kernel_cache.builds

    def explain(self, *args: Any, **kwargs: Any) -> str:
        """Say whether a call would run compiled, or which guard stops it."""
        return self.captured.explain(*args, **kwargs)

    def report(self) -> str:
        """Return what was fused and what was not, for each compiled graph, as text."""
        if not self.compiled_modules:
            return "nothing has been compiled yet: call it first"
        return "\n\n".join(str(module.report()) for module in self.compiled_modules)

    def _note_unchanged(self, failure: Failure) -> None:
        """Warn once that a call runs the program without what passes change on purpose."""
        changing = [p for p in _leaves(self._options.passes) if p.numerics == "changed"]
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
        super().__init__(method, function._options)
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
    kind: type[Compiled], fn: Any, options: CompileOptions, changes: tuple[ProgramChange, ...] = ()
) -> Any:
    made = kind(fn.captured.fn if isinstance(fn, Compiled) else fn, options)
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
    kernels: Iterable[AuthoredKernel] = (),
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
            where gradients are asked for. Passes with `numerics="changed"` apply to every call:
            what the run that is captured did is taken back, and the transformed graph runs. Where
            a call can't be captured, `fn` runs untransformed, with one warning that says why.
        train: Whether to compile gradients: where they are asked for when left out; True also warns
            where a graph is trained in eager, with the reason; with False all are.
        dynamic: Which sizes of the arguments' tensors a captured graph leaves open, as
            `fxkit.capture` takes it. One build serves many sizes; another is made where a
            number in a kernel's text has to become one that is read at run time.
        tune: Whether to time each kernel against eager, with one thread and with all, and keep the
            fastest; compiling takes longer, once. Graphs with gradients are not tuned.
        fast: Whether numerics are relaxed, within eager's errors. bf16 and f16 results stay
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
        kernels: Kernels of your own, made by `fxkit.kernel`, that are used where their patterns
            occur and they are faster; beside those that are registered for all programs.

    Returns:
        A `Compiled`, callable like `fn`. For a module a `CompiledModel`: an instance of a subclass
        of its class, with its state, to use in its place. As a decorator with options, the
        decorator.

    Raises:
        UnsupportedError: When `fn` or the backend can't be called, or a kernel is none; at a call,
            when what the backend returns can't be called.
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
        "kernels": check_kernels(kernels),
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
    return as_model(Compiled(fn, CompileOptions(passes=chosen, backend=made_by, **options)))


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
    return Compiled(gm.forward, CompileOptions(passes=_checked(passes), fast=fast))
