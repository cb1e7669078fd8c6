"""torch's own compiler: whether it is there, and how programs run without it."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import threading
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_LOCK = threading.Lock()
_stances: list[Any] = []
_inside = 0


def has_inductor() -> bool:
    """Tell whether this torch has Inductor; it is not imported."""
    return importlib.util.find_spec("torch._inductor") is not None


def calls_compiled(function: Any, modules: Iterable[torch.nn.Module]) -> bool:
    """Tell whether a program is, or names, what `torch.compile` returned.

    Args:
        function: The program.
        modules: Those that it reaches; what their `forward` names counts too.
    """
    if "torch._dynamo" not in sys.modules:
        return False
    functions = [function]
    for module in modules:
        if vars(module).get("_compiled_call_impl") is not None:
            return True
        functions += [module, type(module).forward]
    return any(map(_is_compiled, functions)) or any(
        _is_compiled(value) for one in functions for value in _named_by(one)
    )


def _is_compiled(value: Any) -> bool:
    is_plain = issubclass(type(value), (types.FunctionType, torch.nn.Module))  # asks it for nothing
    return is_plain and "_torchdynamo_orig_callable" in object.__getattribute__(value, "__dict__")


def _named_by(function: Any) -> Iterator[Any]:
    """Yield what the code of a function names: variables of its closure, and globals."""
    function = getattr(function, "__func__", function)
    if not isinstance(function, types.FunctionType):
        return
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # nothing is in it yet
            yield cell.cell_contents
    for name in function.__code__.co_names:
        yield function.__globals__.get(name)


def given_to_compiler(program: Any) -> Any:
    """Return the program that `torch.compile` was given, of what it returned; others as they are.

    A compiled module that has hooks of its own is more than that module, and stays.
    """
    while _is_compiled(program):
        if isinstance(program, torch.nn.Module):
            if program._forward_hooks or program._forward_pre_hooks:
                break
            inner = getattr(program, "_orig_mod", None)
            if not isinstance(inner, torch.nn.Module):
                break
        else:
            inner = program._torchdynamo_orig_callable
        program = inner
    return program


@contextmanager
def followed_by_placeholders() -> Iterator[None]:
    """Let what `torch.compile` returned run the code that it was given where torch.fx traces it.

    For the calls of this thread; torch raises in place of that, unless a setting of it is changed.
    """
    config = getattr(sys.modules.get("torch._dynamo"), "config", None)
    if not hasattr(config, "error_on_nested_fx_trace"):
        yield
        return
    with config.patch(error_on_nested_fx_trace=False):  # pyright: ignore[reportOptionalMemberAccess]
        yield


@contextmanager
def run_as_written() -> Iterator[None]:
    """Let what `torch.compile` returned run the code that it was given, in all threads.

    What records a program sees the calls of that code then, and not those of a compiler at work.
    Nothing is imported for it: where nobody has imported the compiler, nothing is compiled.
    """
    if "torch._dynamo" not in sys.modules or not _enter():
        yield
        return
    try:
        yield
    finally:
        _leave()


@contextmanager
def compiled_as_usual() -> Iterator[None]:
    """Let `torch.compile` compile, inside of `run_as_written` too."""
    with _LOCK:
        is_changed = bool(_inside)
    if not is_changed:
        yield
        return
    with torch.compiler.set_stance("default"):
        yield


def _enter() -> bool:
    """Set the stance for the first of those that are inside; tell whether torch lets that be."""
    global _inside
    with _LOCK:
        if not _inside:
            try:
                _stances.append(torch.compiler.set_stance("force_eager"))
            except RuntimeError:  # torch is compiling what calls this
                return False
        _inside += 1
        return True


def _leave() -> None:
    """Put back the stance, behind the last of those that were inside."""
    global _inside
    with _LOCK:
        _inside -= 1
        if not _inside:
            _stances.pop().__exit__(None, None, None)
