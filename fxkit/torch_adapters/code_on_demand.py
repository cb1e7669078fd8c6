"""Generate a graph module's code when somebody asks for it.

`GraphModule.recompile` generates code, compiles it and puts `forward` on the class that each graph
module has of its own; the code's text goes to the module. After `code_on_demand` there stand
descriptors for these on that class: the first who reads one has the code generated, and the
descriptors are gone. `torch.fx` has a class that does so for its own passes; here any module can.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.graph import CodeGen

from fxkit.torch_adapters.fx_graphs import codegen_of, flattens_inputs

# What `recompile` puts on the module itself.
_ON_MODULE = ("_code", "_lineno_map", "_prologue_start")

# What is read of the class: the code; what pickles it, which takes the module's attributes first;
# and what TorchDynamo asks for, of the module and of its class, before it looks into a module.
_ON_CLASS = ("forward", "__reduce__", "__reduce_package__", "_call_impl", "_dynamo_marked_static")

_marking = threading.Lock()


def code_on_demand(gm: fx.GraphModule, before: Callable[[fx.GraphModule], None]) -> bool:
    """Let a module's code be generated of its graph anew when it is asked for, if that can be.

    Args:
        gm: The module.
        before: Is given the module before its code is generated; what it raises goes to whoever
            asked.

    Returns:
        Whether it can be; else nothing is done. It can't for a module that has a `recompile` or a
        code generator of its own.
    """
    if not _generates_as_torch_does(gm):
        return False
    if flattens_inputs(gm.graph):
        nesting = codegen_of(gm.graph).pytree_info
        gm._in_spec, gm._out_spec = nesting.in_spec, nesting.out_spec
    with _marking:
        waiting = vars(type(gm))["forward"]
        if isinstance(waiting, _Asked):
            waiting.pending.count += 1
        else:
            _Pending(gm, before).install(gm)
    return True


def bring_up_to_date(gm: fx.GraphModule) -> bool:
    """Generate a module's code if that waits for somebody to ask for it; tell whether it did."""
    is_waiting = isinstance(vars(type(gm)).get("forward"), _Asked)
    _ = gm.forward
    return is_waiting


def _generates_as_torch_does(gm: fx.GraphModule) -> bool:
    cls, code = type(gm), codegen_of(gm.graph)
    is_own_class = cls.__qualname__.endswith("GraphModuleImpl") and "forward" in vars(cls)
    if not is_own_class or cls.recompile is not fx.GraphModule.recompile:
        return False
    is_known = type(code) is CodeGen or flattens_inputs(gm.graph)
    return is_known and getattr(code, "_body_transformer", None) is None


class _Pending:
    """Code that is to be generated.

    Attributes:
        count: How often it was said that the code is out of date.
    """

    def __init__(self, gm: fx.GraphModule, before: Callable[[fx.GraphModule], None]) -> None:
        self.count = 1
        self._module = weakref.ref(gm)
        self._before = before
        self._lock = threading.RLock()
        self._is_generating = False
        self._earlier: dict[str, Any] = {}

    def install(self, gm: fx.GraphModule) -> None:
        """Put descriptors in the place of the code."""
        cls, asked = type(gm), _asked_class()
        self._earlier["forward"] = vars(cls)["forward"]
        for name in (*_ON_CLASS, *_ON_MODULE):
            setattr(cls, name, asked(name, self))
        for name in _ON_MODULE:
            if name in gm.__dict__:
                self._earlier[name] = gm.__dict__.pop(name)

    def read(self, name: str, instance: Any, owner: type) -> Any:
        """Return an attribute as it is once the code is generated."""
        with self._lock:
            if self._is_generating:
                return self._read_earlier(name, instance, owner)
            module = self._module()
            if module is not None:
                self._generate(module)
        return getattr(owner if instance is None else instance, name)

    def _generate(self, gm: fx.GraphModule) -> None:
        cls, is_done = type(gm), False
        while not is_done:
            count = self.count
            if self._is_waiting(cls):
                self._before(gm)
                self._recompile(gm)
            with _marking:
                is_done = count == self.count
                if is_done:
                    self._remove(cls)

    def _recompile(self, gm: fx.GraphModule) -> None:
        self._is_generating = True
        try:
            gm.recompile()
        except AttributeError as error:  # whoever asks for an attribute would take it for missing
            raise RuntimeError(f"the code of a graph can't be generated: {error}") from error
        finally:
            self._is_generating = False

    def _is_waiting(self, cls: type) -> bool:
        """Tell whether nobody else has recompiled the module since."""
        found = vars(cls).get("forward")
        return isinstance(found, _Asked) and found.pending is self

    def _remove(self, cls: type) -> None:
        for name in (*_ON_CLASS, *_ON_MODULE):
            found = vars(cls).get(name)
            if isinstance(found, _Asked) and found.pending is self:
                delattr(cls, name)

    def _read_earlier(self, name: str, instance: Any, owner: type) -> Any:
        """Return what there was before, for the generating of the code itself."""
        if name not in self._earlier:
            above = super(owner, owner if instance is None else instance)
            return getattr(above, name)
        value = self._earlier[name]
        return value.__get__(instance, owner) if name == "forward" else value


class _Asked:
    """Stands on a module's class for an attribute that depends on its code."""

    def __init__(self, name: str, pending: _Pending) -> None:
        self.name = name
        self.pending = pending

    def __get__(self, instance: Any, owner: type) -> Any:
        return self.pending.read(self.name, instance, owner)


_untraced: list[type[_Asked]] = []


def _asked_class() -> type[_Asked]:
    """Return the class of descriptors; one that TorchDynamo does not trace, where it is there."""
    if "torch._dynamo" not in sys.modules:
        return _Asked
    if not _untraced:
        read = torch.compiler.disable(_Asked.__get__)
        _untraced.append(type("_UntracedAsked", (_Asked,), {"__get__": read}))
    return _untraced[0]
