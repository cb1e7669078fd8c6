"""What a profile has measured, and what follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fxkit.errors import UnsupportedError
from fxkit.view.profiling.profile_rows import SORTS, Row, RowEntry, grouped, total
from fxkit.view.texts.text_table import percent

AGREED = 0.03
"""Nodes and whole calls agree where their times differ by no larger share of a call."""

REST = "the rest of a call (Python between the nodes, hooks, inputs and outputs, noise)"
"""What a table says of the time that has no row, so that its rows add up to a call."""

GROUPINGS = ("node", "module", "op", "region")


@dataclass(frozen=True, repr=False)
class ProfileNumbers:
    """What a profile has measured.

    Attributes:
        title: What was measured.
        rows: One for each node, in the order they run; inputs, constants and the output left out.
        end_to_end: Typical seconds of a call of the module itself, without timers: the mean over
            the calmer half of the runs.
        quartiles: First and third quartile of the seconds of such a call.
        instrumented: Typical seconds of a run with timers.
        peak_bytes: The most bytes of values that were alive at once, made by nodes: inputs and
            parameters are not counted, memory inside an operator is not seen.
        warmup: Runs that were not counted.
        iters: Runs, of whose calmer half means were taken.
        threads: Threads that torch used.
        peak_holders: The nodes that hold `peak_bytes`, with the bytes of each, most first.
        allocator_peak: The most bytes that torch's allocator handed out at once during a call,
            memory inside of operators included; None where it can't be told.
        device: Where the work was done.
        clock_seconds: Seconds that reading the clock costs a run with timers, measured by itself;
            taken off the nodes' times.
        node_count: Number of nodes in the graph, those without a row included.
        noise: Spread, in seconds, of what a call of the module takes more than the run with timers
            that came before it: smaller differences between the two mean nothing.
    """

    title: str
    rows: tuple[Row, ...]
    end_to_end: float | None
    quartiles: tuple[float, float] | None
    instrumented: float | None
    peak_bytes: int | None
    warmup: int
    iters: int
    threads: int
    peak_holders: tuple[tuple[str, int], ...] = ()
    allocator_peak: int | None = None
    device: str = "cpu"
    clock_seconds: float = 0.0
    noise: float = 0.0
    node_count: int = 0

    @property
    def node_seconds(self) -> float:
        """Sum of the nodes' times."""
        return sum(row.seconds or 0.0 for row in self.rows)

    @property
    def rest_seconds(self) -> float | None:
        """What a whole call takes beside its nodes, in seconds: with it the rows of a table add up
        to `end_to_end`. Negative where the runs with timers took longer; None without times.
        """
        return self.end_to_end - self.node_seconds if self.end_to_end is not None else None

    @property
    def outside_seconds(self) -> float:
        """Seconds of a call that no node accounts for: the module's own call, its hooks, taking
        inputs apart and putting outputs together; 0 when the nodes add up to more.
        """
        return max(0.0, (self.end_to_end or 0.0) - self.node_seconds)

    @property
    def disagreement(self) -> float:
        """Share of a call by which the sum of the nodes differs from it for no known reason.

        0 where they agree, or where calls take surely longer than the nodes: `outside_seconds` is
        then the time of Python between and around them.
        """
        whole = self.end_to_end or 0.0
        if not whole or any(row.is_reused for row in self.rows):
            return 0.0
        differ = self.node_seconds - whole
        is_sure = differ < 0 and self.noise <= AGREED * whole
        return 0.0 if is_sure or abs(differ) <= AGREED * whole else differ / whole

    @property
    def peak_with_workspace(self) -> int | None:
        """The most bytes of live values and of memory inside operators at once."""
        known = [
            (row.live_bytes or 0) + row.workspace_bytes
            for row in self.rows
            if row.workspace_bytes is not None
        ]
        return max(known, default=None)

    @property
    def overhead(self) -> float | None:
        """Seconds that the timers add to a run; about 0 within the noise of the measurement."""
        if self.instrumented is None or self.end_to_end is None:
            return None
        return self.instrumented - self.end_to_end

    @property
    def uncounted(self) -> tuple[Row, ...]:
        """The nodes without a FLOP formula, slowest first."""
        rows = [row for row in self.rows if row.flops is None]
        return tuple(sorted(rows, key=lambda row: -(row.seconds or 0.0)))

    def entries(self, *, sort_by: str = "time", group_by: str = "node") -> list[RowEntry]:
        """Return the lines of a table.

        Args:
            sort_by: `"time"`, `"flops"`, `"bytes"`, `"memory"`, or `"order"` as they run.
            group_by: `"node"`; `"op"`, by operator; `"module"`, by module, numbers in paths
                taken as one, so that the layers of a stack are added up; `"region"`, by the
                compiled kernel's region.

        Raises:
            UnsupportedError: One of them is none of these.
        """
        if sort_by not in SORTS or group_by not in GROUPINGS:
            raise UnsupportedError(
                f"expected sort_by out of {', '.join(SORTS)} and group_by out of "
                f"{', '.join(GROUPINGS)}, got {sort_by!r} and {group_by!r}"
            )
        return sorted(grouped(self.rows, group_by), key=SORTS[sort_by])

    @property
    def spread(self) -> float:
        """Seconds by which calls differ: less than that is no finding."""
        low, high = self.quartiles or (0.0, 0.0)
        return max(self.noise, high - low)

    @property
    def is_steady(self) -> bool:
        """Whether the middle half of the runs took about the same time."""
        low, high = self.quartiles or (0.0, 0.0)
        return high <= 1.3 * low

    def without_row(self, left: Sequence[RowEntry]) -> list[tuple[str, float | None]]:
        """Return what a table has no rows for, in words and seconds: with it, rows add up."""
        found: list[tuple[str, float | None]] = []
        if left:
            found.append((f"… {len(left):,} more", total([entry.seconds for entry in left])))
        if self.rest_seconds is not None:
            found.append((REST, self.rest_seconds))
        return found

    def share(self, seconds: float | None) -> str:
        """Return which share of a call some seconds are, as text."""
        share = percent(seconds or 0.0, self.end_to_end or self.node_seconds)
        return share.replace("-", "−")
