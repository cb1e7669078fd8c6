"""What `fxkit.compile` makes of a module: that module, but its calls run compiled."""

from __future__ import annotations

import copy
import inspect
import types
import weakref
from typing import Any, Protocol

import torch
from torch import fx, nn

from fxkit.torch_adapters.layers import replica_of
from fxkit.tracing.captured import Captured


class CompiledProgram(Protocol):
    """What a compiled module calls: `Compiled`."""

    captured: Captured

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run the program."""
        ...


_OF_PROGRAM = frozenset(
    """
    program captured compiled_modules graph_module lowered builds report explain __signature__
    """.split()
)


class CompiledModel:
    """A compiled module: an instance of a subclass of its class, over the very same state.

    Parameters, buffers, submodules, hooks, modes and attributes are those of the module, whichever
    of the two sets them. So it trains, moves, saves, loads and stands in other modules as the
    module does, and methods that call it, such as `generate`, call it compiled. `forward` is the
    module's own.

    Attributes:
        program: The `Compiled`. Its `captured`, `compiled_modules`, `graph_module`, `lowered`,
            `builds`, `report()` and `explain()` are found here as well, unless the module has
            something of that name.
    """

    # A call finds the program's own in the slot, without a frame in between.
    __slots__ = ("__call__", "_fxkit_program")

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a plain module: so a compiled one does that makes others of its own class."""
        made = next(c for c in cls.__mro__ if not issubclass(c, CompiledModel))
        return made(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Find what the module has, and then what the program has."""
        try:
            return super().__getattr__(name)  # type: ignore[misc]
        except AttributeError:
            if name not in _OF_PROGRAM:
                raise
        if name == "__signature__":
            return inspect.signature(self.forward)  # type: ignore[attr-defined]
        program = self._fxkit_program
        return program if name == "program" else getattr(program, name)

    def __init_subclass__(cls) -> None:
        """Keep the classes made here from the hooks of the modules' own classes."""

    def _get_name(self) -> str:
        return f"Compiled{type(self).__name__}"

    def __copy__(self) -> Any:
        """Compile a shallow copy of the module."""
        return copy.copy(self._fxkit_program)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Compile a copy of the module; it builds kernels of its own."""
        return copy.deepcopy(self._fxkit_program, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the module, and the options it was compiled with."""
        return self._fxkit_program.__reduce_ex__(protocol)

    def _replicate_for_data_parallel(self) -> Any:
        """Replicas have parameters of their own, so they are of the module."""
        return replica_of(self._fxkit_program.captured.fn)


class _CompiledGraph(CompiledModel):
    """A graph module's code belongs to the class of one object."""

    __slots__ = ()

    def recompile(self) -> Any:
        """Make the code of the module again."""
        return self._fxkit_program.captured.fn.recompile()


def as_model(program: CompiledProgram) -> Any:
    """Return a module that calls a program, over the state of the module that it was made of.

    Args:
        program: What was made of it.

    Returns:
        A `CompiledModel`; the program itself where there is no module, or none that another object
        can stand for: one in TorchScript, or with `__slots__`.
    """
    module = program.captured.fn
    if not isinstance(module, nn.Module) or isinstance(module, torch.jit.ScriptModule):
        return program
    cls = type(module)
    face = _CompiledGraph if isinstance(module, fx.GraphModule) else CompiledModel
    told = ("__module__", "__qualname__", "__doc__")
    names = {"__slots__": (), **{name: getattr(cls, name) for name in told}}
    try:
        made = types.new_class(cls.__name__, (face, cls), {}, lambda space: space.update(names))
    except TypeError:
        return program
    model: Any = object.__new__(made)
    object.__setattr__(model, "__dict__", vars(module))
    object.__setattr__(model, "__call__", program.__call__)
    object.__setattr__(model, "_fxkit_program", program)
    found = weakref.ref(model)

    def plain(*args: Any, **kwargs: Any) -> Any:
        """Run the module itself: its owners know it as the object that stands in them."""
        seen = found()
        return module(*args, **kwargs) if seen is None else cls.__call__(seen, *args, **kwargs)

    program.captured.plain = plain
    return model


def program_of(model: CompiledModel) -> Any:
    """Return the program that a compiled module calls, whatever else the module calls `program`."""
    return model._fxkit_program
