"""What doctor finds: each thing that can be wrong is told apart and has a hint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fxkit import cpu_info, doctor
from fxkit.doctor import Check


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def test_a_healthy_machine_is_ok_throughout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FXKIT_CPU_LEVEL", raising=False)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    checks = doctor.examine()
    assert [check.name for check in checks] == [
        "python", "torch", "torch adapters", "settings", "cpu", "cache", "compiler",
        "openmp", "graphviz", "demo", "torch.compile",
    ]  # fmt: skip
    assert [check for check in checks if check.status != "ok"] == []


def test_a_lesser_processor_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_info, "known_levels", lambda: ("baseline", "avx2"))
    monkeypatch.setenv("FXKIT_CPU_LEVEL", "avx2")
    check = by_name(doctor.examine())["cpu"]
    assert check.status == "warn" and check.finding.endswith("avx2 fma: no more than avx2 is used")
    monkeypatch.setenv("FXKIT_CPU_LEVEL", "avx512")
    check = by_name(doctor.examine())["cpu"]
    assert check.status == "fail" and "got 'avx512'" in check.finding


def test_all_that_is_not_ok_has_a_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXKIT_CXX", str(tmp_path / "no-compiler"))
    monkeypatch.setenv("FXKIT_BACKEND", "eager")
    monkeypatch.setattr(torch, "__version__", "2.10.0")
    found = [check for check in doctor.examine() if check.status != "ok"]
    assert {check.name for check in found} >= {"torch", "settings", "compiler"}
    assert all(check.hint for check in found)


def test_a_compiler_that_is_not_there_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FXKIT_CXX", str(tmp_path / "no-compiler"))
    check = by_name(doctor.examine())["compiler"]
    assert check.status == "warn"
    assert "no-compiler" in check.finding


def test_a_compiler_that_does_not_compile_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken-cxx"
    broken.write_text("#!/bin/sh\necho 'out of order' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("FXKIT_CXX", str(broken))
    check = by_name(doctor.examine())["compiler"]
    assert check.status == "fail"


def test_a_cache_that_others_can_write_to_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = tmp_path / "kernels"
    kernels.mkdir()
    kernels.chmod(0o777)
    monkeypatch.setenv("FXKIT_CACHE_DIR", str(tmp_path))
    check = by_name(doctor.examine())["cache"]
    assert (check.status, check.hint) == ("fail", f"chmod 700 {kernels}")


def test_a_cache_that_is_a_file_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FXKIT_CACHE_DIR", str(tmp_path / "file" / "cache"))
    check = by_name(doctor.examine())["cache"]
    assert check.status == "fail"
    assert "is not a folder" in check.finding


def test_a_bad_setting_is_reported_and_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXKIT_BACKEND", "fortran")
    check = by_name(doctor.examine())["settings"]
    assert (check.status, check.hint) == ("fail", "unset FXKIT_BACKEND to get 'cpp'")


def test_the_report_has_a_line_for_each_check_and_each_hint() -> None:
    text = doctor.report(
        [Check("python", "ok", "3.11"), Check("compiler", "warn", "none", "install g++")]
    )
    assert text == (
        "ok    python    3.11\n"
        "warn  compiler  none\n"
        "                hint: install g++"
    )  # fmt: skip
