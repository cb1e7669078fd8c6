"""First calls from many threads at once: modules that import each other in circles come whole."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Each import lets other threads go on, as a slow disk would.
BEGIN = """
import importlib, sys, threading, time
import torch, fxkit

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name.startswith(("torch", "sympy")):
            time.sleep(0.0002)

sys.meta_path.insert(0, Slow())
errors, together = [], threading.Barrier(16)

def run(work, number):
    together.wait()
    try:
        work(number)
    except BaseException as error:
        errors.append(f"{type(error).__name__}: {error}")

def in_threads(work):
    threads = [threading.Thread(target=run, args=(work, number)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(*sorted(set(errors)), sep="\\n", end="")
"""

IMPORTS = """
from fxkit.torch_adapters import late_imports

def work(number):
    purposes = late_imports.FOR_SIZES, late_imports.FOR_GRAPHS_OF_GRADIENTS
    late_imports.import_at_once(purposes[number % 2])
    names = late_imports.FOR_GRAPHS_OF_GRADIENTS
    importlib.import_module(names[number % len(names)])

in_threads(work)
"""

CALLS = """
def program(x):
    return torch.softmax(x * 2 + x.shape[0], -1)

compiled = fxkit.compile(program)

def work(number):
    for call in range(3):
        x = torch.ones(2 + (number + call) % 5, 8, requires_grad=number % 4 == 0)
        # Not by torch.testing: it imports torch.distributed at its first use.
        assert torch.allclose(compiled(x), program(x))

in_threads(work)
"""


FAKES = """
from fxkit.analysis.type_inference.fake_tensors import as_fake, fake_mode
from fxkit.torch_adapters import late_imports

def work(number):
    if number % 2:
        late_imports.import_at_once(late_imports.FOR_SIZES)
        return
    with fake_mode() as mode:
        assert torch.softmax(as_fake(mode, torch.ones(3, 4)) * 2, -1).shape == (3, 4)

in_threads(work)
"""


def _errors(code: str, python: list[str]) -> str:
    command = [*python, "-W", "ignore", "-c", BEGIN + code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    ended = f"\nexit status {done.returncode}\n{done.stderr}" if done.returncode else ""
    return done.stdout + ended


def test_threads_import_what_they_need_late(bare_python: list[str]) -> None:
    assert _errors(IMPORTS, bare_python) == ""


def test_fake_tensors_are_made_while_other_threads_import_what_sizes_need(
    bare_python: list[str],
) -> None:
    assert _errors(FAKES, bare_python) == ""


def test_sixteen_threads_call_a_fresh_compiled_function_with_a_few_sizes(
    bare_python: list[str],
) -> None:
    assert _errors(CALLS, bare_python) == ""


@pytest.mark.sweep
@pytest.mark.parametrize("process", range(6))
def test_many_processes_of_sixteen_threads(process: int, bare_python: list[str]) -> None:
    assert _errors(CALLS, bare_python) == ""
