"""The C++ text of explicit vectors: `lanes.h` and `lane_functions.h`."""

from __future__ import annotations

from pathlib import Path


def _read(name: str) -> str:
    return Path(__file__).with_name(name).read_text()


LANES = _read("lanes.h") + _read("lane_functions.h")
