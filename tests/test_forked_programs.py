"""A forked program runs as an interpreter of its own would run it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

SHOWN = """
import os, sys
print(sys.argv, os.getcwd(), os.environ["COLOUR"], __name__, sys.stdin.read())
print(sys.path[0], file=sys.stderr)
"""


@pytest.mark.parametrize("way", ["script", "code", "module"])
def test_it_has_the_arguments_streams_and_folder_of_its_caller(
    way: str, python: list[str], tmp_path: Path
) -> None:
    (tmp_path / "shown.py").write_text(SHOWN)
    arguments = {"script": ["shown.py"], "code": ["-c", SHOWN], "module": ["-m", "shown"]}[way]
    kept = []
    for command in ([sys.executable], python):
        done = subprocess.run(
            [*command, *arguments, "one", "-W"], input="said", capture_output=True, text=True,
            cwd=tmp_path, env={"COLOUR": "green", "PATH": ""},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        kept.append((done.stdout, done.stderr))
    assert kept[0] == kept[1]
    assert "green __main__ said" in kept[0][0]


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("raise SystemExit(3)", 3),
        ("1 / 0", 1),
        ("import os; os.kill(os.getpid(), 9)", -9),
        ("import atexit, os; atexit.register(os._exit, 7)", 7),
        ("import warnings; warnings.warn('mind')", 1),
        ("import fxkit, torch; assert fxkit.compile(torch.relu)(torch.ones(2)).sum() == 2", 0),
    ],
)
def test_it_ends_as_it_would(code: str, status: int, python: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [*python, "-W", "error", "-c", code], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == status, done.stderr


def test_it_does_not_outlive_who_started_it(python: list[str], tmp_path: Path) -> None:
    code = (
        "import time; print('begun', flush=True)\nwhile True: open('alive', 'w'); time.sleep(.01)"
    )
    with subprocess.Popen(
        [*python, "-W", "ignore", "-c", code], stdout=subprocess.PIPE, cwd=tmp_path
    ) as client:
        assert client.stdout is not None and client.stdout.readline() == b"begun\n"
        client.kill()
        assert client.stdout.read() == b""  # only when the program is gone too
    (tmp_path / "alive").unlink(missing_ok=True)
    time.sleep(0.1)
    assert not (tmp_path / "alive").exists()
