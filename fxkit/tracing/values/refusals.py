"""The reasons why a program can't be held in one graph."""

from __future__ import annotations

from dataclasses import dataclass


class Refusal(Exception):
    """Why the program can't be held in a graph; never leaves the recorder."""

    def __init__(self, reason: str, hint: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.hint = hint


@dataclass(frozen=True, slots=True)
class Failure:
    """Why, and where, recording stopped."""

    reason: str
    hint: str | None
    trace: str | None = None


def said(error: Exception) -> str:
    """Return the beginning of what an exception of torch says."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"
