"""Graph modules as Python code that builds them again: root, attributes, and every node as it is.

A node is written as the call of `graph.create_node` that makes it, so that kinds, targets, names
and nesting of arguments come back as they were. Modules of `torch.nn` are made by their
constructors.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

import torch
from torch import fx, nn

from fxkit.analysis.reproducing.function_source import FunctionWriter
from fxkit.analysis.reproducing.python_code import PythonWriter
from fxkit.analysis.reproducing.tensor_data import TensorData
from fxkit.errors import UnsupportedError
from fxkit.ir.attributes import ABSENT, find_attribute
from fxkit.ir.printer import format_node, format_source
from fxkit.ir.provenance import source_of
from fxkit.torch_adapters.layers import (
    buffers_of,
    children_of,
    non_persistent_buffers_of,
    parameters_of,
)

# What a script needs to put parameters, buffers and submodules in their places.
PUT_FUNCTION = '''
def put(root, path, value):
    """Set an attribute by its qualified name, and make the modules on the way to it."""
    *parents, name = path.split(".")
    for parent in parents:
        if not hasattr(root, parent):
            root.add_module(parent, nn.Module())
        root = getattr(root, parent)
    if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
        root._parameters.pop(name, None)
        root._buffers.pop(name, None)
        root.register_buffer(name, value)
    else:
        root._buffers.pop(name, None)
        setattr(root, name, value)
'''.strip()

# What a script needs to make a module from its state.
BARE_FUNCTION = '''
def bare(cls, state):
    """Make a module without calling its constructor."""
    made = cls.__new__(cls)
    nn.Module.__init__(made)
    made.__dict__.update(state)
    return made
'''.strip()

_RESERVED = frozenset({"torch", "fx", "nn", "graph", "root", "tensor", "put", "functools", "sys"})


class ModuleWriter(PythonWriter):
    """Writes graph modules as functions that build them.

    Attributes:
        data: The tensors that the code needs.
        functions: Python functions that nodes call, by source where they can't be imported.
    """

    def __init__(self) -> None:
        super().__init__()
        self.data = TensorData()
        self.functions = FunctionWriter(self)
        self._wished = "constant"
        self._builders: list[str] = []

    def other(self, value: Any) -> str:
        """Write tensors by their name, and what any `PythonWriter` knows."""
        if isinstance(value, torch.Tensor):
            return self.data.expression(value, self._wished)
        return super().other(value)

    def function(self, function: Any) -> str:
        """Write a function by import, or by its source where only that can be had."""
        try:
            return super().function(function)
        except UnsupportedError:
            if not inspect.isfunction(function):
                raise
            return self.functions.add(function)

    def named(self, value: Any, name: str) -> str:
        """Write a value whose tensors get a name."""
        self._wished = name
        try:
            return self.value(value)
        finally:
            self._wished = "constant"

    def builder(self, gm: fx.GraphModule, name: str) -> str:
        """Return a function of this name, as text, that builds a module with an equal graph.

        Raises:
            UnsupportedError: When a node or an attribute can't be written.
        """
        lines = [f"def {name}():", "    root = nn.Module()"]
        lines.extend(f"    {line}" for line in self._attributes(gm, name))
        lines.append("    graph = fx.Graph()")
        lines.extend(f"    {line}" for line in _NodeWriter(self).lines(gm.graph))
        lines.append("    made = fx.GraphModule(root, graph)")
        lines.append(f"    made.training = {gm.training}")
        lines.append("    return made")
        return "\n".join(lines)

    def inner_builders(self) -> list[str]:
        """Return the functions that build the graph modules which the others call."""
        return self._builders

    def _attributes(self, gm: fx.GraphModule, name: str) -> list[str]:
        called = dict.fromkeys(str(n.target) for n in gm.graph.nodes if n.op == "call_module")
        read = dict.fromkeys(str(n.target) for n in gm.graph.nodes if n.op == "get_attr")
        written: dict[int, str] = {}
        lines: list[str] = []
        for path in sorted(called, key=lambda p: (p.count("."), p)):
            module = find_attribute(gm, path)
            if any(path.startswith(f"{other}.") for other in called):
                continue
            lines.extend(self._module_lines(module, path, written, f"{name}_"))
        for path in read:
            value = find_attribute(gm, path)
            if value is ABSENT:
                raise UnsupportedError(f"expected the module to have {path!r}, got none")
            if not any(path.startswith(f"{other}.") for other in called):
                lines.append(self._put(path, value, written))
        return lines

    def _put(self, path: str, value: Any, written: dict[int, str]) -> str:
        if isinstance(value, torch.Tensor) and id(value) in written:
            return f"put(root, {path!r}, root.{written[id(value)]})"
        if isinstance(value, nn.Module):
            raise UnsupportedError(
                f"expected a tensor or a plain value at {path!r}, got {type(value).__name__}",
                hint="call submodules by call_module nodes",
            )
        written[id(value)] = path
        return f"put(root, {path!r}, {self.named(value, path)})"

    def _module_lines(
        self, module: nn.Module, path: str, written: dict[int, str], prefix: str
    ) -> list[str]:
        if id(module) in written:
            return [f"put(root, {path!r}, root.get_submodule({written[id(module)]!r}))"]
        written[id(module)] = path
        if isinstance(module, fx.GraphModule):
            name = prefix + re.sub(r"\W", "_", path)
            self._builders.append(self.builder(module, name))
            return [f"put(root, {path!r}, {name}())"]
        if any(getattr(module, hooks) for hooks in _HOOKS):
            raise _refusal(module, path, "it has hooks")
        constructed = self._constructed(module)
        if constructed is None:
            return self._bare_lines(module, path, written, prefix)
        lines = [f"put(root, {path!r}, {constructed})"]
        lines.extend(
            _mode_line(f"{path}.{inner}" if inner else path)
            for inner, part in module.named_modules()
            if not part.training
        )
        tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers()]
        lines.extend(self._put(f"{path}.{name}", value, written) for name, value in tensors)
        return lines

    def _constructed(self, module: nn.Module) -> str | None:
        """Return the call of a constructor that makes an equal module, its tensors aside."""
        given = _constructor_arguments(module)
        if type(module).__module__.partition(".")[0] != "torch" or given is None:
            return None
        inner = [self._constructed(child) for child in module.children()]
        if not isinstance(module, nn.Sequential):
            inner = []
        if None in inner:
            return None
        items = [*map(str, inner), *(f"{key}={self.value(value)}" for key, value in given.items())]
        return f"{self.importable(type(module))}({', '.join(items)})"

    def _bare_lines(
        self, module: nn.Module, path: str, written: dict[int, str], prefix: str
    ) -> list[str]:
        """Make a module without its constructor, from the state that it has."""
        usual = nn.Module().__dict__
        state = {key: value for key, value in module.__dict__.items() if key not in usual}
        try:
            made = f"bare({self.importable(type(module))}, {self.named(state, path)})"
        except UnsupportedError as error:
            raise _refusal(module, path, error.message) from error
        lines = [f"put(root, {path!r}, {made})"]
        if not module.training:
            lines.append(_mode_line(path))
        tensors = (*parameters_of(module).items(), *buffers_of(module).items())
        lines.extend(self._put(f"{path}.{name}", value, written) for name, value in tensors)
        for name, child in module.named_children():
            lines.extend(self._module_lines(child, f"{path}.{name}", written, prefix))
        return lines


def _mode_line(path: str) -> str:
    return f"root.get_submodule({path!r}).training = False"


def _refusal(module: nn.Module, path: str, reason: str) -> UnsupportedError:
    return UnsupportedError(
        f"expected a module that a new process can make at {path!r}, got "
        f"{type(module).__name__}: {reason}",
        hint="trace through it, so that its operators are in the graph",
    )


class _NodeWriter:
    """Writes the nodes of one graph; each is a variable of its own name."""

    def __init__(self, writer: ModuleWriter) -> None:
        self.writer = writer
        self.names: dict[fx.Node, str] = {}

    def lines(self, graph: fx.Graph) -> list[str]:
        lines = []
        for node in graph.nodes:
            try:
                lines.append(self._line(node))
            except UnsupportedError as error:
                raise UnsupportedError(
                    error.message, node=format_node(node), source=format_source(node),
                    hint=error.hint,
                ) from error  # fmt: skip
        return lines

    def _line(self, node: fx.Node) -> str:
        if node.op == "output":
            return f"graph.output({self._value(node.args[0])})"
        target = node.target
        shown = repr(target) if isinstance(target, str) else self.writer.function(target)
        parts = [repr(node.op), shown]
        if node.args or node.kwargs:
            parts.append(self._value(tuple(node.args)))
        if node.kwargs:
            parts.append(self._value(dict(node.kwargs)))
        parts.append(f"name={node.name!r}")
        name = f"{node.name}_" if node.name in _RESERVED else node.name
        while name in self.names.values():
            name += "_"
        self.names[node] = name
        return f"{name} = graph.create_node({', '.join(parts)}){_comment(node)}"

    def _value(self, value: Any) -> str:
        """Write an argument, in which nodes are variables."""
        if isinstance(value, fx.Node):
            return self.names[value]
        if isinstance(value, dict):
            items = [f"{self.writer.value(k)}: {self._value(v)}" for k, v in value.items()]
            return f"{{{', '.join(items)}}}"
        if isinstance(value, slice):
            parts = (value.start, value.stop, value.step)
            return f"slice({', '.join(map(self._value, parts))})"
        if isinstance(value, list) or type(value) is tuple:
            inside = ", ".join(map(self._value, value))
            opening, closing = "[]" if isinstance(value, list) else "()"
            comma = "," if closing == ")" and len(value) == 1 else ""
            return f"{opening}{inside}{comma}{closing}"
        return self.writer.value(value)


def _comment(node: fx.Node) -> str:
    source = source_of(node)
    return "" if source is None else f"  # {source}"


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _constructor_arguments(module: nn.Module) -> dict[str, Any] | None:
    """Return keyword arguments that make a module of equal state, or None when there are none."""
    if isinstance(module, nn.Sequential):
        is_numbered = list(children_of(module)) == [str(i) for i in range(len(module))]
        return {} if is_numbered and "forward" not in module.__dict__ else None
    given: dict[str, Any] = {}
    for name, parameter in _parameters_of(type(module)).items():
        value = getattr(module, name, ABSENT)
        if value is ABSENT and name == "bias":
            value = any(n.endswith("bias") for n, _ in module.named_parameters())
        if name == "bias" and not isinstance(value, bool):
            value = value is not None
        if value is not ABSENT and not _is_default(value, parameter):
            given[name] = value
    return given if _makes_equal(module, given) else None


def _parameters_of(cls: type) -> dict[str, inspect.Parameter]:
    """Return the parameters of a constructor, and of those that it hands them on to."""
    found: dict[str, inspect.Parameter] = {}
    for base in cls.__mro__:
        parameters = list(inspect.signature(base.__init__).parameters.values())[1:]
        found.update({p.name: p for p in parameters if p.name not in found})
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    left_out = {"device", "dtype", "args", "kwargs"}
    return {name: p for name, p in found.items() if name not in left_out}


def _is_default(value: Any, parameter: inspect.Parameter) -> bool:
    return type(value) is type(parameter.default) and value == parameter.default


def _makes_equal(module: nn.Module, given: dict[str, Any]) -> bool:
    if isinstance(module, nn.RNNBase):
        given.pop("mode", None)
    try:
        with torch.device("meta"):
            made = type(module)(**given)
    except (TypeError, ValueError, RuntimeError, AssertionError):
        return False
    return _state(made) == _state(module)


def _state(module: nn.Module) -> Any:
    """Return all that a module is, but for its tensors and its mode."""
    own = {
        key: value
        for key, value in module.__dict__.items()
        if not key.startswith("_") and key != "training" and not isinstance(value, torch.Tensor)
    }
    tensors = (
        list(parameters_of(module)),
        list(buffers_of(module)),
        non_persistent_buffers_of(module),
    )
    present = [
        value is None for value in (*parameters_of(module).values(), *buffers_of(module).values())
    ]
    inner = {name: (type(m), _state(m)) for name, m in module.named_children()}
    return own, tensors, present, inner
