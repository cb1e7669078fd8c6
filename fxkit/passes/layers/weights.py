"""What is the same at every call: parameters, buffers, and what is computed from them alone.

Passes for inference fold such values into one another. What they make goes into new parameters, so
that the user's own stay as they are; what is learnt or loaded into those afterwards is not seen.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from fxkit.analysis.dependencies import EffectOrder
from fxkit.analysis.effects import effects_of
from fxkit.ir.attributes import Attribute, find_attribute
from fxkit.ir.op import resolve
from fxkit.ir.session import EditSession
from fxkit.ir.types import TensorType, set_type
from fxkit.torch_adapters.tensors import impl_address_of

# How many operators may lie between a parameter and its use: a reshape, a transpose, a cast.
_DEPTH = 8


class Weights:
    """The constant tensors of one graph under edit, and the new ones that a pass makes of them.

    Args:
        edit: The session; nodes that it makes are told to `order` by `inserted`.

    Attributes:
        order: Effects and aliases of the graph.
    """

    def __init__(self, edit: EditSession) -> None:
        self.order = EffectOrder(edit.graph)
        self._edit = edit
        self._values: dict[fx.Node, torch.Tensor | None] = {}
        self._kept: dict[Any, tuple[str, Any]] = {}
        self._sources: dict[fx.Node, bool] = {}

    def value(self, operand: Any) -> torch.Tensor | None:
        """Return the tensor that an operand is at every call; None when it is none or may change.

        Args:
            operand: A node, an `Attribute`, or anything else that a call takes.
        """
        if isinstance(operand, torch.Tensor):
            return operand.detach()
        if isinstance(operand, Attribute):
            if self.order.aliases.writers(operand):
                return None
            return _tensor_at(self._edit.gm, operand.path)
        return self._of_node(operand, _DEPTH) if isinstance(operand, fx.Node) else None

    def needs_gradient(self, *operands: Any) -> bool:
        """Tell whether autograd follows any of some constant operands."""
        for operand in operands:
            if isinstance(operand, Attribute):
                found = find_attribute(self._edit.gm, operand.path)
            elif isinstance(operand, fx.Node) and operand.op == "get_attr":
                found = find_attribute(self._edit.gm, str(operand.target))
            elif isinstance(operand, fx.Node):
                found = None
                if self.needs_gradient(*operand.all_input_nodes):
                    return True
            else:
                found = operand
            if isinstance(found, torch.Tensor) and found.requires_grad:
                return True
        return False

    def keep(
        self, name: str, value: torch.Tensor, *, key: Any, gradient: bool, before: fx.Node
    ) -> fx.Node:
        """Read a new parameter in the graph; under an equal key it is registered only once.

        Args:
            name: Name wished for.
            value: The tensor to register.
            key: What it was made of, and how; what it names must outlive this object.
            gradient: Whether autograd follows it, as it followed what it was made of.
            before: The node that will use it.
        """
        path, made = self._kept.get(key, (None, None))
        if path is None or made is None:
            made = torch.nn.Parameter(value, requires_grad=gradient and value.is_floating_point())
            path = self._edit.register(name, made)
            self._kept[key] = (path, made)
        read = self._edit.get_attr(path, before=before)
        set_type(read, TensorType.of(made))
        self.inserted(read)
        return read

    def inserted(self, node: fx.Node) -> fx.Node:
        """Take note of a node that was made; return it."""
        self.order.aliases.add(node)
        return node

    def replaced(self, old: fx.Node, new: fx.Node) -> None:
        """Take note that a node stands for another one to all that used it."""
        self.order.aliases.join(old, new)

    def forget(self) -> None:
        """Drop what was registered under keys, after its registration was undone."""
        self._kept = {
            key: (path, made)
            for key, (path, made) in self._kept.items()
            if find_attribute(self._edit.gm, path) is made
        }

    def _of_node(self, node: fx.Node, depth: int) -> torch.Tensor | None:
        if node not in self._values:
            if self.order.aliases.is_written(node):
                self._values[node] = None
            elif node.op == "get_attr":
                self._values[node] = _tensor_at(self._edit.gm, str(node.target))
            else:
                self._values[node] = self._computed(node, depth)
        return self._values[node]

    def _computed(self, node: fx.Node, depth: int) -> torch.Tensor | None:
        """Compute what takes nothing but constants."""
        call = resolve(node)
        if call is None or call.operator.overload is None or node.op == "call_module" or not depth:
            return None
        if not effects_of(node).is_pure or not node.all_input_nodes:
            return None
        operands = {n: self._of_node(n, depth - 1) for n in node.all_input_nodes}
        if any(value is None for value in operands.values()):
            return None
        args, kwargs = map_arg((node.args, node.kwargs), operands.__getitem__)
        with torch.no_grad():
            if callable(node.target):
                found = node.target(*args, **kwargs)
            else:
                found = getattr(args[0], node.target)(*args[1:], **kwargs)
        return found if isinstance(found, torch.Tensor) else None


def memory_of(tensor: torch.Tensor | None) -> Any:
    """Return what tensors have in common that show the same memory in the same way."""
    if tensor is None:
        return None
    storage = impl_address_of(tensor.untyped_storage())
    return storage, tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride())


def _tensor_at(root: torch.nn.Module, path: str) -> torch.Tensor | None:
    found = find_attribute(root, path)
    is_plain = isinstance(found, torch.Tensor) and found.layout == torch.strided
    return found.detach() if is_plain and type(found) in _PLAIN else None


# Subclasses of tensors keep their numbers in ways of their own.
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
