"""Graphs out of Python programs: `capture` runs a program once, `symbolic_trace` follows it."""

from __future__ import annotations

from fxkit.tracing.capture_modes import capture
from fxkit.tracing.captured import Captured
from fxkit.tracing.guarding.guards import Guard
from fxkit.tracing.opaque_calls.opaque_calls import opaque
from fxkit.tracing.recaptures import RecaptureWarning
from fxkit.tracing.symbolic import symbolic_trace

__all__ = ["Captured", "Guard", "RecaptureWarning", "capture", "opaque", "symbolic_trace"]
