"""The rows of a profile: one a node, and sums over nodes that have something in common."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fxkit.view.texts.labels import clip


@dataclass(frozen=True, slots=True)
class Row:
    """One node.

    Attributes:
        name: The node's name.
        operator: Identity of its operator.
        module: Path of the module it ran in.
        type: Shape and dtype of its value.
        family: One of `fxkit.view.texts.labels.FAMILIES`.
        source: The user's line.
        seconds: Typical time: the mean over the calmer half of the runs.
        low: First quartile of the time.
        high: Third quartile of the time.
        flops: Floating point operations; None when there is no formula for them.
        bytes: Bytes that have to be read and written at least; None when not known.
        live_bytes: Bytes of values, made by nodes, that are alive while it runs.
        workspace_bytes: Bytes that the operator takes besides, and gives back; None where the
            device's allocator does not tell.
        computes: For a kernel the names of the nodes that it computes.
        is_launch_bound: Whether the processor takes longer to queue it than the device to do it.
        is_reused: Whether the time is that of a baseline.
        mark: Equal for nodes with the same operator, operand types and constants.
    """

    name: str
    operator: str
    module: str
    type: str
    family: str
    source: str
    seconds: float | None
    low: float | None
    high: float | None
    flops: int | None
    bytes: int | None
    live_bytes: int | None
    workspace_bytes: int | None = None
    computes: tuple[str, ...] = ()
    is_launch_bound: bool = False
    is_reused: bool = False
    mark: str = ""

    @property
    def intensity(self) -> float | None:
        """Floating point operations a byte; None when one of them is not known."""
        return self.flops / self.bytes if self.flops is not None and self.bytes else None


@dataclass(frozen=True, slots=True)
class RowEntry:
    """One line of a table: a node, or all nodes of a module, an operator or a region.

    Attributes:
        key: Name of the node, module, operator or region.
        operator: Identity of the operator, where there is one.
        type: Shape and dtype, for a node.
        nodes: How many nodes it stands for.
        seconds: Sum of their times; None when time was not measured.
        flops: Sum of what is known; None when nothing is.
        uncounted: How many of its nodes have no FLOP formula.
        bytes: Sum of what is known; None when nothing is.
        live_bytes: Largest of theirs.
        workspace_bytes: Largest of what one of them takes inside.
        computes: For a kernel the names of the nodes that it computes.
        reused: How many of its times are those of a baseline.
        launch_bound: How many of its nodes are bound by their launch.
    """

    key: str
    operator: str
    type: str
    nodes: int
    seconds: float | None
    flops: int | None
    uncounted: int
    bytes: int | None
    live_bytes: int | None
    workspace_bytes: int | None
    computes: tuple[str, ...] = ()
    reused: int = 0
    launch_bound: int = 0


SORTS: dict[str, Callable[[RowEntry], float]] = {
    "time": lambda entry: -(entry.seconds or 0.0),
    "flops": lambda entry: -(entry.flops or 0),
    "bytes": lambda entry: -(entry.bytes or 0),
    "memory": lambda entry: -((entry.live_bytes or 0) + (entry.workspace_bytes or 0)),
    "order": lambda entry: 0.0,
}


def grouped(rows: Sequence[Row], group_by: str) -> list[RowEntry]:
    """Return the lines of a table, in the order of their first nodes."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(key_of(row, group_by), []).append(row)
    return [_entry(key, rows) for key, rows in groups.items()]


def key_of(row: Row, group_by: str) -> str:
    """Return the key of the line that a row belongs to."""
    if group_by == "node":
        return row.name
    if group_by == "op":
        return _work_of_kernel(row) if row.family == "kernel" else row.operator
    if group_by == "region":
        return row.name if row.computes else "in no region"
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", row.module) or "(top level)"


def _work_of_kernel(row: Row) -> str:
    """Name what a kernel computes, the same for the layers of a stack: `kernel: linear + gelu`."""
    words = dict.fromkeys(re.sub(r"_\d+$", "", name) for name in row.computes)
    return f"kernel: {clip(' + '.join(words), 48)}" if words else "compiled kernels"


def _entry(key: str, rows: Sequence[Row]) -> RowEntry:
    operators = {row.operator for row in rows}
    return RowEntry(
        key=key,
        operator=rows[0].operator if len(operators) == 1 else "",
        type=rows[0].type if len(rows) == 1 else "",
        nodes=len(rows),
        computes=rows[0].computes if len(rows) == 1 else (),
        seconds=total([row.seconds for row in rows]),
        flops=total([row.flops for row in rows]),
        uncounted=sum(row.flops is None for row in rows),
        bytes=total([row.bytes for row in rows]),
        live_bytes=_largest([row.live_bytes for row in rows]),
        workspace_bytes=_largest([row.workspace_bytes for row in rows]),
        reused=sum(row.is_reused for row in rows),
        launch_bound=sum(row.is_launch_bound for row in rows),
    )


def _largest(values: Sequence[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def total(values: Sequence[Any]) -> Any:
    """Add up what is known; None when nothing is."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None
