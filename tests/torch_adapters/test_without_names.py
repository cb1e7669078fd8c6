"""A torch that lacks a private name: fxkit imports, and its results are right, by a slower way."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from fxkit.torch_adapters import private_names

ROOT = Path(__file__).parents[2]
FEW = (
    "torch._C._len_torch_dispatch_stack",
    "torch._subclasses.fake_tensor.FakeTensorMode",
    "torch.overrides._get_current_function_mode_stack",
)


def faults(python: list[str], *arguments: str) -> str:
    """Return what goes wrong without each of some names, as text."""
    script = Path(__file__).with_name("without_name.py")
    command = [*python, str(script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_few_names_are_missing(bare_python: list[str]) -> None:
    assert faults(bare_python, *FEW) == ""


def test_all_names_are_missing_at_once(bare_python: list[str]) -> None:
    assert faults(bare_python, "torch") == ""


def test_a_fault_would_be_told(bare_python: list[str]) -> None:
    assert "== without torch.optim.AdamW\nTraceback" in faults(
        bare_python, "--delete", "torch.optim.AdamW"
    )


@pytest.mark.sweep
@pytest.mark.parametrize("how", ["hidden", "deleted"])
def test_any_name_is_missing(how: str, bare_python: list[str]) -> None:
    names = [name.path for name in private_names.declared()]
    assert faults(bare_python, *(["--delete"] if how == "deleted" else []), *names) == ""
