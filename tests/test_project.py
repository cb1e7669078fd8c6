"""What is committed carries no path of the machine it was written on, and no binary data."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Split, so that this file does not contain what it looks for.
PATHS = ("/wo" + "rk/", "/ro" + "ot/", "/ho" + "me/", "/Us" + "ers/")


def tracked_files() -> list[Path]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_no_file_contains_a_path_of_this_machine() -> None:
    paths = {*PATHS, f"{Path.home()}/", f"{ROOT}/"} - {"//"}
    found = [
        f"{file.relative_to(ROOT)}: {path}"
        for file in tracked_files()
        for path in sorted(paths)
        if path.encode() in file.read_bytes()
    ]
    assert found == []


def test_no_file_is_binary() -> None:
    binary = [str(f.relative_to(ROOT)) for f in tracked_files() if b"\0" in f.read_bytes()]
    assert binary == []
