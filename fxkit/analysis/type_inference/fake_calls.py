"""Calls of any kind on fake tensors of one mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from fxkit.analysis.type_inference import type_errors
from fxkit.analysis.type_inference.declared_types import without_numbers
from fxkit.analysis.type_inference.fake_tensors import (
    as_fake,
    is_of_mode,
    new_fake_mode,
    tensors_of,
)
from fxkit.analysis.type_inference.indexing import with_any_place
from fxkit.analysis.type_inference.type_facts import (
    FactTable,
    concrete_number,
    materialise,
    types_of,
)
from fxkit.ir.attributes import find_attribute
from fxkit.ir.types import TensorType
from fxkit.torch_adapters import pytree


class FakeCalls:
    """Runs calls on fake tensors; each real tensor has one fake.

    Args:
        gm: The module whose nodes they are.
        table: Its facts.
        mode: The mode of the fake tensors; a new one, made when it is first needed, where None.

    Attributes:
        gm: The module.
    """

    def __init__(self, gm: fx.GraphModule, table: FactTable, mode: Any) -> None:
        self.gm = gm
        self._table = table
        self._made_mode = mode
        self._fakes: dict[int, torch.Tensor] = {}

    @property
    def mode(self) -> Any:
        """The mode of the fake tensors."""
        if self._made_mode is None:
            self._made_mode = new_fake_mode()
        return self._made_mode

    def apply(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """Call what a node calls."""
        target = node.target
        if callable(target):
            return target(*with_any_place(target, args), **kwargs)
        if node.op == "call_method":
            return getattr(args[0], target)(*args[1:], **kwargs)
        module = find_attribute(self.gm, str(target))
        if not isinstance(module, torch.nn.Module):
            return module(*args, **kwargs)
        tensors = {name: self._fake(tensor) for name, tensor in tensors_of(module)}
        with without_numbers(module):
            return torch.func.functional_call(module, tensors, args, kwargs)

    def fakes_of(self, node: fx.Node, value: Any) -> Any:
        """Return a value with fakes in the place of its tensors."""
        try:
            return pytree.tree_map_only(torch.Tensor, self._fake, value)
        except RuntimeError as error:
            raise type_errors.unfollowed(node, error) from error

    def _fake(self, value: Any) -> Any:
        """Return the fake of a real tensor, the same one each time."""
        if not isinstance(value, torch.Tensor) or is_of_mode(value, self.mode):
            return value
        if id(value) not in self._fakes:
            self._fakes[id(value)] = as_fake(self.mode, value)
        return self._fakes[id(value)]

    def types_of(self, value: Any) -> Any:
        """Return the types of values with fake tensors."""
        return types_of(self._table.abstract(value))

    def made(self, value_type: Any) -> Any:
        """Return a live value of a type that was declared or observed."""
        return pytree.tree_map(self._made_leaf, value_type)

    def _made_leaf(self, leaf: Any) -> Any:
        if not isinstance(leaf, TensorType):
            return concrete_number(leaf)
        return materialise(self._table.of_type(leaf), keep_grad=True)


def filled(node: fx.Node, fill: Callable[[fx.Node], Any]) -> tuple[Any, Any]:
    """Return the arguments of a node with values in the places of its operands."""
    return map_arg(node.args, fill), map_arg(node.kwargs, fill)
