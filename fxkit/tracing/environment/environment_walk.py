"""Walk the environment of a program: all that it can read beside its arguments, before it does.

The walk starts at the callable and goes on while the program runs: when a function is called for
the first time, its globals, closure and the attributes that its code names are looked at before its
first instruction. So each thing is seen as it was before any code that can reach it has run. An
attribute that no code names is not looked at.
"""

from __future__ import annotations

import contextlib
import contextvars
import enum
import functools
import threading
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from fxkit.tracing.bytecode.code_names import names_in
from fxkit.tracing.environment import object_kinds as kinds
from fxkit.tracing.environment.findings import Findings
from fxkit.tracing.environment.found_functions import FoundFunctions
from fxkit.tracing.environment.namespaces import dict_of
from fxkit.tracing.environment.opaque_objects import (
    can_hand_on,
    has_native_state,
    hidden_call,
    is_hidden,
)
from fxkit.tracing.environment.wanted_names import Visit
from fxkit.tracing.guarding import state_containers as h
from fxkit.tracing.guarding.special_state import (
    ArrayHolder,
    ContextHolder,
    LocalHolder,
    MemoHolder,
    WeakHolder,
)
from fxkit.tracing.values.allowlist import is_allowlisted_class
from fxkit.tracing.values.refusals import Refusal
from fxkit.tracing.values.stored import (
    attributes_of,
    class_attributes,
    in_classes,
    is_a,
    is_comparable,
    is_weak_proxy,
    module_of,
    mro_of,
    qualname_of,
)
from fxkit.tracing.values.symbolic_scalars import SYMBOLIC


class EnvironmentWalk:
    """What a program refers to.

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
        self._findings = findings = Findings()
        self._wanted, self._namespaces = findings.wanted, findings.namespaces
        self._todo, self._weak = findings.todo, findings.weak
        self.places, self.holders, self.kept = findings.places, findings.holders, findings.kept
        self.modules: dict[int, str] = {}
        self.found: list[tuple[str, torch.nn.Module]] = []
        self.empties: list[tuple[str, dict[Any, Any]]] = []
        self.names = self._wanted.names
        self.refusal: Refusal | None = None
        self.strangers: list[Visit] = []
        self.is_lenient = False
        self.unseen = findings.unseen
        self._functions = FoundFunctions(findings)
        self.codes, self.missed = self._functions.codes, self._functions.missed
        self._classes: set[type] = set()
        self._contexts: dict[int, Any] = {}

    @classmethod
    def of(
        cls,
        fn: Any,
        modules: Iterable[tuple[str, torch.nn.Module]],
        more: Iterable[Visit] = (),
    ) -> EnvironmentWalk:
        """Walk from a callable, from the modules among its arguments, and from other objects."""
        reach = cls()
        reach._todo.append((fn, kinds.root_name(fn)))
        reach._todo.extend([*((module, path) for path, module in modules), *more])
        reach._walk()
        return reach

    def add(self, value: Any, path: str) -> None:
        """Look at one more object."""
        self._todo.append((value, path))
        self._walk()

    def enter(self, frame: types.FrameType) -> None:
        """Look at what a function that is being called may read."""
        with self._giving_up():
            self._enter(frame)

    def _enter(self, frame: types.FrameType) -> None:
        names = names_in(frame.f_code)
        self._functions.enter(frame, names.codes)
        self._findings.add_names(names.attributes, names.asked | names.stored)
        if names.is_reflective:
            self._findings.add_names(part for text in names.strings for part in text.split("."))
            self._findings.read_all()
        self._functions.look_inside(frame.f_code)
        self._namespaces.add_globals(frame.f_globals, names)
        self._walk()

    def enter_again(self, frame: types.FrameType) -> None:
        """Look whether a closure that is called is one of those that were looked at."""
        self._functions.enter_again(frame)

    @property
    def names_of_given(self) -> set[str]:
        """The attributes that the program reads, sets or asks for of what it is given."""
        return self.names | self._wanted.asked

    @property
    def reads_all(self) -> bool:
        """Whether the program may read attributes by names that are not written in its code."""
        return self._wanted.reads_all

    def enter_context(self, variable: contextvars.ContextVar[Any]) -> None:
        """Look at a context variable that is about to be read or set."""
        if id(variable) in self._contexts:
            return
        self._contexts[id(variable)] = variable
        holder = ContextHolder(variable, variable.name)
        self.holders.append(holder)
        self._findings.child((holder.entries[None],), 0, holder.entries[None], variable.name)
        self._walk()

    def finish(self) -> None:
        """Let methods that have not run count as well, where the program may look into them."""
        if not kinds.REVEALING.isdisjoint(self.names):
            self._functions.add_idle()

    def forget(self) -> None:
        """Let go of what only weak references lead to."""
        for key in self._weak:
            self.kept.pop(key, None)

    def _walk(self) -> None:
        self.refusal = self.refusal or self._namespaces.refusal
        with self._giving_up():
            while self._todo or self._namespaces.found:
                while self._namespaces.found:
                    self._findings.child(*self._namespaces.found.pop())
                if self._todo:
                    self._visit(*self._todo.popleft())
                if len(self.kept) > kinds.LIMIT:
                    raise Refusal(
                        f"the program refers to more than {kinds.LIMIT} objects",
                        "pass what it needs as arguments, or keep it in fewer objects",
                    )

    @contextlib.contextmanager
    def _giving_up(self) -> Iterator[None]:
        """Let the state be one that can't be told where looking at it fails."""
        try:
            yield
        except Refusal as refusal:
            self._give_up(refusal)
        except Exception as error:  # objects may have any code that runs when they are looked at
            why = f"looking at what the program refers to raises {type(error).__name__}: {error}"
            self._give_up(Refusal(why))

    def _give_up(self, refusal: Refusal) -> None:
        self.refusal = self.refusal or refusal
        self._todo.clear()

    # Visits -----------------------------------------------------------------------------------

    def _visit(self, value: Any, path: str) -> None:
        kind = type(value)
        if not is_comparable(kind):
            raise Refusal(f"{path or 'an object'} is of a class that can't be compared")
        if kind in h.PLAIN or kind in SYMBOLIC or id(value) in self.kept:
            return
        if issubclass(kind, enum.Enum) and not is_allowlisted_class(kind):
            self.kept[id(value)] = value
            self._findings.namespace(
                attributes_of(value) or {}, path, self.names, extra=frozenset({"_value_"})
            )
            self._visit_class(kind, qualname_of(kind))
            return
        if issubclass(kind, kinds.LEFT_ALONE) or kind is type(None):
            self._findings.leaf(value, path)
            return
        self.kept[id(value)] = value
        if issubclass(kind, torch.nn.Module):
            self._visit_module(value, path)
        elif kind is types.FunctionType:
            self._functions.visit(value, path)
        elif issubclass(kind, dict):
            factory = kinds.factory_of(value)
            if can_hand_on(factory):
                raise Refusal(*hidden_call(path, factory))
            self._findings.hold(h.DictHolder(value, path))
            self._visit_attributes(value, kind, path)
        elif issubclass(kind, (list, deque)):
            self._findings.hold(h.SequenceHolder(value, path))
            self._visit_attributes(value, kind, path)
        elif issubclass(kind, set):
            self._findings.hold(h.SetHolder(value, path))
            self._visit_attributes(value, kind, path)
        elif issubclass(kind, (tuple, frozenset)):
            base = tuple if issubclass(kind, tuple) else frozenset
            for index, item in enumerate(base.__iter__(value)):
                self._findings.child(value, index, item, f"{path}[{index}]")
            self._visit_attributes(value, kind, path)
        elif issubclass(kind, type):
            self._visit_class(value, path)
        elif not self._visit_wrapper(value, path):
            self._visit_object(value, kind, path)

    def _visit_wrapper(self, value: Any, path: str) -> bool:
        """Visit what a method, partial, property or memoised function is made of."""
        parts = kinds.made_of(value)
        if parts is not None:
            if is_a(value, functools.partial) and can_hand_on(parts[0]):
                raise Refusal(*hidden_call(path, parts[0]))
            if is_a(value, kinds.LRU):
                self._visit_memo(value, path)
        elif is_a(value, np.ndarray):
            if value.dtype.hasobject or value.nbytes > 1 << 22:
                raise Refusal(f"{path} is an array whose content can't be guarded")
            self._findings.hold(ArrayHolder(value, path))
            self._visit_attributes_of_array(value, path)
            parts = []
        elif is_a(value, types.ModuleType):
            self._namespaces.add_module(value, self.names, path)
            parts = []
        elif is_a(value, weakref.ref) or is_weak_proxy(value):
            reference = value if is_a(value, weakref.ref) else kinds.reference_of(value)
            if reference is None:
                return False
            self.holders.append(WeakHolder(reference, path))
            referent = weakref.ref.__call__(reference)
            parts = [] if is_a(referent, torch.Tensor) else [referent]
            self._weak.update(map(id, parts))
        else:
            return False
        self._todo.extend((part, path) for part in parts if part is not None)
        return True

    def _visit_memo(self, memo: Any, path: str) -> None:
        self.holders.append(MemoHolder(memo, path))
        for result in kinds.results_of(memo):
            self._findings.child((result,), 0, result, f"{path}_result")

    def _visit_module(self, module: torch.nn.Module, path: str) -> None:
        if not self.found:
            full, empty = kinds.global_hooks()
            self._todo.extend(full)
            self.empties.extend(empty)
        self.modules[id(module)] = path
        self.found.append((path, module))
        dot = f"{path}." if path else ""
        attributes = attributes_of(module)
        if attributes is None:
            raise Refusal(f"{path or 'the module'} hides its attributes")
        names = self._findings.attribute_names(type(module))
        holder = h.NamespaceHolder(attributes, path, names=names, extra=kinds.MODULE_STATE)
        self._namespaces.held[id(attributes)] = holder
        self.holders.append(holder)
        self._findings.parts(module, path)
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
                self._findings.child(
                    entries, name, value, f"{dot}{name}" if is_named else f"{dot}{table}"
                )
        for name, value in attributes.items():
            if name not in kinds.TABLES and name != "_non_persistent_buffers_set":
                self._findings.attribute(attributes, name, value, dot + name, names)
        self._visit_class(type(module), path)

    def _visit_class(self, kind: type, path: str) -> None:
        if not is_allowlisted_class(type(kind)):
            self._todo.append((type(kind), qualname_of(type(kind))))
        for base in mro_of(kind):
            if is_allowlisted_class(base):
                if issubclass(base, torch.nn.Module):
                    self._namespaces.add_class(base)
                continue
            if base in self._classes:
                continue
            self._classes.add(base)
            self.kept[id(base)] = base
            self._findings.parts(base, qualname_of(base))
            attributes, held = class_attributes(base), dict_of(base)
            holder = h.NamespaceHolder(
                held,
                qualname_of(base),
                names=None if self.reads_all else self.names,
                has_specials=True,
                extra=kinds.read_by_bases(base),
                assign=functools.partial(kinds.assign, base),
            )
            self.holders.append(holder)
            for name, value in list(attributes.items()):
                where = f"{qualname_of(base)}.{name}"
                # What a method is made of counts once it runs.
                self._functions.methods.update(map(id, (value, *(kinds.made_of(value) or ()))))
                if not (name.startswith("__") and name.endswith("__")):
                    names = None if name in holder.extra else self.names
                    self._findings.attribute(held, name, value, where, names)
                elif type(value) is types.FunctionType:
                    self._todo.append((value, name))  # operators call it without naming it
                else:
                    self._findings.attribute(held, name, value, where, self.names, is_sealed=True)

    def _visit_object(self, value: Any, kind: type, path: str) -> None:
        if issubclass(kind, torch.Tensor):
            return
        if issubclass(kind, threading.local):
            self._findings.hold(LocalHolder(value, path))
            return
        is_file = module_of(kind) == "_io"
        if is_file and not kinds.is_readable(value):
            return
        if is_file or in_classes(kind, "__next__") is not None:
            if not self.is_lenient:
                self.strangers.append((value, path))
            return
        if has_native_state(kind) or is_hidden(value):
            self.strangers.append((value, path))
            return
        self._visit_attributes(value, kind, path)

    def _visit_attributes(self, value: Any, kind: type, path: str) -> None:
        if kinds.keeps_to_itself(kind):
            return
        self._findings.parts(value, path)
        attributes = attributes_of(value)
        if attributes is not None:
            self._findings.namespace(
                attributes, path, self._findings.attribute_names(kind), kinds.is_sealed(kind)
            )
        slots = kinds.guarded_slots(kind)
        if slots:
            holder = h.SlotsHolder(value, path, slots=slots)
            self.holders.append(holder)
            for name, item in holder.entries.items():
                self._findings.child(holder.place(name).holder, name, item, f"{path}.{name}")
        if not is_allowlisted_class(kind):
            self._visit_class(kind, path)

    def _visit_attributes_of_array(self, array: np.ndarray, path: str) -> None:
        """Look at what an array of a class of its own has as attributes, such as a mask."""
        attributes = attributes_of(array)
        if attributes:
            self._findings.namespace(attributes, path, None)
        if not is_allowlisted_class(type(array)):
            self._visit_class(type(array), path)
