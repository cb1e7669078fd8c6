"""A captured program that is trained: its forward and its backward both run as kernels."""

from __future__ import annotations

import copy
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from fxkit.lower.compiling.compiled_module import CompiledModule
from fxkit.lower.compiling.kernel_cache import KernelCache
from fxkit.lower.compiling.lower_report import KernelTrial, LowerReport, Region
from fxkit.lower.compiling.lowering import to_cpp
from fxkit.lower.fusion.policy import Policy
from fxkit.lower.runtime.argument_key import argument_key
from fxkit.passes.manager.instruments import Instrument
from fxkit.torch_adapters.late_imports import FOR_GRAPHS_OF_GRADIENTS, import_at_once
from fxkit.tracing.recorder.state_restore import random_states, set_random_states
from fxkit.tracing.values.refusals import Refusal

if TYPE_CHECKING:
    from fxkit.tracing.functional.functional_program import FunctionalProgram

MAX_SIZES = 8

# What a call under autograd costs beside its kernels, what an operator costs that is not called and
# not followed, forward and backward, and how fast memory is; measured, in seconds and bytes.
CALL_SECONDS = 50e-6
OPERATOR_SECONDS = 2.5e-6
BYTES_PER_SECOND = 10e9

# Where kernels promise to save less than this, they are tried: what is spelled out in operators
# for kernels to take in may be one call of eager, and small tensors stay in caches.
TRIED_BELOW_SECONDS = 5e-3
TRIES = 7
MAX_TRIES, TRIED_SECONDS = 40, 0.05  # more of them for so long: a call may meet fresh memory
MAX_TRIED_BYTES = 64 * 2**20

# What is around a step in a call of the whole: guards, and what is written back.
AROUND_SECONDS = 15e-6


@dataclass(frozen=True)
class TrainingReport:
    """What became of a program that is trained.

    Attributes:
        forward: Of its forward, as it was built last, with the calls of all sizes; None where it is
            left to eager.
        backward: Of its backward, likewise; None where there is none.
        reason: Why it is left to eager, or None.
        eager_calls: How often the captured graph, or the program in its place, ran in eager.
        differentiated_again: How often a gradient was itself differentiated: eager does that, since
            kernels have a first derivative only.
        trials: What became of the user's own kernels.
    """

    forward: LowerReport | None
    backward: LowerReport | None
    reason: str | None
    eager_calls: int
    differentiated_again: int
    trials: tuple[KernelTrial, ...] = ()

    @property
    def regions(self) -> tuple[Region, ...]:
        """Regions of the forward, then of the backward."""
        parts = (self.forward, self.backward)
        return tuple(region for part in parts if part is not None for region in part.regions)

    @property
    def float_layers(self) -> tuple[str, ...]:
        """See `LowerReport`: of the forward."""
        return () if self.forward is None else self.forward.float_layers

    def __str__(self) -> str:
        lines = []
        if self.reason is not None:
            lines.append(f"left to eager, which autograd sees through: {self.reason}")
        if self.forward is not None:
            lines += ["forward", str(self.forward)]
        if self.backward is not None:
            lines += ["backward", str(self.backward)]
        lines += [f"kernel {trial}" for trial in self.trials]
        lines.append(
            f"{self.eager_calls} calls in eager, {self.differentiated_again} gradients "
            "differentiated again, in eager"
        )
        return "\n".join(lines)


@dataclass
class _Built:
    """The program for one set of sizes, which runs what was compiled."""

    program: FunctionalProgram
    forward: CompiledModule
    backward: CompiledModule | None

    def __post_init__(self) -> None:
        backward = None if self.backward is None else self.backward.forward
        self.program.bind(self.forward.forward, backward)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Built:
        """Copy the program so that it runs, and counts the calls of, the copies."""
        return _Built(*copy.deepcopy((self.program, self.forward, self.backward), memo))

    @property
    def modules(self) -> list[CompiledModule]:
        """The forward, and the backward if there is one."""
        return [self.forward] if self.backward is None else [self.forward, self.backward]


class TrainingModule(nn.Module):
    """A graph whose forward and backward run as kernels under autograd; made by `to_cpp_training`.

    Args:
        gm: A captured graph.
        policy: When a kernel pays.
        kernel_cache: Kernels built for other sizes.
        instruments: What is told of the steps of lowering.
        reason: Why it is left to eager whatever its inputs are, or None.

    Attributes:
        graph_module: The captured graph; parameters are read from it at each call.
        reason: Why it is left to eager, or None.
        eager_calls: How often the captured graph, or the program in its place, ran in eager.
        trials: What became of the user's own kernels in it.
    """

    trials: tuple[KernelTrial, ...] = ()

    def __init__(
        self,
        gm: fx.GraphModule,
        policy: Policy | None,
        kernel_cache: KernelCache | None = None,
        instruments: tuple[Instrument, ...] = (),
        *,
        reason: str | None = None,
    ) -> None:
        super().__init__()
        self.graph_module = gm
        self.reason = reason
        self._is_left = reason is not None
        self._policy = policy
        self._kernel_cache = kernel_cache
        self._instruments = instruments
        self._built: dict[Any, _Built | None] = {}
        self.eager_calls = 0

    def forward(self, *args: torch.Tensor) -> Any:
        """Run the program; autograd gets the compiled backward."""
        key = argument_key(args)
        if key not in self._built:
            self.build(args)
        built = self._built.get(key)
        if built is None:
            self.eager_calls += 1
            return self.graph_module.forward(*args)
        return built.program(*args)

    @property
    def parts(self) -> tuple[TrainingModule, ...]:
        """What was compiled: the module itself."""
        return (self,)

    @property
    def leaves_calls(self) -> bool:
        """Whether it leaves calls to eager."""
        return self.reason is not None

    @property
    def calls_in_eager(self) -> int:
        """How often the captured graph, or the program in its place, ran in eager."""
        return self.eager_calls

    def note_eager_call(self) -> None:
        """Count a call that the program itself has run in this module's place."""
        self.eager_calls += 1

    def way_for(self, args: tuple[torch.Tensor, ...]) -> Callable[..., Any] | None:
        """Return what runs for inputs of just these types; None where they are left to eager."""
        built = self._built.get(argument_key(args))
        return None if built is None else built.program

    def build(self, args: tuple[torch.Tensor, ...]) -> None:
        """Make the kernels for inputs of these types."""
        key = argument_key(args)
        if self._is_left or len(self._built) >= MAX_SIZES:
            return
        leaves = tuple([a if a.is_leaf else a.detach().requires_grad_() for a in args])
        try:
            self._built[key] = self._make(leaves)
        except Refusal as refusal:
            self.reason = refusal.reason
            self._built[key] = None

    def _make(self, args: tuple[torch.Tensor, ...]) -> _Built:
        if any(a.layout is not torch.strided for a in args):
            raise Refusal("an input is not dense")
        # Imported where a program is trained: most programs are not, and start sooner.
        import_at_once(FOR_GRAPHS_OF_GRADIENTS)
        from fxkit.lower.training.decompositions import decompositions
        from fxkit.tracing.functional.functional_program import FunctionalProgram

        program = FunctionalProgram(self.graph_module, args, decompositions(), train=True)
        forward = self._lowered(program.forward, "forward")
        gradient = program.backward
        backward = None if gradient is None else self._lowered(gradient, "backward")
        saved = _seconds_saved(forward, backward)
        has_kernels = forward.has_kernels or (backward is not None and backward.has_kernels)
        is_small = not has_kernels or _bytes_of(args) < CALL_SECONDS * BYTES_PER_SECOND
        if saved < CALL_SECONDS and is_small:
            raise Refusal("its kernels save less than a call under autograd costs")
        built = _Built(program, forward, backward)
        if saved < TRIED_BELOW_SECONDS and not _is_faster(program, args, saved >= CALL_SECONDS):
            raise Refusal("tried against each other, eager was faster")
        for module in built.modules:
            module.forget_calls()
        return built

    def _lowered(self, gm: fx.GraphModule, part: str) -> CompiledModule:
        inputs = tuple(node.meta["val"] for node in gm.graph.find_nodes(op="placeholder"))
        kernel_cache = None if self._kernel_cache is None else self._kernel_cache.part(part)
        return to_cpp(
            gm,
            inputs,
            policy=self._policy,
            kernel_cache=kernel_cache,
            instruments=self._instruments,
        )

    @property
    def regions(self) -> tuple[Region, ...]:
        """What became of each pointwise or normalising node, forward and backward."""
        return self.report().regions

    @property
    def reasons(self) -> dict[str, str]:
        """Each node of the forward and the backward that torch computes → why."""
        built = self._last()
        if built is None:
            return {}
        parts = {"forward": built.forward, "backward": built.backward}
        return {
            f"{part}.{name}": reason
            for part, module in parts.items()
            if module is not None
            for name, reason in module.reasons.items()
        }

    @property
    def source(self) -> str:
        """The C++ text of the kernels of the sizes that were built last."""
        built = self._last()
        if built is None:
            return ""
        return built.forward.source + (built.backward.source if built.backward else "")

    @property
    def program(self) -> FunctionalProgram | None:
        """The functional program that was built last, or None."""
        built = self._last()
        return None if built is None else built.program

    def _all(self) -> list[_Built]:
        return [built for built in self._built.values() if built is not None]

    def _last(self) -> _Built | None:
        return next(reversed(self._all()), None)

    def report(self) -> TrainingReport:
        """Return what was fused, what was not and why, and how calls went."""
        built = self._all()
        return TrainingReport(
            forward=_report([b.forward for b in built]),
            backward=_report([b.backward for b in built]),
            reason=self.reason,
            eager_calls=self.eager_calls,
            differentiated_again=sum(b.program.differentiated_again for b in built),
            trials=self.trials,
        )


def to_cpp_training(
    gm: fx.GraphModule,
    args: tuple[torch.Tensor, ...],
    *,
    policy: Policy | None = None,
    kernel_cache: KernelCache | None = None,
    instruments: tuple[Instrument, ...] = (),
) -> TrainingModule:
    """Compile a captured graph and its gradient into fused C++ kernels.

    The graph is brought into functional form, differentiated and split by torch's own parts; what
    has no functional form is left to eager, with the reason in the report.

    Args:
        gm: A captured graph. It is not changed.
        args: Inputs of the types to compile for; each other set of sizes is compiled when it comes.
        policy: When a kernel pays.
        kernel_cache: Kernels built for other sizes, which serve here too where they can.
        instruments: What is told of the steps of lowering.

    Returns:
        A module that is called like `gm`.
    """
    module = TrainingModule(gm, policy, kernel_cache, instruments)
    module.build(tuple(args))
    return module


def _seconds_saved(*modules: CompiledModule | None) -> float:
    """Estimate what kernels save over eager in one step."""
    fused = [r for m in modules if m is not None for r in m.regions if r.kernel is not None]
    spared = sum(len(region.nodes) - 1 for region in fused)
    moved = sum(region.bytes_saved or 0 for region in fused)
    return spared * OPERATOR_SECONDS + moved / BYTES_PER_SECOND


def _bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _is_faster(
    program: FunctionalProgram, args: tuple[torch.Tensor, ...], is_promised: bool
) -> bool:
    """Tell whether a step takes less time in kernels than in eager.

    Args:
        program: The program, with its kernels.
        args: Its inputs.
        is_promised: What is said where that can't be tried.
    """
    size = _bytes_of((*args, *program.graph_module.parameters()))
    ways = program.both_ways(args) if CALL_SECONDS > 0 and size <= MAX_TRIED_BYTES else None
    if ways is None:
        return is_promised
    ours, eager = ways
    state = random_states()
    try:
        best = dict.fromkeys((ours, eager), math.inf)
        began = time.perf_counter()
        for turn in range(MAX_TRIES):
            if turn >= TRIES and time.perf_counter() - began > TRIED_SECONDS:
                break
            for step in best:
                start = time.perf_counter()
                step()
                best[step] = min(best[step], time.perf_counter() - start)
    finally:
        set_random_states(state)
    return best[ours] + AROUND_SECONDS < best[eager]


def _report(modules: Sequence[CompiledModule | None]) -> LowerReport | None:
    """Return the report of the module that was built last, with the calls of all."""
    if not modules or modules[-1] is None:
        return None
    reports = [module.report() for module in modules if module is not None]
    eager_calls: Counter[str] = Counter()
    for report in reports:
        eager_calls.update(report.eager_calls)
    return replace(
        reports[-1],
        calls=sum(report.calls for report in reports),
        eager_calls=eager_calls,
        kernel_misses=sum(report.kernel_misses for report in reports),
        stand_ins=sum(report.stand_ins for report in reports),
    )
