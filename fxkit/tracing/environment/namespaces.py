"""The names that a program reads from modules: its own, the interpreter's, torch's and others'.

Of its own modules it may read whatever its code names. What trusted packages compute is not looked
into, but whether the very functions that the program names still lie there is, since they may have
been exchanged for others.
"""

from __future__ import annotations

import builtins
import gc
import sys
import types
from collections.abc import Iterable
from typing import Any

import torch

from fxkit.tracing.bytecode.code_names import CodeNames, names_in
from fxkit.tracing.environment.object_kinds import names_of_tensors
from fxkit.tracing.environment.opaque_objects import MARK_IT, hidden_names
from fxkit.tracing.guarding import state_containers as h
from fxkit.tracing.guarding.parts import PartsHolder
from fxkit.tracing.values.allowlist import is_allowlisted, is_allowlisted_class
from fxkit.tracing.values.refusals import Refusal
from fxkit.tracing.values.stored import attributes_of, class_attributes, is_a, qualname_of

_CALLS_OF_MODULES = frozenset({"forward", "__call__", "_call_impl", "__getattr__"})


class Namespaces:
    """The modules and classes in which a program looks up names.

    Args:
        holders: Takes a holder for each of them.

    Attributes:
        held: The holder of each dict, by `id` of the dict.
        found: What lies there and has to be looked at: what holds it, its key, the value, its path.
        refusal: Why a name can't be told, once that is known.
    """

    def __init__(self, holders: list[h.GuardedContainer]) -> None:
        self.found: list[tuple[Any, Any, Any, str]] = []
        self.held: dict[int, h.NamespaceHolder] = {}
        self.refusal: Refusal | None = None
        self._holders = holders
        self._modules: list[tuple[types.ModuleType, str]] = []
        self._classes: set[type] = set()
        self._wide: set[int] = set()
        self._seen: set[int] = set()
        self._reflects_objects = False

    def add_globals(self, namespace: dict[str, Any], code: CodeNames) -> None:
        """Look at the globals that a function reads, and at those of the modules among them."""
        holder = self._holder(namespace, "")
        attributes = code.attributes | code.stored
        for name in sorted(code.globals):
            is_new = name not in holder.entries
            value = holder.add(name)
            if is_a(value, types.ModuleType):
                self.add_names(value, attributes, name)
            elif is_new and value is h.ABSENT:
                self._add_builtin(namespace, name)
            elif is_new:
                self.found.append((namespace, name, value, name))
        for name in sorted(code.imports):
            self._add_import(name, attributes)
        if code.reflected:
            self._reflect(namespace, code)

    def add_module(self, module: types.ModuleType, names: Iterable[str], path: str) -> None:
        """Look at a module that lies in an object, where any code may find it."""
        self._modules.append((module, path))
        self.add_names(module, names, path)
        if self._reflects_objects and not is_allowlisted(name_of_module(module)):
            self._widen(module, path)

    def note(self, name: str, asked: bool = False) -> None:
        """Look at what has a name that some code reads as an attribute.

        Args:
            name: The name.
            asked: Whether the code asks if there is such an attribute.
        """
        for module, path in self._modules:
            self.add_names(module, (name,), path)
        if asked or name in names_of_tensors() or name in vars(torch.Tensor):
            self._named_in_class(torch.Tensor, (name,), lacks=True)

    def add_names(self, module: types.ModuleType, names: Iterable[str], path: str) -> None:
        """Look at some attributes of a module."""
        is_ours = not is_allowlisted(name_of_module(module))
        attributes = attributes_of(module)
        if attributes is None:
            self.refusal = self.refusal or Refusal(f"the module {path} hides its attributes")
            return
        wanted: Iterable[str] = ("__getattr__", *names)
        if is_ours and id(module) not in self._seen:
            self._seen.add(id(module))
            self._holders.append(PartsHolder(module, path))
        if not is_ours:
            self._check_hidden(module, names)
            wanted = [n for n in names if n in attributes and not _is_own(attributes[n])]
        holder = self._holder(attributes, path) if wanted else None
        for name in sorted(wanted):
            if holder is None or name in holder.entries:
                continue
            value = holder.add(name)
            if is_a(value, types.ModuleType):
                self.add_names(value, names, f"{path}.{name}")
            elif value is not h.ABSENT and (is_ours or _is_foreign(value)):
                self.found.append((attributes, name, value, f"{path}.{name}"))

    def add_class(self, kind: type) -> None:
        """Look at what runs when a module of a trusted class is called, one step deep."""
        if kind in self._classes:
            return
        self._classes.add(kind)
        forward = class_attributes(kind).get("forward")
        names = _CALLS_OF_MODULES
        if isinstance(forward, types.FunctionType) and is_allowlisted(forward.__module__):
            code = names_in(forward.__code__)
            names |= code.attributes
            for name in code.globals:
                value = forward.__globals__.get(name)
                if is_a(value, types.ModuleType):
                    self.add_names(value, code.attributes, name)
        self._named_in_class(kind, names)

    def _holder(self, namespace: dict[str, Any], path: str) -> h.NamespaceHolder:
        holder = self.held.get(id(namespace))
        if holder is None:
            holder = h.GlobalsHolder(namespace, path)
            self.held[id(namespace)] = holder
            self._holders.append(holder)
        return holder

    def _add_builtin(self, namespace: dict[str, Any], name: str) -> None:
        found = namespace.get("__builtins__", builtins)
        table = vars(found) if is_a(found, types.ModuleType) else found
        holder = self._holder(table, "builtins")
        if name in holder.entries:
            return
        value = holder.add(name)
        is_usual = is_a(value, (type, types.BuiltinFunctionType, types.FunctionType))
        if value is not h.ABSENT and (not is_usual or _is_foreign(value)):
            self.found.append((table, name, value, name))

    def _add_import(self, name: str, attributes: Iterable[str]) -> None:
        module = sys.modules.get(name)
        if not is_allowlisted(name):
            self._holder(sys.modules, "sys.modules").add(name)
        if module is not None:
            self.add_names(module, attributes, name)

    def _check_hidden(self, module: types.ModuleType, names: Iterable[str]) -> None:
        for hidden in hidden_names(module, names):
            why = f"the program may call {hidden}, which a graph can't repeat"
            self.refusal = self.refusal or Refusal(why, MARK_IT)

    def _named_in_class(self, kind: type, names: Iterable[str], *, lacks: bool = False) -> None:
        holder = self._holder(dict_of(kind), qualname_of(kind))
        for name in sorted(names):
            if name in holder.entries or not (lacks or name in holder.value):
                continue
            value = holder.add(name)
            if value is not h.ABSENT and _is_foreign(value):
                self.found.append((holder.value, name, value, f"{qualname_of(kind)}.{name}"))

    def _reflect(self, namespace: dict[str, Any], code: CodeNames) -> None:
        """Look at all attributes of the modules that a function asks for computed names."""
        for name in code.reflected:
            if name in code.globals:
                modules = [(namespace.get(name), name)]
            else:
                self._reflects_objects = True
                modules = [(sys.modules.get(it), it) for it in code.imports] + self._modules
            for module, path in modules:
                if is_a(module, types.ModuleType) and not is_allowlisted(name_of_module(module)):
                    self._widen(module, path)

    def _widen(self, module: types.ModuleType, path: str) -> None:
        attributes = attributes_of(module)
        if attributes is None or id(attributes) in self._wide:
            return
        self._wide.add(id(attributes))
        holder = self._holder(attributes, path)
        holder.widen()
        for name, value in list(attributes.items()):
            if not (is_a(value, types.ModuleType) or name.startswith("__")):
                self.found.append((attributes, name, value, f"{path}.{name}"))


def name_of_module(module: types.ModuleType) -> str | None:
    """Return the name of a module, as it lies there: asking for it may load a lazy one."""
    name = (attributes_of(module) or {}).get("__name__")
    return name if isinstance(name, str) else None


def dict_of(kind: type) -> dict[str, Any]:
    """Return the dict behind the attributes of a class."""
    attributes = class_attributes(kind)
    inner = next((d for d in gc.get_referents(attributes) if isinstance(d, dict)), None)
    return attributes if inner is None else inner  # type: ignore[return-value]


def _is_own(value: Any) -> bool:
    """Tell whether a function stands in for one of torch's while a program is recorded."""
    if type(value) is not types.FunctionType:
        return False
    return str(value.__globals__.get("__name__")).startswith("fxkit.")


def _is_foreign(value: Any) -> bool:
    """Tell whether something that lies in a trusted package was put there by others."""
    if type(value) is types.FunctionType:
        return not is_allowlisted(value.__globals__.get("__name__"))
    return is_a(value, type) and not is_allowlisted_class(value)
