"""What all tests share: a kernel cache of their own, a fixed seed, and the `gpu` mark."""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import traceback
import types
from collections.abc import Iterator

import pytest

# Each worker has as many threads as there are cores, and threads that spin while they wait for one
# another take the time of other workers': half of all. OpenMP reads it when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

from fxkit.lower.runtime import binding
from fxkit.torch_adapters import late_imports
from tests import forked_programs, generated_text, sampling
from tests.generated_text import HoldPage
from tests.sampling import Some

_IMPORTED_BY_USE = (
    "fxkit.compiling.compiler",
    "fxkit.passes.manager.manager",
    "fxkit.patterns.engine",
    "fxkit.quantization",
    *late_imports.FOR_GRAPHS_OF_GRADIENTS,
    *late_imports.FOR_CHECKPOINTS,
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add what runs sampled cases whole, and what writes generated text into the documentation."""
    parser.addoption("--update", action="store_true", help="write generated text into docs/")
    parser.addoption("--operator", default="logaddexp", help="which one is checked in each kind")
    parser.addoption("--every-case", action="store_true", help="run what tests sample from, whole")


def pytest_configure(config: pytest.Config) -> None:
    """Tell what draws examples how many."""
    sampling.run_every_case(config.getoption("every_case"))


@pytest.fixture(scope="session", autouse=True)
def _own_kernel_cache(request: pytest.FixtureRequest) -> Iterator[None]:
    """Build kernels below pytest's cache folder, so that the user's own cache stays untouched."""
    folder = request.config.cache.mkdir("kernels")
    folder.chmod(0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FXKIT_CACHE_DIR", str(folder))
        patch.delenv("FXKIT_BACKEND", raising=False)
        patch.delenv("FXKIT_MAX_REWRITES", raising=False)
        binding.load()  # so that no test depends on whether it is there yet
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_stacks_of_seeds() -> Iterator[None]:
    """Where no device is there, let `torch.manual_seed` not write the stack three times for them.

    That takes it some milliseconds, in thousands of calls. It is read when a device refuses a seed.
    """
    with pytest.MonkeyPatch.context() as patch:
        quick = types.SimpleNamespace(**{**vars(traceback), "format_stack": list})
        for module in (torch.cuda, torch.mtia, torch.xpu):
            if not module.is_available():
                patch.setattr(module, "traceback", quick)
        yield


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    # torch.manual_seed walks the stack for devices that are not there, which takes a millisecond.
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:
        torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True)
def _registers_are_left_free() -> Iterator[None]:
    """Find what leaves registers of MMX in use, in whose place numbers of x87 would be NaN."""
    yield
    assert ctypes.c_longdouble(1.0).value == 1.0


@pytest.fixture
def hold_page(request: pytest.FixtureRequest) -> HoldPage:
    """Expect that a page of the documentation shows a text; with `--update`, write it there."""
    return functools.partial(generated_text.hold_page, update=request.config.getoption("update"))


@pytest.fixture
def some(request: pytest.FixtureRequest) -> Some:
    """Take a few of a test's inner cases: `for length in some(LENGTHS, 4)`."""
    return Some(request)


@pytest.fixture
def few_objects() -> Iterator[None]:
    """Let collections of garbage, and searches for objects, pass over what was there before.

    Of what torch, fxkit and other tests have made, each takes up to a second.
    """
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def bare_python(_own_kernel_cache: None) -> Iterator[list[str]]:
    """What stands in place of `python` in a command, where torch alone is imported already."""
    with forked_programs.serving("torch") as command:
        yield command


@pytest.fixture(scope="session")
def python(bare_python: list[str]) -> Iterator[list[str]]:
    """The same where fxkit is there too, with what it and torch import when they are used."""
    with forked_programs.serving(*_IMPORTED_BY_USE, python=bare_python) as command:
        yield command


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Seed what a module draws when it is imported, whatever was imported before."""
    if isinstance(collector, pytest.Module):
        torch.manual_seed(0)


def pytest_collection_finish() -> None:
    """Let no later search for garbage go through what stays until the end: modules and tests."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what samples its cases; skip what is marked `gpu` where there is no CUDA device."""
    for item in items:
        if sampling.is_left_to_sweeps(item):
            item.add_marker("sweep")
        if "some" in getattr(item, "fixturenames", ()):
            item.add_marker("sampled")
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
