"""torch's whole table of operators through `fxkit.compile`, in processes that may crash."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.lower.operators.operator_worker import AT_SIZES, GRADIENTS, KINDS, ON_GPU, operators

ROOT = Path(__file__).parents[3]
PYTHON = (sys.executable,)
WORKER = "tests.lower.operators.operator_worker"
MOST_SAMPLES = 5

# Pieces of the table, by the beginning of an operator's name → how many of its operators with
# float32 samples run in generated code, at least.
PIECES = {
    r"[_A-Za-c]\w*$": 57, r"[d-h]\w*$": 44, r"[i-m]\w*$": 44, r"[n-r]\w*$": 39,
    r"[s-z]\w*$": 53, r"(fft|linalg|signal|sparse|torch)\.": 17, r"(masked|special)\.": 21,
    r"nn\.functional\.[a-l]": 43, r"nn\.functional\.[m-z]": 40,
}  # fmt: skip


# What becomes of an operator is the first of these that became of one of its calls.
WORST_FIRST = ("crash", "wrong", "generated", "undetermined", "aten", "refused")


def verdicts(
    file: Path,
    kinds: Sequence[str],
    samples: int,
    step: int,
    names: str,
    first: int = 0,
    python: Sequence[str] = PYTHON,
) -> list[dict[str, Any]]:
    """Return what became of every `step`-th operator in each kind, from the first on."""
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for call in outcomes(file, kinds, samples, step, names, first=first, python=python):
        found.setdefault((call["kind"], call["index"]), []).append(call)
    return [min(calls, key=lambda c: WORST_FIRST.index(c["status"])) for calls in found.values()]


def outcomes(
    file: Path,
    kinds: Sequence[str],
    samples: int,
    step: int,
    names: str,
    worker: str = WORKER,
    first: int = 0,
    python: Sequence[str] = PYTHON,
) -> list[dict[str, Any]]:
    """Return what became of each call; one that ends its process crashed, and stops no other."""
    found: list[dict[str, Any]] = []
    skipped = 0
    while True:
        status, errors = run_apart(
            [*python, "-m", worker, str(file), ",".join(kinds),
             *map(str, (samples, first, skipped, step)), names]
        )  # fmt: skip
        end = f"exit status {status}: {errors.strip()[-300:]}"
        assert file.exists(), end
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        file.unlink()
        found += [line for line in lines if "status" in line]
        if status == 0:
            return found
        found.append({**lines[-1], "status": "crash", "reason": end})
        kinds = kinds[kinds.index(lines[-1]["kind"]) :]
        first, skipped = lines[-1]["index"], lines[-1]["call"] + 1


def run_apart(command: list[str]) -> tuple[int, str]:
    """Run a command in a process group of its own, of which nothing stays; return how it ended."""
    with subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True,
    ) as process:  # fmt: skip
        errors = process.communicate()[1]
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, errors


def table(found: list[dict[str, str]]) -> str:
    """Return the counts, and why operators did not run in generated code."""
    counts = Counter(one["status"] for one in found)
    reasons = Counter(one["reason"] for one in found if one["status"] == "aten")
    lines = [f"{len(found)} operators: " + ", ".join(f"{n} {s}" for s, n in counts.most_common())]
    lines += [f"{count:5} in ATen: {reason}" for reason, count in reasons.most_common()]
    bad = [one for one in found if one["status"] in ("wrong", "crash")]
    return "\n".join(lines + [f"{b['status']}: {b['operator']}: {b['reason']}" for b in bad])


def check(
    file: Path,
    generated: int,
    kinds: Sequence[str],
    samples: int,
    step: int = 1,
    names: str = "",
    first: int = 0,
    python: Sequence[str] = PYTHON,
) -> None:
    every = verdicts(file, kinds, samples, step, names, first, python)
    for kind in kinds:
        found = [one for one in every if one["kind"] == kind]
        counts = Counter(one["status"] for one in found)
        print(f"{kind} {names}: {table(found)}")
        assert len(found) == len(range(first, len(operators(kind, names)), step))
        assert not counts["wrong"] + counts["crash"], table(found)
        assert counts["generated"] >= generated, table(found)


def test_a_crash_counts_and_stops_nothing(tmp_path: Path) -> None:
    found = outcomes(
        tmp_path / "found", ["float32"], 1, 1, "", "tests.lower.operators.crashing_worker"
    )
    seen = [(one["index"], one["call"], one["status"]) for one in found]
    good, bad = "generated", "crash"
    assert seen == [
        (0, 0, good),
        (0, 1, bad),
        (0, 2, good),
        (1, 0, good),
        (1, 1, bad),
        (1, 2, good),
    ]
    assert "exit status -9" in found[1]["reason"]


def test_a_tenth_of_the_operators(tmp_path: Path, python: list[str]) -> None:
    check(
        tmp_path / "found", 25, ["float32"], 1, 10, python=python
    )  # which they are differs from torch to torch


def test_a_few_operators_of_other_kinds(tmp_path: Path, python: list[str]) -> None:
    kinds = [kind for kind in KINDS if kind not in ("float32", ON_GPU, *AT_SIZES)]
    check(tmp_path / "found", 2, kinds, 1, 75, python=python)


def test_one_operator_in_each_kind(
    tmp_path: Path, request: pytest.FixtureRequest, python: list[str]
) -> None:
    """`make test-operator OPERATOR=lerp` runs this for one that has just been written."""
    operator = request.config.getoption("operator")
    kinds = [kind for kind in KINDS if kind != ON_GPU]
    names = rf"([\w.]+\.)?{re.escape(operator)}$"
    assert operators("float32", names), f"torch's table of samples has no operator {operator}"
    kinds = [kind for kind in kinds if operators(kind, names)]
    check(tmp_path / "found", 0, kinds, 2, 1, names, python=python)


@pytest.mark.sweep
@pytest.mark.parametrize("names", PIECES)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != ON_GPU])
def test_every_operator(kind: str, names: str, tmp_path: Path) -> None:
    samples = 2 if kind in (*GRADIENTS, *AT_SIZES) else MOST_SAMPLES
    check(tmp_path / "found", PIECES[names] if kind == "float32" else 0, [kind], samples, 1, names)


@pytest.mark.gpu
@pytest.mark.sweep
@pytest.mark.parametrize("first", range(2))
@pytest.mark.parametrize("names", PIECES)
def test_every_operator_on_a_gpu(names: str, first: int, tmp_path: Path) -> None:
    check(tmp_path / "found", 0, [ON_GPU], 2, 2, names, first)


def test_each_operator_is_in_one_piece() -> None:
    assert sum(len(operators("float32", names)) for names in PIECES) == len(operators())
    assert sum(PIECES.values()) >= 358
