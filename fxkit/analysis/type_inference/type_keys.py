"""Which calls have a result type that follows from a key, and what that key is.

The key of a call: the modes, the target, and for each argument the facts of a tensor or the value
of a constant. A called module of torch's own is known by its class, settings and parameters.
"""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.fx.immutable_collections import immutable_dict, immutable_list
from torch.fx.node import map_arg

from fxkit.analysis.effects import Effects, effects_of
from fxkit.analysis.type_inference.declared_types import declared_type, declared_type_of_module
from fxkit.analysis.type_inference.type_facts import FactTable, TypeFacts
from fxkit.analysis.type_inference.type_modes import TypeModes
from fxkit.ir.attributes import Attribute, find_attribute
from fxkit.ir.op import OPERATOR_NAME, resolve
from fxkit.ir.symbols import Symbol
from fxkit.ir.types import TensorType, type_of
from fxkit.torch_adapters.operators import HigherOrderOperator, OpOverload, OpOverloadPacket


class NoKey(Exception):
    """An argument is of a kind that can't be part of a key."""


class Manner(enum.Enum):
    """How a call's result type is found."""

    BY_CORE = "the cores of its operands decide it"
    BY_FACTS = "all facts of its operands decide it: it may share memory with them"
    ALONE = "it depends on its operands only, but no key holds them"
    LIVE = "it may depend on more: its operands have to be the very ones, made by running"


_BY_ITSELF = frozenset(
    {
        *(str, type(None), type(Ellipsis), torch.dtype, torch.device, torch.layout),
        *(torch.memory_format, type, types.BuiltinFunctionType),
    }
)
_BY_TYPE_TOO = frozenset({bool, float, complex})
_LISTS = {tuple: tuple, list: list, immutable_list: list, torch.Size: tuple}


def core_of(facts: TypeFacts) -> Any:
    """Return the part of facts that most operators look at."""
    return facts.core


def itself(facts: TypeFacts) -> Any:
    """Return facts as they are."""
    return facts


def part_of_key(value: Any, pick: Callable[[TypeFacts], Any], table: FactTable) -> Any:
    """Return what stands for a value in a key.

    Args:
        value: A constant, facts, or those nested.
        pick: `core_of` or `itself`.
        table: Gives the facts of tensors that stand in the graph as constants.

    Raises:
        NoKey: When the value is of any other kind.
    """
    kind = type(value)
    if kind is int or kind is Symbol or kind in _BY_ITSELF:
        return value
    if kind is TypeFacts:
        return pick(value)
    if kind in _BY_TYPE_TOO:
        return kind, value
    if kind in _LISTS:
        return (_LISTS[kind], *[part_of_key(item, pick, table) for item in value])
    if kind is slice:
        ends = (value.start, value.stop, value.step)
        return (slice, *[part_of_key(end, pick, table) for end in ends])
    if kind is dict or kind is immutable_dict:
        items = [(key, part_of_key(item, pick, table)) for key, item in value.items()]
        return (dict, *items)
    if isinstance(value, torch.Tensor):
        return pick(table.of(value))
    if isinstance(value, tuple):
        return (kind, *[part_of_key(item, pick, table) for item in value])
    raise NoKey


def key_of_call(
    node: fx.Node,
    target: Any,
    modes: TypeModes,
    values: Mapping[fx.Node, Any],
    pick: Callable[[TypeFacts], Any],
    table: FactTable,
) -> tuple[Any, ...]:
    """Return the key of a call.

    Args:
        node: The call.
        target: What stands for what it calls.
        modes: The modes that it runs in.
        values: What is known of the value of each node before it.
        pick: `core_of` or `itself`.
        table: Gives the facts of tensors that stand in the graph as constants.

    Raises:
        NoKey: When an argument is of a kind that can't be part of a key.
    """
    parts: list[Any] = [modes, target]
    value: Any
    for value in node.args:
        kind = type(value)
        if kind is fx.Node:
            value = values[value]
            kind = type(value)
        if kind is TypeFacts:
            parts.append(pick(value))
        elif kind is int:
            parts.append(value)
        else:
            parts.append(part_of_key(_filled(value, values), pick, table))
    for name, value in node.kwargs.items():
        parts.append((Ellipsis, name, part_of_key(_filled(value, values), pick, table)))
    return tuple(parts)


def _filled(value: Any, values: Mapping[fx.Node, Any]) -> Any:
    """Return an argument with what is known of nodes in their place."""
    if type(value) is fx.Node:
        return values[value]
    if isinstance(value, (list, tuple, dict, slice)):
        return map_arg(value, values.__getitem__)
    return value


_UNSEEN = frozenset(
    """
    _parameters _buffers _modules _non_persistent_buffers_set _backward_pre_hooks _backward_hooks
    _is_full_backward_hook _forward_hooks _forward_hooks_with_kwargs _forward_hooks_always_called
    _forward_pre_hooks _forward_pre_hooks_with_kwargs _state_dict_hooks _state_dict_pre_hooks
    _load_state_dict_pre_hooks _load_state_dict_post_hooks
    """.split()
)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@functools.cache
def _is_class_of_torch(cls: type) -> bool:
    home = cls.__module__
    return home.startswith("torch.nn.modules.") and getattr(nn, cls.__name__, None) is cls


def is_module_of_torch(module: Any) -> bool:
    """Tell whether a module, with all in it, is torch's own and has no hooks."""
    if not isinstance(module, nn.Module) or not _is_class_of_torch(type(module)):
        return False
    state = module.__dict__
    if "forward" in state or any(state.get(hooks) for hooks in _HOOKS):
        return False
    return all(is_module_of_torch(child) for child in state["_modules"].values())


def key_of_module(module: nn.Module, table: FactTable) -> Any:
    """Return what decides how a module of torch computes.

    Raises:
        NoKey: When it has a setting that can't be part of a key.
    """
    state = module.__dict__
    parts: list[Any] = [type(module)]
    for name, value in state.items():
        if name not in _UNSEEN:
            kind = type(value)
            if kind is not int and kind is not str:
                value = part_of_key(value, core_of, table)
            parts.append((name, value))
    for tensors in (state["_parameters"], state["_buffers"]):
        for name, tensor in tensors.items():
            parts.append((name, None if tensor is None else table.of(tensor).core))
    for name, child in state["_modules"].items():
        parts.append((name, key_of_module(child, table)))
    return tuple(parts)


_OWN_HOMES = ("torch", "_operator", "math", "builtins")


def is_function_of_torch(target: Any) -> bool:
    """Tell whether a function is torch's own, Python's or a guard, and not of higher order."""
    if isinstance(target, (OpOverload, OpOverloadPacket)):
        return True
    if isinstance(target, HigherOrderOperator):
        return False
    if str(getattr(target, OPERATOR_NAME, "")).startswith("guard."):
        return True
    home = getattr(target, "__module__", None)
    if home is None or home == "torch._C" or isinstance(target, types.MethodDescriptorType):
        return isinstance(target, (types.BuiltinFunctionType, types.MethodDescriptorType))
    return home.split(".")[0] in _OWN_HOMES


def is_shared_target(target: Any) -> bool:
    """Tell whether what a function does is settled once and for all: not so for custom ones."""
    if isinstance(target, (OpOverload, OpOverloadPacket)):
        return str(target).startswith(("aten.", "prims."))
    return True


_READ_FROM_FACTS = frozenset(
    """
    shape dtype device layout ndim requires_grad is_cuda is_cpu is_meta is_mps is_xpu is_sparse
    is_quantized is_nested itemsize nbytes T mT H mH real imag is_leaf data
    """.split()
)
_NOT_FROM_FACTS = frozenset({"python.is_pinned", "aten.set_"})


def is_address(node: fx.Node) -> bool:
    """Tell whether a call asks where a tensor or its storage lies, which fake ones can't say."""
    if node.op == "call_method":
        return node.target == "data_ptr"
    return node.target is torch.Tensor.data_ptr


def manner_of(node: fx.Node, operands: list[TypeFacts], grad: bool, mixed: bool) -> Manner:
    """Settle how a call's result type is found.

    Args:
        node: The call; its operands' types are recorded.
        operands: The facts of the tensors among its operands.
        grad: Whether autograd records.
        mixed: Whether the modes have changed before it in this graph.
    """
    if is_address(node) or any(not facts.core.is_plain for facts in operands):
        return Manner.LIVE
    effects = effects_of(node)
    if node.op == "call_module":
        return _manner_of_module(node, effects, operands, grad)
    call = resolve(node)
    assert call is not None
    if effects.is_global:
        return Manner.LIVE
    if effects.is_opaque:
        is_declared = declared_type(node.target) is not None
        return Manner.LIVE if operands or is_declared else Manner.ALONE
    if call.name in _NOT_FROM_FACTS or _reads_hidden(node):
        return Manner.LIVE
    if effects.writes and grad and _may_spread_grad(operands, mixed):
        return Manner.LIVE
    if any(not _is_tensor(written) for written in effects.writes):
        return Manner.LIVE
    if effects.may_raise:
        return Manner.ALONE
    is_fresh = call.operator.overload is not None and not (effects.aliases or effects.writes)
    return Manner.BY_CORE if is_fresh else Manner.BY_FACTS


def _manner_of_module(
    node: fx.Node, effects: Effects, operands: list[TypeFacts], grad: bool
) -> Manner:
    module = find_attribute(node.graph.owning_module, str(node.target))
    if not is_module_of_torch(module) or declared_type_of_module(module) is not None:
        return Manner.LIVE
    writes = any(getattr(part, "inplace", False) for part in module.modules())
    writes |= any(isinstance(written, fx.Node) for written in effects.writes)
    if writes and grad and _may_spread_grad(operands, mixed=False):
        return Manner.LIVE
    return Manner.BY_FACTS


def _may_spread_grad(operands: list[TypeFacts], mixed: bool) -> bool:
    """Tell whether a write may let other tensors than the written one require a gradient.

    The written operand comes first, or nearly: all are looked at.
    """
    if not any(facts.type.requires_grad for facts in operands):
        return False
    first = operands[0]
    is_settled = first.type.requires_grad and not first.is_leaf and not first.is_view
    return mixed or not is_settled


def _is_tensor(written: fx.Node | Attribute) -> bool:
    return isinstance(written, Attribute) or isinstance(type_of(written), TensorType)


def _reads_hidden(node: fx.Node) -> bool:
    if node.target is not getattr or len(node.args) < 2:
        return False
    return isinstance(node.args[0], fx.Node) and node.args[1] not in _READ_FROM_FACTS
