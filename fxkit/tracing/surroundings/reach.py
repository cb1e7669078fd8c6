"""All that a program can read beside its arguments, looked at before the program reads it.

The walk starts at the callable and goes on while the program runs: when a function is called for
the first time, its globals, closure and the attributes that its code names are looked at before its
first instruction. So each thing is seen as it was before any code that can reach it has run. An
attribute that no code names is not looked at.
"""

from __future__ import annotations

import contextvars
import functools
import gc
import sys
import threading
import types
import weakref
from collections import defaultdict, deque
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from fxkit.tracing.guarding import holders as h
from fxkit.tracing.surroundings import reach_kinds as kinds
from fxkit.tracing.surroundings.code_names import CodeNames, names_in
from fxkit.tracing.surroundings.strangers import (
    MARK_IT,
    can_hand_on,
    hidden_call,
    hidden_names,
    is_hidden,
    is_stranger,
)
from fxkit.tracing.surroundings.trust import is_trusted, is_trusted_class
from fxkit.tracing.values.outside import Place
from fxkit.tracing.values.refusals import Refusal

Visit = tuple[Any, str]


class Reach:
    """What a program refers to; see `values.outside.Surroundings` for the shared names.

    Attributes:
        places: `{id: (tensor, places)}` of the tensors that were found.
        modules: The path of each `nn.Module`, by `id`.
        found: `(path, module)` in the order in which they were found.
        holders: What was looked into, in order.
        empties: Dicts of modules that were empty; they have to stay so.
        codes: The code of the functions that were called, with that nested in it.
        names: The attributes that this code reads.
        missed: Code that was called and of which no function is known.
        refusal: Why the state can't be told, once that is known.
        strangers: Objects whose state can't be told, and where they lie.
        is_lenient: Whether objects that change when they are read are passed over.
        kept: All objects that were visited, by `id`.
        unseen: Functions in C whose calls have to be seen, with their names.
    """

    def __init__(self) -> None:
        self.places: dict[int, tuple[torch.Tensor, list[Place]]] = {}
        self.modules: dict[int, str] = {}
        self.found: list[tuple[str, torch.nn.Module]] = []
        self.holders: list[h.Holder] = []
        self.empties: list[tuple[str, dict[Any, Any]]] = []
        self.codes: set[types.CodeType] = set()
        self.names: set[str] = set()
        self.missed: list[types.CodeType] = []
        self.refusal: Refusal | None = None
        self.strangers: list[Visit] = []
        self.is_lenient = False
        self.unseen: list[tuple[Any, str]] = [(print, "print")]
        self._functions: dict[types.CodeType, list[types.FunctionType]] = defaultdict(list)
        self._nested: set[types.CodeType] = set()
        self._reads_all = False
        self._waiting: dict[str, list[Visit]] = defaultdict(list)
        self._any: list[Visit] = []
        self._namespaces: dict[int, h.NamespaceHolder] = {}
        self.kept: dict[int, Any] = {}
        self._contexts: dict[int, Any] = {}
        self._todo: deque[Visit] = deque()
        self._python_modules: list[tuple[types.ModuleType, str]] = []

    @classmethod
    def of(
        cls,
        fn: Any,
        modules: Iterable[tuple[str, torch.nn.Module]],
        more: Iterable[Visit] = (),
    ) -> Reach:
        """Walk from a callable, from the modules among its arguments, and from other objects."""
        reach = cls()
        reach._todo.append((fn, "" if isinstance(fn, torch.nn.Module) else kinds.root_name(fn)))
        reach._todo.extend([*((module, path) for path, module in modules), *more])
        reach._walk()
        return reach

    def add(self, value: Any, path: str) -> None:
        """Look at one more object."""
        self._todo.append((value, path))
        self._walk()

    def enter(self, frame: types.FrameType) -> None:
        """Look at what a function that is being called may read."""
        code = frame.f_code
        names = names_in(code)
        if code not in self._functions and code not in self.codes and not self._find(frame):
            self.missed.append(code)
        self.codes |= names.codes
        self._nested |= names.codes - {code}
        self._add_names(names.attributes)
        if names.is_reflective:
            self._add_names(part for text in names.strings for part in text.split("."))
            self._read_all()
        for fn in self._functions[code]:
            self._inside(fn)
        self._globals(frame.f_globals, names)
        self._walk()

    def enter_again(self, frame: types.FrameType) -> None:
        """Look whether a closure that is called is one of those that were looked at.

        Functions that the program makes itself are: what they hold is its own.
        """
        code, values = frame.f_code, frame.f_locals
        if code not in self._functions or code in self._nested:
            return
        for fn in self._functions[code]:
            cells = zip(code.co_freevars, fn.__closure__ or (), strict=False)
            if all(h.content(cell) is values.get(name, h.ABSENT) for name, cell in cells):
                return
        self.missed.append(code)

    @property
    def reads_all(self) -> bool:
        """Whether the program may read attributes by names that are not written in its code."""
        return self._reads_all

    def enter_context(self, variable: contextvars.ContextVar[Any]) -> None:
        """Look at a context variable that is about to be read or set."""
        if id(variable) in self._contexts:
            return
        self._contexts[id(variable)] = variable
        holder = h.ContextHolder(variable, variable.name)
        self.holders.append(holder)
        self._child((holder.entries[None],), 0, holder.entries[None], variable.name)
        self._walk()

    def _find(self, frame: types.FrameType) -> bool:
        """Look for the function that is called on its first argument, and among the globals."""
        code = frame.f_code
        candidates = [frame.f_globals.get(code.co_name)]
        if code.co_argcount:
            first = frame.f_locals.get(code.co_varnames[0])
            kind = first if isinstance(first, type) else type(first)
            candidates += [vars(base).get(code.co_name) for base in kind.__mro__]
            self._todo.append((kind, kind.__name__))
        found = kinds.function_with(code, candidates)
        if found:
            self._functions[code] += found
        return bool(found)

    def _walk(self) -> None:
        try:
            while self._todo:
                self._visit(*self._todo.popleft())
                if len(self.kept) > kinds.LIMIT:
                    raise Refusal(
                        f"the program refers to more than {kinds.LIMIT} objects",
                        "pass what it needs as arguments, or keep it in fewer objects",
                    )
        except Refusal as refusal:
            self.refusal = self.refusal or refusal
            self._todo.clear()

    # Visits -----------------------------------------------------------------------------------

    def _visit(self, value: Any, path: str) -> None:
        kind = type(value)
        if kind in h.PLAIN or id(value) in self.kept:
            return
        if isinstance(value, kinds.LEFT_ALONE) or kind is type(None):
            self._visit_leaf(value, path)
            return
        self.kept[id(value)] = value
        if isinstance(value, torch.nn.Module):
            self._visit_module(value, path)
        elif kind is types.FunctionType:
            self._visit_function(value, path)
        elif isinstance(value, dict):
            if can_hand_on(factory := getattr(value, "default_factory", None)):
                raise Refusal(*hidden_call(path, factory))
            self._hold(h.DictHolder(value, path))
            self._visit_attributes(value, kind, path)
        elif isinstance(value, (list, deque)):
            self._hold(h.SequenceHolder(value, path))
            self._visit_attributes(value, kind, path)
        elif isinstance(value, set):
            self._hold(h.SetHolder(value, path))
        elif isinstance(value, (tuple, frozenset)):
            for index, item in enumerate(value):
                self._child(value, index, item, f"{path}[{index}]")
            self._visit_attributes(value, kind, path)
        elif isinstance(value, type):
            self._visit_class(value, path)
        elif not self._visit_wrapper(value, path):
            self._visit_object(value, kind, path)

    def _visit_leaf(self, value: Any, path: str) -> None:
        owner = getattr(value, "__self__", None)
        if type(value) is torch.Generator:
            self.kept[id(value)] = value
        elif isinstance(owner, torch.Tensor):
            self._child((owner,), 0, owner, path or value.__name__)
        elif can_hand_on(value):
            self.unseen.append((value, path.rpartition(".")[2]))

    def _visit_wrapper(self, value: Any, path: str) -> bool:
        """Visit what a method, partial, property or memoised function is made of."""
        if isinstance(value, types.MethodType):
            parts = [value.__self__, value.__func__]
        elif isinstance(value, functools.partial):
            if can_hand_on(value.func):
                raise Refusal(*hidden_call(path, value.func))
            parts = [value.func, value.args, value.keywords]
        elif isinstance(value, (staticmethod, classmethod)):
            parts = [value.__func__]
        elif isinstance(value, property):
            parts = [value.fget, value.fset, value.fdel]
        elif isinstance(value, kinds.LRU):
            self._visit_memo(value, path)
            parts = [value.__wrapped__]
        elif isinstance(value, types.MappingProxyType):
            parts = [part for part in gc.get_referents(value) if isinstance(part, dict)]
        elif isinstance(value, np.ndarray):
            if value.dtype.hasobject or value.nbytes > 1 << 22:
                raise Refusal(f"{path} is an array whose content can't be guarded")
            self._hold(h.ArrayHolder(value, path))
            parts = []
        elif isinstance(value, types.ModuleType):
            self._python_modules.append((value, path))
            self._python_module_names(value, self.names, path)
            parts = []
        elif isinstance(value, weakref.ref):
            self.holders.append(h.WeakHolder(value, path))
            parts = [] if isinstance(value(), torch.Tensor) else [value()]
        else:
            return False
        self._todo.extend((part, path) for part in parts if part is not None)
        return True

    def _visit_memo(self, memo: Any, path: str) -> None:
        self.holders.append(h.MemoHolder(memo, path))
        for result in kinds.results_of(memo):
            self._child((result,), 0, result, f"{path}_result")

    def _visit_module(self, module: torch.nn.Module, path: str) -> None:
        if not self.found:
            full, empty = kinds.global_hooks()
            self._todo.extend(full)
            self.empties.extend(empty)
        self.modules[id(module)] = path
        self.found.append((path, module))
        dot = f"{path}." if path else ""
        attributes = module.__dict__
        names = self._attribute_names(type(module))
        holder = h.NamespaceHolder(attributes, path, names=names, extra=kinds.MODULE_STATE)
        self._namespaces[id(attributes)] = holder
        self.holders.append(holder)
        for table in kinds.TABLES:
            entries = attributes.get(table)
            if not entries:
                if entries is not None:
                    self.empties.append((dot + table, entries))
                continue
            self.kept[id(entries)] = entries
            held = h.NamespaceHolder(entries, path)
            self.holders.append(held)
            is_named = table in ("_parameters", "_buffers", "_modules")
            for name, value in entries.items():
                self._child(entries, name, value, f"{dot}{name}" if is_named else f"{dot}{table}")
        for name, value in attributes.items():
            if name not in kinds.TABLES and name != "_non_persistent_buffers_set":
                self._attribute(attributes, name, value, dot + name, names)
        self._visit_class(type(module), path)

    def _visit_function(self, fn: types.FunctionType, path: str) -> None:
        if is_trusted(fn.__globals__.get("__name__")):
            if not (is_trusted(fn.__module__) or hasattr(fn, kinds.OPAQUE)):
                self._cells(fn)  # what a decorator of torch or contextlib has put around it
            return
        self._functions[fn.__code__].append(fn)
        if fn.__dict__ or fn.__code__ in self.codes:
            self._namespace(fn.__dict__, path, None)
        if fn.__code__ in self.codes:
            self._inside(fn)

    def _inside(self, fn: types.FunctionType) -> None:
        """Look at the closure and the defaults of a function that runs."""
        self._cells(fn)
        if fn.__defaults__ and id(fn.__defaults__) not in self.kept:
            self.kept[id(fn.__defaults__)] = fn.__defaults__
            for index, value in enumerate(fn.__defaults__):
                self._child(fn.__defaults__, index, value, f"default_{index}")
                if can_hand_on(value):
                    place = fn.__code__.co_argcount - len(fn.__defaults__) + index
                    self._visit_leaf(value, fn.__code__.co_varnames[place])
        if fn.__kwdefaults__:
            self._todo.append((fn.__kwdefaults__, fn.__name__))

    def _cells(self, fn: types.FunctionType) -> None:
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=False):
            if id(cell) in self.kept:
                continue
            self.kept[id(cell)] = cell
            holder = h.CellHolder(cell, name)
            self.holders.append(holder)
            if holder.entries[None] is not h.ABSENT:
                self._child(cell, None, holder.entries[None], name)

    def _globals(self, namespace: dict[str, Any], code: CodeNames) -> None:
        holder = self._namespaces.get(id(namespace))
        if holder is None:
            holder = h.NamespaceHolder(namespace, "", copied=False)
            self._namespaces[id(namespace)] = holder
            self.holders.append(holder)
        attributes = code.attributes | code.stored
        for name in sorted(code.globals):
            is_new = name not in holder.entries
            value = holder.add(name)
            if isinstance(value, types.ModuleType):
                self._python_module_names(value, attributes, name)
            elif is_new and value is not h.ABSENT:
                self._child(namespace, name, value, name)
        for name in code.imports:
            module = sys.modules.get(name)
            if module is not None:
                self._python_module_names(module, attributes, name)

    def _python_module_names(self, module: Any, names: Iterable[str], path: str) -> None:
        """Look at those attributes of a Python module that a function which sees it names."""
        if is_trusted(module.__name__):
            for hidden in hidden_names(module, names):
                why = f"the program may call {hidden}, which a graph can't repeat"
                self.refusal = self.refusal or Refusal(why, MARK_IT)
            return
        attributes = vars(module)
        holder = self._namespaces.get(id(attributes))
        if holder is None:
            holder = h.NamespaceHolder(attributes, path, copied=False)
            self._namespaces[id(attributes)] = holder
            self.holders.append(holder)
        for name in sorted(names):
            if name not in attributes or name in holder.entries:
                continue
            value = holder.add(name)
            if isinstance(value, types.ModuleType):
                self._python_module_names(value, names, f"{path}.{name}")
            else:
                self._child(attributes, name, value, f"{path}.{name}")

    def _visit_class(self, kind: type, path: str) -> None:
        if not is_trusted_class(type(kind)):
            self._todo.append((type(kind), type(kind).__qualname__))
        for base in kind.__mro__:
            if is_trusted_class(base) or (base is not kind and id(base) in self.kept):
                continue
            self.kept[id(base)] = base
            attributes = vars(base)
            inner = next((d for d in gc.get_referents(attributes) if isinstance(d, dict)), None)
            held = attributes if inner is None else inner
            holder = h.NamespaceHolder(
                held,
                base.__qualname__,
                names=self.names,
                assign=functools.partial(kinds.assign, base),
            )
            self.holders.append(holder)
            for name, value in list(attributes.items()):
                where = f"{base.__qualname__}.{name}"
                if not (name.startswith("__") and name.endswith("__")):
                    self._attribute(held, name, value, where, self.names)
                elif isinstance(value, types.FunctionType):
                    self._todo.append((value, name))  # operators call it without naming it
                else:
                    self._attribute(held, name, value, where, self.names, is_sealed=True)

    def _visit_object(self, value: Any, kind: type, path: str) -> None:
        if isinstance(value, torch.Tensor):
            return
        if isinstance(value, threading.local):
            self._hold(h.LocalHolder(value, path))
            return
        if kind.__module__ == "_io" and not kinds.is_readable(value):
            return
        if hasattr(kind, "__next__") or kind.__module__ == "_io":
            if not self.is_lenient:
                self.strangers.append((value, path))
            return
        if is_stranger(kind) or is_hidden(value):
            self.strangers.append((value, path))
            return
        self._visit_attributes(value, kind, path)
        if not is_trusted_class(kind):
            self._visit_class(kind, path)

    def _visit_attributes(self, value: Any, kind: type, path: str) -> None:
        if kinds.keeps_to_itself(kind):
            return
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            self._namespace(attributes, path, self._attribute_names(kind), kinds.is_sealed(kind))
        slots = kinds.slot_names(kind)
        if slots:
            holder = h.SlotsHolder(value, path, names=slots)
            self.holders.append(holder)
            for name, item in holder.entries.items():
                self._child(kinds.slot_place(holder, name), name, item, f"{path}.{name}")

    # Parts ------------------------------------------------------------------------------------

    def _namespace(
        self, attributes: dict[str, Any], path: str, names: set[str] | None, seals: bool = False
    ) -> None:
        if id(attributes) in self.kept:
            return
        self.kept[id(attributes)] = attributes
        holder = h.NamespaceHolder(attributes, path, names=names, is_sealed=seals)
        self._namespaces[id(attributes)] = holder
        self.holders.append(holder)
        for name, value in list(attributes.items()):
            self._attribute(attributes, name, value, f"{path}.{name}".lstrip("."), names, seals)

    def _attribute(
        self,
        holder: Any,
        name: str,
        value: Any,
        path: str,
        names: set[str] | None,
        is_sealed: bool = False,
    ) -> None:
        if type(value) in h.PLAIN:
            return
        if isinstance(value, torch.Tensor):
            self._child(holder, name, value, path)
        elif names is None or name in names or name in kinds.MODULE_STATE:
            self._todo.append((value, path))
        else:
            self._waiting[name].append((value, path))
            if not (is_sealed or isinstance(value, types.FunctionType)):
                self._any.append((value, path))

    def _hold(self, holder: h.Holder) -> None:
        self.holders.append(holder)
        for key, value in holder.entries.items():
            if isinstance(holder, h.DictHolder) and type(key) not in h.PLAIN:
                self._todo.append((key, holder.path))
            path = f"{holder.path}.{key}" if isinstance(key, (str, int)) else holder.path
            self._child(holder.value, key, value, path)

    def _child(self, holder: Any, key: Any, value: Any, path: str) -> None:
        if type(value) in h.PLAIN:
            return
        if isinstance(value, torch.Tensor):
            place = Place(holder, key, path)
            self.places.setdefault(id(value), (value, []))[1].append(place)
            extra = getattr(value, "__dict__", None)
            if extra:
                self._namespace(extra, path, self.names)
        else:
            self._todo.append((value, path))

    def _attribute_names(self, kind: type) -> set[str] | None:
        """Return the attributes of instances that may be read; None for all."""
        others = [base for base in kind.__mro__[:-1] if is_trusted_class(base)]
        if kinds.is_read_by_name(kind):
            return self.names
        if self._reads_all or any(base is not torch.nn.Module for base in others):
            return None
        return self.names

    def _add_names(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self.names:
                self.names.add(name)
                self._todo.extend(self._waiting.pop(name, ()))
                for module, path in self._python_modules:
                    self._python_module_names(module, (name,), path)

    def _read_all(self) -> None:
        if not self._reads_all:
            self._reads_all = True
            for holder in self.holders:
                if isinstance(holder, h.NamespaceHolder) and kinds.can_widen(holder):
                    holder.names = None
        self._todo.extend(self._any)
        self._any.clear()
