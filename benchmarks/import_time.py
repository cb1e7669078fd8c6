"""What `import fxkit` costs over `import torch`."""

from __future__ import annotations

import statistics
import subprocess
import sys

from fxkit.view.texts.text_table import duration, table

_BOTH = """
import time
start = time.perf_counter()
import torch
middle = time.perf_counter()
import fxkit
print(middle - start, time.perf_counter() - middle)
"""


def run(rounds: int) -> str:
    """Import in fresh processes and return a table of median seconds."""
    torch_times, fxkit_times = [], []
    for _ in range(max(3, rounds // 4)):
        done = subprocess.run(
            [sys.executable, "-c", _BOTH], capture_output=True, text=True, check=True
        )
        torch_seconds, fxkit_seconds = map(float, done.stdout.split())
        torch_times.append(torch_seconds)
        fxkit_times.append(fxkit_seconds)
    rows = [
        ["import torch", duration(statistics.median(torch_times)), ""],
        ["import fxkit, after it", duration(statistics.median(fxkit_times)), "at most 300 ms"],
    ]
    return table(["what", "median", "goal"], rows, align="<>")
