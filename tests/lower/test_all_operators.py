"""torch's whole table of operators through `fxkit.compile`, in processes that may crash."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.lower.operator_worker import operators

ROOT = Path(__file__).parents[2]


def verdicts(file: Path, step: int) -> list[dict[str, str]]:
    """Return what became of every `step`-th operator; one that ends its process has crashed."""
    last = range(0, len(operators()), step)[-1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    found: list[dict[str, str]] = []
    first = 0
    while first <= last:
        done = subprocess.run(
            [sys.executable, "-m", "tests.lower.operator_worker", file, str(first), str(step)],
            cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        file.unlink()
        found += [line for line in lines if "status" in line]
        if done.returncode == 0:
            break
        end = f"exit status {done.returncode}: {done.stderr.strip()[-300:]}"
        found.append({**lines[-1], "status": "crash", "reason": end})
        first = lines[-1]["index"] + step
    return found


def table(found: list[dict[str, str]]) -> str:
    """Return the counts, and why operators did not run in generated code."""
    counts = Counter(one["status"] for one in found)
    reasons = Counter(one["reason"] for one in found if one["status"] == "aten")
    lines = [f"{len(found)} operators: " + ", ".join(f"{n} {s}" for s, n in counts.most_common())]
    lines += [f"{count:5} in ATen: {reason}" for reason, count in reasons.most_common()]
    bad = [one for one in found if one["status"] in ("wrong", "crash")]
    return "\n".join(lines + [f"{b['status']}: {b['operator']}: {b['reason']}" for b in bad])


def check(file: Path, step: int, generated: int) -> None:
    found = verdicts(file, step)
    counts = Counter(one["status"] for one in found)
    print(table(found))
    assert len(found) == len(range(0, len(operators()), step))
    assert not counts["wrong"] + counts["crash"], table(found)
    assert counts["generated"] >= generated, table(found)


def test_a_tenth_of_the_operators(tmp_path: Path) -> None:
    check(tmp_path / "found", 10, 34)


@pytest.mark.sweep
def test_every_operator(tmp_path: Path) -> None:
    check(tmp_path / "found", 1, 320)
