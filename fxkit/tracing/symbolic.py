"""Capture a program by following it with placeholders instead of tensors."""

from __future__ import annotations

import inspect
import itertools
import math
import operator
import sys
from collections.abc import Callable, Collection
from types import BuiltinFunctionType, FrameType, FunctionType
from typing import Any

import torch
from torch import fx

from fxkit.analysis.type_inference.declared_types import is_quantizer
from fxkit.errors import CaptureError, UnsupportedError
from fxkit.ir.code_tracer import read_by_code
from fxkit.ir.names import MODULE_NAME, distinct_names, keep_module_name
from fxkit.torch_adapters.compilers import followed_by_placeholders
from fxkit.torch_adapters.graph_surgery import name_of_target
from fxkit.torch_adapters.layers import buffers_of
from fxkit.tracing.callables import Program, program_of
from fxkit.tracing.made_tensors import MadeTensors
from fxkit.tracing.modules_kept import modules_kept
from fxkit.tracing.parameter_names import parameter_names
from fxkit.tracing.recorder.frames import Frames
from fxkit.tracing.recorder.state_restore import (
    random_states,
    same_random_states,
    set_random_states,
)
from fxkit.tracing.symbolic_errors import explained, refuse_hooks
from fxkit.tracing.values.mode_scopes import RegionModes, Regions, read_ambient


def symbolic_trace(
    root: torch.nn.Module | Callable[..., Any],
    concrete_args: dict[str, Any] | None = None,
    leaf_modules: Collection[type[torch.nn.Module] | str] = (),
) -> fx.GraphModule:
    """Follow a module or function with placeholders, and return its graph.

    No inputs are needed, and the graph holds for all shapes. What the program decides by Python
    values is decided once: training flags, numbers in attributes, defaults of parameters. torch's
    own modules stay calls of modules. Attributes that the program assigns are put back.

    A callable that is written in C, such as `torch.relu`, becomes one node, with a placeholder for
    each argument that it needs. What `functools.partial` gives is fixed, and so are defaults of
    parameters that no code can write down, tensors among them.

    Args:
        root: A module, function, bound method, operator, or any other callable.
        concrete_args: Values of parameters that are to be fixed, by name.
        leaf_modules: Classes or qualified names of modules that stay calls, beside torch's own.

    Returns:
        The graph module; each node carries the user's line and the modules it ran in.

    Raises:
        CaptureError: When the program needs more than a placeholder; names the line and a remedy.
        UnsupportedError: When `root` can't be called, is a class or a generator function, takes no
            arguments that are known, or `concrete_args` are an input.

    Example:
        >>> import torch, fxkit
        >>> print(fxkit.graph(fxkit.symbolic_trace(lambda x: torch.relu(x) + 1)))
        graph(%x):
          %relu = aten.relu(%x)
          %add = aten.add(%relu, 1)
          return %add
    """
    if not callable(root):
        raise UnsupportedError(
            f"expected something to call, got {type(root).__name__}",
            hint="pass a function or a module",
        )
    if not isinstance(concrete_args, dict | tuple | None):
        raise UnsupportedError(
            f"expected concrete_args to be a dict of values by parameter, got "
            f"{type(concrete_args).__name__}",
            hint="leave inputs out, symbolic_trace needs none; fxkit.capture(fn, args) takes them",
        )
    return traced_module(SymbolicTracer(leaf_modules), root, concrete_args)


def traced_module(tracer: SymbolicTracer, root: Any, concrete_args: Any = None) -> fx.GraphModule:
    """Return the graph that a tracer makes, as a module.

    Raises:
        CaptureError: When the program can't be followed, or no code can be made of its names.
    """
    with MadeTensors() as made:
        graph = traced(tracer, root, concrete_args)
    made.check(graph, tracer.root, _name_of(root))
    try:
        gm = fx.GraphModule(tracer.root, graph, _name_of(root))
    except SyntaxError as error:
        raise CaptureError(
            f"expected names that code can be made of, got attributes of {_name_of(root)} that it "
            f"can't: {error.text or error}",
            hint="rename what is called by a keyword of Python or holds quotes, or use "
            "fxkit.capture(fn, args), which gives it another name",
        ) from error
    _take_constants_back(tracer, graph)
    read_by_code(gm)
    return gm


def _name_of(root: Any) -> str:
    return type(root).__name__ if isinstance(root, torch.nn.Module) else _function_name(root)


def traced(tracer: SymbolicTracer, root: Any, concrete_args: Any = None) -> fx.Graph:
    """Return the graph that a tracer makes, and leave modules and random numbers as they were.

    Raises:
        CaptureError: When the program needs more than a placeholder, or draws random numbers.
    """
    name = getattr(root, "__name__", None) or _name_of(root)
    random = random_states()
    modes = RegionModes.now()
    try:
        with modules_kept(root), followed_by_placeholders():
            graph = tracer.trace(root, concrete_args)
    except Exception as error:
        modes.restore(error)
        raise explained(error, name) from error
    finally:
        tracer.forget()
    if not same_random_states(random, random_states()):
        set_random_states(random)
        raise CaptureError(
            f"expected {name} to run on placeholders, got random numbers drawn without one",
            hint="use fxkit.capture(fn, args), which draws them anew at each call",
        )
    return graph


def _take_constants_back(tracer: SymbolicTracer, graph: fx.Graph) -> None:
    """Remove the tensors that the tracer of torch.fx has put on the user's module."""
    if tracer.owns_root:
        return
    for node in graph.find_nodes(op="get_attr"):
        name = str(node.target)
        if name.startswith("_tensor_constant"):
            tracer.root.__dict__.pop(name, None)
            buffers_of(tracer.root).pop(name, None)


class _Placeholder(fx.Proxy):
    """A value that is followed; unlike torch's own, it sees changes in place.

    `y += 1` on a `torch.fx.Proxy` computes a new value, which loses the write when `y` is a view.
    """

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, index, value), {})

    @classmethod
    def __torch_function__(
        cls, orig_method: Any, types: Any, args: Any = None, kwargs: Any = None
    ) -> fx.Proxy:
        """Record a call. To tell methods, torch lists all that can be overridden, in 10 ms."""
        first = args[0] if args else None
        if not isinstance(first, cls) or not _is_function(orig_method):
            return super().__torch_function__(orig_method, types, args, kwargs)
        tracer: Any = first.tracer
        name = name_of_target(tracer.graph, orig_method.__name__)
        return tracer.create_proxy("call_function", orig_method, args, kwargs or {}, name=name)


def _is_function(called: Any) -> bool:
    """Tell whether something is a function of torch that is no method of tensors, for sure."""
    is_plain = isinstance(called, (BuiltinFunctionType, FunctionType))
    return is_plain and getattr(torch.Tensor, called.__name__, None) is not called


def _follow_in_place(name: str) -> None:
    function = getattr(operator, name)

    def method(self: _Placeholder, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    setattr(_Placeholder, f"__{name}__", method)


for _name in ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior",
              "ixor", "ilshift", "irshift"):  # fmt: skip
    _follow_in_place(_name)


class SymbolicTracer(fx.Tracer):
    """A `torch.fx.Tracer` that records the user's line and the module stack on every node.

    Args:
        leaf_modules: Classes or qualified names of modules that stay calls, beside torch's own.
        wraps_math: Whether functions of Python's `math` may be called on placeholders.
    """

    # Buffers are read when the graph runs, as parameters are, and not when it is traced.
    proxy_buffer_attributes = True

    def __init__(
        self,
        leaf_modules: Collection[type[torch.nn.Module] | str] = (),
        *,
        wraps_math: bool = True,
    ) -> None:
        super().__init__(autowrap_modules=(math,) if wraps_math else ())  # type: ignore[arg-type]
        self._leaf_classes = tuple(leaf for leaf in leaf_modules if isinstance(leaf, type))
        self._leaf_names = frozenset(leaf for leaf in leaf_modules if isinstance(leaf, str))
        self._frames: Frames | None = None
        self.regions: Regions | None = None
        self.program: Program | None = None
        self.owns_root = False

    def trace(
        self,
        root: torch.nn.Module | Callable[..., Any],
        concrete_args: dict[str, Any] | None = None,
    ) -> fx.Graph:
        """Return the graph of `root`."""
        self._frames = Frames(_caller(), {})
        self.regions = Regions(self._emit, read_ambient())
        self.program = program = program_of(root)
        self.owns_root = program.owner is None
        if program.owner is not None:
            refuse_hooks(program.owner, "" if program.is_method else program.name)
            self.traced_func_name = program.name if program.is_method else "forward"
            return super().trace(program.owner, concrete_args)
        return self.follow(program.function if program.is_plain else _stand_in, concrete_args)

    def follow(
        self, function: Callable[..., Any], concrete_args: dict[str, Any] | None
    ) -> fx.Graph:
        """Return the graph of a function of Python."""
        return super().trace(function, concrete_args)

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        """Return a function of placeholders, and those placeholders."""
        keep_module_name(self.graph)
        program = self.program
        if program is None or program.is_plain:
            return super().create_args_for_root(root_fn, is_module, concrete_args)
        parameters = program.parameters()
        proxies = [self._placeholder_of(parameter) for parameter in parameters]
        fixed = concrete_args or {}

        def run(*values: Any) -> Any:
            args, kwargs = [], {}
            for parameter, value in zip(parameters, values[is_module:], strict=True):
                value = fixed.get(parameter.name, value)
                if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
                    kwargs[parameter.name] = value
                else:
                    args.append(value)
            return self.run(root_fn, (), tuple(args), kwargs)

        return run, [self.root, *proxies] if is_module else proxies

    def run(self, fn: Any, owner: tuple[Any, ...], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Call the program on placeholders.

        Args:
            fn: The function that torch's tracer follows.
            owner: The module that it takes first, if it does.
            args: What it is given.
            kwargs: What it is given by keyword.
        """
        if self.program is None or self.program.is_plain:
            return fn(*owner, *args, **kwargs)
        return self.program.call(self.create_proxy, args, kwargs)

    def _placeholder_of(self, parameter: inspect.Parameter) -> fx.Proxy:
        has_default = parameter.default is not inspect.Parameter.empty
        default = (parameter.default,) if has_default else ()
        return self.create_proxy("placeholder", parameter.name, default, {})

    def call_module(
        self, m: torch.nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Follow a call of a module, its hooks with it, or keep it as one node."""
        path = self.path_of_module(m)
        refuse_hooks(m, "" if self.is_leaf_module(m, path) else path or type(m).__name__)
        return super().call_module(m, forward, args, kwargs)

    def path_of_module(self, mod: torch.nn.Module) -> str:
        """Return the name of a module; one that a function calls gets a name of its own."""
        if not self.owns_root or any(held is mod for held in self.root.modules()):
            return super().path_of_module(mod)
        name = self._free_name(type(mod).__name__.lower())
        self.root.add_module(name, mod)
        return name

    def create_arg(self, a: Any) -> Any:
        """Return a value as an argument of a node; a function's parameters become attributes."""
        is_free = self.owns_root and isinstance(a, torch.nn.Parameter)
        if is_free and not any(held is a for held in self.root.parameters()):
            self.root.register_parameter(self._free_name("parameter"), a)
        return super().create_arg(a)

    def _free_name(self, name: str) -> str:
        numbered = (f"{name}_{number}" for number in itertools.count(1))
        return next(it for it in itertools.chain([name], numbered) if not hasattr(self.root, it))

    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        """Tell whether a module stays one call in the graph."""
        if m is self.root:
            return False
        return (
            isinstance(m, self._leaf_classes)
            or module_qualified_name in self._leaf_names
            or is_quantizer(m)
            or super().is_leaf_module(m, module_qualified_name)
        )

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """Return the placeholder that stands for a node."""
        return _Placeholder(node, self)

    def create_node(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Append a node, with where it comes from."""
        if kind == "placeholder":
            return self._create(kind, self._parameter_name(target), *args, **kwargs)
        if self.regions is not None:
            ambient = read_ambient()
            if ambient != self.regions.state:
                self.regions.follow(ambient)
        return self._create(kind, target, *args, **kwargs)

    def _parameter_name(self, name: str) -> str:
        """Return what generated code calls a parameter, with its stars."""
        plain = name.lstrip("*")
        if plain != MODULE_NAME or self.program is None:
            return name
        others = parameter_names(self.program.function, keywords=True)
        free = distinct_names([*(other for other in others if other != plain), plain])[-1]
        return name.replace(plain, free)

    def _emit(self, target: Callable[..., Any], args: tuple[Any, ...]) -> fx.Node:
        return self._create("call_function", target, args, {})

    def _create(self, kind: str, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(kind, *args, **kwargs)
        stack = {path: entry for path, entry in self.module_stack.items() if path}
        node.meta["nn_module_stack"] = stack
        if self._frames is not None and kind not in ("placeholder", "output"):
            trace = self._frames.locate(sys._getframe(1)).trace
            if trace is not None:
                node.meta["stack_trace"] = trace
        return node

    def forget(self) -> None:
        """Drop the frames that were looked at."""
        if self._frames is not None:
            self._frames.forget()


def _caller() -> FrameType:
    return sys._getframe(2)


def _stand_in() -> None:
    """Stands for what is no function of Python, where torch's tracer asks for one."""


def _function_name(root: Any) -> str:
    name = program_of(root).name
    return name if name.isidentifier() else "GraphModule"
