"""Work out the type of every node by running the graph on fake tensors: no numbers, no memory.

Torch's own FakeTensorMode does the work, behind `fake_mode` here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from fxkit.errors import FxkitError, InvalidGraphError
from fxkit.ir.attributes import find_attribute
from fxkit.ir.printer import format_node, format_source, format_type
from fxkit.ir.types import TensorType, set_type, type_of, type_of_value


@contextmanager
def fake_mode() -> Iterator[Any]:
    """Enter a mode in which operators compute types only, on inputs that may still be real."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield mode


def propagate_types(
    gm: fx.GraphModule, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
) -> Any:
    """Record the type of every node for inputs like the given ones.

    Effects do not happen: writes go to fake copies, nothing random is drawn from torch's generator,
    prints inside opaque calls do happen when such a call can run on fake tensors at all. A number
    that is read out of a tensor keeps the value that was recorded at capture.

    Args:
        gm: The module; each node's `type_of` is set.
        args: Example inputs; tensors may be real, fake or on the meta device.
        kwargs: Example keyword inputs.

    Returns:
        The type of the output, nested as the output is.

    Raises:
        InvalidGraphError: When a node can't take its operands, naming node, source line and types.
    """
    with fake_mode() as mode, torch.no_grad() if not torch.is_grad_enabled() else _nothing():
        fake_args, fake_kwargs = pytree.tree_map_only(
            torch.Tensor, mode.from_tensor, (tuple(args), dict(kwargs or {}))
        )
        return type_of_value(_TypeInterpreter(gm, mode).run_with(fake_args, fake_kwargs))


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def infer_type(node: fx.Node) -> Any:
    """Work out one node's type from its operands' recorded types, and record it.

    Returns:
        The type as `type_of` gives it; None when an operand's is not known or the operator can't
        run on fake tensors, and then nothing is recorded.
    """
    operands = node.all_input_nodes
    if node.op == "get_attr":
        found = find_attribute(node.graph.owning_module, str(node.target))
        known = type_of_value(found) if isinstance(found, torch.Tensor) else None
    elif node.op == "placeholder" or any(type_of(o) is None for o in operands):
        return type_of(node)
    else:
        known = _run_on_fakes(node)
    if known is not None:
        set_type(node, known)
    return known


def _run_on_fakes(node: fx.Node) -> Any:
    """Run one call on fake tensors of its operands' types."""
    root, target = node.graph.owning_module, node.target
    with fake_mode(), torch.no_grad():
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: fake_value(type_of(n)))
        try:
            if callable(target):
                return type_of_value(target(*args, **kwargs))
            if node.op == "call_method":
                return type_of_value(getattr(args[0], target)(*args[1:], **kwargs))
            return type_of_value(_call_fake_module(find_attribute(root, target), args, kwargs))
        except (RuntimeError, TypeError, ValueError, AttributeError):
            return None


def fake_value(value_type: Any) -> Any:
    """Make a value of a recorded type; inside `fake_mode` its tensors take no memory."""
    if isinstance(value_type, TensorType):
        if value_type.stride is None:
            return torch.empty(value_type.shape, dtype=value_type.dtype, device=value_type.device)
        return torch.empty_strided(
            value_type.shape, value_type.stride, dtype=value_type.dtype, device=value_type.device
        )
    if isinstance(value_type, (tuple, list)) and not isinstance(value_type, torch.Size):
        return type(value_type)(fake_value(v) for v in value_type)
    if isinstance(value_type, dict):
        return {key: fake_value(v) for key, v in value_type.items()}
    return value_type


def _call_fake_module(module: Any, args: Any, kwargs: Any) -> Any:
    tensors = {name: fake_value(TensorType.of(t)) for name, t in _tensors_of(module)}
    return torch.func.functional_call(module, tensors, args, kwargs)


class _TypeInterpreter(fx.Interpreter):
    """Runs a graph on fake tensors and records a type for every node."""

    def __init__(self, gm: fx.GraphModule, mode: Any) -> None:
        super().__init__(gm)
        self._mode = mode
        self._graph = gm.graph
        self._fakes: dict[int, torch.Tensor] = {}
        self.extra_traceback = False

    def run_with(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        names = [n.target for n in self._graph.nodes if n.op == "placeholder"]
        ordered = [*args, *(kwargs[name] for name in names[len(args) :] if name in kwargs)]
        return self.run(*ordered, enable_io_processing=False)

    def fetch_attr(self, target: str) -> Any:
        value = super().fetch_attr(target)
        return self._fake(value)

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        module = self.fetch_attr(target)
        names = {n: self._fake(p) for n, p in _tensors_of(module)}
        return torch.func.functional_call(module, names, args, kwargs)

    def run_node(self, n: fx.Node) -> Any:
        try:
            result = super().run_node(n)
        except FxkitError:
            raise
        except Exception as error:
            result = _recorded_number(n, error)
            if result is None:
                raise _type_error(n, error, self._operands(n)) from error
        set_type(n, type_of_value(result))
        return result

    def _operands(self, node: fx.Node) -> str:
        known = [f"%{o.name}: {format_type(type_of_value(self.env[o]))}"
                 for o in node.all_input_nodes if o in self.env]  # fmt: skip
        return ", ".join(known)

    def _fake(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in self._fakes:
            self._fakes[id(value)] = self._mode.from_tensor(value, static_shapes=True)
        return self._fakes[id(value)]


def _tensors_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _recorded_number(node: fx.Node, error: Exception) -> Any:
    """Return the number that a node read out of a tensor when it was captured, else None."""
    from torch._subclasses.fake_tensor import DataDependentOutputException

    known = type_of(node)
    is_number = isinstance(known, (bool, int, float, complex))
    return known if is_number and isinstance(error, DataDependentOutputException) else None


def _type_error(node: fx.Node, error: Exception, operands: str) -> InvalidGraphError:
    return InvalidGraphError(
        f"expected operands that {node.name} can take, got {operands or 'none'}: "
        f"{str(error).splitlines()[0] if str(error) else type(error).__name__}",
        node=format_node(node),
        source=format_source(node),
        hint="check the shapes and dtypes of the example inputs against this line",
    )
