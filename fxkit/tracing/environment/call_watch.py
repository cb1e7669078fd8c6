"""Watch the calls of a program while it is recorded: Python functions, and those written in C.

The interpreter reports calls of one thread to one function (`sys.setprofile`). It is switched off
while torch works, so that it sees the program and not what is recorded anyway.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import threading
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from types import CodeType, FrameType
from typing import Any, Protocol

import torch

from fxkit.torch_adapters.checkpoints import is_wrapper_of_checkpoints
from fxkit.torch_adapters.custom_functions import APPLY, is_without_frame
from fxkit.torch_adapters.late_imports import FOR_CHECKPOINTS, FOR_CONTROL_OPERATORS, import_at_once
from fxkit.tracing.bytecode.call_hooks import can_hook
from fxkit.tracing.environment import foreign_calls
from fxkit.tracing.environment.call_sites import innermost_user_code, user_code
from fxkit.tracing.environment.control_operators import CODES
from fxkit.tracing.environment.environment_walk import EnvironmentWalk
from fxkit.tracing.environment.interpreter import reports_calls, settle
from fxkit.tracing.environment.opaque_objects import MARK_IT
from fxkit.tracing.values.allowlist import is_allowlisted
from fxkit.tracing.values.refusals import Refusal

Refuse = Callable[[str, str | None], None]
SEED = inspect.unwrap(torch.random.manual_seed).__code__
LOAD: CodeType = importlib._bootstrap._find_and_load.__code__  # type: ignore[attr-defined]
CALL = (lambda function, args, kwargs: function(*args, **kwargs)).__code__
"""Code of what stands for a caller of an opaque function, under that caller's name and line."""

SPECIAL = frozenset({APPLY, SEED, LOAD})


class CallListener(Protocol):
    """What a watcher tells of."""

    def refuse(self, reason: str, hint: str | None = None, *, watch: bool = False) -> None:
        """Note what a graph can't hold."""

    def note_text(self, stream: str, text: str) -> None:
        """Note what the program prints."""

    def begin_special(self, frame: FrameType) -> tuple[FrameType, Callable[[Any], None]] | None:
        """Note a call of a function that stays one node; the callable takes its result."""


class Watcher:
    """Notes the code that runs, and stops the recording when a C function is called blindly.

    Args:
        reach: Is told of each function that is called for the first time.
        listener: Is told of what the program does.

    Attributes:
        blamed: Code of the program that calls what can't be looked into.
        codes: Code of functions outside of the trusted packages, with the globals it ran on.
        is_muted: Whether what the program prints is noted only.
        has_effects: Whether the last opaque call has changed Python state, or may have done more.
    """

    def __init__(self, reach: EnvironmentWalk, listener: CallListener) -> None:
        self.codes: dict[CodeType, dict[str, Any]] = {}
        self._trusted: set[CodeType] = set()
        self._reach = reach
        self._opaque = EnvironmentWalk()
        self._opaque.is_lenient = True
        self._pending: set[int] = set()
        self._foreign: dict[tuple[int, Any], str] = {}
        self.blamed: set[CodeType] = set()
        self._listener = listener
        self._streams: _Streams | None = None
        self._special: tuple[FrameType, Callable[[Any], None]] | None = None
        self._refused: FrameType | None = None
        self.is_muted = False
        self.has_effects = False
        self._is_on = False
        self._depth = 0
        # CPython keeps no reference of its own while it calls this: it has to live as long as self.
        self._callback: Callable[[FrameType, str, Any], None] | None = self._see

    @property
    def foreign(self) -> dict[tuple[int, Any], str]:
        """What opaque calls have changed: `(id of what holds it, key)`, and its name."""
        return self._foreign

    @property
    def kept(self) -> dict[int, Any]:
        """The objects that the program refers to, by `id`."""
        return self._reach.kept

    def start(self) -> None:
        """Begin to watch this thread.

        Raises:
            Refusal: When a profiler watches it already, or hears not of each call.
        """
        if sys.getprofile() is not None:
            raise Refusal("a profiler is active", "capture before profiling")
        if not reports_calls():
            raise Refusal("this interpreter does not tell of all calls", "use CPython 3.11 to 3.13")
        settle()
        self._is_on = True
        sys.setprofile(self._callback)

    def stop(self) -> None:
        """Stop watching for good."""
        if self._is_on:
            self._is_on = False
            sys.setprofile(None)
        self._callback = None  # it would keep what the program has dropped alive until a collection
        if self._streams is not None:
            self._streams.close()
            self._streams = None

    def forget(self) -> None:
        """Let go of what the program itself does not keep alive."""
        self._reach.forget()

    def pause(self) -> None:
        """Look away, until `resume`."""
        if self._is_on:
            sys.setprofile(None)

    def resume(self) -> None:
        """Look again."""
        if self._is_on:
            sys.setprofile(self._callback)

    def enter_opaque(self, function: Any) -> None:
        """Watch what an opaque function may change, and let it do what it likes."""
        self._note_state_before(function)
        self._depth += 1
        self.resume()

    def _note_state_before(self, function: Any) -> None:
        """Note what an opaque function may reach, as it is before the call."""
        self.has_effects = False
        self._opaque.add(function, getattr(function, "__name__", "an opaque function"))
        for holder in self._opaque.holders:
            holder.entries = holder.read()
        self._pending = self._changed_so_far(function)

    def _changed_so_far(self, function: Any) -> set[int]:
        """Return the `id` of what the program has written to; a graph writes to it at its end."""
        changed: dict[int, Any] = {}
        for holder in self._reach.holders:
            own = [k for k in holder.changes() if (id(holder.value), k) not in self._foreign]
            if own:
                changed[id(holder.value)] = holder.value
        if getattr(function, "__module__", None) == "_warnings":
            filters = (id(vars(warnings)), id(warnings.filters))
            if any(key in changed for key in filters):
                self._listener.refuse("the program warns where it has changed which warnings count")
        return set(changed)

    def leave_opaque(self) -> None:
        """Watch the program itself again."""
        self._depth -= 1
        self.pause()
        self._note_state_after()

    def _note_state_after(self) -> None:
        """Note what an opaque function has changed: its next call changes it, and not the graph."""
        for holder in self._opaque.holders:
            if id(holder.value) in self._pending:
                name = holder.path or "globals of its module"
                self._listener.refuse(
                    f"an opaque call may read {name}, which the program has changed before",
                    "change it behind the opaque call, or give its value to the function",
                )
            for key in holder.changes():
                self.has_effects = True
                self._foreign[id(holder.value), key] = holder.name_of(key)

    def _see(self, frame: FrameType, event: str, function: Any) -> None:
        if not self._is_on:
            return
        if self._depth:
            is_users = not is_allowlisted(frame.f_globals.get("__name__"))
            if event == "call" and is_users and not _stands_for_caller(frame.f_code):
                self._opaque.enter(frame)
        elif self._special is not None:
            self._see_inside_special(frame, event, function)
        elif self._refused is not None:
            if event == "return" and frame is self._refused:
                self._refused = None
        elif event == "call":
            code = frame.f_code
            if is_wrapper_of_checkpoints(code):
                import_at_once(FOR_CHECKPOINTS)  # not watched here, as it is in the call
            if code in CODES:
                import_at_once(FOR_CONTROL_OPERATORS)  # not watched here, as it is in the call
                self.blame_user(frame)
                self._listener.refuse(f"the program calls torch.{code.co_name}", None, watch=True)
                self._refused = frame  # TorchDynamo's own calls, tens of thousands, say no more
                return
            if code in SPECIAL:
                self._special = self._listener.begin_special(frame)
                if self._special is not None and code is APPLY:
                    self._note_state_before(frame.f_locals["cls"])
            if code not in self.codes and code not in self._trusted:
                self._note(code, frame)
            if code.co_freevars and code in self.codes:
                self._reach.enter_again(frame)
        elif event == "c_call":
            if function is print:
                self._streams = _Streams(self.is_muted)
            elif isinstance(getattr(function, "__self__", None), ContextVar):
                self._reach.enter_context(function.__self__)
            elif is_without_frame(function):
                self._see_application(frame, function)
            elif self._streams is None and not foreign_calls.is_known(function):
                self._see_foreign(frame, function)
        elif event in ("c_return", "c_exception") and function is print:
            self._end_of_print(frame)

    def _see_inside_special(self, frame: FrameType, event: str, result: Any) -> None:
        if not is_allowlisted(frame.f_globals.get("__name__")):
            if event == "call":
                self._opaque.enter(frame)
            elif event == "c_call" and not foreign_calls.is_known(result):
                self.has_effects = True
        special = self._special
        if event == "return" and special is not None and frame is special[0]:
            self._special = None
            if frame.f_code is APPLY:
                self._note_state_after()
            special[1](result)

    def _note(self, code: CodeType, frame: FrameType) -> None:
        if is_allowlisted(frame.f_globals.get("__name__")):
            self._trusted.add(code)
        else:
            self.codes[code] = frame.f_globals
            self._reach.enter(frame)

    def _see_application(self, frame: FrameType, function: Any) -> None:
        """Refuse a custom autograd function whose arguments can't be seen here, but by a hook."""
        if frame.f_code is APPLY:
            return
        self._blame(frame)
        self._listener.refuse(
            f"the program calls {foreign_calls.name_of(function)}, looked up before the call",
            "look it up where it is called: Scale.apply(x)",
            watch=True,
        )

    def _see_foreign(self, frame: FrameType, function: Any) -> None:
        # id() and sys functions inside of trusted packages serve their own bookkeeping.
        caller = frame.f_globals.get("__name__")
        if is_allowlisted(caller) and not foreign_calls.has_effects(function, _who_asks(frame)):
            return
        if function is hash and frame.f_code.co_name == "__hash__":
            return
        self._blame(frame)
        self._listener.refuse(
            f"the program calls {foreign_calls.name_of(function)}, which a graph can't repeat",
            MARK_IT,
            watch=True,
        )

    def _blame(self, frame: FrameType) -> None:
        code = innermost_user_code(frame)
        if code is not None and can_hook(code):
            self.blamed.add(code)

    def blame_user(self, frame: FrameType | None) -> None:
        """Let the calls of the function that led to a frame go through a hook the next time."""
        code = user_code(frame)
        if code is not None and can_hook(code):
            self.blamed.add(code)

    def _end_of_print(self, frame: FrameType) -> None:
        streams, self._streams = self._streams, None
        if streams is None:
            return
        streams.close()
        if not streams.texts:
            self._blame(frame)
            self._listener.refuse("the program prints to a file", MARK_IT, watch=True)
        for name, text in streams.texts:
            self._listener.note_text(name, text)


def _who_asks(frame: FrameType) -> str | None:
    """Return the module whose code calls; where lines of source are looked up, `linecache`."""
    caller = asking = frame.f_globals.get("__name__")
    above: FrameType | None = frame
    while asking == "tokenize" and (above := above.f_back) is not None:
        asking = above.f_globals.get("__name__")
    return asking if asking == "linecache" else caller


class _Streams:
    """Stands in for the standard streams while one `print` runs, and keeps what is written."""

    def __init__(self, is_muted: bool) -> None:
        self.texts: list[tuple[str, str]] = []
        self._before = {"stdout": sys.stdout, "stderr": sys.stderr}
        self._tees = {
            name: _Tee(stream, name, self.texts, is_muted) for name, stream in self._before.items()
        }
        for name, tee in self._tees.items():
            setattr(sys, name, tee)

    def close(self) -> None:
        """Put the streams back, unless the program has replaced them."""
        for name, stream in self._before.items():
            if getattr(sys, name) is self._tees[name]:
                setattr(sys, name, stream)


class _Tee:
    def __init__(
        self, stream: Any, name: str, texts: list[tuple[str, str]], is_muted: bool
    ) -> None:
        self._stream = stream
        self._is_muted = is_muted
        self._name = name
        self._texts = texts
        self._thread = threading.get_ident()

    def write(self, text: str) -> Any:
        if threading.get_ident() == self._thread:
            self._texts.append((self._name, text))
            if self._is_muted:
                return len(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _stands_for_caller(code: CodeType) -> bool:
    """Tell whether code only calls what it is given, from a line of the program's."""
    return code.co_varnames == CALL.co_varnames and code.co_code == CALL.co_code
