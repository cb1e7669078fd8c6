"""Opaque calls: functions that a graph calls unchanged; effects are kept, bodies not recorded.

An opaque call runs exactly once for each call of a captured program, even when a guard fails behind
it and the program is run again: a tape of this thread gives the second run what the first one got.
"""

from __future__ import annotations

import functools
import threading
import types
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar, overload

import torch
from torch.fx.node import has_side_effect

from fxkit.analysis.type_inference.declared_types import declare_type
from fxkit.errors import CaptureError, UnsupportedError
from fxkit.ir.types import TensorType, type_of_value
from fxkit.torch_adapters import pytree
from fxkit.tracing.environment.object_kinds import OPAQUE
from fxkit.tracing.recorder.recorder import active_recorder

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(slots=True)
class _Entry:
    """One call: what it gave or raised, and the tensors in it as they were just after it.

    `given` has the numbers of the tensors that it was given, where those may differ when it is made
    again.
    """

    function: Any
    result: Any
    error: BaseException | None
    tensors: list[tuple[torch.Tensor, torch.Tensor]]
    given: list[torch.Tensor] | None = None


@dataclass(slots=True)
class _Tape:
    may_differ: bool = False
    done: list[_Entry] = field(default_factory=list)
    again: deque[_Entry] = field(default_factory=deque)


class _Current(threading.local):
    tape: _Tape | None = None


_current = _Current()


@overload
def opaque(function: F) -> F: ...


@overload
def opaque(function: None = None) -> Callable[[F], F]: ...


def opaque(function: Any = None) -> Any:
    """Keep a function as one node of each graph that is captured of a program which calls it.

    The function runs at every call of the captured program, on the tensors of that call: it may
    print, read files or clocks, draw random numbers, use NumPy. What it does to Python state is its
    own business; a program whose other code reads what it changes runs in Python. Gradients flow
    through it as they do in eager.

    Args:
        function: Takes tensors, plain values and containers of those; gives tensors, containers of
            them, or None. A plain value that it gives is guarded.

    Returns:
        The function, to be called in its place; outside of captures it only calls it.

    Raises:
        UnsupportedError: When `function` can't be called.

    Example:
        >>> import torch, fxkit
        >>> @fxkit.opaque
        ... def note(x):
        ...     print("mean", float(x.mean()))
        >>> program = fxkit.capture(lambda x: (note(x), x * 2)[1], (torch.ones(2),))
        mean 1.0
        >>> y = program(torch.zeros(2))
        mean 0.0
    """
    if function is None:
        return opaque
    if not callable(function):
        raise UnsupportedError(
            f"expected a function, got {type(function).__name__}", hint="write @fxkit.opaque"
        )

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        recorder = active_recorder()
        if recorder is None or recorder.failure is not None:
            return call_once(function, args, kwargs)
        key = recorder.unseen(lambda: _key(args, kwargs))
        result = recorder.record_opaque(
            call, lambda: call_once(function, args, kwargs), args, kwargs, function
        )
        observed[key] = recorder.unseen(lambda: type_of_value(result))
        return result

    observed: dict[str, Any] = {}

    @declare_type(call)
    def _(*args: Any, **kwargs: Any) -> Any:
        key = _key(args, kwargs)
        if key not in observed:
            raise UnsupportedError(
                f"expected {function.__name__} to be given what it was captured with, got {key}",
                hint=f"declare what it returns with fxkit.declare_type({function.__name__})",
            )
        return observed[key]

    setattr(call, OPAQUE, True)
    return has_side_effect(call)


def _key(args: Any, kwargs: Any) -> str:
    return str(pytree.tree_map_only(torch.Tensor, TensorType.of, (args, kwargs)))


def repeats_calls() -> bool:
    """Tell whether opaque calls of this thread are noted, and some may be given again."""
    return _current.tape is not None


def call_once(
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    frames: tuple[types.FunctionType, ...] = (),
) -> Any:
    """Call a function, or give again what it gave before the program was started over.

    Args:
        function: The function.
        args: What it takes.
        kwargs: What it takes by keyword.
        frames: What the function is to see as its callers, innermost first; each takes a function
            with its arguments.
    """
    tape = _current.tape
    if tape is None:
        return _call(function, args, kwargs, frames)
    given = _numbers((args, kwargs)) if tape.may_differ else None
    if tape.again and _is_given_the_same(tape.again[0], given):
        return _repeated(tape, function)
    if tape.again:
        tape.again.popleft()
    entry = _Entry(function, None, None, [], given)
    tape.done.append(entry)
    try:
        entry.result = _call(function, args, kwargs, frames)
    except BaseException as error:
        entry.error = error
        raise
    finally:
        leaves = pytree.tree_leaves((args, kwargs, entry.result))
        with torch.no_grad():
            entry.tensors = [
                (leaf, leaf.detach().clone()) for leaf in leaves if isinstance(leaf, torch.Tensor)
            ]
    return entry.result


def _call(
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    frames: tuple[types.FunctionType, ...],
) -> Any:
    for frame in frames:
        function, args, kwargs = frame, (function, args, kwargs), {}
    return function(*args, **kwargs)


def _repeated(tape: _Tape, function: Any) -> Any:
    entry = tape.again.popleft()
    if entry.function is not function and entry.function != function:
        raise CaptureError(
            f"expected {getattr(entry.function, '__name__', 'a function')} to be called again, got "
            f"{getattr(function, '__name__', 'another one')}",
            hint="the program takes another way when it is run again with equal arguments",
        )
    tape.done.append(entry)
    with torch.no_grad():
        for tensor, content in entry.tensors:
            if not torch.equal(tensor, content):
                tensor.detach().copy_(content)
    if entry.error is not None:
        raise entry.error
    return entry.result


def _numbers(given: Any) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves(given)
    return [leaf.detach().clone() for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _is_given_the_same(entry: _Entry, given: list[torch.Tensor] | None) -> bool:
    if entry.given is None or given is None:
        return True
    return len(entry.given) == len(given) and all(map(_is_same, entry.given, given))


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return bool(((a == b) | ((a != a) & (b != b))).all())


@contextmanager
def called_once(*, may_differ: bool = False) -> Iterator[Callable[[], None]]:
    """Let opaque calls of this thread run once each, and give a function that starts them over.

    Args:
        may_differ: Whether calls may be given other numbers after that; those are made again.
    """
    before, tape = _current.tape, _Tape(may_differ)
    _current.tape = tape

    def start_over() -> None:
        tape.again = deque([*tape.done, *tape.again])
        tape.done = []

    try:
        yield start_over
    finally:
        _current.tape = before
