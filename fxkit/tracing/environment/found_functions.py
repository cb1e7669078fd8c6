"""The functions that a program refers to: what they keep counts once they run."""

from __future__ import annotations

import types
from collections import defaultdict

import torch

from fxkit.tracing.environment import object_kinds as kinds
from fxkit.tracing.environment.findings import Findings
from fxkit.tracing.environment.opaque_objects import can_hand_on
from fxkit.tracing.guarding import state_containers as h
from fxkit.tracing.guarding.parts import PartsHolder
from fxkit.tracing.values.allowlist import is_allowlisted
from fxkit.tracing.values.stored import is_a


class FoundFunctions:
    """The functions that a walk has found, and the code that has run.

    Args:
        findings: Takes what the functions hold.

    Attributes:
        codes: The code of the functions that were called, with that nested in it.
        missed: Code that was called and of which no function is known.
        methods: What methods are made of, by `id`; that counts once they run.
    """

    def __init__(self, findings: Findings) -> None:
        self.codes: set[types.CodeType] = set()
        self.missed: list[types.CodeType] = []
        self.methods: set[int] = set()
        self._findings = findings
        self._functions: dict[types.CodeType, list[types.FunctionType]] = defaultdict(list)
        self._nested: set[types.CodeType] = set()
        self._idle: dict[int, PartsHolder] = {}

    def enter(self, frame: types.FrameType, codes: frozenset[types.CodeType]) -> None:
        """Note that a function is called.

        Args:
            frame: Its frame.
            codes: Its code, with that nested in it.
        """
        code = frame.f_code
        if code not in self._functions and code not in self.codes and not self._find(frame):
            self.missed.append(code)
        self.codes |= codes
        self._nested |= codes - {code}

    def look_inside(self, code: types.CodeType) -> None:
        """Look at the closures and defaults of the functions that have some code."""
        for fn in self._functions[code]:
            self._inside(fn)

    def enter_again(self, frame: types.FrameType) -> None:
        """Look whether a closure that is called is one of those that were looked at.

        Functions that the program makes itself are: what they hold is its own.
        """
        code, values = frame.f_code, frame.f_locals
        if code not in self._functions or code in self._nested:
            return
        if not any(kinds.has_cells(fn, values) for fn in self._functions[code]):
            self.missed.append(code)

    def add_idle(self) -> None:
        """Let methods that have not run count as well."""
        self._findings.holders.extend(self._idle.values())
        self._idle.clear()

    def _find(self, frame: types.FrameType) -> bool:
        """Look for the function that is called on its first argument, and among the globals."""
        code = frame.f_code
        kind, candidates = kinds.candidates(frame)
        if kind is not None:
            self._findings.todo.append((kind, kind.__name__))
        found = kinds.function_with(code, candidates)
        if found:
            self._functions[code] += found
        return bool(found)

    def visit(self, fn: types.FunctionType, path: str) -> None:
        """Look at a function: at its attributes, and once it runs at its closure and defaults."""
        if is_allowlisted(fn.__globals__.get("__name__")):
            if not (is_allowlisted(fn.__module__) or hasattr(fn, kinds.OPAQUE)):
                self._cells(fn)  # what a decorator of torch or contextlib has put around it
                self._findings.namespace(fn.__dict__, path, None)
            return
        self._functions[fn.__code__].append(fn)
        self._findings.namespace(fn.__dict__, path, None)
        if id(fn) in self.methods:
            self._idle[id(fn)] = PartsHolder(fn, path)
        else:
            self._findings.parts(fn, path)
        if fn.__code__ in self.codes:
            self._inside(fn)

    def _inside(self, fn: types.FunctionType) -> None:
        """Look at the closure and the defaults of a function that runs."""
        if id(fn) in self._idle:
            self._findings.holders.append(self._idle.pop(id(fn)))
        self._cells(fn)
        for defaults, entries in kinds.defaults_of(fn):
            if id(defaults) in self._findings.kept:
                continue
            self._findings.kept[id(defaults)] = defaults
            if isinstance(defaults, dict):
                self._findings.holders.append(h.DictHolder(defaults, fn.__name__))
            for key, name, value in entries:
                is_tensor = is_a(value, torch.Tensor)
                path = f"default_{key}" if is_tensor else f"{kinds.DEFAULT_OF}{name}"
                self._findings.child(defaults, key, value, path)
                if can_hand_on(value):
                    self._findings.leaf(value, name)

    def _cells(self, fn: types.FunctionType) -> None:
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=False):
            if id(cell) in self._findings.kept:
                continue
            self._findings.kept[id(cell)] = cell
            holder = h.CellHolder(cell, name)
            self._findings.holders.append(holder)
            if holder.entries[None] is not h.ABSENT:
                self._findings.child(cell, None, holder.entries[None], name)
