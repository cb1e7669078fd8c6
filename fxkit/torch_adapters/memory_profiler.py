"""torch's older profiler, which notes each allocation; the newer one writes to stderr."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from fxkit.torch_adapters.private_names import private

_MEMORY = "measuring memory on the CPU"
_ZERO = "profiles say nothing of it"
_START = private("torch.autograd._enable_profiler_legacy", _MEMORY, _ZERO)
_STOP = private("torch.autograd._disable_profiler_legacy", _MEMORY, _ZERO)
_OPTIONS = private("torch._C._profiler._ExperimentalConfig", _MEMORY, _ZERO)


def can_note_allocations() -> bool:
    """Tell whether this torch can note allocations."""
    return None not in (_START.get(), _STOP.get(), _OPTIONS.get())


def start() -> None:
    """Begin to note allocations."""
    autograd: Any = torch.autograd
    flags = (False, True, False, False, False)  # of these only memory is wanted
    config = autograd.ProfilerConfig(autograd.ProfilerState.CPU, *flags, _OPTIONS.get()())
    _START.get()(config)


def stop() -> Iterator[int]:
    """Yield the bytes of each allocation, less than 0 for a release, in their order."""
    for records in _STOP.get()():
        for record in records:
            if record.kind() == "memory_alloc":
                yield record.cpu_memory_usage()
