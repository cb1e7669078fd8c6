"""Constructs of ordinary model code, each run by every way to get a graph, and judged."""

from __future__ import annotations

from benchmarks.constructs import control, python, state, tensors
from benchmarks.constructs.case import CALLS, CONSTRUCTS, Case, Make, construct

__all__ = [
    "CALLS",
    "CONSTRUCTS",
    "Case",
    "Make",
    "construct",
    "control",
    "python",
    "state",
    "tensors",
]
