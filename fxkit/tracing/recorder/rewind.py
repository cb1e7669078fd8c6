"""Restore state between recordings: undo what a run changed, and redo it.

A second recording of the same call has to find what the first one found. What the first run wrote
is known by then, so that it can be taken back for the while.
"""

from __future__ import annotations

from typing import Any

from fxkit.tracing.guarding import state_containers as h
from fxkit.tracing.values.structure import Content, content_of

Entries = list[tuple[h.GuardedContainer, dict[Any, Any]]]
Contents = list[tuple[Any, Content]]


class Rewind:
    """What one run has changed of Python state and of its arguments.

    Args:
        before: What held values that were changed, and what it held before the run.
        containers: Argument containers that were changed, and their content before the run.
    """

    def __init__(self, before: Entries, containers: Contents) -> None:
        self._before = before
        self._after = [(holder, holder.read()) for holder, _ in before]
        self._containers = containers
        self._containers_after = [
            (container, content)
            for container, _ in containers
            if (content := content_of(container)) is not None
        ]

    def to_before(self) -> None:
        """Let everything be as it was before the run."""
        put_back(self._before)
        _fill(self._containers)

    def to_after(self) -> None:
        """Let everything be as the run has left it."""
        put_back(self._after)
        _fill(self._containers_after)


def put_back(entries: Entries) -> None:
    """Let holders hold what they held."""
    for holder, wanted in entries:
        now = holder.read()
        changes = {
            key: wanted.get(key, h.ABSENT)
            for key in {**now, **wanted}
            if now.get(key, h.ABSENT) is not wanted.get(key, h.ABSENT)
        }
        if changes or list(now) != list(wanted):
            holder.write(changes, wanted)


def _fill(contents: Contents) -> None:
    for container, content in contents:
        if content.fill is not None:
            content.fill(container, content.values)
