"""Objects written in C whose state can't be told, and callables that the interpreter hides.

An object of a class in C may answer otherwise at each call although nothing that Python shows of
it has changed: a random generator, a memory view, a queue. The interpreter reports calls of plain
functions in C; calls of what Cython makes, and calls that other C code makes, it does not report.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Iterator
from typing import Any

from fxkit.tracing.surroundings import foreign_calls
from fxkit.tracing.surroundings.code_names import CodeNames

_IMMUTABLE = frozenset(
    """
    builtins.object builtins.type builtins.int builtins.float builtins.complex builtins.str
    builtins.bytes builtins.bool builtins.tuple builtins.frozenset builtins.range builtins.slice
    builtins.property builtins.dict builtins.list builtins.set builtins.BaseException
    builtins.staticmethod builtins.classmethod builtins.super builtins.function builtins.method
    builtins.module builtins.code builtins.cell builtins.mappingproxy builtins.ellipsis
    builtins.NoneType builtins.NotImplementedType builtins.classmethod_descriptor
    builtins.builtin_function_or_method builtins.wrapper_descriptor builtins.method-wrapper
    builtins.getset_descriptor builtins.member_descriptor builtins.method_descriptor
    collections.deque collections.defaultdict collections.OrderedDict _collections._tuplegetter
    collections._tuplegetter
    functools.partial functools._lru_cache_wrapper _functools._lru_cache_wrapper
    operator.itemgetter operator.attrgetter operator.methodcaller re.Pattern re.Match
    datetime.date datetime.time datetime.timedelta datetime.timezone datetime.tzinfo
    datetime.datetime decimal.Decimal _thread.lock _thread.RLock _thread._local
    weakref.ref weakref.ReferenceType weakref.proxy types.GenericAlias types.UnionType
    types.SimpleNamespace typing.TypeVar typing.ParamSpec typing.TypeVarTuple
    typing.TypeAliasType _abc._abc_data
    _contextvars.ContextVar contextvars.ContextVar zoneinfo.ZoneInfo _struct.Struct struct.Struct
    """.split()
)
_POINTER = object.__basicsize__ // 2
_CALL_BACK = frozenset(
    """
    map filter iter sorted min max sort reduce accumulate starmap partial defaultdict methodcaller
    takewhile dropwhile groupby filterfalse sub subn partialmethod default_factory
    """.split()
)
MARK_IT = "call it outside, or put it into a function marked with fxkit.opaque"
_HIDDEN = "cython_function_or_method"
_READS_CLOCK = frozenset({("numpy", "datetime64")})


@functools.lru_cache(maxsize=8192)
def is_stranger(kind: type) -> bool:
    """Tell whether instances of a class keep state in C that no guard can compare."""
    if kind.__module__.partition(".")[0] == "torch":
        return False
    base = _in_c(kind)
    module, name = base.__module__, base.__qualname__
    if f"{module}.{name}" in _IMMUTABLE or issubclass(base, BaseException):
        return False
    return module.partition(".")[0] not in ("torch", "numpy") or module.startswith("numpy.random")


def is_hidden(function: Any) -> bool:
    """Tell whether calls of a function are not reported, and may do anything."""
    if isinstance(function, types.MethodType):
        function = function.__func__
    return type(function).__name__ == _HIDDEN


def reads_clock(kind: Any) -> bool:
    """Tell whether a class, when it is called, may ask for the time."""
    return (getattr(kind, "__module__", None), getattr(kind, "__name__", None)) in _READS_CLOCK


def hidden_names(module: types.ModuleType, names: Iterable[str]) -> Iterator[str]:
    """Iterate over what NumPy has under some names that a graph can't repeat a call of."""
    if module.__name__.partition(".")[0] != "numpy":
        return
    for name in names:
        value = vars(module).get(name)
        is_foreign = is_hidden(value) and not isinstance(value, types.MethodType)
        if is_foreign or (module.__name__, name) in _READS_CLOCK:
            yield f"{module.__name__}.{name}"
        if isinstance(value, types.ModuleType):
            yield from hidden_names(value, set(names) - {name})


def can_hand_on(value: Any) -> bool:
    """Tell whether a value is a function in C of which each call has to be seen."""
    if value is print:
        return True
    return isinstance(value, types.BuiltinFunctionType) and not foreign_calls.is_known(value)


def hands_on(code: CodeNames, name: str) -> bool:
    """Tell whether code may give what has a name to C code that calls it.

    Args:
        code: The names in the code.
        name: That of a global, an attribute, or a variable.
    """
    if name not in code.values:
        return False
    return not (_CALL_BACK.isdisjoint(code.globals) and _CALL_BACK.isdisjoint(code.attributes))


def _in_c(kind: type) -> type:
    """Return the first class of the inheritance that adds fields which Python does not manage."""
    while kind is not object:
        base = kind.__base__ or object
        own = vars(kind)
        slots = own.get("__slots__", ())
        count = 1 if isinstance(slots, str) else len(tuple(slots))
        managed = _POINTER * (count + ("__dict__" in own) + ("__weakref__" in own))
        if kind.__basicsize__ - base.__basicsize__ > managed or kind.__itemsize__:
            return kind if kind.__basicsize__ > base.__basicsize__ + managed else _sized(kind)
        kind = base
    return object


def _sized(kind: type) -> type:
    """Return the base that made instances of a class vary in size, such as `tuple` or `int`."""
    while kind.__base__ is not None and kind.__base__.__itemsize__ == kind.__itemsize__:
        kind = kind.__base__
    return kind


def hidden_call(path: str, function: Any) -> tuple[str, str]:
    """Return why a function that is handed on can't be followed, and what helps."""
    who = path or "the program"
    return f"{who} hands {function.__name__} on to what calls it unseen", MARK_IT
