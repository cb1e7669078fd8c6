"""What is raised where a place can't be rewritten."""

from __future__ import annotations


class Refused(Exception):
    """Nodes can't be changed in one way; the message says why. It never leaves a pass."""
