"""Bytecode rewriting: functions whose calls go through a hook while a program is recorded.

The interpreter reports which function in C is called, and not on what; some calls it does not
report at all. Where a program calls such functions, the code of the function that calls them is
replaced, for as long as it is recorded, by code that asks a hook about each call: the hook either
makes it or says what to call, and then the code does so itself, from its own frame, which is what
`warnings`, `logging` and `inspect` look at. Everything else in the code stays as it is. torch's own
assembler for bytecode is used for that, and without it nothing is replaced.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from fxkit.torch_adapters.bytecode import find_assembler
from fxkit.tracing.bytecode.decoding import can_read
from fxkit.tracing.bytecode.hooked_code import Hook, ToCall, calls_of_plain_values, hook_calls
from fxkit.tracing.bytecode.living_functions import functions_of
from fxkit.tracing.bytecode.value_flow import flow_of

_SEES_ITS_CALLER = frozenset(
    "eval exec locals globals vars dir _getframe currentframe breakpoint __import__ stack".split()
)


def result_of(value: Any) -> ToCall:
    """Return what to call where a hook has made a call itself, which gave `value`."""
    return _same, (value,), {}


def _same(value: Any) -> Any:
    return value


_lock = threading.RLock()
_in_use: dict[int, tuple[FunctionType, CodeType, int]] = {}
_originals: dict[CodeType, CodeType] = {}
_with_hooks: set[CodeType] = set()


def original(code: CodeType) -> CodeType:
    """Return the code that hooked code stands for."""
    return _originals.get(code, code)


def has_hooks(code: CodeType) -> bool:
    """Tell whether the calls of running code go through a hook.

    Code that only makes functions whose calls do is replaced too, and code that can't be assembled
    stays as it is: neither has hooks of its own.
    """
    return code in _with_hooks


def code_of(function: FunctionType) -> CodeType:
    """Return the code of a function, whether calls in it go through a hook or not."""
    in_use = _in_use.get(id(function))
    return function.__code__ if in_use is None else in_use[1]


@contextlib.contextmanager
def with_call_hooks(
    codes: frozenset[CodeType], hook: Hook, makers: frozenset[CodeType] = frozenset()
) -> Iterator[None]:
    """Let calls in some code go through a hook inside the block; other threads see no difference.

    Args:
        codes: The code.
        hook: Is asked about each call, in all threads that run the code.
        makers: Other code that makes functions with that code.
    """
    found = _replacements(codes, hook, makers) if codes else {}
    with _lock:
        for function, code in found.items():
            _, before, users = _in_use.get(id(function), (function, function.__code__, 0))
            _in_use[id(function)] = (function, before, users + 1)
            if users == 0:
                function.__code__ = code
    try:
        yield
    finally:
        with _lock:
            for function in found:
                _, before, users = _in_use.pop(id(function))
                if users > 1:
                    _in_use[id(function)] = (function, before, users - 1)
                else:
                    function.__code__ = before


def can_hook(code: CodeType) -> bool:
    """Tell whether the calls in some code can go through a hook."""
    if not can_read(code) or code in _originals:
        return False
    return _SEES_ITS_CALLER.isdisjoint(code.co_names)


def is_given_to_calls(code: CodeType, name: str) -> bool:
    """Tell whether code only takes attributes of what has a name, or gives it to hooked calls."""
    assembler = find_assembler()
    if assembler is None:
        return False
    if not can_read(code):
        return False
    instructions = assembler.cleaned_instructions(code, False)
    calls = calls_of_plain_values(instructions)
    for place, instruction in enumerate(instructions):
        is_load = instruction.opname.startswith("LOAD_") and instruction.opname != "LOAD_CLOSURE"
        if instruction.argval != name or not is_load:
            continue
        if instructions[place + 1].opname in ("LOAD_ATTR", "LOAD_METHOD"):
            continue
        flow = flow_of(instructions, calls, instruction)
        if not flow.is_known or flow.computes or flow.returns or flow.enters:
            return False
    return True


def _replacements(
    codes: frozenset[CodeType], hook: Hook, makers: frozenset[CodeType]
) -> dict[FunctionType, CodeType]:
    """Return the living functions that run some code, or make functions that do, and new code."""
    living = functions_of(codes | makers)
    return {item: _rewritten(item.__code__, codes, hook) for item in living}


@functools.lru_cache(maxsize=256)
def _rewritten(code: CodeType, codes: frozenset[CodeType], hook: Hook) -> CodeType:
    consts = tuple(
        _rewritten(item, codes, hook) if isinstance(item, CodeType) else item
        for item in code.co_consts
    )
    same = all(new is old for new, old in zip(consts, code.co_consts, strict=True))
    new = code if same else code.replace(co_consts=consts)
    with_hooks = hook_calls(new, hook) if code in codes and can_hook(code) else None
    if with_hooks is not None:
        new = with_hooks
        _with_hooks.add(new)
    if new is not code:
        _originals[new] = code
    return new
