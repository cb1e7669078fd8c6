"""Whether a tracer follows this thread, and how torch.fx patches functions that are wrapped.

torch 2.11 to 2.13 keep the flag in a global variable; torch 2.14 has one a thread, behind functions
of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fxkit.torch_adapters.private_names import find, private

_MODULE = "torch.fx._symbolic_trace"
_ASK = "telling whether torch.fx traces"
_NO_FLAG = "fxkit looks whether something stands in place of nn.Module.__call__"
_QUICK = "tracing short patterns quickly"
_SLOW = "patterns are traced as programs are"
_FLAG = private(f"{_MODULE}._is_fx_tracing_flag", _ASK, _NO_FLAG, until=(2, 13))
_GET = private(f"{_MODULE}._get_is_fx_tracing", _ASK, _NO_FLAG, since=(2, 14))
_SET = private(f"{_MODULE}._set_is_fx_tracing", _QUICK, _SLOW, since=(2, 14))
_JIT = private("torch._C._is_tracing", "telling whether torch.jit traces", "torch.jit is asked")
_PATCHER = private(f"{_MODULE}._new_patcher", _QUICK, _SLOW)
_PATCH = private(f"{_MODULE}._patch_wrapped_functions", _QUICK, _SLOW)

_call_of_modules = torch.nn.Module.__call__
_tracing = find(_MODULE)
_get, _set = _GET.get(), _SET.get()
_new_patcher, _patch_wrapped_functions = _PATCHER.get(), _PATCH.get()
_has_flag = _FLAG.get() is not None


def _is_tracing_by_flag() -> bool:
    return bool(_tracing._is_fx_tracing_flag)


def _is_tracing_by_patch() -> bool:
    return torch.nn.Module.__call__ is not _call_of_modules


is_fx_tracing = _get or (_is_tracing_by_flag if _has_flag else _is_tracing_by_patch)
"""Tell whether a tracer of torch.fx follows this thread."""

_jit: Any = torch.jit
is_jit_tracing: Callable[[], bool] = _JIT.get(getattr(_jit, "is_tracing", bool))
"""Tell whether `torch.jit.trace` follows this thread."""

can_trace_functions = bool(
    _new_patcher and _patch_wrapped_functions and (_has_flag or (_get and _set))
)
"""Whether `tracing_functions` can stand in for `Tracer.trace`."""


@contextlib.contextmanager
def tracing_functions() -> Iterator[None]:
    """Let functions be traced that call no module: what `torch.fx.wrap` names becomes one node."""
    before = is_fx_tracing()
    _say(True)
    try:
        with _new_patcher() as patcher:
            _patch_wrapped_functions(patcher)
            yield
    finally:
        _say(before)


def _say(is_on: bool) -> None:
    if _set is not None:
        _set(is_on)
    else:
        _tracing._is_fx_tracing_flag = is_on
