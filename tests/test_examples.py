"""Each example runs by itself, in a process and a folder of its own, and prints something."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs(example: Path, tmp_path: Path, python: list[str]) -> None:
    done = subprocess.run(
        [*python, "-W", "error", str(example)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize("name", ["own_observer", "own_algorithm", "own_accelerator"])
def test_what_authors_of_quantization_add_is_one_short_file(name: str) -> None:
    (example,) = (one for one in EXAMPLES if one.stem == name)
    assert len(example.read_text().splitlines()) < 60


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 3
