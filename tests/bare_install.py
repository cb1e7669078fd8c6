"""Build the wheel, install it alone into a new environment, and do there what the README says.

What is installed for development hides what the package's metadata forgot. Run it as
`python -m tests.bare_install`; it takes about a minute, most of it to install torch.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.code_blocks import Block, agrees, python_blocks

ROOT = Path(__file__).parents[1]
PACKAGED = ("fxkit", "pyproject.toml", "README.md", "LICENSE")
EXPORT = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))
torch.export.save(torch.export.export(model.eval(), (torch.randn(4, 8),)), "model.pt2")
"""
IMPORT_ALL = """
import importlib, pkgutil, fxkit
names = [info.name for info in pkgutil.walk_packages(fxkit.__path__, "fxkit.")]
for name in names:
    name.endswith("__main__") or importlib.import_module(name)
print(len(names), "modules of", fxkit.__file__)
"""
COMMANDS = (
    "doctor",
    "tree model.pt2",
    "draw model.pt2 -o drawing.html",
    "profile model.pt2",
    "report model.pt2 -o report.html",
    "passes",
    "passes run inference model.pt2 -o after.pt2",
    "diff model.pt2 after.pt2",
)


def main() -> None:
    """Install and try the wheel; the exit status is 1 at the first thing that fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--constraints", type=Path, help="a file of versions for pip")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        try:
            _try_wheel(Path(folder), options.constraints)
        except subprocess.CalledProcessError as error:
            sys.exit(f"failed with status {error.returncode}: {' '.join(error.cmd)}")


def _try_wheel(folder: Path, constraints: Path | None) -> None:
    wheel = _build_wheel(folder)
    python = _install(wheel, folder, constraints)
    outside = folder / "elsewhere"
    outside.mkdir()
    environment = {**os.environ, "FXKIT_CACHE_DIR": str(folder / "cache")}
    environment.pop("PYTHONPATH", None)

    def run(*words: str) -> str:
        print("$ python", *(word if "\n" not in word else "…" for word in words), flush=True)
        done = subprocess.run(
            [python, *words], cwd=outside, env=environment, stdout=subprocess.PIPE, text=True,
            check=True,
        )  # fmt: skip
        return done.stdout

    print(run("-c", IMPORT_ALL), end="")
    _check_example(python_blocks((ROOT / "README.md").read_text())[0], outside, run)
    run("-c", EXPORT)
    for command in COMMANDS:
        printed = run("-m", "fxkit", *command.split())
        print(printed if command == "doctor" else f"  {printed.count(chr(10))} lines")


def _check_example(example: Block, folder: Path, run) -> None:
    (folder / "example.py").write_text(example.code)
    printed = run("example.py")
    if not agrees(example.output or "", printed):
        sys.exit(f"README shows\n{example.output}\nbut its example prints\n{printed}")


def _build_wheel(folder: Path) -> Path:
    source = folder / "source"
    source.mkdir()
    for name in PACKAGED:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, source / name)
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation",
         "--wheel-dir", str(folder / "wheel"), str(source)],
        check=True,
    )  # fmt: skip
    (wheel,) = (folder / "wheel").glob("*.whl")
    return wheel


def _install(wheel: Path, folder: Path, constraints: Path | None) -> str:
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    python = str(folder / "venv" / "bin" / "python")
    bound = ["-c", str(constraints)] if constraints else []
    subprocess.run([python, "-m", "pip", "install", "-q", *bound, str(wheel)], check=True)
    subprocess.run([python, "-m", "pip", "check"], check=True)
    return python


if __name__ == "__main__":
    main()
