"""Whether a kernel may be used: its source builds, and its proof holds. Asked once on a machine."""

from __future__ import annotations

import hashlib
import json
import threading
from typing import Any

from fxkit.authoring.kernels.definition import AuthoredKernel
from fxkit.authoring.kernels.proof import prove_kernel
from fxkit.errors import BuildError, FxkitError
from fxkit.lower.autotuning.kept_times import read_times, times_path, write_times

_lock = threading.Lock()
_known: dict[tuple[int, str], tuple[AuthoredKernel, str | None]] = {}


def objection_to(kernel: AuthoredKernel, device: str) -> str | None:
    """Return why a kernel may not be used on a kind of device, or None.

    That is asked once of a kernel: it is built, and held to its pattern. That a proof holds is kept
    beside the built kernels, under what the kernel and its pattern are made of.
    """
    if not kernel.serves(device):
        return f"it has no source for {device}"
    with _lock:
        known = _known.get((id(kernel), device))
        if known is None:
            known = kernel, _found_out(kernel, device)
            _known[id(kernel), device] = known
    return known[1]


def _found_out(kernel: AuthoredKernel, device: str) -> str | None:
    native = kernel.natives.get(device)
    try:
        if native is not None:
            _ = native.path
        path = times_path("proofs")
        key = _key(kernel, device)
        if key is not None and read_times(path).get(key):
            return None
        compared = prove_kernel(kernel, device)
    except BuildError as error:
        return str(error)
    except FxkitError as error:
        return str(error)
    if key is not None:
        write_times(path, {**read_times(path), key: compared})
    return None


def _key(kernel: AuthoredKernel, device: str) -> str | None:
    """Return what a proof is kept under; None where that can't be told, as of Python functions."""
    native = kernel.natives.get(device)
    if native is None:
        return None
    rule = kernel.rule
    parts = [native.source.key, native.wrapper, str(native.dtypes), repr(kernel.pattern.outputs)]
    parts += [repr(rule.exact), repr(rule.finite_only), repr(rule.samples), device]
    functions = (*native.computed.values(), native.workspace, kernel.where, kernel.gradient)
    for function in functions:
        told = _code_of(function)
        if told is None:
            return None
        parts.append(told)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _code_of(function: Any) -> str | None:
    """Return a text that differs where a function does; None where that can't be told."""
    if not callable(function):
        return json.dumps(function) if isinstance(function, (int, float, type(None))) else None
    code = getattr(function, "__code__", None)
    if code is None or getattr(function, "__closure__", None):
        return None
    plain = all(isinstance(c, (int, float, str, bool, tuple, type(None))) for c in code.co_consts)
    if not plain:
        return None
    return repr((code.co_code, code.co_consts, code.co_names, function.__defaults__))
