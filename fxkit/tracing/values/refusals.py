"""Why a program can't be held in one graph."""

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
