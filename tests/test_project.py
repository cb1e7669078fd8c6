"""What is committed has no path of a machine and no binary data; its metadata is true."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Looked for when needed; where they are missing a place does without or says what to install.
LOOKED_FOR = {"rich", "IPython", "pandas"}
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


def package_of(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9_]", requirement)[0]


@functools.cache
def third_party_imports() -> list[tuple[str, str, bool]]:
    """Return place, package and whether it comes with its module, for each import in fxkit."""
    found = []
    for file in sorted((ROOT / "fxkit").rglob("*.py")):
        tree = ast.parse(file.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            else:
                continue
            for package in {name.partition(".")[0] for name in names}:
                if package != "fxkit" and package not in sys.stdlib_module_names:
                    place = f"{file.relative_to(ROOT)}:{node.lineno}"
                    found.append((place, package, node in tree.body))
    return found


def test_what_is_imported_is_declared() -> None:
    needed = {package_of(line) for line in PROJECT["dependencies"]}
    extras = {
        package_of(line)
        for name in ("demo", "notebook")
        for line in PROJECT["optional-dependencies"][name]
    }
    undeclared = [
        f"{place}: {package}"
        for place, package, is_with_module in third_party_imports()
        if package not in (needed if is_with_module else needed | extras | LOOKED_FOR)
    ]
    assert undeclared == []


def test_what_is_declared_is_imported() -> None:
    imported = {package for _, package, _ in third_party_imports()}
    assert {package_of(line) for line in PROJECT["dependencies"]} <= imported


def test_the_package_says_that_it_is_typed() -> None:
    assert (ROOT / "fxkit" / "py.typed").is_file()
    assert "Typing :: Typed" in PROJECT["classifiers"]
