"""Objects with native state, which can't be inspected, and callables that the profiler misses.

An object of a class in C may answer otherwise at each call although nothing that Python shows of
it has changed: a random generator, a memory view, a queue. The interpreter reports calls of plain
functions in C; calls of what Cython makes, and calls that other C code makes, it does not report.
"""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Iterable, Iterator
from typing import Any

from fxkit.tracing.bytecode.code_names import CodeNames
from fxkit.tracing.environment import foreign_calls
from fxkit.tracing.values.stored import (
    base_of,
    class_attributes,
    count_of_slots,
    hides_attributes,
    is_a,
    module_of,
    name_of,
    qualname_of,
    sizes_of,
)

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
def has_native_state(kind: type) -> bool:
    """Tell whether instances of a class keep state in C that no guard can compare."""
    if _full_name(kind) in _IMMUTABLE:  # a type variable hides its dict since Python 3.12
        return False
    if hides_attributes(kind):
        return True
    if module_of(kind).partition(".")[0] == "torch":
        return False
    base = _in_c(kind)
    module = module_of(base)
    if _full_name(base) in _IMMUTABLE or issubclass(base, BaseException):
        return False
    return module.partition(".")[0] not in ("torch", "numpy") or module.startswith("numpy.random")


def _full_name(kind: type) -> str:
    return f"{module_of(kind)}.{qualname_of(kind)}"


def is_hidden(function: Any) -> bool:
    """Tell whether calls of a function are not reported, and may do anything."""
    if type(function) is types.MethodType:
        function = function.__func__
    return name_of(type(function)) == _HIDDEN


def reads_clock(kind: Any) -> bool:
    """Tell whether a class, when it is called, may ask for the time."""
    return (getattr(kind, "__module__", None), getattr(kind, "__name__", None)) in _READS_CLOCK


def hidden_names(module: types.ModuleType, names: Iterable[str]) -> Iterator[str]:
    """Iterate over what NumPy has under some names that a graph can't repeat a call of."""
    if str(vars(module).get("__name__")).partition(".")[0] != "numpy":
        return
    for name in names:
        value = vars(module).get(name)
        is_foreign = is_hidden(value) and not is_a(value, types.MethodType)
        if is_foreign or (module.__name__, name) in _READS_CLOCK:
            yield f"{module.__name__}.{name}"
        if is_a(value, types.ModuleType):
            yield from hidden_names(value, set(names) - {name})


def can_hand_on(value: Any) -> bool:
    """Tell whether a value is a function in C of which each call has to be seen."""
    if value is print:
        return True
    return is_a(value, types.BuiltinFunctionType) and not foreign_calls.is_known(value)


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
    """Return the first class of the inheritance that adds fields which Python does not manage.

    A slot that something else has taken the place of can't be reached, and is such a field.
    """
    for base, before in itertools.pairwise(_layouts(kind)):
        own = class_attributes(base)
        managed = _POINTER * (count_of_slots(base) + ("__dict__" in own) + ("__weakref__" in own))
        size, item_size = sizes_of(base)
        added = size - sizes_of(before)[0]
        if added > managed or item_size:
            return base if added > managed else _sized(base)
    return object


def _layouts(kind: type) -> Iterator[type]:
    """Iterate over the classes that say how instances lie in memory, up to `object`."""
    base: type | None = kind
    while base is not None:
        yield base
        base = base_of(base)


def _sized(kind: type) -> type:
    """Return the base that made instances of a class vary in size, such as `tuple` or `int`."""
    while (base := base_of(kind)) is not None and sizes_of(base)[1] == sizes_of(kind)[1]:
        kind = base
    return kind


def hidden_call(path: str, function: Any) -> tuple[str, str]:
    """Return why a function that is handed on can't be followed, and what helps."""
    who = path or "the program"
    return f"{who} hands {function.__name__} on to what calls it unseen", MARK_IT
