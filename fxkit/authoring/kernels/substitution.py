"""Kernels in a captured graph: found by their patterns, held to them, tried, and put in place."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import fx

from fxkit.authoring.kernels.conversions import by_dtypes
from fxkit.authoring.kernels.definition import AuthoredKernel
from fxkit.authoring.kernels.epilogue_fusion import FuseEpilogues
from fxkit.authoring.kernels.readiness import objection_to
from fxkit.authoring.kernels.trial import TrialOptions, times_at
from fxkit.errors import PassError, UnsupportedError
from fxkit.ir.op import operator_of
from fxkit.ir.provenance import source_of
from fxkit.ir.session import EditSession
from fxkit.lower.compiling.inferred_types import typed
from fxkit.lower.compiling.lower_report import KernelTrial
from fxkit.passes.base import Pass, PassContext
from fxkit.passes.manager.instruments import Instrument
from fxkit.passes.manager.manager import PassManager
from fxkit.passes.remove_inference_no_ops import RemoveInferenceNoOps
from fxkit.patterns.match_results import Match
from fxkit.patterns.rewriting import Rule, objection_of


@dataclass(frozen=True)
class SubstituteKernels(Pass):
    """Put kernels of the user's own where their patterns occur, and where they are faster.

    Attributes:
        kernels: The kernels, each held to its pattern already.
        options: How fxkit compiles what they are timed against.
        is_without_no_ops: Whether the graph has lost calls that change nothing.
        trials: Takes note of what became of each.
        placed: Of the first of them, names of the nodes that took the places.
    """

    kernels: tuple[AuthoredKernel, ...]
    options: TrialOptions
    is_without_no_ops: bool = False
    trials: list[KernelTrial] = field(default_factory=list)
    placed: list[tuple[str, ...]] = field(default_factory=list)

    numerics: ClassVar[str] = "close"
    is_idempotent: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Take the options as they are."""

    def apply(self, edit: EditSession, context: PassContext) -> None:
        """Run the kernels' rules. Cost: linear, and trials of types not met before."""
        asked: dict[tuple[str, str], KernelTrial] = {}
        self.options.look_at(edit.gm)
        rules = [
            self._tried(kernel, rule, asked)
            for kernel in self.kernels
            for rule in by_dtypes(kernel.rule, drops_conversions=self.is_without_no_ops)
        ]
        report = context.rewrite(edit, rules)
        for site in report.sites:
            found = asked.pop((site.rule, site.root), None)
            if found is not None:
                self.trials.append(found)
                self.placed.append(site.inserted)
        reasons = {(rule, root): why for rule, root, why in report.refusals}
        for place, trial in asked.items():
            why = trial.reason or reasons.pop(place, "another kernel was taken there")
            self.trials.append(replace(trial, reason=why))
        refused = (KernelTrial(rule, (root,), why) for (rule, root), why in reasons.items()
                   if (rule, root) not in asked)  # fmt: skip
        self.trials.extend(refused)

    def __str__(self) -> str:
        return f"{self.name}({', '.join(kernel.name for kernel in self.kernels)})"

    def note_epilogues(self, fused: Mapping[str, tuple[str, ...]]) -> None:
        """Take note of the nodes that are computed behind kernels, by the kernels' nodes."""
        for place, names in enumerate(self.placed):
            behind = next((fused[name] for name in names if name in fused), ())
            self.trials[place] = replace(self.trials[place], epilogue=behind)

    def _tried(
        self, kernel: AuthoredKernel, rule: Rule, asked: dict[tuple[str, str], KernelTrial]
    ) -> Rule:
        """Return a form of a kernel's rule that asks for a trial where it would apply."""
        where = rule.where

        def accepts(match: Match) -> bool | str:
            objection = None if where is None else objection_of(where(match))
            if objection is not None:
                return objection
            place = (kernel.name, match.root.name)
            if place not in asked:
                asked[place] = self._trial(kernel, match)
            return asked[place].reason or True

        return replace(rule, where=accepts)

    def _trial(self, kernel: AuthoredKernel, match: Match) -> KernelTrial:
        names = tuple(node.name for node in sorted(match.matched))
        source = source_of(match.root)
        trial = KernelTrial(kernel.name, names, None, source=source and str(source))
        if kernel.always:
            return trial
        theirs, own = times_at(kernel, match, self.options)
        reason = None if theirs < own else "fxkit's own kernels are faster"
        return replace(trial, seconds=theirs, own_seconds=own, reason=reason)


def use_kernels(
    gm: fx.GraphModule,
    args: tuple[Any, ...] | None,
    kernels: Sequence[AuthoredKernel],
    options: TrialOptions,
    on_failure: Callable[[Pass, PassError], bool] | None = None,
    instruments: Iterable[Instrument] = (),
) -> tuple[KernelTrial, ...]:
    """Put kernels into a captured graph wherever they are proven and faster.

    Args:
        gm: The graph.
        args: Its inputs; None where sizes are open.
        kernels: The kernels.
        options: How fxkit compiles what they are timed against.
        on_failure: As `PassManager` takes it.
        instruments: What is told of the pass.

    Returns:
        What became of each kernel that the graph has operators of.

    Raises:
        UnsupportedError: When sizes are open and a kernel may apply, which needs them.
    """
    found = {o.name for node in gm.graph.nodes if (o := operator_of(node)) is not None}
    wanted = [kernel for kernel in kernels if found & _roots_of(kernel)]
    if not wanted:
        return ()
    if args is None:
        raise UnsupportedError("expected sizes for a kernel's trial, got open ones")
    typed(gm, args)
    device = next((a.device.type for a in args if isinstance(a, torch.Tensor)), "cpu")
    trials: list[KernelTrial] = []
    ready: list[AuthoredKernel] = []
    for kernel in wanted:
        reason = objection_to(kernel, device)
        if reason is None:
            ready.append(kernel)
            continue
        trials.append(KernelTrial(kernel.name, (), reason.splitlines()[0]))
        if kernel.serves(device):
            _warn_once(kernel, reason)
    if not ready:
        return tuple(trials)
    places = [SubstituteKernels(tuple(ready), options)]
    steps: list[Pass] = [places[0]]
    # Patterns are looked for in the graph as it was recorded, then without what computes nothing,
    # such as casts to the same dtype.
    removing = [step for step in options.passes if isinstance(step, RemoveInferenceNoOps)]
    if removing:
        places.append(SubstituteKernels(tuple(ready), options, is_without_no_ops=True))
        steps += [*removing, places[1]]
    PassManager(
        steps, verify="structure", args=args, on_failure=on_failure, instruments=instruments
    ).run(gm)
    if any(kernel.has_hook for kernel in ready):
        typed(gm, args)
        fusing = FuseEpilogues(tuple(ready), options.policy)
        PassManager(
            (fusing,), verify="structure", args=args, on_failure=on_failure, instruments=instruments
        ).run(gm)
        for substituted in places:
            substituted.note_epilogues(fusing.fused)
    used = [trial for substituted in places for trial in substituted.trials if trial.is_used]
    return (*trials, *used, *(trial for trial in places[-1].trials if not trial.is_used))


def _roots_of(kernel: AuthoredKernel) -> set[str]:
    forms = by_dtypes(kernel.rule, drops_conversions=True)
    return {name for rule in forms for name in rule.root_operators}


_warned: set[tuple[int, str]] = set()


def _warn_once(kernel: AuthoredKernel, reason: str) -> None:
    if (id(kernel), reason) not in _warned:
        _warned.add((id(kernel), reason))
        warnings.warn(
            f"kernel {kernel.name} is left out: {reason}\n  fxkit computes its pattern.",
            stacklevel=2,
        )
