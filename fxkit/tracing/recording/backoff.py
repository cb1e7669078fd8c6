"""Exponential backoff: when a program that could not be recorded is tried again."""

from __future__ import annotations

TRIES = 4
FIRST_PAUSE = 16
LONGEST_PAUSE = 1 << 16


class ExponentialBackoff:
    """Lets more and more calls go by between recordings that fail one after the other.

    A recording costs many times what a run costs, so that a program that no graph can hold would
    be slowed down by each of them.
    """

    def __init__(self) -> None:
        self._failures = 0
        self._left = 0

    def skips_call(self) -> bool:
        """Tell whether a call is to run unrecorded; count it if so."""
        if not self._left:
            return False
        self._left -= 1
        return True

    def note(self, *, failed: bool) -> None:
        """Note how a recording went.

        Args:
            failed: Whether it gave no graph, and nothing that the next one would do otherwise.
        """
        if not failed:
            self._failures = 0
            return
        self._failures += 1
        if self._failures >= TRIES:
            self._left = min(FIRST_PAUSE << (self._failures - TRIES), LONGEST_PAUSE)
