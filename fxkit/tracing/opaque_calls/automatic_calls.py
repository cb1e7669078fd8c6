"""Make calls that can't be inspected opaque calls of the graph, without the user's mark.

The first recording of a program finds the functions that make such calls; at the next one their
calls go through `call_through`, which sees each function with what it is given. Functions of the
standard library and of C are opaque here, those of the program are not. So is `print` there: what
it is given feeds it at each call, and it writes where it stands, without a guard on the text.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch

from fxkit.errors import CaptureError
from fxkit.torch_adapters import pytree
from fxkit.torch_adapters.custom_functions import with_frame
from fxkit.tracing.bytecode.call_hooks import result_of
from fxkit.tracing.bytecode.hooked_code import ToCall
from fxkit.tracing.bytecode.value_flow import Flow
from fxkit.tracing.environment import foreign_calls
from fxkit.tracing.environment.call_sites import makes_opaque_calls
from fxkit.tracing.environment.call_watch import CALL
from fxkit.tracing.environment.control_operators import CONTROL
from fxkit.tracing.environment.opaque_objects import has_native_state, is_hidden, reads_clock
from fxkit.tracing.guarding.plain_values import ATOMS
from fxkit.tracing.opaque_calls.opaque_calls import call_once, repeats_calls
from fxkit.tracing.recorder.frames import is_user_file
from fxkit.tracing.recorder.recorded import declare_result
from fxkit.tracing.recorder.recorder import Recorder, active_recorder
from fxkit.tracing.values.refusals import Refusal
from fxkit.tracing.values.structure import Blueprint, Parts
from fxkit.tracing.values.symbolic_scalars import SYMBOLIC, plain

AUTOMATIC = "_fxkit_automatic"
_MAX_FRAMES = 8
_SHARES_MEMORY = (torch.from_numpy, torch.frombuffer)
_MODULES_OF_TORCH = ("torch",)


def call_through(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], flow: Flow
) -> ToCall:
    """Make a call of a program, as a node of the graph, where it can't be looked into.

    Args:
        function: What the program calls.
        args: What it gives.
        kwargs: What it gives by keyword.
        flow: What the program does with the result.

    Returns:
        What the program has to call itself.
    """
    recorder = active_recorder()
    is_on = recorder is not None and recorder.is_following
    if is_on:
        function = with_frame(function)
    if function is print:
        function, args, kwargs = _printed(args, kwargs)
    if is_on and recorder is not None and function in CONTROL:
        return result_of(_controlled(recorder, function, args, kwargs))
    is_kept = is_opaque(function) or _reads_state(function, args, kwargs)
    if not is_kept and recorder is not None:
        is_kept = _takes(recorder, function, (args, kwargs))
    if is_on and recorder is not None:
        if not is_kept and _gives_number(function, args):
            return result_of(args[0].tracer.compute(function, args))
        if not is_kept:
            _check_strangers(recorder, (*args, *kwargs.values()))
        if is_kept or _leaves_torch(function, flow, recorder):
            return result_of(_recorded(recorder, function, args, kwargs, flow))
    elif is_kept and repeats_calls():
        frames = _frames(recorder)
        return result_of(call_once(function, plain(args), plain(kwargs), frames))
    args, kwargs = _without_stand_ins(function, (args, kwargs))
    return function, args, kwargs


def _printed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> ToCall:
    """Return a call that writes what `print` would, of values that an opaque call can take."""
    if isinstance(getattr(type(kwargs.get("file")), "write", None), FunctionType):
        return _print_in_parts, args, kwargs
    taken = (torch.Tensor, str, *SYMBOLIC, *ATOMS)
    return print, tuple(arg if isinstance(arg, taken) else str(arg) for arg in args), kwargs


def _print_in_parts(
    *args: Any, file: Any, sep: str | None = " ", end: str | None = "\n", flush: bool = False
) -> None:
    """Do as `print` for a file whose methods are written in Python, which the graph follows."""
    for number, arg in enumerate(args):
        if number:
            file.write(" " if sep is None else sep)
        file.write(str(arg))
    file.write("\n" if end is None else end)
    if flush:
        file.flush()


def _controlled(
    recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Record a call that runs other functions depending on tensors."""
    args, kwargs = recorder.fixed(args), recorder.fixed(kwargs)
    result, reason = recorder.run_control(function, args, kwargs)
    if reason is not None:
        recorder.refuse(f"torch.{function.__name__} is called: {reason}")
    return result


def _recorded(
    recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], flow: Flow
) -> Any:
    try:
        call = _Call(recorder, function, args, kwargs)
    except (Refusal, CaptureError) as error:
        reason = error.reason if isinstance(error, Refusal) else error.message
        recorder.refuse(f"{foreign_calls.name_of(function)} is called: {reason}", error.hint)
        return call_once(function, plain(args), plain(kwargs))
    return call.record(flow)


def _reads_state(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether a call advances an iterator or a random generator, or shares NumPy's memory."""
    if function is next:
        return not isinstance(args[0], types.GeneratorType)
    if function in _SHARES_MEMORY:
        return True
    module = getattr(function, "__module__", None) or ""
    owner = getattr(function, "__self__", None)
    is_of_torch = module.partition(".")[0] == "torch" or isinstance(owner, torch.Tensor)
    return is_of_torch and any(type(leaf) is torch.Generator for leaf in (*args, *kwargs.values()))


def _takes(recorder: Recorder, function: Any, given: Any) -> bool:
    """Tell whether a call is given something that only opaque calls may look into."""
    if not recorder.opaque_objects:
        return False
    return bool(_objects_in(recorder, (getattr(function, "__self__", None), given)))


def _leaves_torch(function: Any, flow: Flow, recorder: Recorder) -> bool:
    """Tell whether a tensor becomes an array that only goes to calls of this program."""
    owner = getattr(function, "__self__", None)
    if not isinstance(owner, torch.Tensor) or getattr(function, "__name__", "") != "numpy":
        return False
    return flow.is_known and not (flow.computes or flow.returns) and type(recorder) is Recorder


def _gives_number(function: Any, args: tuple[Any, ...]) -> bool:
    """Tell whether a call computes a number of stand-ins and plain numbers only."""
    if not any(type(arg) in SYMBOLIC for arg in args) or type(args[0]) not in SYMBOLIC:
        return False
    is_pure = function in (float, int, round, abs) or getattr(function, "__module__", "") == "math"
    return is_pure and all(type(arg) in SYMBOLIC or type(arg) in (int, float) for arg in args)


def is_opaque(function: Any) -> bool:
    """Tell whether a graph keeps calls of a function as they are."""
    if function is print:
        return True
    if isinstance(function, type):
        return reads_clock(function) or makes_opaque_calls(_code_of(function))
    if is_hidden(function):
        return True
    if isinstance(function, (types.BuiltinFunctionType, types.MethodWrapperType)):
        return not foreign_calls.is_known(function)
    if isinstance(function, (types.FunctionType, types.MethodType)):
        return makes_opaque_calls(_code_of(function))
    return has_native_state(type(getattr(function, "__self__", None)))


def _code_of(function: Any) -> CodeType | None:
    if isinstance(function, type):
        function = function.__init__
    function = getattr(function, "__func__", function)
    return getattr(function, "__code__", None)


def _reason(function: Any) -> str:
    """Say why a function can't be looked into."""
    if isinstance(function, (types.FunctionType, types.MethodType)) and not is_hidden(function):
        return "it reaches out of the program"
    return "it is written in C, and not known to do no more than to compute"


def _check_strangers(recorder: Recorder, args: tuple[Any, ...]) -> None:
    for arg in args:
        if type(arg) not in ATOMS and has_native_state(type(arg)) and recorder.failure is None:
            recorder.refuse(
                f"the program hands on a {type(arg).__qualname__}, whose state can't be told",
                "call its methods where it is kept",
            )


def _without_stand_ins(function: Any, given: Any) -> Any:
    """Give plain numbers to all but torch, which hands stand-ins to the recorder."""
    leaves, spec = pytree.tree_flatten(given)
    if not any(type(leaf) in SYMBOLIC for leaf in leaves):
        return given
    owner = getattr(function, "__self__", None)
    module = getattr(function, "__module__", None) or ""
    is_of_torch = isinstance(function, types.BuiltinFunctionType) and (
        isinstance(owner, torch.Tensor) or module.startswith(_MODULES_OF_TORCH)
    )
    if is_of_torch:
        return given
    leaves = [leaf._fix() if type(leaf) in SYMBOLIC else leaf for leaf in leaves]
    return pytree.tree_unflatten(leaves, spec)


class _Call:
    """One opaque call that is recorded."""

    def __init__(
        self, recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._recorder = recorder
        self._function = function
        self._given = (args, kwargs)
        kept = recorder.kept
        _check_owner(function, {**kept, **recorder.opaque_objects})
        self._leaves: list[Any] = []
        self._kept = {**kept, **recorder.opaque_objects}
        owner = getattr(function, "__self__", None)
        is_method = id(owner) in recorder.opaque_objects or isinstance(owner, torch.Tensor)
        if is_method:
            self._function = _method(function.__name__)
            self._given = ((owner, *args), kwargs)
        objects = _objects_in(recorder, self._given)
        existing = {id(value): number for number, value in enumerate(objects)}
        where = "an argument of an opaque call"
        blueprint = Blueprint(self._given, self._place, existing, where, kept)
        frames = _frames(recorder)
        count, callee = len(objects), self._function
        self._leaves[:0] = objects

        def call(*leaves: Any) -> Any:
            now = blueprint.build(list(leaves[count:]), list(leaves[:count]), {})
            return call_once(callee, now[0], now[1], frames)

        call.__name__ = getattr(function, "__name__", "call")
        call.__qualname__ = foreign_calls.name_of(function)
        call.__module__ = _home_of(function)
        setattr(call, AUTOMATIC, True)
        self._target = call
        self._frames = frames

    def record(self, flow: Flow) -> Any:
        """Make the call and append its node."""
        args, kwargs = plain(self._given[0]), plain(self._given[1])
        before = _tokens((args, kwargs), self._kept)
        result = self._recorder.record_opaque(
            self._target,
            lambda: call_once(self._function, args, kwargs, self._frames),
            tuple(self._leaves),
            {},
            self._function,
            flow=flow,
            reason=_reason(self._function),
        )
        after = self._recorder.unseen(lambda: _tokens((args, kwargs), self._kept))
        if after != before:
            name = foreign_calls.name_of(self._function)
            self._recorder.refuse(f"{name} changes what it is given")
        # Types are found without the call, which would be one more than the program makes.
        self._recorder.unseen(lambda: declare_result(self._target, plain(result)))
        return result

    def _place(self, value: Any, path: str) -> int:
        self._leaves.append(value)
        return len(self._leaves) - 1


@functools.lru_cache(maxsize=256)
def _method(name: str) -> Callable[..., Any]:
    """Return a function that calls a method of its first argument."""

    def call(owner: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(owner, name)(*args, **kwargs)

    call.__name__ = call.__qualname__ = name
    return call


def _objects_in(recorder: Recorder, given: Any) -> list[Any]:
    known = recorder.opaque_objects
    leaves = pytree.tree_leaves(given, is_leaf=lambda value: id(value) in known)
    return list({id(leaf): leaf for leaf in leaves if id(leaf) in known}.values())


def _tokens(value: Any, kept: dict[int, Any]) -> tuple[Any, ...]:
    parts = Parts()
    leaves, spec = pytree.tree_flatten(value, is_leaf=lambda item: id(item) in kept)
    for index, item in enumerate(leaves):
        if id(item) not in kept:
            parts.add(item, str(index))
    return (*parts.tokens, str(spec))


def _check_owner(function: Any, kept: dict[int, Any]) -> None:
    """Refuse a method of an object that the program makes anew at each call."""
    owner = getattr(function, "__self__", None)
    if owner is None or isinstance(owner, (types.ModuleType, type, torch.Tensor)):
        return
    if id(owner) in kept:
        return
    module = sys.modules.get(type(owner).__module__)
    if module is not None and any(value is owner for value in vars(module).values()):
        return
    raise Refusal(
        f"its {type(owner).__qualname__} is made by the program",
        "keep it in a variable or an attribute that is older than the call",
    )


def _home_of(function: Any) -> str:
    """Return a module to name; not torch's, whose functions a graph's code calls by their names."""
    module = _module_of(function)
    return f"fxkit.{module}" if module.partition(".")[0] == "torch" else module


def _module_of(function: Any) -> str:
    module = getattr(function, "__module__", None)
    owner = getattr(function, "__self__", None)
    return module or getattr(owner, "__module__", None) or type(owner).__module__


# The frames that an opaque function sees around it ------------------------------------------------


def _frames(recorder: Recorder | None) -> tuple[FunctionType, ...]:
    """Return stand-ins for the frames between the program's start and a call, innermost first.

    Logging and warnings name the line that called them.
    """
    found: list[FunctionType] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and len(found) < _MAX_FRAMES:
        if recorder is not None and not recorder.is_inside(frame):
            break
        if is_user_file(frame.f_code.co_filename):
            found.append(_stand_in(frame))
        frame = frame.f_back
    return tuple(found)


def _stand_in(frame: FrameType) -> FunctionType:
    code = frame.f_code
    return FunctionType(
        _code_like(code.co_filename, code.co_name, frame.f_lineno), frame.f_globals, code.co_name
    )


@functools.lru_cache(maxsize=1024)
def _code_like(file: str, name: str, line: int) -> CodeType:
    return CALL.replace(co_filename=file, co_name=name, co_firstlineno=line)
