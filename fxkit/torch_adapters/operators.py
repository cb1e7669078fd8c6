"""Operators: their classes, the kernels they have, and the dispatch keys of tensors."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from fxkit.torch_adapters.private_names import private

if TYPE_CHECKING:
    from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
else:
    OpOverload = type(torch.ops.aten.relu.default)
    OpOverloadPacket = type(torch.ops.aten.relu)
    HigherOrderOperator = private(
        "torch._ops.HigherOrderOperator",
        "telling torch.cond and its like from other calls",
        "the class of torch.cond is asked for",
    ).get(type(torch.ops.higher_order.cond))

_HAS_KERNEL = private(
    "torch._C._dispatch_has_kernel_for_dispatch_key",
    "asking which operators autocast casts for",
    "the lists of torch 2.13 hold",
)
_IS_KNOWN = private(
    "torch._C._dispatch_has_kernel", "asking whether an operator is there", "the lists hold"
)
_KEYS = private(
    "torch._C._dispatch_keys",
    "the quick entry into compiled programs",
    "calls go through Python, some microseconds slower",
)
_KEY = private(
    "torch._C.DispatchKey",
    "keeping operators whole that autograd has a kernel for",
    "programs that are trained run in eager",
)
_DEFINITIONS = private(
    "torch._library.custom_ops.OPDEFS",
    "writing reproducers of programs with custom operators",
    "no reproducer is written of these",
)
_CUSTOM = private(
    "torch._library.custom_ops.CustomOpDef",
    "capturing custom operators by themselves",
    "only programs that call them are captured",
)
_GROUPED = private(
    "torch._grouped_mm", "types of products of groups", "they are told for bfloat16 only"
)
_HELPER = "torch._higher_order_ops"
_FAKES = private(
    f"{_HELPER}.utils.registered_hop_fake_fns",
    "types of torch.cond and its like",
    "each is asked for a rule of its own",
)
_EFFECT_OF = private(
    f"{_HELPER}.effects._get_effect", "keeping opaque calls in order", "they are left to eager"
)
_ADD_EFFECT = private(
    f"{_HELPER}.effects._register_effectful_op",
    "keeping opaque calls in order",
    "they are left to eager",
)
_EFFECTS = private(
    f"{_HELPER}.effects._EffectType", "keeping opaque calls in order", "they are left to eager"
)

CustomOpDef: Any = _CUSTOM.get(type("NoCustomOpDef", (), {}))

_has_kernel, _is_known = _HAS_KERNEL.get(), _IS_KNOWN.get()
_keys: Any = _KEYS.get()


def has_kernel(name: str, key: str) -> bool | None:
    """Tell whether an operator has a kernel under a dispatch key, or None where that can't be told.

    Args:
        name: As `aten::add.Tensor`.
        key: As `AutocastCPU`.
    """
    if _has_kernel is None or _is_known is None:
        return None
    if not _is_known(name):
        return False
    return bool(_has_kernel(name, key))


can_read_keys: bool = _keys is not None
"""Whether `dispatch_keys` works."""


def dispatch_keys(tensor: torch.Tensor) -> int:
    """Return the bits of a tensor's dispatch keys."""
    return _keys(tensor).raw_repr()


def overload_of(definition: Any) -> OpOverload:
    """Return the operator that a `CustomOpDef` calls."""
    return definition._opoverload


def grouped_product() -> Any:
    """Return the function that multiplies groups of matrices, or None."""
    return _GROUPED.get()


def grouped_product_overload() -> Any:
    """Return the operator of ATen that multiplies groups of matrices, or None."""
    packet = getattr(torch.ops.aten, "_grouped_mm", None)
    return None if packet is None else packet.default


def custom_definition(name: str) -> Any:
    """Return how a custom operator was defined, or None.

    Args:
        name: As `mylib::scale`.
    """
    return _DEFINITIONS.get({}).get(name)


def higher_order_fakes() -> Any:
    """Return the higher-order operators whose types torch works out by functions of its own."""
    return _FAKES.get({})


def effect_of(operator: Any) -> Any:
    """Return the effect that an operator is registered with, or None."""
    ask = _EFFECT_OF.get()
    return None if ask is None else ask(operator)


def register_ordered(operator: Any) -> Any:
    """Let torch keep calls of an operator in order; return what takes that back, or None."""
    register, kinds = _ADD_EFFECT.get(), _EFFECTS.get()
    if register is None or kinds is None:
        return None
    return register(operator, kinds.ORDERED)


def can_keep_order() -> bool:
    """Tell whether this torch can keep calls of operators in order."""
    return None not in (_EFFECT_OF.get(), _ADD_EFFECT.get(), _EFFECTS.get())


def can_keep_whole() -> bool:
    """Tell whether this torch can keep operators whole where it traces what they compute."""
    dropout = torch.ops.aten.dropout.default
    has_kernels = hasattr(dropout, "py_kernels") and hasattr(dropout, "_dispatch_cache")
    return _KEY.get() is not None and has_kernels


@contextlib.contextmanager
def kept_by_tracing(operator: Any, instead: Callable[..., Any] | None = None) -> Iterator[None]:
    """Take from an operator what torch's tracing would compute it by, or exchange it."""
    kernels, key = operator.py_kernels, _KEY.get()
    before = dict(kernels)
    kernels.pop(key.Autograd, None)
    if instead is not None:
        kernels[key.Autograd] = instead
    kernels[key.CompositeImplicitAutograd] = instead or _nothing
    operator._dispatch_cache.clear()
    try:
        yield
    finally:
        kernels.clear()
        kernels.update(before)
        operator._dispatch_cache.clear()


def _nothing(*args: Any, **kwargs: Any) -> Any:
    """Answer as an operator that no others stand for."""
    return NotImplemented


def refuse_calls(overload: Any, refused: Callable[..., Any]) -> None:
    """Let calls of an operator that is no longer registered raise an error.

    Its handle is that of freed memory, or of what was registered under its name since.

    Args:
        overload: The operator.
        refused: Is called in its place, and raises.
    """
    overload._op = overload._op_dk = refused


schema_of: Callable[[Any], Any] = operator.attrgetter("_schema")
"""Returns the schema of an overload: its name, arguments and results."""

overload_name_of: Callable[[Any], str] = operator.attrgetter("_overloadname")
"""Returns an overload's own name, such as `default`."""

packet_of: Callable[[Any], Any] = operator.attrgetter("_overloadpacket")
"""Returns all overloads of one's name, as an object."""

qualified_name_of: Callable[[Any], str] = operator.attrgetter("_qualified_op_name")
"""Returns the name of what holds the overloads of one name, as `aten::relu`."""


def can_decompose(overload: Any) -> bool:
    """Tell whether an overload has a decomposition of its own."""
    return overload._can_decompose()
