"""What the system tells of its processor."""

from __future__ import annotations

import functools
import re
from pathlib import Path


@functools.cache
def info() -> str | None:
    """Return what Linux tells of the processors, as text; None on another system."""
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def info_line(*names: str) -> str | None:
    """Return the first line of that text that has one of these names, or None."""
    found = re.search(rf"^({'|'.join(names)})\s*:.*$", info() or "", re.MULTILINE)
    return found and found[0]


def model_name(otherwise: str = "unknown CPU") -> str:
    """Return what the processor calls itself, or something else where the system does not say."""
    return _value(info_line("model name")) or otherwise


def features() -> frozenset[str]:
    """Return the names of the instruction sets that the processor has, as Linux calls them."""
    return frozenset(_value(info_line("flags", "Features")).split())


def _value(line: str | None) -> str:
    return (line or "").partition(":")[2].strip()
