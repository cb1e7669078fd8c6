"""Programs of an assignment: converted, compiled, timed against float32, and judged."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fxkit.compiling.compiler import compile as compile_program
from fxkit.lower.building import deadline
from fxkit.passes.manager.manager import PassManager
from fxkit.passes.mixed_precision import MixedPrecision
from fxkit.quantization.batches import Batch, call_with
from fxkit.quantization.config import QuantizationConfig
from fxkit.quantization.conversion import convert
from fxkit.quantization.preparation import PreparedProgram, Program
from fxkit.searching.number_formats import BFLOAT16, Layers
from fxkit.searching.search_result import Trial
from fxkit.timing import in_turn

Assignment = Mapping[str, str]
Metric = Callable[[Callable[..., Any], Sequence[Any]], float]


class Bench:
    """Makes and measures the program of an assignment.

    Args:
        prepared: Calibrated, with observers for all that may be quantised.
        layers: What each layer may take.
        metric: Takes a program and examples, and returns a figure of which more is better.
        examples: What it is judged by while it is searched.
        batch: What is timed.
        rounds: How often each program is timed, in turn with float32.
    """

    def __init__(
        self,
        prepared: PreparedProgram,
        layers: Layers,
        metric: Metric,
        examples: Sequence[Any],
        batch: Batch,
        rounds: int,
    ) -> None:
        self.prepared = prepared
        self.layers = layers
        self.metric = metric
        self.examples = examples
        self.batch = batch
        self.rounds = rounds
        self.floats = compile_program(prepared.remake())
        self.compiled: dict[tuple[str, ...], Any] = {}
        self.quantized: dict[tuple[str, ...], Program] = {}

    def program(self, assignment: Assignment) -> Program:
        """Return the reference graph of an assignment."""
        specs = self.layers.specs
        by_node = {name: specs[kind] for name, kind in assignment.items() if kind in specs}
        prepared = copy.copy(self.prepared)
        prepared.config = QuantizationConfig(None, by_node=by_node)
        program = convert(prepared) if by_node else self.prepared.remake()
        halves = frozenset(name for name, kind in assignment.items() if kind == BFLOAT16)
        if halves:
            lower = MixedPrecision(freeze_weights=True, where=lambda node: node.name in halves)
            PassManager([lower]).run(program)
        return program

    def judge(self, assignment: Assignment) -> float:
        """Return the metric of an assignment, of its reference graph."""
        return float(self.metric(self.program(assignment), self.examples))

    def measure(self, label: str, assignment: Assignment) -> Trial:
        """Compile the program of an assignment; time it in turn with float32, and judge it."""
        key = tuple(assignment.values())
        if key not in self.compiled:
            self.quantized[key] = self.program(assignment)
            self.compiled[key] = compile_program(self.quantized[key])
        compiled = self.compiled[key]
        seconds = self.latencies(compiled, self.rounds)
        deadline.remaining()
        found = float(self.metric(compiled, self.examples))
        return Trial(label, dict(assignment), seconds[1], seconds[1] / seconds[0], found)

    def latencies(self, compiled: Callable[..., Any], rounds: int) -> tuple[float, float]:
        """Return median seconds of float32 and of a program, called in turn."""
        found = in_turn(
            {
                "float": lambda: call_with(self.floats, self.batch),
                "tried": lambda: call_with(compiled, self.batch),
            },
            rounds=rounds,
            warmup=2,  # the first call runs the program itself
        )
        return found["float"], found["tried"]


class Clock:
    """Tells whether there is time for another step.

    Args:
        seconds: For all of it.

    Attributes:
        longest: Seconds of the longest step so far.
        reserve: Seconds that measuring a program again takes; twice that is kept for the end.
        ran_out: Whether a step had to be stopped.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.longest = 0.0
        self.reserve = 0.0
        self.ran_out = False
        self._start = time.monotonic()

    @property
    def elapsed(self) -> float:
        """Seconds since it was made."""
        return time.monotonic() - self._start

    def has_time(self) -> bool:
        """Tell whether another step as long as the longest ends in time."""
        return self.elapsed + self.longest + 2 * self.reserve < self.seconds

    def can_verify(self) -> bool:
        """Tell whether there is time to measure a program again."""
        return self.elapsed + self.reserve <= self.seconds

    def timed(self, step: Callable[[], Any]) -> Any:
        """Run a step, and remember how long it took; None where it had to be stopped.

        One that builds what was never built may last longer than any before.
        """
        begun = self.elapsed
        try:
            with deadline.until(self._start + self.seconds - 2 * self.reserve):
                result = step()
        except deadline.DeadlinePassed:
            self.ran_out = True
            return None
        self.longest = max(self.longest, self.elapsed - begun)
        return result
