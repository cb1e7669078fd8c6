"""What a walk through the environment of a program has found, and what it has still to look at."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch

from fxkit.tracing.environment import object_kinds as kinds
from fxkit.tracing.environment.namespaces import Namespaces
from fxkit.tracing.environment.opaque_objects import can_hand_on
from fxkit.tracing.environment.wanted_names import Visit, WantedNames
from fxkit.tracing.guarding import state_containers as h
from fxkit.tracing.guarding.parts import PartsHolder
from fxkit.tracing.values.allowlist import is_allowlisted_class
from fxkit.tracing.values.sources import ValueSource
from fxkit.tracing.values.stored import is_a, mro_of


class Findings:
    """What objects hold: tensors get a place, containers are guarded, the rest waits for a visit.

    Attributes:
        places: `{id: (tensor, places)}` of the tensors that were found.
        holders: What was looked into, in order.
        kept: All objects that were visited, by `id`.
        weak: The objects that only weak references lead to, by `id`.
        todo: The objects that are still to be visited, with their paths.
        wanted: The attribute names that the program reads.
        namespaces: The modules and classes in which it looks up names.
        unseen: Functions in C whose calls have to be seen, with their names.
    """

    def __init__(self) -> None:
        self.places: dict[int, tuple[torch.Tensor, list[ValueSource]]] = {}
        self.holders: list[h.GuardedContainer] = []
        self.kept: dict[int, Any] = {}
        self.weak: set[int] = set()
        self.todo: deque[Visit] = deque()
        self.wanted = WantedNames()
        self.namespaces = Namespaces(self.holders)
        self.unseen: list[tuple[Any, str]] = [(print, "print")]
        self._bare: list[tuple[torch.Tensor, str]] = []

    def leaf(self, value: Any, path: str) -> None:
        """Look at what has no parts: a generator, a method of a tensor, a function in C."""
        owner = getattr(value, "__self__", None)
        if type(value) is torch.Generator:
            self.kept[id(value)] = value
        elif isinstance(owner, torch.Tensor):
            self.child((owner,), 0, owner, path or value.__name__)
        elif can_hand_on(value):
            self.unseen.append((value, path.rpartition(".")[2]))

    def parts(self, value: Any, path: str) -> None:
        """Let what a value consists of be guarded; what may die is not kept alive for that."""
        if id(value) not in self.weak and kinds.has_parts(value):
            self.holders.append(PartsHolder(value, path))

    def namespace(
        self,
        attributes: dict[str, Any],
        path: str,
        names: set[str] | None,
        seals: bool = False,
        extra: frozenset[str] = frozenset(),
    ) -> None:
        """Let a dict of attributes be guarded.

        Args:
            attributes: The dict.
            path: Where it lies.
            names: The attributes that may be read; None for all.
            seals: Whether what lies there is read by names that are written in code alone.
            extra: Attributes that are read in any case.
        """
        if id(attributes) in self.kept:
            return
        self.kept[id(attributes)] = attributes
        holder = h.NamespaceHolder(attributes, path, names=names, is_sealed=seals, extra=extra)
        self.namespaces.held[id(attributes)] = holder
        self.holders.append(holder)
        for name, value in list(dict.items(attributes)):
            known = None if name in extra else names
            self.attribute(attributes, name, value, f"{path}.{name}".lstrip("."), known, seals)

    def attribute(
        self,
        holder: Any,
        name: str,
        value: Any,
        path: str,
        names: set[str] | None,
        is_sealed: bool = False,
    ) -> None:
        """Look at an attribute, once some code reads its name."""
        if type(value) in h.PLAIN:
            return
        if is_a(value, torch.Tensor):
            self.child(holder, name, value, path)
            return
        is_only_named = is_sealed or type(value) is types.FunctionType
        is_read = names is None or name in names or name in kinds.MODULE_STATE
        if is_read or (self.wanted.reads_all and not is_only_named):
            self.todo.append((value, path))
        else:
            self.wanted.put_off(name, (value, path), is_only_named=is_only_named)

    def hold(self, holder: h.GuardedContainer) -> None:
        """Let a container be guarded, and look at all that it holds."""
        self.holders.append(holder)
        for key, value in holder.entries.items():
            if isinstance(holder, h.DictHolder) and type(key) not in h.PLAIN:
                self.todo.append((key, holder.path))
            path = f"{holder.path}.{key}" if isinstance(key, (str, int)) else holder.path
            self.child(holder.value, key, value, path)

    def child(self, holder: Any, key: Any, value: Any, path: str) -> None:
        """Look at what lies in an object that is kept."""
        if type(value) in h.PLAIN:
            return
        if is_a(value, torch.Tensor):
            place = ValueSource(holder, key, path)
            self.places.setdefault(id(value), (value, []))[1].append(place)
            self.tensor(value, path)
        else:
            self.todo.append((value, path))

    def tensor(self, tensor: torch.Tensor, path: str) -> None:
        """Look at what a tensor has been given as attributes, or may be given."""
        if self.wanted.asked or vars(tensor):
            self.namespace(vars(tensor), path, self.wanted.names)
        else:
            self._bare.append((tensor, path))

    def attribute_names(self, kind: type) -> set[str] | None:
        """Return the attributes of instances that may be read; None for all."""
        others = [base for base in mro_of(kind)[:-1] if is_allowlisted_class(base)]
        if kinds.is_read_by_name(kind):
            return self.wanted.names
        if self.wanted.reads_all or any(base is not torch.nn.Module for base in others):
            return None
        return self.wanted.names

    def add_names(self, names: Iterable[str], asked: frozenset[str] = frozenset()) -> None:
        """Look at what has some names; those that are asked for may be given to tensors as well."""
        new, waited = self.wanted.add(names, asked)
        self.todo.extend(waited)
        for name in new:
            self.namespaces.note(name, name in asked)
        bare, self._bare = (self._bare, []) if self.wanted.asked else ([], self._bare)
        for tensor, path in bare:
            self.tensor(tensor, path)

    def read_all(self) -> None:
        """Look at all attributes, as the program may read any."""
        if not self.wanted.reads_all:
            for holder in self.holders:
                if isinstance(holder, h.NamespaceHolder) and kinds.can_widen(holder):
                    holder.names = None
        self.todo.extend(self.wanted.add_all())
