"""One operator, one identity, whatever its spelling.

`torch.relu(x)`, `F.relu(x)`, `x.relu()`, `nn.ReLU()(x)`, `F.relu(x, inplace=False)` and
`aten.relu.default(x)` are calls of one operator, `aten.relu`. `resolve` gives a node's operator and
its arguments, bound by the schema's names with the defaults filled in, once, in a cache.

A result read by its name, `x.max(0).values`, is taken by its position: `python.getitem`.

In-place and `out=` variants are operators of their own (`aten.relu_`, `aten.add_out`), since they
have effects. What can't be told is opaque, and opaque means effectful.
"""

from __future__ import annotations

import builtins
import functools
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from fxkit.ir import op_table, schema
from fxkit.ir.attributes import Attribute, find_attribute
from fxkit.ir.binding import (
    PYTHON_FUNCTIONS,
    bind_function,
    bind_method,
    binder_of,
    call_of,
    fixed_operator,
    is_hashable,
    opaque_call,
    python_call,
    schemaless_call,
)
from fxkit.ir.binding_cache import BoundForm, form_of, learn
from fxkit.ir.call import OPERATOR_NAME, Call, Operator, operator_named
from fxkit.ir.named_results import place_of_result
from fxkit.ir.types import KEY as TYPE_KEY
from fxkit.ir.types import TensorType, type_of
from fxkit.torch_adapters.fx_nodes import args_of, input_nodes_of, kwargs_of
from fxkit.torch_adapters.layers import (
    backward_hooks_of,
    backward_pre_hooks_of,
    forward_hooks_of,
    forward_pre_hooks_of,
)
from fxkit.torch_adapters.operators import OpOverload, OpOverloadPacket

__all__ = [
    "OPERATOR_NAME",
    "Attribute",
    "Call",
    "Operator",
    "is_check",
    "operator_name",
    "operator_named",
    "operator_of",
    "operator_of_overload",
    "resolve",
]

_CACHE = "_fxkit_call"
_KEPT = "_fxkit_operator"


def is_check(node: fx.Node) -> bool:
    """Tell whether a node checks that a Python value is the one of the capture."""
    return getattr(node.target, OPERATOR_NAME, "") == "guard.check_value"


def resolve(node: fx.Node) -> Call | None:
    """Return the operator that a node calls and its arguments.

    Cost: about 15 µs for a node seen the first time, below 2 µs after that. The cache lives with
    the node and is checked against its target and arguments, so that edits can't make it stale.

    Args:
        node: Any node.

    Returns:
        The call, or None for a placeholder, a `get_attr` or the output.
    """
    if node.op not in _RESOLVERS:
        return _resolve_module(node) if node.op == "call_module" else None
    target: Any = node.target
    if target is builtins.getattr:
        taken = _named_result(node)
        if taken is not None:
            return taken
    args, kwargs = args_of(node), kwargs_of(node)
    cached = node.__dict__.get(_CACHE)
    if (
        cached is not None
        and cached[0] is target
        and cached[1] is args
        and cached[2] is kwargs
        and (cached[3] or not _is_typed(node))
    ):
        return cached[4]
    if type(target) is OpOverload:
        call, is_final = _resolve_overload(target, args, kwargs), True
    else:
        call, is_final = _resolve(node.op, target, args, kwargs), _is_typed(node)
    node.__dict__[_CACHE] = (target, args, kwargs, is_final, call)
    return call


def operator_of(node: fx.Node) -> Operator | None:
    """Return the operator that a node calls, for when its arguments are not asked for.

    The same as `resolve(node).operator`, but that a call of an ATen overload with arguments that do
    not fit, which could not run, is not told from one with arguments that do.

    Cost: below 1 µs for a call of an ATen overload, whether seen before or not; else `resolve`'s.
    """
    if node.op not in _RESOLVERS and node.op != "call_module":
        return None
    operator = operator_of_overload(node.target)
    if operator is not None:
        return operator
    kept = node.__dict__.get(_KEPT)
    if kept is not None and _is_of(node, kept) and node.target is not builtins.getattr:
        return kept[4]
    call = resolve(node)
    return None if call is None else call.operator


def keep_operator(node: fx.Node, before: tuple[Any, ...], old: fx.Node, new: fx.Node) -> None:
    """Let a node keep the operator that is known of it, when an operand became one of its type.

    Args:
        node: The node, with its operands as they are now.
        before: Its operands by position as they were, when that operator was found.
        old: The operand that went.
        new: The operand in its place.
    """
    was, now = type_of(old), type_of(new)
    if was is not now and not (isinstance(was, TensorType) and was == now):
        return
    known = node.__dict__.get(_KEPT)
    if known is None or known[1] is not before:
        known = node.__dict__.get(_CACHE)
        if known is None or known[1] is not before or known[4] is None:
            return
        known = (*known[:4], known[4].operator)
    node.__dict__[_KEPT] = (known[0], args_of(node), *known[2:])


def operator_of_overload(target: Any) -> Operator | None:
    """Return the operator of every call of an ATen overload; None when its arguments decide."""
    return _forms_of(target).operator if type(target) is OpOverload else None


def operator_name(spelling: Any) -> str:
    """Return the name of an operator given in any spelling, without arguments.

    Args:
        spelling: A function (`F.relu`, `torch.relu`, `operator.add`), a tensor method
            (`torch.Tensor.relu`), a module class (`nn.ReLU`), an ATen overload or packet, a name
            (`"aten.relu"`, `"relu"`), or any other callable.
    """
    if isinstance(spelling, str):
        packet = spelling.removeprefix("aten.")
        is_aten = bool(schema.signatures(op_table.ALIASES.get(packet, packet)))
        return f"aten.{op_table.ALIASES.get(packet, packet)}" if is_aten else spelling
    if isinstance(spelling, (OpOverload, OpOverloadPacket)):
        namespace, packet = str(spelling).split(".")[:2]
        return operator_name(packet) if namespace == "aten" else f"{namespace}.{packet}"
    if isinstance(spelling, type) and issubclass(spelling, nn.Module):
        function, _ = op_table.MODULES.get(spelling.__name__, (None, ()))
        if function is not None and getattr(nn, spelling.__name__, None) is spelling:
            home = torch if function.startswith("torch.") else F
            return operator_name(getattr(home, function.removeprefix("torch.")))
        return f"opaque.{spelling.__module__}.{spelling.__qualname__}"
    name = getattr(spelling, "__name__", type(spelling).__name__)
    home = getattr(spelling, "__module__", None) or ""
    if is_hashable(spelling) and spelling in PYTHON_FUNCTIONS:
        return f"python.{PYTHON_FUNCTIONS[spelling]}"
    if home == "_operator":
        return operator_name(op_table.INFIX.get(name) or f"python.{name}")
    if spelling is getattr(F, name, None) and name in op_table.NN_FUNCTIONS:
        return operator_name(op_table.NN_FUNCTIONS[name].packet or name)
    is_pure = name in op_table.PURE_FUNCTIONS or name in op_table.PURE_WITHOUT_DROPOUT
    if is_pure and spelling is getattr(F, name, None):
        return f"torch.nn.functional.{name}"
    if binder_of(spelling) is not None:
        return operator_name(op_table.REFLECTED.get(name, name))
    return opaque_call(spelling, (), {}).name


_RESOLVERS: dict[str, Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Call]] = {
    "call_function": bind_function,
    "call_method": bind_method,
}

_RECIPES: dict[Hashable, BoundForm | None] = {}


class _Forms:
    """What is known of an ATen overload: the operator that each of its calls is, and recipes.

    Attributes:
        overload: The overload, kept so that its `id` stays its own.
        operator: The operator, or None when it depends on the arguments.
        recipes: Count of operands → recipe, for calls whose operands are all nodes: an overload
            binds those by position, whatever they are.
    """

    def __init__(self, overload: OpOverload) -> None:
        self.overload = overload
        self.operator = fixed_operator(overload)
        self.recipes: dict[int, BoundForm | None] = {}


_FORMS: dict[int, _Forms] = {}  # by id, since the hash of an overload is computed in Python


def _forms_of(overload: OpOverload) -> _Forms:
    found = _FORMS.get(id(overload))
    if found is None:
        found = _FORMS[id(overload)] = _Forms(overload)
    return found


def _resolve_overload(
    overload: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Call:
    """Resolve a call of an ATen overload."""
    if kwargs:
        return _resolve("call_function", overload, args, kwargs)
    for value in args:
        if type(value) is not fx.Node:
            return _resolve("call_function", overload, args, kwargs)
    forms = _forms_of(overload)
    recipe = forms.recipes.get(len(args))
    if recipe is None:
        if forms.operator is None or len(set(args)) < len(args):
            return _resolve("call_function", overload, args, kwargs)
        recipe = learn(args, kwargs, functools.partial(bind_function, overload))
        if recipe is None or recipe.operator is not forms.operator:
            return _resolve("call_function", overload, args, kwargs)
        forms.recipes[len(args)] = recipe
    return Call(recipe.operator, recipe.arguments(args, kwargs))


def _resolve(op: str, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    """Resolve a call through the recipe of its form, if it has one."""
    resolver = _RESOLVERS[op]
    form = form_of(target, args, kwargs) if is_hashable(target) else None
    if form is None:
        return resolver(target, args, kwargs)
    recipe = _RECIPES.get(form, _UNKNOWN)
    if recipe is _UNKNOWN:
        recipe = learn(args, kwargs, functools.partial(resolver, target))
        if recipe is None or not recipe.operator.is_opaque:
            _RECIPES[form] = recipe
    if recipe is None:
        return resolver(target, args, kwargs)
    return Call(recipe.operator, recipe.arguments(args, kwargs))


_UNKNOWN: Any = object()


def _named_result(node: fx.Node) -> Call | None:
    """Resolve `x.max(0).values`, which is `x.max(0)[0]`; not kept, since the operand decides."""
    args = args_of(node)
    if len(args) != 2 or not isinstance(args[0], fx.Node) or not isinstance(args[1], str):
        return None
    source = operator_of(args[0])
    place = None if source is None else place_of_result(source, args[1])
    return None if place is None else python_call("getitem", (args[0], place), {})


def _is_of(node: fx.Node, kept: tuple[Any, ...]) -> bool:
    """Tell whether what was noted of a node holds for its target and operands as they are now."""
    target, args, kwargs, is_final, _ = kept
    if target is not node.target or args is not args_of(node) or kwargs is not kwargs_of(node):
        return False
    return is_final or not _is_typed(node)


def _is_typed(node: fx.Node) -> bool:
    for operand in input_nodes_of(node):
        if TYPE_KEY not in operand.meta and type_of(operand) is None:
            return False
    return True


def _resolve_module(node: fx.Node) -> Call:
    """Resolve a called module through the function that its forward calls."""
    root = node.graph.owning_module
    path = str(node.target)
    module = find_attribute(root, path)
    cls = type(module)
    name = f"{cls.__module__}.{cls.__qualname__}"
    if isinstance(module, fx.GraphModule):
        return opaque_call("torch.fx.GraphModule", node.args, node.kwargs)
    if name == _CHECK_OF_INPUTS and not _has_hooks(module, but="forward"):
        return schemaless_call("guard.check_inputs", node.args, node.kwargs)
    if not isinstance(module, nn.Module) or _has_hooks(module):
        return opaque_call(name, node.args, node.kwargs)
    if cls is nn.Identity:
        return python_call("identity", node.args[:1], {})
    if getattr(nn, cls.__name__, None) is not cls or cls.__name__ not in op_table.MODULES:
        return opaque_call(name, node.args, node.kwargs)
    if getattr(module, "padding_mode", "zeros") != "zeros" or node.kwargs or len(node.args) != 1:
        return opaque_call(name, node.args, node.kwargs)
    function, attributes = op_table.MODULES[cls.__name__]
    home = torch if function.startswith("torch.") else F
    call = call_of(
        getattr(home, function.removeprefix("torch.")),
        node.args,
        {attribute: _module_value(module, path, attribute) for attribute in attributes},
    )
    return opaque_call(name, node.args, node.kwargs) if call.operator.is_opaque else call


# What torch.export puts first in a program: it raises where inputs differ from those exported for.
_CHECK_OF_INPUTS = "torch.export._unlift.GuardsFn"


def _module_value(module: nn.Module, path: str, attribute: str) -> Any:
    value = getattr(module, attribute)
    if attribute == "training" and hasattr(module, "running_mean"):
        return value or module.running_mean is None
    return Attribute(f"{path}.{attribute}") if isinstance(value, torch.Tensor) else value


def _has_hooks(module: nn.Module, but: str = "") -> bool:
    return bool(
        forward_hooks_of(module)
        or forward_pre_hooks_of(module)
        or backward_hooks_of(module)
        or backward_pre_hooks_of(module)
        or ("forward" in module.__dict__ and but != "forward")
    )
