"""`import fxkit` loads no compiler, draws nothing, leaves no global state; its names all work."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fxkit

pytestmark = pytest.mark.core

ROOT = Path(__file__).parents[1]
HEAVY = ("torch._inductor", "torch._dynamo", "networkx", "graphviz", "matplotlib", "transformers")

# What torch itself has loaded does not count: the difference that `import fxkit` makes does.
PROBE = f"""
import json, logging, sys
import torch
import torch.fx

def hooks():
    from torch.nn.modules import module
    loggers = logging.root.manager.loggerDict.values()
    return {{
        "log handlers": len(logging.root.handlers) + sum(
            len(getattr(logger, "handlers", ())) for logger in loggers
        ),
        "module hooks": len(module._global_forward_hooks) + len(module._global_forward_pre_hooks),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "excepthook": repr(sys.excepthook),
        "import hooks": len(sys.meta_path),
        "warning filters": len(__import__("warnings").filters),
        "default dtype": str(torch.get_default_dtype()),
        "threads": torch.get_num_threads(),
        "grad": torch.is_grad_enabled(),
    }}

modules, state = set(sys.modules), hooks()
import fxkit
heavy = [name for name in {HEAVY!r} if name in set(sys.modules) - modules]
print(json.dumps({{"heavy": heavy, "before": state, "after": hooks()}}))
"""


@pytest.fixture(scope="module")
def probe(bare_python: list[str]) -> dict:
    done = subprocess.run(
        [*bare_python, "-c", PROBE], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return json.loads(done.stdout)


def test_import_loads_nothing_heavy(probe: dict) -> None:
    assert probe["heavy"] == []


def test_import_leaves_global_state_alone(probe: dict) -> None:
    assert probe["after"] == probe["before"]


def test_import_prints_nothing(bare_python: list[str]) -> None:
    done = subprocess.run(
        [*bare_python, "-c", "import fxkit"], capture_output=True, text=True, cwd=ROOT
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("name", sorted(fxkit.__all__))
def test_a_public_name_exists_and_says_what_it_is(name: str) -> None:
    thing = getattr(fxkit, name)
    if inspect.ismodule(thing) or inspect.isroutine(thing) or inspect.isclass(thing):
        assert inspect.getdoc(thing), f"fxkit.{name} has no docstring"


def test_nothing_that_is_public_is_a_stub() -> None:
    words = re.compile(r"raise NotImplementedError|not implemented yet|\b(TODO|FIXME|XXX)\b")
    found = [
        f"{path.relative_to(ROOT)}: {word[0]}"
        for path in sorted((ROOT / "fxkit").rglob("*.py"))
        for word in words.finditer(path.read_text())
    ]
    assert found == []


def test_the_version_is_that_of_the_package() -> None:
    import importlib.metadata

    assert fxkit.__version__ == importlib.metadata.version("fxkit")


IMPORTS = """
import gc, torch, fxkit
assert gc.isenabled() and gc.get_freeze_count() < 1000
starts = []
gc.callbacks.append(lambda phase, info: phase == "start" and starts.append(info["generation"]))
fxkit.compile
print(gc.isenabled(), gc.get_freeze_count(), starts)
gc.disable()
fxkit.draw
print(gc.isenabled())
"""


def test_names_are_loaded_without_a_walk_over_all_objects() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.splitlines() == ["True 0 []", "False"]


PAUSES = """
import gc, weakref
from fxkit.gc_pause import paused_collector

class Loop:
    def __init__(self):
        self.itself = self

for keeps_all in (True, False):
    starts = []
    note = lambda phase, info: phase == "start" and starts.append(info["generation"])
    gc.callbacks.append(note)
    with paused_collector(keeps_all=keeps_all):
        left = weakref.ref(Loop())
        kept = [Loop() for _ in range(100_000)]
        assert not starts and left() is not None
    gc.callbacks.remove(note)
    gc.collect(0)
    print(keeps_all, left() is None, gc.isenabled())
"""


def test_what_is_garbage_after_a_pause_is_found_unless_all_is_kept() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PAUSES], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.splitlines() == ["True False True", "False True True"]
