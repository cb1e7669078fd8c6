"""Measured times on disk, as JSON beside the built kernels, for later processes."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fxkit.lower.building import toolchain
from fxkit.lower.building.build import cache_folder


def times_path(kind: str, kernels: Iterable[str] = ()) -> Path:
    """Return the file of times of this compiler, processor and torch.

    Args:
        kind: What was timed, as the beginning of the file's name.
        kernels: Texts without which the times say nothing.
    """
    tools = toolchain.current()
    text = "\0".join([*kernels, *tools.flags, tools.identity])
    return cache_folder() / f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def read_times(path: Path) -> Any:
    """Return what a file holds; nothing where it can't be read, or is no JSON."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def write_times(path: Path, times: Mapping[str, Any]) -> None:
    """Replace a file at once; times that can't be kept are measured again by the next process."""
    try:
        descriptor, name = tempfile.mkstemp(prefix=f"{path.stem[:8]}-", dir=path.parent)
        with os.fdopen(descriptor, "w") as file:
            json.dump(times, file, indent=1)
        os.replace(name, path)
    except OSError:
        return
