"""Write into the graph what `torch.autocast` does around it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import fx
from torch.fx.node import map_arg

from fxkit.errors import UnsupportedError
from fxkit.ir.attributes import Attribute, find_attribute
from fxkit.ir.op import Call, resolve
from fxkit.ir.printer import format_node, format_source
from fxkit.ir.session import EditSession
from fxkit.ir.types import TensorType, set_type, type_of
from fxkit.passes.base import Pass, PassContext
from fxkit.passes.decomposition.fake_runs import operators_under, type_under, without_autocast
from fxkit.passes.layers.autocast_lists import (
    APPEND_DTYPE,
    AUTOCAST,
    BANNED,
    FLOAT32,
    HIDING,
    PROMOTE,
    SET_DTYPE,
    WITH_DTYPE,
    overload_key,
)
from fxkit.passes.layers.casts import cast_results_back, insert_cast, result_types
from fxkit.passes.options import check_lower_precision
from fxkit.torch_adapters.grad_modes import enter_autocast, exit_autocast
from fxkit.torch_adapters.operators import OpOverload, has_kernel
from fxkit.torch_adapters.tensors import is_view_of_another


@dataclass(frozen=True)
class Autocast(Pass):
    """Insert the casts that eager `torch.autocast` makes, so that the graph runs without it.

    The result gives the very numbers that the graph gives inside `torch.autocast`, and the same
    gradients: casts stand where torch makes them, a float32 parameter that requires a gradient is
    cast once, everything else at each use. Parts that the program itself put inside of
    `torch.autocast(...)`, switched on or off, are left to it. Calls that nothing is known of, or
    that make casts somewhere inside, keep a `torch.autocast` of their own, entered and left by
    nodes: when such a call raises, it stays on. Inputs are taken for
    results of other operators: torch also casts an input once when it is a leaf.

    A program that asks whether autocast is on, as some models do, has to be captured with it on,
    and the pass manager to run with it on, so that the types are those of that program.

    Rewrites:
        %y = aten.linear(%x, %w); return %y
            →  %x_b = aten.to(%x, bf16); %w_b = aten.to(%w, bf16); %y = aten.linear(%x_b, %w_b)
               %y_f = aten.to(%y, f32); return %y_f

    Source: ATen/autocast_mode.h and ATen/autocast_mode.cpp of torch 2.13.

    Attributes:
        device_type: Device whose lists hold, and whose tensors are cast: `cpu` or `cuda`.
        dtype: The lower precision: bfloat16 or float16.
        is_caching: Whether parameters are cast once, as `torch.autocast(cache_enabled=)` tells.
        keep_output_types: Whether the results are cast back to the dtypes they had; eager autocast
            returns what it has.
    """

    device_type: str = "cpu"
    dtype: torch.dtype = torch.bfloat16
    is_caching: bool = True
    keep_output_types: bool = True

    requires: ClassVar[tuple[str, ...]] = ("shapes_known",)
    numerics: ClassVar[str] = "changed"

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        check_lower_precision(self)

    def apply(self, edit: EditSession, context: PassContext) -> None:
        """Visit the nodes in order. Cost: linear; changed nodes run on fake tensors once or twice.

        Raises:
            UnsupportedError: For a device without lists, or an operator that autocast refuses.
        """
        if self.device_type not in AUTOCAST:
            raise UnsupportedError(
                f"expected a device type of {', '.join(AUTOCAST)}, got {self.device_type!r}",
                hint="autocast has lists for these",
            )
        wanted = result_types(edit)
        caster = _Caster(edit, context, self)
        for node in list(edit.graph.nodes):
            if node.op.startswith("call_"):
                caster.visit(node)
        if self.keep_output_types:
            cast_results_back(edit, wanted)


@dataclass
class _Caster:
    edit: EditSession
    context: PassContext
    options: Autocast
    regions: list[tuple[Any, ...]] = field(default_factory=list)
    changed: set[fx.Node] = field(default_factory=set)
    cached: dict[int, fx.Node] = field(default_factory=dict)
    hiding: dict[Hashable, bool] = field(default_factory=dict)

    def visit(self, node: fx.Node) -> None:
        call = resolve(node)
        if call is None or self._enters_or_leaves(node, call):
            return
        if self.regions:
            self._retype(node, torch.autocast(*self.regions[-1]))
            return
        key = self._overload_key(node, call)
        if key in BANNED.get(self.options.device_type, ()):
            raise _banned(node)
        policy = AUTOCAST[self.options.device_type].get(key)
        with self.edit.on_behalf_of([node], "autocast"):
            if policy is not None:
                self._follow(policy, node, call, key)
            elif self._hides_casts(node, call):
                self._wrap(node)
            else:
                self._retype(node, without_autocast())

    # What the program itself says of autocast.

    def _enters_or_leaves(self, node: fx.Node, call: Call) -> bool:
        name = call.name.rpartition(".")[2]
        if name == "_enter_autocast":
            device = node.args[0] if node.args else None
            if device == self.options.device_type:
                self.regions.append(node.args)
            return True
        if name == "_exit_autocast":
            entered = node.args[0]
            if isinstance(entered, fx.Node) and entered.args[:1] == (self.options.device_type,):
                del self.regions[-1:]
            return True
        return False

    # Following the lists.

    def _follow(self, policy: str, node: fx.Node, call: Call, key: str) -> None:
        operands = self._eligible(node, call)
        if policy in (SET_DTYPE, APPEND_DTYPE):
            node = self._with_dtype(policy, node, call, key, operands)
        elif operands:
            node = self._with_casts(node, call, self._target_dtype(policy, operands))
        self._retype(node, without_autocast(), is_new=True)

    def _target_dtype(self, policy: str, operands: list[TensorType]) -> torch.dtype:
        is_wide = policy == PROMOTE and any(t.dtype == torch.float32 for t in operands)
        return torch.float32 if is_wide or policy == FLOAT32 else self.options.dtype

    def _eligible(self, node: fx.Node, call: Call) -> list[TensorType]:
        """Return the types of the operands that autocast looks at: floating, not float64."""
        found = [type_of(operand) for operand in node.all_input_nodes]
        if node.op == "call_module":
            held = (self._held(a) for a in call.arguments.values() if isinstance(a, Attribute))
            found.extend(TensorType.of(tensor) for tensor in held)
        return [t for t in found if self._is_eligible(t)]

    def _is_eligible(self, known: Any) -> bool:
        return (
            isinstance(known, TensorType)
            and known.dtype.is_floating_point
            and known.dtype != torch.float64
            and known.device.type == self.options.device_type
        )

    def _with_casts(self, node: fx.Node, call: Call, dtype: torch.dtype) -> fx.Node:
        """Cast the operands of a call; one of a module becomes one of its operator."""

        def cast(operand: fx.Node) -> fx.Node:
            known = type_of(operand)
            if not self._is_eligible(known) or known.dtype == dtype:
                return operand
            return self._cast(operand, known, dtype, node)

        if node.op != "call_module":
            args, kwargs = map_arg(node.args, cast), map_arg(node.kwargs, cast)
            if (args, kwargs) != (node.args, node.kwargs):
                self.edit.set_args(node, args, kwargs)
            return node
        arguments = {name: self._read(value, node) for name, value in call.arguments.items()}
        if not any(_needs(type_of(o), dtype) for o in _nodes_in(arguments) if self._is_eligible(
            type_of(o)
        )):  # fmt: skip
            return node
        return self._replaced(node, call.operator.overload, map_arg(arguments, cast))

    def _cast(
        self, operand: fx.Node, known: TensorType, dtype: torch.dtype, user: fx.Node
    ) -> fx.Node:
        parameter = self._cacheable(operand, known, dtype)
        if parameter is None:
            return insert_cast(self.edit, operand, dtype, before=user)
        if id(parameter) not in self.cached:
            self.cached[id(parameter)] = insert_cast(self.edit, operand, dtype, before=user)
        return self.cached[id(parameter)]

    def _cacheable(self, operand: fx.Node, known: TensorType, dtype: torch.dtype) -> Any:
        """Return the parameter behind an operand whose cast torch would remember."""
        if operand.op != "get_attr" or not self.options.is_caching:
            return None
        if known.dtype != torch.float32 or dtype != self.options.dtype:
            return None
        tensor = find_attribute(self.edit.gm, str(operand.target))
        may_cache = tensor.requires_grad and tensor.is_leaf and not is_view_of_another(tensor)
        return tensor if may_cache else None

    def _held(self, attribute: Attribute) -> torch.Tensor:
        return find_attribute(self.edit.gm, attribute.path)

    def _read(self, value: Any, before: fx.Node) -> Any:
        if not isinstance(value, Attribute):
            return value
        node = self.edit.get_attr(value.path, before=before)
        set_type(node, TensorType.of(self._held(value)))
        return node

    def _with_dtype(
        self, policy: str, node: fx.Node, call: Call, key: str, operands: list[TensorType]
    ) -> fx.Node:
        """Let a call name float32 as the dtype of its result."""
        first = type_of(node.all_input_nodes[0]) if node.all_input_nodes else None
        arguments = {name: self._read(value, node) for name, value in call.arguments.items()}
        overload: Any = call.operator.overload
        if policy == SET_DTYPE:
            if not self._is_eligible(first) or arguments.get("dtype") is not None:
                return node
            return self._replaced(node, overload, {**arguments, "dtype": torch.float32})
        dtype = torch.float32 if self._is_eligible(first) else getattr(first, "dtype", None)
        wider = getattr(overload.overloadpacket, WITH_DTYPE[key])
        return self._replaced(node, wider, {**arguments, "dtype": dtype})

    def _replaced(self, node: fx.Node, overload: Any, arguments: Any) -> fx.Node:
        new = self.edit.insert("call_function", overload, (), dict(arguments), before=node)
        set_type(new, type_of(node))
        self.edit.replace(node, new)
        return new

    # Calls that make casts somewhere inside.

    def _overload_key(self, node: fx.Node, call: Call) -> str:
        """Return the overload that a call goes to first: its own, where the graph names one."""
        named = node.target if isinstance(node.target, OpOverload) else None
        overload = named or call.operator.overload
        return "" if overload is None else overload_key(overload)

    def _hides_casts(self, node: fx.Node, call: Call) -> bool:
        if call.name.partition(".")[0] in ("python", "guard"):
            return False
        overload: Any = call.operator.overload
        if overload is None:
            return True
        if not self._eligible(node, call):
            return False
        if not _has_parts(overload.name()):
            return overload_key(overload) in HIDING
        types = tuple(str(type_of(operand)) for operand in node.all_input_nodes)
        key = (overload, types)
        if key not in self.hiding:
            plain = operators_under(node, without_autocast())
            self.hiding[key] = (
                plain is None
                or plain != operators_under(node, self._mode())
                or any(name.removeprefix("aten.") in HIDING for name, _ in plain)
            )
        return self.hiding[key]

    def _mode(self) -> torch.autocast:
        options = self.options
        return torch.autocast(options.device_type, options.dtype, True, options.is_caching)

    def _wrap(self, node: fx.Node) -> None:
        """Give a call an autocast of its own."""
        options = self.options
        mode = (options.device_type, options.dtype, True, options.is_caching)
        entered = self.edit.call(enter_autocast, *mode, before=node)
        self.edit.call(exit_autocast, entered, after=node)
        self.context.notes.append(f"%{node.name} keeps an autocast of its own: it may cast inside")
        self._retype(node, self._mode(), is_new=True)

    # Types.

    def _retype(self, node: fx.Node, context: Any, *, is_new: bool = False) -> None:
        """Work out the type of a node whose operands got others."""
        if not is_new and not any(operand in self.changed for operand in node.all_input_nodes):
            return
        before = type_of(node)
        now = type_under(node, context)
        if now is None:
            self.context.notes.append(f"%{node.name} keeps the type it had: it runs on no fakes")
        elif now != before:
            set_type(node, now)
            self.changed.add(node)


def _has_parts(name: str) -> bool:
    """Tell whether an operator is made of others that go through the dispatcher."""
    return bool(has_kernel(name, "CompositeImplicitAutograd"))


def _needs(known: Any, dtype: torch.dtype) -> bool:
    return isinstance(known, TensorType) and known.dtype != dtype


def _nodes_in(value: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    map_arg(value, found.append)
    return found


def _banned(node: fx.Node) -> UnsupportedError:
    return UnsupportedError(
        "expected an operator that is safe to autocast, got one that torch.autocast refuses",
        node=format_node(node),
        source=format_source(node),
        hint="use binary_cross_entropy_with_logits, or switch autocast off around it",
    )
