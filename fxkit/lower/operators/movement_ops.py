"""Operators that only move elements: all rows of their table."""

from __future__ import annotations

from fxkit.lower.operators import indexing_ops, joining_ops, placing_ops
from fxkit.lower.operators.movement_table import TABLE

__all__ = ["TABLE", "indexing_ops", "joining_ops", "placing_ops"]
