"""Let torch compute as it does unobserved, although a function mode is active.

`nn.MultiheadAttention`, `nn.TransformerEncoderLayer` and `nn.TransformerEncoder` have fast paths,
which they leave while a torch function mode is active, and a recorder is one. The paths differ in
more than rounding: padding comes out as zeros, masks of numbers count as masks of bools, results
lie in another order. So both questions are answered without the recorder while one records. Where
nothing is masked the paths compute the same, and the long one is taken, whose operators can be
fused.

An activation checkpoint runs its function again in backward, and does there again what that does
beside computing, such as to write running statistics. Without gradients it is a plain call, and
recorded as one.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fxkit.torch_adapters.checkpoints import plain_checkpoints
from fxkit.torch_adapters.modes import REFUSES_FUNCTIONS

_MASKS = ("attn_mask", "key_padding_mask", "src_mask", "src_key_padding_mask", "is_causal")

_lock = threading.Lock()
_users = 0
_before: list[tuple[Any, str, Any]] = []


@contextlib.contextmanager
def fast_paths(is_recording: Callable[[], bool | None]) -> Iterator[None]:
    """Answer the layers' questions as if nothing recorded; other threads see no difference.

    Args:
        is_recording: Tells of this thread whether a recorder is active and its graph still grows;
            None where there is no recorder.
    """
    global _users
    with _lock:
        _users += 1
        if _users == 1:
            _install(is_recording)
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                _restore()


def _install(is_recording: Callable[[], bool | None]) -> None:
    ask = torch.overrides.has_torch_function
    activation = sys.modules[nn.MultiheadAttention.__module__]
    ask_fx: Callable[[], bool] = getattr(activation, "_is_make_fx_tracing", bool)

    def has_torch_function(tensors: Iterable[Any]) -> bool:
        recording = is_recording()
        if recording is None:
            return ask(tensors)
        if recording and _takes_long_path(sys._getframe(1)):
            return True
        return any(_has_function(type(tensor)) for tensor in tensors)

    def is_traced() -> bool:
        # The answer that makes the long path's result contiguous, as the fast one's is.
        frame = sys._getframe(1)
        is_replaced = is_recording() is True and not _is_masked(frame)
        if isinstance(activation.F, _Straightening):
            _instead.of_fast_path = is_replaced and _takes_fast_path_unobserved(activation, frame)
        return is_replaced or ask_fx()

    _replace(torch.overrides, "has_torch_function", has_torch_function)
    checkpoints = plain_checkpoints(lambda: is_recording() is True and not torch.is_grad_enabled())
    if checkpoints is not None:
        _replace(*checkpoints)
    if ask_fx is not bool:
        _replace(activation, "_is_make_fx_tracing", is_traced)
        code = inspect.unwrap(nn.MultiheadAttention.forward).__code__
        if _STRAIGHTENS not in code.co_varnames:
            _replace(activation, "F", _Straightening())


def _replace(module: Any, name: str, new: Any) -> None:
    _before.append((module, name, getattr(module, name)))
    setattr(module, name, new)


def _restore() -> None:
    while _before:
        setattr(*_before.pop())


def _takes_long_path(frame: FrameType) -> bool:
    code = getattr(nn.TransformerEncoderLayer.forward, "__code__", None)
    return frame.f_code is code and not _is_masked(frame)


def _takes_fast_path_unobserved(activation: Any, frame: FrameType) -> bool:
    """Tell what attention that is asked whether it is traced would do were it not.

    torch 2.11 asks that before the rest, and leaves the long path's result as it lies.
    """
    tensors = frame.f_locals.get("tensor_args", ())
    follows = torch.is_grad_enabled() and any(map(activation._arg_requires_grad, tensors))
    return all(map(activation._check_arg_device, tensors)) and not follows


class _Straightening:
    """`torch.nn.functional`, with attention whose result lies as that of the fast path's would."""

    def __getattr__(self, name: str) -> Any:
        return getattr(F, name)

    def multi_head_attention_forward(self, *args: Any, **kwargs: Any) -> Any:
        is_replaced, _instead.of_fast_path = _instead.of_fast_path, False
        output, weights = F.multi_head_attention_forward(*args, **kwargs)
        if is_replaced:
            output = output.transpose(0, 1).contiguous().transpose(0, 1)
        return output, weights


class _Instead(threading.local):
    of_fast_path = False


_instead = _Instead()

# What `nn.MultiheadAttention.forward` of torch 2.13, which straightens results, calls its reason.
_STRAIGHTENS = "fast_path_blocked_by_tracing"


def _is_masked(frame: FrameType) -> bool:
    values = frame.f_locals
    return any(values.get(name) is not None and values[name] is not False for name in _MASKS)


def _has_function(kind: type) -> bool:
    function = getattr(kind, "__torch_function__", REFUSES_FUNCTIONS)
    return kind is not torch.Tensor and function is not REFUSES_FUNCTIONS
