"""Operators by those of the closed core set, as torch's own decompositions compute them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from fxkit.ir.compositions import composition_of
from fxkit.ir.op import Call, resolve
from fxkit.ir.session import EditSession
from fxkit.ir.symbols import Symbol
from fxkit.ir.types import TensorType, set_type, type_of
from fxkit.passes.base import PassContext
from fxkit.passes.decomposition.core_operators import is_core
from fxkit.passes.decomposition.decompositions import Decomposition, Entry
from fxkit.passes.decomposition.functional_forms import write_back
from fxkit.passes.decomposition.strides import laid_out_as
from fxkit.passes.decomposition.torch_decompositions import computation_of, expansion_of
from fxkit.passes.decomposition.unrecordable import Unrecordable
from fxkit.torch_adapters.operators import OpOverload

_aten = torch.ops.aten


class ToCore(Decomposition):
    """Every operator of ATen outside of the core set, but for what writes results back."""

    def __init__(self, edit: EditSession, context: PassContext, name: str) -> None:
        super().__init__(edit, context, name)
        self._epilogue = write_back(edit.graph)

    def entry(self, node: fx.Node, call: Call) -> Entry | None:
        """Return what puts operators of the core set in the place of an operator."""
        target = node.target
        if not isinstance(target, OpOverload) or is_core(target) or node in self._epilogue:
            return None
        if target.namespace != "aten" and composition_of(target) is None:
            raise Unrecordable("it is no operator of ATen")
        own = {
            _aten.dim.default: self._count_axes,
            _aten.item.default: self._read_number,
            _aten._assert_tensor_metadata.default: self._check_type,
        }
        return own.get(target, self._compute)

    def expansion(self, overload: Any) -> Callable[..., Any] | None:
        """Return what computes an operator; None for one of the core set."""
        return expansion_of(overload)

    def operand_type(self, node: fx.Node) -> Any:
        """Return the type of what an operator takes: a number, too, that types tell."""
        known = type_of(node)
        if isinstance(known, (TensorType, Symbol)) or _holds_tensors(known):
            return known
        if known is not None and _is_told_by_types(node):
            return known
        raise Unrecordable(f"it depends on %{node.name}, which may differ from call to call")

    def _count_axes(self, node: fx.Node, call: Call) -> None:
        self._give_number(node, len(type_of(node.all_input_nodes[0]).shape))

    def _read_number(self, node: fx.Node, call: Call) -> None:
        number = _aten._local_scalar_dense.default
        self.take_over(node, self.edit.call(number, *node.args, before=node))

    def _check_type(self, node: fx.Node, call: Call) -> None:
        """Leave out what says that a tensor has the type that is recorded."""
        given, known = call.arguments, type_of(node.all_input_nodes[0])
        told = ((given["size"], known.shape), (given["stride"], known.stride),
                (given["dtype"], known.dtype), (given["device"], known.device))  # fmt: skip
        if any(it is not None and it != found for it, found in told):
            raise Unrecordable(f"it asks for another type than {known}")
        self.edit.erase(node)

    def _compute(self, node: fx.Node, call: Call) -> None:
        mark = self.edit.mark()
        target: Any = node.target
        function = composition_of(target) or computation_of(target)
        try:
            self.replay(node, function, (node.args, node.kwargs))
        except Unrecordable:
            self.edit.undo(mark)
            raise

    def give(self, node: fx.Node, result: Any) -> None:
        """Let a node's users use what replaces it, with the types and layouts that they had."""
        known = type_of(node)
        if isinstance(known, TensorType):
            self._give_tensor(node, result, known)
        elif isinstance(result, (tuple, list)):
            self._give_several(node, result)
        else:
            self._give_number(node, result)

    def _give_tensor(self, node: fx.Node, result: Any, known: TensorType) -> None:
        made = type_of(result) if isinstance(result, fx.Node) else None
        if not isinstance(made, TensorType) or made.dtype != known.dtype:
            raise Unrecordable(f"its decomposition gives {made} instead of {known}")
        placed = laid_out_as(self.edit, result, known, node)
        if placed is None:
            raise Unrecordable(f"its decomposition gives {made} in another layout")
        is_new = placed not in node.all_input_nodes
        self.edit.replace(node, placed)
        if is_new:
            set_type(placed, replace(type_of(placed), requires_grad=known.requires_grad))

    def _give_several(self, node: fx.Node, results: Any) -> None:
        """Let those who take one of several results take what computes it now."""
        for user in list(node.users):
            taken = resolve(user)
            if taken is None or taken.name != "python.getitem":
                _put(self.edit, user, node, self._as_list(node, results))
        for user in list(node.users):
            taken = resolve(user)
            assert taken is not None
            result = results[taken.arguments["1"]]
            if not isinstance(result, fx.Node) or not isinstance(type_of(user), TensorType):
                raise Unrecordable("one of its results is no tensor")
            self._give_tensor(user, result, type_of(user))
        self.edit.erase(node)

    def _give_number(self, node: fx.Node, number: Any) -> None:
        """Write a number that types tell into the users of its node."""
        if not isinstance(number, (bool, int, float)):
            raise Unrecordable(f"its decomposition gives {number!r}")
        for user in list(node.users):
            _put(self.edit, user, node, number)
        self.edit.erase(node)

    def _as_list(self, node: fx.Node, results: Any) -> list[fx.Node]:
        """Return results that somebody takes whole, each with the layout that it had."""
        wanted = type_of(node)
        if not isinstance(wanted, (tuple, list)) or len(wanted) != len(results):
            raise Unrecordable("its results are taken whole")
        placed = []
        for result, known in zip(results, wanted, strict=True):
            made = laid_out_as(self.edit, result, known, node)
            if made is None:
                raise Unrecordable("one of its results lies in another layout")
            placed.append(made)
        return placed


def _put(edit: EditSession, user: fx.Node, old: fx.Node, value: Any) -> None:
    """Let a user take a constant, or a list, in place of a node."""
    edit.set_args(
        user,
        map_arg(user.args, lambda n: value if n is old else n),
        map_arg(user.kwargs, lambda n: value if n is old else n),
    )


def _holds_tensors(known: Any) -> bool:
    return isinstance(known, (tuple, list)) and any(isinstance(k, TensorType) for k in known)


def _is_told_by_types(node: fx.Node) -> bool:
    """Tell whether a number or tuple is computed from the sizes of tensors alone."""
    call = resolve(node)
    if call is None:
        return False
    if call.name in _SIZES or (call.name == "python.getattr" and node.args[1:] == ("shape",)):
        return True
    operands = node.all_input_nodes
    is_python = call.name.startswith("python.") and bool(operands)
    return is_python and all(_is_told_by_types(operand) for operand in operands)


_SIZES = frozenset({"aten.size", "aten.sym_size", "aten.numel", "aten.sym_numel", "aten.dim"})
