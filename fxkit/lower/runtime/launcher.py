"""What GPU launches need of torch: the current stream and device."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Launcher:
    """How kernels are launched from C.

    Attributes:
        device: The GPU that they run on.
        stream: Address of `int32_t (int32_t device, void** stream)`, which gives the current
            stream of a device and returns 0.
        exchange: Address of `int8_t (int8_t device)`, which makes a device the current one and
            returns which one was.
    """

    device: torch.device
    stream: int
    exchange: int


@functools.cache
def launcher_for(device: torch.device) -> Launcher | None:
    """Return how kernels are launched on a GPU from C; None where torch exports no way to."""
    if not torch.cuda.is_available():
        return None
    folder = Path(torch.__file__).parent / "lib"
    try:
        # Loaded already, by torch itself.
        stream = ctypes.CDLL(str(folder / "libtorch_cuda.so")).aoti_torch_get_current_cuda_stream
        # `c10::cuda::ExchangeDevice(int8_t)` by its linker name.
        exchange = ctypes.CDLL(str(folder / "libc10_cuda.so"))._ZN3c104cuda14ExchangeDeviceEa
    except (OSError, AttributeError):
        return None
    return Launcher(device, _address(stream), _address(exchange))


def _address(function: object) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0  # type: ignore[arg-type]
