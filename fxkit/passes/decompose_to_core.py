"""Lower every operator to the closed core set."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx
from torch.fx.node import map_arg

from fxkit.ir.op import resolve
from fxkit.ir.session import EditSession
from fxkit.ir.symbols import Symbol
from fxkit.ir.types import TensorType, set_type, type_of
from fxkit.passes.base import Pass, PassContext
from fxkit.passes.decomposition.core_operators import is_core
from fxkit.passes.decomposition.recording import OperatorRecording, form_of_call, record, replay
from fxkit.passes.decomposition.torch_decompositions import computation_of, expansion_of
from fxkit.passes.decomposition.unrecordable import Unrecordable
from fxkit.passes.layout.layout import laid_out_as
from fxkit.passes.properties import write_back
from fxkit.torch_adapters import pytree
from fxkit.torch_adapters.operators import OpOverload


@dataclass(frozen=True)
class DecomposeToCore(Pass):
    """Compute every operator by those of the core set, as torch's own decompositions do.

    The set is the table in `fxkit.passes.decomposition.core_operators`. What an operator becomes
    depends on the recorded types, and equal calls are worked out once. Results keep their types and
    strides. What torch has no decomposition for, and operators outside of ATen, stay, with a note.

    Rewrites:
        return torch.ops.aten.linear.default(%x, %w, %b)
            →  %t = torch.ops.aten.permute.default(%w, [1, 0])
               return torch.ops.aten.addmm.default(%b, %x, %t)

    Source: torch/_decomp, through `fxkit.passes.decomposition.torch_decompositions`.
    """

    requires: ClassVar[tuple[str, ...]] = ("shapes_known", "aten", "functional")
    ensures: ClassVar[tuple[str, ...]] = ("core_aten",)
    preserves: ClassVar[tuple[str, ...]] = ("aten", "functional", "shapes_known")
    numerics: ClassVar[str] = "close"

    def apply(self, edit: EditSession, context: PassContext) -> None:
        """Visit the nodes in order. Cost: linear in the edges."""
        lowering, epilogue = _Lowering(edit, context), write_back(edit.graph)
        for node in list(edit.graph.nodes):
            if node not in epilogue:
                lowering.visit(node)


class _Lowering:
    def __init__(self, edit: EditSession, context: PassContext) -> None:
        self.edit = edit
        self.context = context
        self.recordings: dict[Any, OperatorRecording] = {}

    def visit(self, node: fx.Node) -> None:
        target = node.target
        if not isinstance(target, OpOverload) or is_core(target):
            return
        if target.namespace != "aten":
            self.context.notes.append(f"%{node.name} stays: {target} is no operator of ATen")
            return
        try:
            with self.edit.on_behalf_of([node], "decompose_to_core"):
                self._lower(node)
        except Unrecordable as reason:
            self.context.notes.append(f"%{node.name} stays a call of {target}: {reason}")

    def _lower(self, node: fx.Node) -> None:
        if node.target is torch.ops.aten.dim.default:
            self._give_number(node, len(type_of(node.all_input_nodes[0]).shape))
            return
        if node.target is torch.ops.aten.item.default:
            number = torch.ops.aten._local_scalar_dense.default
            new = self.edit.call(number, *node.args, before=node)
            set_type(new, type_of(node))
            self.edit.replace(node, new)
            return
        operands = list(dict.fromkeys(node.all_input_nodes))
        recording = self._recording(node, operands)
        mark = self.edit.mark()
        result = replay(self.edit, recording, operands, node)
        try:
            self._give(node, result)
        except Unrecordable:
            self.edit.undo(mark)
            raise

    def _recording(self, node: fx.Node, operands: list[fx.Node]) -> OperatorRecording:
        """Return what the operator becomes for operands of these types."""
        leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
        key = form_of_call((node.target, str(spec)), leaves)
        if key is not None and key in self.recordings:
            return self.recordings[key]

        compute = computation_of(node.target)

        def run(*values: Any) -> Any:
            given = dict(zip(operands, values, strict=True))
            filled = [given[leaf] if isinstance(leaf, fx.Node) else leaf for leaf in leaves]
            args, kwargs = pytree.tree_unflatten(filled, spec)
            return compute(*args, **kwargs)

        types = [_fakeable(operand) for operand in operands]
        recording = record(run, types, expansion_of)
        if key is not None:
            self.recordings[key] = recording
        return recording

    def _give(self, node: fx.Node, result: Any) -> None:
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


def _fakeable(node: fx.Node) -> Any:
    known = type_of(node)
    if isinstance(known, (TensorType, Symbol)) or _holds_tensors(known):
        return known
    if known is not None and _is_told_by_types(node):
        return known
    raise Unrecordable(f"it depends on %{node.name}, which may differ from call to call")


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
