"""Whether the processor has AMX tiles, and the system lets kernels use them."""

from __future__ import annotations

import ctypes
import functools
import platform

from fxkit import cpu_info

_WANTED = frozenset(("avx512f", "avx512bw", "avx512_bf16", "amx_tile", "amx_bf16"))
_WANTED_FOR_BYTES = frozenset(("avx512f", "avx512bw", "avx512_vnni", "amx_tile", "amx_int8"))

# Linux gives a process the registers of the unit when it asks for them: the number of the call
# `arch_prctl`, what is asked for, and the registers.
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18


def is_available() -> bool:
    """Tell whether kernels may use it for bfloat16; the first such call asks the system."""
    return _has(_WANTED)


def multiplies_bytes() -> bool:
    """Tell whether kernels may use it for integers of 8 bits; asks the system, too."""
    return _has(_WANTED_FOR_BYTES)


def _has(wanted: frozenset[str]) -> bool:
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    return cpu_info.features() >= wanted and _is_permitted()


@functools.cache
def _is_permitted() -> bool:
    call = ctypes.CDLL(None, use_errno=True).syscall
    return call(*map(ctypes.c_long, (_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA))) == 0
