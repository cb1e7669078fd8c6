"""Remove what does nothing outside of training."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxkit.ir.op import Call, resolve
from fxkit.ir.session import EditSession
from fxkit.ir.types import TensorType, type_of
from fxkit.passes.base import Pass, PassContext
from fxkit.passes.layout.sharing import MemorySharing
from fxkit.patterns.rules import RULES

# Rules that give the very tensor that they take.
_RULES = (
    "dropout_in_eval", "contiguous_of_contiguous", "cast_to_same", "cast_like_same", "move_to_same",
    "reshape_to_same", "view_as_same", "expand_to_same", "shape_as_same", "permute_to_same",
)  # fmt: skip


@dataclass(frozen=True)
class RemoveInferenceNoOps(Pass):
    """Remove calls that give back what they take, and checks that are known to hold.

    - dropout outside of training, `nn.Identity`, casts, moves, reshapes and `contiguous` that find
      what they are to make;
    - `detach` of what autograd does not follow, and `alias`;
    - `clone`, and `cat` of one tensor with empty ones, as a cache of keys begins with, when nobody
      writes to either tensor and the caller can't tell one from two;
    - checks of a tensor's dtype, size, strides or device that its recorded type answers.

    A check of numbers may still fail at the next call, so it goes only when asked for.

    Rewrites:
        %d = aten.dropout(%x, 0.1, False); %i = python.identity(%d); return aten.relu(%i)
            →  return aten.relu(%x)
        aten._assert_tensor_metadata(%x: f32[2,3], None, None, f32); return %x  →  return %x

    Attributes:
        assertions: Whether to remove checks of numbers too, such as `torch._assert`.
    """

    assertions: bool = False

    def apply(self, edit: EditSession, context: PassContext) -> None:
        """Run the rules, then visit the other calls in order. Cost: linear in the edges."""
        context.rewrite(edit, [RULES[name] for name in _RULES])
        remover = _Remover(edit, context, self.assertions)
        for node in list(edit.graph.nodes):
            remover.visit(node)


class _Remover:
    def __init__(self, edit: EditSession, context: PassContext, assertions: bool) -> None:
        self.edit = edit
        self.context = context
        self.assertions = assertions

    @functools.cached_property
    def sharing(self) -> MemorySharing:
        """Who shares memory: only asked where a call may do nothing."""
        return MemorySharing(self.edit.graph)

    def visit(self, node: fx.Node) -> None:
        """Remove one call that does nothing, or note why it may not go."""
        call = resolve(node)
        if call is None:
            return
        if call.name in _CHECKS:
            self._visit_check(node, call)
            return
        find_reason, operand = _SAME.get(call.name), _operand(call)
        if find_reason is None or not isinstance(operand, fx.Node):
            return
        reason = find_reason(node, operand, call) or self.sharing.refusal(node, operand)
        if reason is not None:
            self.context.notes.append(f"%{node.name} stays: {reason}")
            return
        with self.edit.on_behalf_of([node], "remove_inference_no_ops"):
            self.edit.replace_uses(node, operand)
            self.edit.erase(node)
        self.sharing.join(node, operand)

    def _visit_check(self, node: fx.Node, call: Call) -> None:
        if node.users:
            return
        holds = _CHECKS[call.name](call)
        if not holds and not self.assertions:
            self.context.notes.append(f"%{node.name} stays: it is not known to hold")
            return
        self.edit.erase(node)


def _operand(call: Call) -> Any:
    """Return what a call may give back: of tensors that are joined, the one that has elements."""
    if call.name != "aten.cat":
        return call.arguments.get("self", call.arguments.get("0"))
    joined = call.arguments.get("tensors")
    if not isinstance(joined, (list, tuple)):
        return None
    whole = [one for one in joined if not _is_empty(one)]
    return whole[0] if len(whole) == 1 else None


def _is_empty(operand: Any) -> bool:
    known = type_of(operand) if isinstance(operand, fx.Node) else None
    sizes = known.shape if isinstance(known, TensorType) else ()
    return any(isinstance(size, int) and size == 0 for size in sizes or ())


# Why a call does not give its operand itself, by the operator; None where it does.


def _always(node: fx.Node, operand: fx.Node, call: Call) -> str | None:
    return None


def _if_detached(node: fx.Node, operand: fx.Node, call: Call) -> str | None:
    known = type_of(operand)
    if isinstance(known, TensorType) and not known.requires_grad:
        return None
    return f"autograd may follow %{operand.name}"


def _if_same_layout(node: fx.Node, operand: fx.Node, call: Call) -> str | None:
    before, after = type_of(operand), type_of(node)
    if not isinstance(before, TensorType) or not isinstance(after, TensorType):
        return "the types are not known; give args"
    is_same = before.stride is not None and before.stride == after.stride
    return None if is_same else "it changes the memory layout"


def _if_same_type(node: fx.Node, operand: fx.Node, call: Call) -> str | None:
    before, after = type_of(operand), type_of(node)
    if not isinstance(before, TensorType) or not isinstance(after, TensorType):
        return "the types are not known; give args"
    if before.dtype != after.dtype or before.requires_grad != after.requires_grad:
        return "its dtype or its gradient is not that of its operand"
    return _if_same_layout(node, operand, call)


_SAME: dict[str, Callable[[fx.Node, fx.Node, Call], str | None]] = {
    "python.identity": _always,
    "aten.alias": _always,
    "aten.detach": _if_detached,
    "aten.clone": _if_same_layout,
    "aten.cat": _if_same_type,
}


# Whether a check is known to hold, by the operator.


def _metadata_holds(call: Call) -> bool:
    arguments = call.arguments
    operand = arguments.get("a")
    known = type_of(operand) if isinstance(operand, fx.Node) else None
    if not isinstance(known, TensorType) or arguments.get("layout") not in (None, torch.strided):
        return False
    wanted = {"size": known.shape, "stride": known.stride}
    for name, found in wanted.items():
        asked = arguments.get(name)
        if asked is not None and (found is None or tuple(asked) != tuple(found)):
            return False
    device = arguments.get("device")
    is_there = device is None or _is_device(device, known.device)
    return is_there and arguments.get("dtype") in (None, known.dtype)


def _is_device(wanted: Any, found: torch.device) -> bool:
    wanted = torch.device(wanted)
    return wanted.type == found.type and wanted.index in (None, found.index)


def _truth_holds(call: Call) -> bool:
    return call.arguments.get("0", call.arguments.get("self")) is True


_CHECKS: dict[str, Callable[[Call], bool]] = {
    "aten._assert_tensor_metadata": _metadata_holds,
    "aten._assert_async": _truth_holds,
    "aten._assert_scalar": _truth_holds,
    "aten._functional_assert_async": _truth_holds,
    "opaque.torch._assert": _truth_holds,
    "opaque.torch._check": _truth_holds,
}
