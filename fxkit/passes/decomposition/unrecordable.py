"""What is raised where a call can't be replaced by what it calls."""

from __future__ import annotations


class Unrecordable(Exception):
    """A call whose operators can't be told from types alone; the text says why."""
