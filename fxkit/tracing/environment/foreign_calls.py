"""Allowlists of C functions: which a program may call while its graph is recorded.

What such a function does can't be looked into. Those of the tables only compute from what they are
given, or change containers whose content is compared; any other may see or change what no guard
knows about: clocks, files, the network, other threads.
"""

from __future__ import annotations

import collections
import functools
import re
import sys
import types
from typing import Any

import numpy as np

from fxkit.tracing.values.allowlist import is_allowlisted

_MODULES = frozenset(
    """
    math cmath _operator operator _functools itertools _collections _abc _bisect _heapq _struct
    _string _json _typing unicodedata binascii zlib _stat errno _signature _sre _md5 _sha1 _sha256
    _sha512 _hashlib _random _weakref _codecs _locale _imp _frozen_importlib marshal _statistics
    """.split()
)
_IN_MODULES = frozenset(
    """
    sys._getframe sys.getrecursionlimit sys.intern sys.exc_info sys.getsizeof sys.is_finalizing
    posix.fspath sys.setprofile sys.getprofile _thread.get_ident sys.audit
    _warnings._filters_mutated posix.getpid nt.fspath _thread.allocate_lock _thread.RLock
    posix._path_normpath posix._path_splitroot posix._path_splitroot_ex
    nt._path_normpath nt._path_splitroot nt._path_splitroot_ex
    """.split()
)
_EFFECTFUL = frozenset(
    """
    io _io posix nt time _socket socket _ssl select _posixsubprocess mmap _random fcntl termios
    datetime _datetime _winapi _thread _queue _curses readline _tkinter _sqlite3 sqlite3
    """.split()
)
_CLOCKS = frozenset({"now", "today", "utcnow"})
FILES_OF_TORCH = ("torch.serialization", "torch.hub", "torch.storage", "torch.utils.data")
_OWN_MODULES = ("importlib", "_frozen_importlib", "linecache")
_DENIED_OF_NUMPY = frozenset({"fromfile", "get_state", "bit_generator"})
_DENIED_OF_TORCH = frozenset(
    """
    initial_seed seed get_num_threads get_num_interop_threads _get_num_threads set_num_threads
    _get_float32_matmul_precision _set_float32_matmul_precision set_flush_denormal
    _set_deterministic_algorithms set_anomaly_enabled is_anomaly_enabled
    is_anomaly_check_nan_enabled
    """.split()
)
_FLAGS_OF_TORCH = re.compile(r"_[gs]et_(\w+_)?(sdp|cudnn|mkldnn|cublas|overrideable|onednn)_\w+")
_DENIED_BUILTINS = frozenset(
    "input open exec eval compile __import__ globals locals breakpoint id hash".split()
)
_CONTAINERS: tuple[type, ...] = (
    *(object, type, list, dict, set, frozenset, tuple, str, bytes, bytearray, int, float, complex),
    *(bool, type(None), slice, range, property, re.Pattern, re.Match, types.MappingProxyType),
    *(collections.deque, collections.OrderedDict, collections.defaultdict, functools.partial),
    *(
        types.GeneratorType,
        types.CoroutineType,
        types.CodeType,
        types.FunctionType,
        types.MethodType,
    ),
    *(type({}.keys()), type({}.values()), type({}.items()), BaseException, super),
    *(types.FrameType, types.TracebackType, types.GetSetDescriptorType, types.MemberDescriptorType),
    *(types.BuiltinFunctionType, types.WrapperDescriptorType, types.MethodDescriptorType),
    *(np.ndarray, np.generic, np.dtype, np.ufunc, staticmethod, classmethod, types.SimpleNamespace),
    *(type(functools.lru_cache(lambda: None)), types.CellType, types.ModuleType),
)
_LOCKS = ("lock", "RLock")


@functools.lru_cache(maxsize=8192)
def _is_known_method(kind: type, name: str) -> bool:
    if kind.__module__ == "torch._C" and _is_setting(name):
        return False
    for base in kind.__mro__:
        if name in base.__dict__ and not isinstance(base.__dict__[name], types.FunctionType):
            if base in _CONTAINERS or base.__name__ in _LOCKS:
                return True
            return is_allowlisted(base.__module__) and base.__module__ != "numpy.random.mtrand"
    return hasattr(kind, "__next__") or kind.__module__ == "builtins"


@functools.lru_cache(maxsize=8192)
def _is_known_function(module: str, name: str) -> bool:
    if module == "builtins":
        return name not in _DENIED_BUILTINS
    if module in _MODULES or f"{module}.{name}" in _IN_MODULES:
        return True
    if name in _DENIED_OF_NUMPY or _is_setting(name):
        return False
    return is_allowlisted(module) and not module.startswith("builtins")


def has_effects(function: Any, caller: str | None) -> bool:
    """Tell whether a C function that a trusted package calls reaches out of the program.

    Args:
        function: The function.
        caller: The name of the module whose code calls it.
    """
    if caller is not None and caller.startswith(_OWN_MODULES):
        return False
    if caller is not None and caller.startswith("torch.") and not caller.startswith(FILES_OF_TORCH):
        return _is_setting(getattr(function, "__name__", ""))
    owner = getattr(function, "__self__", None)
    name = function.__name__
    if owner is None or isinstance(owner, types.ModuleType):
        module = _module_of(function) or getattr(owner, "__name__", "")
        if module.startswith("torch"):
            return _is_setting(name)
        return module in _EFFECTFUL and f"{module}.{name}" not in _IN_MODULES
    return _reaches_out(owner if isinstance(owner, type) else type(owner), name)


@functools.lru_cache(maxsize=8192)
def _is_setting(name: str) -> bool:
    """Tell whether a function of torch reads or writes a setting that no guard compares."""
    return name in _DENIED_OF_TORCH or _FLAGS_OF_TORCH.fullmatch(name) is not None


@functools.lru_cache(maxsize=8192)
def _reaches_out(kind: type, name: str) -> bool:
    if kind.__module__ == "torch._C":
        return _is_setting(name)
    base = next((base for base in kind.__mro__ if name in base.__dict__), kind)
    if base.__module__ in ("datetime", "_datetime"):
        return name in _CLOCKS
    return base.__module__ in _EFFECTFUL and base.__name__ not in _LOCKS


def _module_of(function: Any) -> str | None:
    """Return the name of the module that a function says it is of; some give the module itself."""
    module = getattr(function, "__module__", None)
    if isinstance(module, types.ModuleType):
        module = module.__name__
    return module if isinstance(module, str) else None


def is_known(function: Any) -> bool:
    """Tell whether a C function that is called has no effects but those that are looked for."""
    owner = getattr(function, "__self__", None)
    if isinstance(owner, types.ModuleType) or owner is None:
        module = _module_of(function)
        if module is None:
            module = getattr(owner, "__name__", "builtins")
        return _is_known_function(module, function.__name__)
    if isinstance(owner, type) and function.__name__ not in type(owner).__dict__:
        return owner in _CONTAINERS or is_allowlisted(owner.__module__) or _is_type_method(owner)
    return _is_known_method(type(owner), function.__name__)


def _is_type_method(owner: type) -> bool:
    return owner.__module__ not in sys.stdlib_module_names


def name_of(function: Any) -> str:
    """Return how messages call a C function: `time.perf_counter`, `StringIO.write`."""
    owner = getattr(function, "__self__", None)
    name = getattr(function, "__name__", repr(function))
    if isinstance(owner, types.ModuleType):
        return name if owner.__name__ == "builtins" else f"{owner.__name__}.{name}"
    module = getattr(function, "__module__", None)
    if owner is None:
        return f"{module}.{name}" if module else name
    kind = owner if isinstance(owner, type) else type(owner)
    return f"{kind.__qualname__}.{name}"
