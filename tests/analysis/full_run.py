"""The types of a graph by running all of it on torch's fake tensors: slow, and the reference."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils import _pytree as pytree

from fxkit.ir.types import type_of, type_of_value


class _FullRun(fx.Interpreter):
    def __init__(self, gm: fx.GraphModule, mode: FakeTensorMode) -> None:
        super().__init__(gm)
        self.types: dict[str, Any] = {}
        self._mode = mode
        self._fakes: dict[int, Any] = {}
        self.extra_traceback = False

    def fetch_attr(self, target: str) -> Any:
        return self._fake(super().fetch_attr(target))

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        module = super().fetch_attr(target)
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        fakes = {name: self._fake(tensor) for name, tensor in tensors.items()}
        return torch.func.functional_call(module, fakes, args, kwargs)

    def run_node(self, n: fx.Node) -> Any:
        try:
            result = super().run_node(n)
        except DataDependentOutputException:
            result = type_of(n)
            if not isinstance(result, (bool, int, float)):
                raise
        self.types[n.name] = type_of_value(result)
        return result

    def _fake(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in self._fakes:
            self._fakes[id(value)] = self._mode.from_tensor(value, static_shapes=True)
        return self._fakes[id(value)]


def types_by_full_run(gm: fx.GraphModule, args: tuple[Any, ...]) -> dict[str, Any]:
    """Return the type of each node, by name.

    Args:
        gm: The module.
        args: An input for each placeholder.
    """
    grad = torch.is_grad_enabled()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        run = _FullRun(gm, mode)
        try:
            run.run(*pytree.tree_map_only(torch.Tensor, mode.from_tensor, args))
        finally:
            torch.set_grad_enabled(grad)
        return run.types
