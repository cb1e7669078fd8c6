"""What is read of a compiled file."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from fxkit.lower.building import toolchain
from fxkit.lower.building.object_file import may_need_libraries


@pytest.mark.parametrize(
    ("text", "needs"),
    [
        ('extern "C" int f(int x) { return x + 1; }', False),
        ('extern "C" void f(float* x) {\n#pragma omp parallel for\n'
         "for (long i = 0; i < 9; ++i) x[i] += 1;\n}", False),
        ('extern "C" float sinf(float);\nextern "C" float f(float x) { return sinf(x); }', True),
        ('extern "C" void g();\nextern "C" void f() { g(); }', True),
        ("thread_local int kept;\nint* f() { return &kept; }", True),
    ],
)  # fmt: skip
def test_names_that_are_found_elsewhere(tmp_path: Path, text: str, needs: bool) -> None:
    tools = toolchain.current()
    if not tools.bare_link:
        pytest.skip("reads files of ELF")
    (tmp_path / "unit.cpp").write_text(text)
    flags = [*tools.flags, *tools.library_flags]
    compiled = tmp_path / "unit.o"
    command = [tools.compiler, *flags, "-c", str(tmp_path / "unit.cpp"), "-o", str(compiled)]
    subprocess.run(command, check=True)
    assert may_need_libraries(compiled) == needs


def test_of_another_kind_of_file_nothing_is_known(tmp_path: Path) -> None:
    (tmp_path / "unit.o").write_bytes(b"something else")
    assert may_need_libraries(tmp_path / "unit.o")
