"""Runs of a graph in which calls with `out=` write what they write when the program runs.

Torch's fake tensors don't always say what `out=` makes of memory: `linalg.qr` lays it out in
another way there, and some operators leave it empty. The captured graph knows the types that
results had. So memory has its size before the call, and what the call computes without `out=` is
copied into it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from fxkit.analysis.effects import effects_of
from fxkit.ir.binding import is_out_variant
from fxkit.ir.op import Call, resolve
from fxkit.ir.types import TensorType, type_of
from fxkit.torch_adapters import pytree
from fxkit.torch_adapters.operators import schema_of
from fxkit.torch_adapters.tensors import impl_address_of
from fxkit.tracing.values.refusals import Refusal


class SizedRun(fx.Interpreter):
    """Runs a graph, with new memory for what a call with `out=` resizes.

    Args:
        gm: The graph, with the types that its values had.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self._gone: list[torch.Tensor] = []  # no other object is to have their identity

    def run_node(self, n: fx.Node) -> Any:
        """Run a node."""
        call = resolve(n)
        written = [] if call is None else _written(call)
        if not written:
            return super().run_node(n)
        types = _types(n, len(written))
        for operand, known in zip(written, types, strict=True):
            self._give_size(n, operand, known)
        if "out" not in n.kwargs or n.op != "call_function" or effects_of(n).is_random:
            return super().run_node(n)
        return self._run_and_copy(n, written)

    def _run_and_copy(self, node: fx.Node, written: list[fx.Node]) -> Any:
        """Compute without `out=`, and copy the results, where they have the same dtypes."""
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        targets = [self.env[operand] for operand in written]
        function: Any = node.target
        made = function(*args, **{name: v for name, v in kwargs.items() if name != "out"})
        results = list(made) if isinstance(made, (tuple, list)) else [made]
        if [it.dtype for it in results] != [it.dtype for it in targets]:
            return super().run_node(node)
        for target, result in zip(targets, results, strict=True):
            target.copy_(result)
        return tuple(targets) if isinstance(made, (tuple, list)) else targets[0]

    def _give_size(self, node: fx.Node, operand: fx.Node, known: TensorType | None) -> None:
        """Let new memory of a size stand for a tensor wherever that is known."""
        before = self.env[operand]
        if known is not None and tuple(before.shape) == tuple(known.shape):
            return
        if known is None or known.stride is None or known.is_symbolic:
            raise Refusal(f"it is not known which shape %{node.name} gives memory")
        same = [n for n, value in self.env.items() if value is before]
        if any(n.op == "placeholder" for n in same):
            raise Refusal(f"%{node.name} resizes an input")
        memory = impl_address_of(before.untyped_storage())
        shown = (t for value in self.env.values() for t in tensors_in(value))
        if any(t is not before and impl_address_of(t.untyped_storage()) == memory for t in shown):
            raise Refusal(f"%{node.name} resizes memory that others show")
        options: dict[str, Any] = {"dtype": before.dtype, "device": before.device}
        after = torch.empty_strided(known.shape, known.stride, **options)
        self._gone.append(before)
        for one in same:
            self.env[one] = after
            self.note_size(one)

    def note_size(self, node: fx.Node) -> None:
        """Take note that a node stands for new memory."""


def _written(call: Call) -> list[fx.Node]:
    """Return what a call is given as `out=`."""
    overload = call.operator.overload
    if overload is None or not is_out_variant(overload):
        return []
    names = [argument.name for argument in schema_of(overload).arguments if argument.is_out]
    values = [call.arguments[name] for name in names]
    return values if all(isinstance(value, fx.Node) for value in values) else []


def _types(node: fx.Node, count: int) -> list[TensorType | None]:
    """Return the types that so many results of a call have, as far as they are known."""
    known = type_of(node)
    types = list(known) if isinstance(known, (tuple, list)) else [known]
    found = [one if isinstance(one, TensorType) else None for one in types]
    return found if len(found) == count else [None] * count


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among nested values."""
    return (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))
