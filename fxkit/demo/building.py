"""Build the demo's kernels: once from nothing, and as often as not from the cache."""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, fx

from fxkit import config
from fxkit.errors import UnsupportedError
from fxkit.lower import CompiledModule, to_cpp
from fxkit.lower.runtime import binding


@dataclass(frozen=True)
class DemoModel:
    """A compiled module and what it took to get it.

    Attributes:
        module: Callable like the graph module it came from.
        cold: Seconds to plan, print, compile and load, with an empty cache.
        warm: Seconds for the same with the kernels in the cache.
        notes: What was warned about: no compiler, an unfit cache folder.
    """

    module: CompiledModule
    cold: float
    warm: float
    notes: tuple[str, ...]


def build(gm: fx.GraphModule, inputs: Sequence[Tensor]) -> DemoModel:
    """Lower a graph with an empty cache, then with the user's own."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cold = _cold_seconds(gm, inputs)
        to_cpp(gm, tuple(inputs))
        start = time.perf_counter()
        module = to_cpp(gm, tuple(inputs))
        warm = time.perf_counter() - start
    notes = dict.fromkeys(str(warning.message) for warning in caught)
    return DemoModel(module, cold, warm, tuple(notes))


def _cold_seconds(gm: fx.GraphModule, inputs: Sequence[Tensor]) -> float:
    try:
        empty = tempfile.TemporaryDirectory(prefix="fxkit-demo-")
    except OSError as error:
        raise UnsupportedError(
            f"expected a folder for temporary files, got none that can be written: {error}",
            hint="set TMPDIR to a folder that can be written to",
        ) from error
    with empty as folder, config.using_cache_dir(Path(folder)):
        start = time.perf_counter()
        to_cpp(gm, tuple(inputs))
        seconds = time.perf_counter() - start
        binding.finish()
        return seconds
