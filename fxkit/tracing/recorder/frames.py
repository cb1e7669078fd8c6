"""Where in the user's program a call comes from, read off the interpreter's stack.

No hook is installed and nothing is patched: `nn.Module` runs every call through `_call_impl`, whose
frame holds the module. Frames seen before are remembered while they are alive, so that a call costs
a walk over the frames that are new since the last one.
"""

from __future__ import annotations

import functools
import linecache
import os
import re
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch

from fxkit import torch_adapters
from fxkit.torch_adapters.custom_functions import APPLY, forwards_without_frame
from fxkit.torch_adapters.layers import CALL_OF_MODULE
from fxkit.tracing.bytecode.decoding import may_handle

_TORCH = os.path.dirname(torch.__file__) + os.sep
_TORCH_MODULES = os.path.join(_TORCH, "nn", "modules", "")
_HERE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_ADAPTERS = os.path.dirname(torch_adapters.__file__) + os.sep

_LINE = re.compile(r'File "(.+?)", line (\d+), in (\S+)')

_USER, _MODULE, _OTHER = "user", "module", "other"

ModuleStack = dict[str, tuple[str, type]]


@dataclass(slots=True)
class _Known:
    frame: FrameType | None
    parent: FrameType | None
    modules: ModuleStack
    user: FrameType | None
    module: FrameType | None
    custom_function: FrameType | None


@dataclass(slots=True)
class Location:
    """Where a call was made.

    Attributes:
        trace: The user's line in the form of a traceback, or None.
        modules: `{path: (path, class)}` of the modules around the call, outermost first.
        custom_function: The frame of the `torch.autograd.Function.apply` around it, or of the
            `forward` where `apply` has none, or None.
    """

    trace: str | None
    modules: ModuleStack
    custom_function: FrameType | None


class Frames:
    """The frames between `capture` and the call that is being recorded.

    Args:
        boundary: The frame that calls the user's program; it and its callers are not looked at.
        names: Qualified names of the modules that are known, by `id`.

    Attributes:
        may_catch: Whether one of the user's functions seen so far handles exceptions.
    """

    def __init__(self, boundary: FrameType, names: dict[int, str]) -> None:
        self._boundary: FrameType | None = boundary
        self._names = names
        self._stack: list[_Known] = []
        self._index: dict[int, int] = {}
        self._kinds: dict[CodeType, str] = {}
        self._forwards = forwards_without_frame()
        self.may_catch = False
        self._traces: dict[tuple[CodeType, int], str] = {}
        self._root = _Known(boundary, None, {}, None, None, None)

    def begin_at(self, boundary: FrameType) -> None:
        """Take another frame as the one that calls the program."""
        self._boundary = boundary

    @property
    def is_active(self) -> bool:
        """Whether the program is still running."""
        return self._boundary is not None

    def locate(self, frame: FrameType | None) -> Location:
        """Return where the call was made that reached `frame`."""
        pending: list[FrameType] = []
        known = self._root
        index, boundary, stack = self._index, self._boundary, self._stack
        while frame is not None and frame is not boundary:
            position = index.get(id(frame))
            if position is not None and stack[position].parent is frame.f_back:
                known = stack[position]
                self._forget_above(position)
                break
            pending.append(frame)
            frame = frame.f_back
        else:
            self._forget_above(-1)
        for frame in reversed(pending):
            known = self._learn(frame, known)
        chosen = known.user or known.module
        trace = self._trace(chosen) if chosen is not None else None
        return Location(trace, known.modules, known.custom_function)

    def forget(self) -> None:
        """Drop all frames, and with them what their local variables hold."""
        self._forget_above(-1)
        self._boundary = None
        self._root.frame = None

    def _forget_above(self, position: int) -> None:
        while len(self._stack) > position + 1:
            self._index.pop(id(self._stack.pop().frame), None)

    def _learn(self, frame: FrameType, parent: _Known) -> _Known:
        code = frame.f_code
        kind = self._kinds.get(code)
        if kind is None:
            kind = self._kinds[code] = _kind_of(code)
            self.may_catch |= kind is _USER and may_handle(code)
        known = _Known(
            frame,
            frame.f_back,
            parent.modules,
            frame if kind is _USER else parent.user,
            frame if kind is _MODULE else parent.module,
            parent.custom_function,
        )
        if code is CALL_OF_MODULE:
            known.modules = self._entered(frame.f_locals["self"], parent.modules)
        elif code is APPLY or (known.custom_function is None and code in self._forwards):
            known.custom_function = frame
        self._index[id(frame)] = len(self._stack)
        self._stack.append(known)
        return known

    def _entered(self, module: Any, around: ModuleStack) -> ModuleStack:
        path = self._names.get(id(module))
        if path is None:
            outer = next(reversed(around), "")
            path = f"{outer}.{type(module).__name__}".lstrip(".")
        return {**around, path: (path, type(module))}

    def _trace(self, frame: FrameType) -> str:
        key = (frame.f_code, frame.f_lasti)
        trace = self._traces.get(key)
        if trace is None:
            trace = self._traces[key] = format_frame(frame)
        return trace


def format_frame(frame: FrameType) -> str:
    """Return the line that `frame` is at, as a traceback writes it."""
    code, line = frame.f_code, frame.f_lineno
    text = f'  File "{code.co_filename}", line {line}, in {code.co_name}'
    source = linecache.getline(code.co_filename, line, frame.f_globals).strip()
    return f"{text}\n    {source}" if source else text


def is_user_file(file: str) -> bool:
    """Tell whether a file is the user's, rather than torch's or this package's."""
    return not file.startswith((_TORCH, _HERE, _ADAPTERS, "<frozen", "<eval_with_key>"))


def _kind_of(code: CodeType) -> str:
    file = code.co_filename
    if file.startswith(_TORCH_MODULES) and code is not CALL_OF_MODULE:
        return _MODULE if code.co_name == "forward" else _OTHER
    return _USER if is_user_file(file) else _OTHER


@functools.lru_cache(maxsize=4096)
def source_text(trace: str | None) -> str | None:
    """Return `file:line in function` of a line in the form of a traceback."""
    match = _LINE.search(trace or "")
    return f"{os.path.basename(match[1])}:{match[2]} in {match[3]}" if match else None
