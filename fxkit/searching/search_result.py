"""What a search found: the fastest program that keeps the metric, and all that was measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fxkit.ir.text_table import table
from fxkit.quantization.preparation import Program
from fxkit.view.profiling.charts import Chart
from fxkit.view.profiling.front_chart import FrontPoint, front_chart
from fxkit.view.texts.text_table import duration


@dataclass(frozen=True)
class Trial:
    """One assignment that was compiled and measured.

    Attributes:
        label: What it is.
        assignment: The format of each layer, by the name of its node.
        seconds: Median latency of a call.
        ratio: The same over that of float32, called in turn.
        metric: Of the compiled program, on the examples of the search.
    """

    label: str
    assignment: Mapping[str, str]
    seconds: float
    ratio: float
    metric: float

    @property
    def formats(self) -> str:
        """How many layers have which format, as text."""
        counts = Counter(self.assignment.values())
        return ", ".join(f"{count} {name}" for name, count in counts.most_common())


@dataclass(frozen=True)
class SearchResult:
    """The answer of a search, and the front of latency against the metric.

    Attributes:
        program: The compiled program of the answer.
        reference: Its reference graph, which can be drawn, exported and changed.
        answer: What was measured for it in the search.
        trials: All that was compiled and measured, float32 first.
        at_least: What the metric may not fall below.
        held_back_metric: The metric of the compiled answer on examples that the search never saw.
        ratio: Latency over that of float32, measured again in the end, in turn.
        notes: What was odd: candidates that did not hold on examples held back, time that ran out.
        elapsed: Seconds that the search took.
    """

    program: Any
    reference: Program
    answer: Trial
    trials: tuple[Trial, ...]
    at_least: float
    held_back_metric: float
    ratio: float
    notes: tuple[str, ...]
    elapsed: float

    @property
    def assignment(self) -> Mapping[str, str]:
        """The format of each layer, by the name of its node."""
        return self.answer.assignment

    @property
    def front(self) -> tuple[Trial, ...]:
        """The trials to which no other is ahead in both latency and metric, fastest first."""
        best, found = float("-inf"), []
        for trial in sorted(self.trials, key=lambda one: (one.ratio, -one.metric)):
            if trial.metric > best:
                found.append(trial)
                best = trial.metric
        return tuple(found)

    def table(self) -> str:
        """Return a row for each trial, fastest first, and what became of the answer."""
        front = self.front
        rows = [
            [
                "answer" if one is self.answer else "front" if one in front else "",
                one.label,
                duration(one.seconds),
                f"{one.ratio:.2f}",
                f"{one.metric:.4g}",
                one.formats,
            ]
            for one in sorted(self.trials, key=lambda one: one.ratio)
        ]
        headers = ["", "tried", "latency", "of float32", "metric", "layers"]
        last = (
            f"answer: {self.answer.formats}; measured again {self.ratio:.2f} of float32, metric "
            f"{self.held_back_metric:.4g} on examples held back, asked for {self.at_least:.4g}"
        )
        return "\n".join([table(headers, rows, align="<<>>><"), last, *self.notes])

    def chart(self) -> Chart:
        """Return latency against the metric as a picture."""
        front = self.front
        points = [
            FrontPoint(
                one.seconds,
                one.metric,
                f"{one.label}: {one.formats}",
                is_on_front=one in front,
                is_answer=one is self.answer,
            )
            for one in self.trials
        ]
        return front_chart(points, self.at_least, "latency against metric")

    def __str__(self) -> str:
        return self.table()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"image/svg+xml": str(self.chart()), "text/plain": self.table()}
