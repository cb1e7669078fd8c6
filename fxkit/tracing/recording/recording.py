"""Run a program once under the recorder and make a cache entry of what was recorded."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxkit.errors import CaptureError
from fxkit.ir.modes import has_function_modes
from fxkit.ir.types import TensorType
from fxkit.torch_adapters import modes, transforms
from fxkit.torch_adapters.code_on_demand import bring_up_to_date
from fxkit.torch_adapters.compilers import calls_compiled, run_as_written
from fxkit.torch_adapters.custom_functions import frames_of_apply
from fxkit.torch_adapters.layers import backward_hooks_of, backward_pre_hooks_of
from fxkit.tracing.bytecode.call_hooks import with_call_hooks
from fxkit.tracing.environment.fast_paths import fast_paths
from fxkit.tracing.environment.interpreter import no_collection
from fxkit.tracing.guarding import guards as g
from fxkit.tracing.guarding.aliasing_guards import SameTensorGuard
from fxkit.tracing.opaque_calls.automatic_calls import call_through
from fxkit.tracing.parameter_names import placeholder_names
from fxkit.tracing.recorder.calls import READS_GRAD_FN
from fxkit.tracing.recorder.recorded import Outside
from fxkit.tracing.recorder.recorder import Recorder, active_recorder
from fxkit.tracing.recorder.state_restore import Entries, Mutations, Rewind
from fxkit.tracing.recorder.tape import misfit
from fxkit.tracing.recording.guarded_graph import Extra, GuardedGraph, RecordedEffects
from fxkit.tracing.recording.invocation import Invocation
from fxkit.tracing.recording.run_guards import (
    alias_guards,
    extra_guards,
    first_use,
    module_guards,
    outside_guards,
    structure_guard,
    tensor_guard,
    value_guards,
)
from fxkit.tracing.recording.state import State, raw
from fxkit.tracing.values.contents import Content, content_of
from fxkit.tracing.values.mode_scopes import read_ambient
from fxkit.tracing.values.refusals import Failure, Refusal
from fxkit.tracing.values.scalar_inputs import ScalarInput
from fxkit.tracing.values.structure import Blueprint


@dataclass(slots=True)
class Attempt:
    """The outcome of one recorded run.

    Attributes:
        result: What the program returned.
        guarded: The graph, or None when the run could not be held in one.
        failure: Why not.
        was_first: Whether a memoised function was computed, as it won't be at the next call.
        run: The run itself, with what it found before the program began.
        has_learned: Whether the next recording keeps calls opaque that this one could not.
        written: The tensors from outside of the program that it has written to, as far as known.
        has_changed: Whether it has changed Python state; known where the run may be taken back.
    """

    result: Any
    guarded: GuardedGraph | None
    failure: Failure | None
    was_first: bool = False
    run: RecordedRun | None = None
    has_learned: bool = False
    written: Sequence[torch.Tensor] = ()
    has_changed: bool = False

    def take_back(self) -> str | None:
        """Put back all that the run has changed; return why that can't be, if it can't.

        What a run that no graph holds has changed of Python state may be anything.
        """
        run = self.run
        earlier = None if run is None else run.invocation.earlier
        if run is None or earlier is None:
            return None  # the program has not run
        reason = earlier.objection(self.written)
        if reason is None and self.guarded is None and self.has_changed:
            reason = "it changes Python state"
        if reason is not None:
            return reason
        run.rewind([] if self.guarded is None else run.state.before).to_before()
        earlier.restore()
        return None


def record(invocation: Invocation) -> Attempt:
    """Run a program once, and record it.

    Args:
        invocation: The call. Where its run may have to be taken back, and there can be no graph
            from the outset, the program does not run at all.
    """
    around = active_recorder()
    if around is not None:
        around.refuse("the program captures another program")
    learned = invocation.learned
    with with_call_hooks(frozenset(learned.codes), call_through, frozenset(learned.makers)):
        return _record(invocation)


def _record(invocation: Invocation) -> Attempt:
    try:
        run = RecordedRun(invocation)
    except Refusal as refusal:
        may_run = invocation.earlier is None
        result = invocation.fn(*invocation.args, **invocation.kwargs) if may_run else None
        return Attempt(result, None, Failure(refusal.reason, refusal.hint))
    try:
        result = run.execute(invocation.args, invocation.kwargs)
        has_changed = invocation.earlier is not None and run.has_changed_state()
        guarded = run.guarded_graph(result)
        written = [] if invocation.earlier is None else run.written()
    finally:
        watcher = run.recorder.watcher
        has_learned = invocation.learned.learn(watcher.blamed, watcher.codes)
        run.recorder.close()
    was_first, failure = run.state.has_memoised(), run.recorder.failure
    return Attempt(result, guarded, failure, was_first, run, has_learned, written, has_changed)


class RecordedRun:
    """One run of a program, with what has to be compared before and after.

    Attributes:
        invocation: The call.
        is_repeated: Whether the call has been recorded before, and its texts are printed.
    """

    is_repeated = False

    def __init__(self, invocation: Invocation) -> None:
        call, parts = invocation.call, invocation.call.parts
        for tensor, path in zip(parts.tensors, parts.tensor_paths, strict=True):
            why = misfit(tensor)
            if why is not None:
                raise Refusal(f"{path} is {why}")
        missing = modes.why_not_recorded() or transforms.why_not_recorded()
        if missing is not None:
            raise Refusal(missing)
        if has_function_modes(Recorder):
            raise Refusal("a TorchFunctionMode is active around the call")
        self.invocation = invocation
        self.call = call
        self.before = (call.ambient, call.defaults)
        self.types = [TensorType.of(tensor) for tensor in parts.tensors]
        self.containers = [content_of(container) for container in parts.containers]
        self.arrays = [array.tobytes() for array in parts.arrays]
        self.state = State(invocation.fn, parts, invocation.learned)
        graphs = [m for _, m in self.state.reach.found if isinstance(m, fx.GraphModule)]
        waited = [bring_up_to_date(gm) for gm in graphs]
        if any(waited):  # which is no part of what the program does
            self.state = State(invocation.fn, parts, invocation.learned)
        self.environment = self.state.reach
        self.training = [(path, module, module.training) for path, module in self.environment.found]
        names = placeholder_names(invocation.fn, parts.tensor_paths)
        leaves = zip(names, parts.tensors, strict=True)
        self.recorder = self.make_recorder(leaves)
        self.recorder.earlier = invocation.earlier
        self.changes = Mutations()
        self.extras: list[Outside] = []

    def make_recorder(self, leaves: Iterable[tuple[str, torch.Tensor]]) -> Recorder:
        """Return what records the run."""
        return Recorder(leaves, self.environment, sys._getframe())

    def execute(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the program under the recorder, with its arguments or stand-ins for them."""
        recorder = self.recorder
        recorder.begin_at(sys._getframe())
        recorder.watcher.is_muted = self.is_repeated
        with no_collection():
            try:
                with self._around(), fast_paths(_is_recording), frames_of_apply(), recorder:
                    recorder.watch()
                    return self.invocation.fn(*args, **kwargs)
            finally:
                recorder.release()

    def _around(self) -> AbstractContextManager[None]:
        """Return what lets torch's compiler be, where it has a part in the program."""
        modules = (module for _, module in self.environment.found)
        if calls_compiled(self.invocation.fn, modules):
            return run_as_written()
        return nullcontext()

    def guarded_graph(self, result: Any) -> GuardedGraph | None:
        """Return the graph of the run, or None with the reason in `recorder.failure`."""
        recorder = self.recorder
        self.changes = recorder.finish()
        if recorder.failure is not None:
            recorder.failure = self._naming_hooks(recorder.failure)
            return None
        try:
            self.state.finish(recorder.watcher)
            self._check_environment()
            return self._build(result)
        except Refusal as refusal:
            recorder.refuse(refusal.reason, refusal.hint)
        except CaptureError as error:
            recorder.refuse(error.message, error.hint)
        return None

    def _naming_hooks(self, failure: Failure) -> Failure:
        """Return a failure that names the module with a backward hook that led to it."""
        hooked = [
            path
            for path, module, _ in self.training
            if backward_hooks_of(module) or backward_pre_hooks_of(module)
        ]
        if READS_GRAD_FN not in failure.reason or not hooked:
            return failure
        name = hooked[0] or "the module"
        reason = f"{name} has a backward hook, which is Python code that runs in the backward pass"
        return Failure(reason, "remove the hook, or capture under torch.no_grad()", failure.trace)

    def _build(self, result: Any) -> GuardedGraph:
        recorder = self.recorder
        outputs: list[fx.Node] = []
        blueprint, mutations, replays = self._blueprints(result, outputs)
        undo = self._undo()
        extras = self.extras = self._take_extras(outputs)
        recorder.write_texts()
        is_single = isinstance(result, torch.Tensor) and not (mutations or replays)
        recorder.graph.output(outputs[0] if is_single else tuple(outputs))
        self._check_undo(undo)
        module = _graph_module(recorder)
        numbers, values = self.scalar_inputs()
        inputs = (*self.tensors(), *values, *(item.tensor for item in extras))
        self.settle(module, inputs)
        return GuardedGraph(
            graph_module=module,
            guards=self._guards(),
            value_guards=value_guards(recorder),
            undo=undo,
            changes=self.changes,
            has_regions=recorder.regions.has_changed,
            result=blueprint,
            mutations=mutations,
            is_single=is_single,
            outside={outside.target: outside.tensor for outside in recorder.outside},
            extras=tuple(Extra(item.target, item.places) for item in extras),
            replays=replays,
            watch=self.state.watch,
            opaque_calls=tuple(recorder.opaque_calls),
            can_run_again=not recorder.writes_early,
            numbers=numbers,
        )

    def _blueprints(
        self, result: Any, outputs: list[fx.Node]
    ) -> tuple[Blueprint, tuple[tuple[int, Blueprint], ...], tuple[RecordedEffects, ...]]:
        """Describe the result, and what is written to arguments and state; fill in `outputs`."""
        parts, state = self.call.parts, self.state

        def place(tensor: torch.Tensor, path: str) -> int:
            outputs.append(self.recorder.node_of(tensor))
            return len(outputs) - 1

        existing = {id(container): number for number, container in enumerate(parts.containers)}
        kept = state.reach.kept
        blueprint = Blueprint(result, place, existing, "the result", kept)
        mutations = tuple(
            (number, Blueprint.of_content(container, place, existing, path, kept))
            for number, container, path in self._changed_containers()
        )
        replays = state.replays(lambda value, path: Blueprint(value, place, existing, path, kept))
        return blueprint, mutations, replays

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors that the graph takes, of the types that they came with."""
        return tuple(map(_as_it_came, self.call.parts.tensors, self.types))

    def written(self) -> list[torch.Tensor]:
        """Return the tensors from outside of the program that it has written to."""
        tensors, changes = self.call.parts.tensors, self.changes
        outside = [*self.recorder.outside, *self.extras]
        written = [item.tensor for item in outside if item.target in changes.outside]
        return [tensors[index] for index in changes.leaves] + written

    def has_changed_state(self) -> bool:
        """Tell whether the run has changed Python state."""
        return bool(raw(self.state.reach.holders))

    def rewind(self, before: Entries) -> Rewind:
        """Return what takes arguments and Python state back.

        Args:
            before: What the containers and objects that were changed held before the run.
        """
        containers = [
            (container, content)
            for number, container, _ in self._changed_containers()
            if (content := self.containers[number]) is not None
        ]
        return Rewind(before, containers)

    @property
    def free_tokens(self) -> frozenset[int]:
        """Which values in the arguments are numbers that the graph takes as inputs."""
        return frozenset()

    def scalar_inputs(self) -> tuple[tuple[ScalarInput, ...], list[Any]]:
        """Return the numbers that are inputs of the graph, and what they are in this run."""
        return (), []

    def settle(self, module: fx.GraphModule, inputs: tuple[Any, ...]) -> None:
        """Look at the whole graph before guards are made of it."""

    def _undo(self) -> Mutations:
        recorder = self.recorder
        if (
            recorder.may_catch
            or recorder.has_texts
            or not (self.changes.leaves or self.changes.outside)
        ):
            return self.changes
        return self.recorder.before_guards if self.recorder.reads else Mutations()

    def _changed_containers(self) -> list[tuple[int, Any, str]]:
        changed = []
        for number, container in enumerate(self.call.parts.containers):
            label, before = _label_and_values(self.containers[number])
            new_label, after = _label_and_values(content_of(container))
            if (
                label != new_label
                or len(before) != len(after)
                or any(old is not new for old, new in zip(before, after, strict=True))
            ):
                changed.append((number, container, f"an argument's {type(container).__name__}"))
        return changed

    def _check_environment(self) -> None:
        arrays = [array.tobytes() for array in self.call.parts.arrays]
        if arrays != self.arrays:
            raise Refusal("the program writes to a NumPy array that it was given")
        self.state.check()
        if (g.read_defaults(), read_ambient()) != self.before[::-1]:
            raise Refusal("the program leaves other modes of torch behind than it found")

    def _take_extras(self, outputs: list[fx.Node]) -> list[Outside]:
        """Turn tensors that lie where the program or the user replaces them into inputs."""
        recorder = self.recorder
        extras = [item for item in recorder.outside if self.state.is_replaced(item.places)]
        recorder.outside = [item for item in recorder.outside if item not in extras]
        for item in extras:
            node = recorder.make_input(item)
            outputs[:] = [node if output is item.node else output for output in outputs]
        return extras

    def _check_undo(self, undo: Mutations) -> None:
        written = [self.call.parts.tensors[index] for index in undo.leaves]
        written += [item.tensor for item in self.recorder.outside if item.target in undo.outside]
        if any(tensor.grad_fn is not None for tensor in written):
            raise Refusal(
                "an argument or a buffer is written to, followed by autograd, before the program "
                "reads a value of a tensor or handles an exception",
                "write under torch.no_grad(), or after the last such place",
            )

    # Guards -----------------------------------------------------------------------------------

    def _guards(self) -> tuple[g.Guard, ...]:
        recorder, parts, call = self.recorder, self.call.parts, self.call
        is_written = bool(self.changes.leaves or self.changes.outside)
        uses = [first_use(node) for node in recorder.placeholders[: len(parts.tensors)]]
        tensors = zip(parts.tensors, self.types, parts.tensor_paths, uses, strict=True)
        found: list[g.Guard] = [
            g.ModesGuard("torch's modes", ambient=call.ambient, defaults=call.defaults),
            structure_guard(parts, self.free_tokens),
        ]
        for index, (tensor, kind, path, use) in enumerate(tensors):
            found.append(self.tensor_guard(index, tensor, kind, path, use))
            if id(tensor) in self.environment.places:
                place = self.environment.places[id(tensor)][1][0]
                found.append(
                    SameTensorGuard(path, source=use, index=index, tensor=tensor, place=place.name)
                )
        found += self.size_guards()
        if len(parts.tensors) > 1:
            found += alias_guards(parts.tensors, is_written=is_written)
        found += [*module_guards(self.training), *outside_guards(recorder.outside)]
        found += extra_guards(self.extras, recorder.outside, is_written=is_written)
        found += self.state.guards()
        return tuple(found)

    def size_guards(self) -> list[g.Guard]:
        """Return the guards on sizes that are free."""
        return []

    def tensor_guard(
        self, index: int, tensor: torch.Tensor, kind: TensorType, path: str, use: str | None
    ) -> g.Guard:
        """Return the guard on one argument."""
        return tensor_guard(index, tensor, kind, path, use)


def _graph_module(recorder: Recorder) -> fx.GraphModule:
    root: dict[str, Any] = {item.target: item.tensor for item in recorder.outside}
    return fx.GraphModule({**root, **recorder.modules}, recorder.graph)


def _as_it_came(tensor: torch.Tensor, known: TensorType) -> torch.Tensor:
    """Return an argument, or zeros in its place where the program has given it another shape."""
    if known.stride is None or (tensor.shape == known.shape and tensor.stride() == known.stride):
        return tensor
    made = torch.empty_strided(known.shape, known.stride, dtype=known.dtype, device=known.device)
    return made.zero_().requires_grad_(known.requires_grad)


def _label_and_values(content: Content | None) -> tuple[Any, list[Any]]:
    return (None, []) if content is None else (content.label, content.values)


def _is_recording() -> bool | None:
    recorder = active_recorder()
    return None if recorder is None else recorder.is_following
