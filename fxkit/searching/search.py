"""Find the fastest assignment of number formats to layers that keeps a metric."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from fxkit.errors import UnsupportedError
from fxkit.quantization.batches import Batch, arguments_of
from fxkit.quantization.calibration import calibrate
from fxkit.quantization.comparison import compare
from fxkit.quantization.config import QuantizationConfig
from fxkit.quantization.preparation import PreparedProgram, prepare
from fxkit.quantization.specs import QuantizationSpec
from fxkit.searching.bench import Assignment, Bench, Clock, Metric
from fxkit.searching.number_formats import FLOAT, Layers, formats_of, layers_of
from fxkit.searching.search_result import SearchResult, Trial
from fxkit.searching.signal_to_noise import SignalToNoise

ROUNDS, LEAST_ROUNDS = 30, 5
GAIN = 0.99
"""A latency counts as lower from a hundredth on: timings waver."""


def search(
    model: Any,
    data: Iterable[Any],
    metric: Metric | None = None,
    *,
    at_least: float,
    over: Iterable[str] | Mapping[str, QuantizationSpec] = ("float32", "bfloat16", "int8", "int4"),
    seconds: float = 300.0,
    inputs: Callable[[Any], Batch] | None = None,
) -> SearchResult:
    """Return the fastest program that keeps a metric, by measured latency of compiled graphs.

    All layers get each format at first. Where that loses too much, the layers that add most error
    go back to float32, as few as keep the metric; then single layers are changed while that gains.
    The fastest that keeps the metric is measured again, in turn with float32, and judged by
    examples that the search never saw; where it fails, the next one is, and float32 in the end.

    Args:
        model: A module in eval mode, a function, captured program or `torch.fx.GraphModule`.
        data: Examples, at least two; the last third is held back. Each is a batch to call the model
            with, or what `inputs` makes one of. The first one is timed.
        metric: Takes a program and some of the examples, and returns a figure of which more is
            better; dB of the results against those in float32 where left out.
        at_least: What the metric may not fall below.
        over: The formats that layers may take: names of `fxkit.searching.FORMATS`, or specs of
            one's own by name.
        seconds: When to stop. No step is begun that would last longer, judging by those before, and
            builds that are under way shortly before the end are stopped; to compile and measure
            float32 is always done.
        inputs: Returns the batch of an example, for examples that hold labels, too.

    Raises:
        UnsupportedError: When there are fewer than two examples, float32 does not keep the metric,
            no layer has a choice, or a format is not known.
    """
    examples, batch_of = list(data), inputs or (lambda example: example)
    if len(examples) < 2:
        raise UnsupportedError(
            f"expected at least two examples, one of them to hold back, got {len(examples)}",
            hint="split the data into several batches",
        )
    formats = formats_of(over)
    held = max(len(examples) // 3, 1)
    clock = Clock(seconds)
    with torch.no_grad():
        batches = [batch_of(example) for example in examples]
        prepared = _prepared(model, batches[:-held], formats)
        layers = layers_of(prepared.graph_modules[0], formats)
        if not layers.choices:
            raise UnsupportedError(
                "expected layers with weights that can be quantised, got none",
                hint="fxkit.quantization.report says why for each operator",
            )
        judge = metric or SignalToNoise(prepared.remake(), batch_of)
        bench = Bench(prepared, layers, judge, examples[:-held], batches[0], ROUNDS)
        found = _Search(bench, at_least, clock, batches[:1])
        found.run()
        return found.verified(examples[-held:])


def _prepared(
    model: Any, batches: Sequence[Batch], formats: Mapping[str, QuantizationSpec | None]
) -> PreparedProgram:
    """Return a calibrated program whose activations are observed where any format needs it."""
    static = [spec for spec in formats.values() if _is_static(spec)]
    args, kwargs = arguments_of(batches[0])
    prepared = prepare(model, args, QuantizationConfig(next(iter(static), None)), kwargs=kwargs)
    calibrate(prepared, batches, progress=False)
    return prepared


def _is_static(spec: QuantizationSpec | None) -> bool:
    return spec is not None and spec.activations is not None and not spec.activations.is_dynamic


class _Search:
    def __init__(self, bench: Bench, at_least: float, clock: Clock, shown: Sequence[Batch]) -> None:
        self.bench = bench
        self.at_least = at_least
        self.clock = clock
        self.shown = shown
        self.trials: list[Trial] = []
        self.notes: list[str] = []

    @property
    def layers(self) -> Layers:
        return self.bench.layers

    def run(self) -> None:
        """Measure float32, then each format for all layers, and mixtures while there is time."""
        floats = self._begin()
        if not floats.metric >= self.at_least:  # also where it is no number
            raise UnsupportedError(
                f"expected a metric of at least {self.at_least:g}, got {floats.metric:g} in "
                "float32",
                hint="ask for less than float32 has",
            )
        kinds = dict.fromkeys(k for own in self.layers.choices.values() for k in own if k != FLOAT)
        whole = [self._try(f"all {kind}", self.layers.all_in(kind)) for kind in kinds]
        tried = sorted((one for one in whole if one is not None), key=lambda one: one.ratio)
        for trial in tried:
            if trial.ratio < 1 and trial.metric < self.at_least:
                self._take_back(trial)
        self._improve()
        if self.clock.ran_out or not self.clock.has_time():
            self.notes.append(f"time ran out after {self.clock.seconds:g} s")

    def _begin(self) -> Trial:
        bench, clock = self.bench, self.clock
        begun = clock.elapsed
        seconds = bench.latencies(bench.floats, LEAST_ROUNDS)[0]
        longest = max(clock.seconds / 40, LEAST_ROUNDS * 2 * seconds)
        bench.rounds = max(min(ROUNDS, int(longest / (2 * seconds))), LEAST_ROUNDS)
        before = clock.elapsed
        seconds = bench.latencies(bench.floats, bench.rounds)[0]
        found = float(bench.metric(bench.floats, bench.examples))
        self.trials.append(Trial("float32", self.layers.all_in(FLOAT), seconds, 1.0, found))
        # To convert and compile another takes as long as this; to verify, as long as the end of it.
        clock.longest = clock.elapsed - begun
        clock.reserve = clock.elapsed - before
        return self.trials[0]

    def _try(self, label: str, assignment: Assignment) -> Trial | None:
        """Measure an assignment where there is time for it and it is new."""
        known = next((one for one in self.trials if one.assignment == assignment), None)
        if known is not None or not self.clock.has_time():
            return known
        trial = self.clock.timed(lambda: self.bench.measure(label, assignment))
        if trial is not None:
            self.trials.append(trial)
        return trial

    def _best(self) -> Trial:
        return min(self._keeping(), key=lambda one: one.ratio)

    def _keeping(self) -> list[Trial]:
        return [one for one in self.trials if one.metric >= self.at_least]

    def _take_back(self, trial: Trial) -> None:
        """Put the layers that add most error back into float32, as few as keep the metric."""
        if not self.clock.has_time():
            return
        order = self._by_error(trial.assignment)
        low, high = 0, len(order)  # all of `order[:high]` in float32 keeps the metric
        while high - low > 1 and self.clock.has_time():
            middle = (low + high) // 2
            tried = {**trial.assignment, **dict.fromkeys(order[:middle], FLOAT)}
            found = self.clock.timed(lambda tried=tried: self.bench.judge(tried))
            keeps = found is not None and found >= self.at_least
            low, high = (low, middle) if keeps else (middle, high)
        if high < len(order):
            mixed = {**trial.assignment, **dict.fromkeys(order[:high], FLOAT)}
            self._try(f"{trial.label} but {high}", mixed)

    def _by_error(self, assignment: Assignment) -> list[str]:
        """Return the layers that are not in float32, those that add most error first.

        That is the error of results where one layer alone is not in float32; where there is no time
        for that, the error of the layer's own results.
        """
        changed = [name for name, kind in assignment.items() if kind != FLOAT]
        noise = SignalToNoise(self.bench.prepared.remake(), lambda batch: batch)
        alone: dict[str, float] = {}
        until = (self.clock.elapsed + self.clock.seconds) / 2
        for name in changed:
            if self.clock.elapsed > until:
                break
            program = self.bench.program({name: assignment[name]})
            alone[name] = noise(program, self.shown)
        if len(alone) < len(changed):
            program = self.bench.program(assignment)
            rows = compare(self.bench.prepared, program, self.shown).rows
            alone = {row.node: row.added for row in rows}
        return sorted(changed, key=lambda name: alone.get(name, math.inf))

    def _improve(self) -> None:
        """Change single layers of the best assignment while that makes it faster."""
        is_better = True
        while is_better:
            is_better = False
            best = self._best()
            for name, own in self.layers.choices.items():
                for kind in own:
                    if not self.clock.has_time():
                        return
                    if kind == best.assignment[name]:
                        continue
                    trial = self._try(f"%{name} in {kind}", {**best.assignment, name: kind})
                    if trial is None or trial.metric < self.at_least:
                        continue
                    if trial.ratio < GAIN * best.ratio:
                        best, is_better = trial, True

    def verified(self, held_back: Sequence[Any]) -> SearchResult:
        """Measure the fastest again, and judge it by what was held back.

        Where it does not hold, or is slower now than the next one was, that one is measured, too.
        """
        best: tuple[Trial, float] | None = None
        faster = [one for one in self._keeping() if one.ratio < 1]
        for trial in sorted(faster, key=lambda one: one.ratio):
            is_best = best is not None and best[0].ratio <= trial.ratio
            if is_best or not self.clock.can_verify():
                break
            again, found = self._measured_again(trial, held_back)
            if again.ratio >= 1 or found < self.at_least:
                is_faster = again.ratio < 1
                why = (
                    f"metric {found:.4g} on examples held back" if is_faster else "no faster again"
                )
                self.notes.append(f"{trial.label} did not hold: {why}")
            elif best is None or again.ratio < best[0].ratio:
                best = again, found
        if best is None:
            floats = self.bench.floats
            best = self.trials[0], float(self.bench.metric(floats, held_back))
        return self._result(*best)

    def _measured_again(self, trial: Trial, held_back: Sequence[Any]) -> tuple[Trial, float]:
        """Let what is measured now stand for a trial; return it, and its metric on others."""
        program = self._program(trial)
        found = float(self.bench.metric(program, held_back))
        before, after = self.bench.latencies(program, self.bench.rounds)
        new = replace(trial, seconds=after, ratio=after / before)
        self.trials[self.trials.index(trial)] = new
        return new, found

    def _program(self, trial: Trial) -> Any:
        is_float = trial is self.trials[0]
        bench = self.bench
        return bench.floats if is_float else bench.compiled[tuple(trial.assignment.values())]

    def _result(self, trial: Trial, found: float) -> SearchResult:
        if found < self.at_least:
            self.notes.append(f"float32 itself has a metric of {found:.4g} on examples held back")
        quantized = self.bench.quantized.get(tuple(trial.assignment.values()))
        return SearchResult(
            self._program(trial),
            self.bench.prepared.remake() if quantized is None else quantized,
            trial,
            tuple(self.trials),
            self.at_least,
            found,
            trial.ratio,
            tuple(self.notes),
            self.clock.elapsed,
        )
