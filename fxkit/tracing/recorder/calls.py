"""How each function that torch reports is written into a graph, and what its result may depend on.

A `TorchFunctionMode` sees method descriptors, property getters, slot wrappers, builtins and Python
functions. `spelling_of` settles once for each of them how a node spells the call, and classifies
it by what torch's own tags say, so that recording a call costs one dictionary lookup.
"""

from __future__ import annotations

import enum
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fxkit.ir.op_table import INFIX, REFLECTED
from fxkit.torch_adapters.operators import OpOverload, OpOverloadPacket


class DataRead(enum.Enum):
    """What a call gives to the Python program around it."""

    VALUE = "value"
    """Tensors, or Python values that depend on the numbers in a tensor."""
    METADATA = "metadata"
    """Python values that follow from shapes, dtypes and devices, which entry guards pin."""
    STATE = "state"
    """Reads or sets the interpreter's modes, which the recorder polls by itself."""


@dataclass(frozen=True, slots=True)
class CallSpelling:
    """How to write calls of one function as nodes.

    Attributes:
        op: `call_function` or `call_method`.
        target: The node's target.
        name: Name that the node asks for.
        reading: What the call gives to Python.
        attribute: For a property, the attribute's name, which becomes the second argument.
        swap: Whether the two operands change places (`__rsub__`).
        may_be_random: Whether the call may draw random numbers.
        is_dynamic: Whether the result's shape may depend on the numbers in a tensor.
        may_write_unseen: Whether the call may write to arguments and not count up their versions.
        writes_in_training: Whether it does that where one of its arguments is True.
        is_pointwise: Whether the shape is that of the broadcast operands, whatever their numbers.
        refusal: Why a graph can't hold such a call, or None.
    """

    op: str
    target: Any
    name: str
    reading: DataRead = DataRead.VALUE
    attribute: str | None = None
    swap: bool = False
    may_be_random: bool = True
    is_dynamic: bool = False
    may_write_unseen: bool = False
    writes_in_training: bool = False
    is_pointwise: bool = False
    refusal: str | None = None


_METADATA = frozenset(
    """
    shape dtype device layout ndim requires_grad is_cuda is_cpu is_meta is_mps is_xpu is_mkldnn
    is_sparse is_sparse_csr is_quantized is_nested is_vulkan is_ipu is_xla is_mtia is_maia
    itemsize nbytes
    size dim numel nelement ndimension stride element_size is_contiguous is_floating_point
    is_complex is_signed get_device __len__ dim_order has_names is_same_size
    result_type promote_types can_cast is_tensor
    """.split()
)

_STATE = frozenset({"_set_grad_enabled", "_enter_autocast", "_exit_autocast"})

_OPERATORS: dict[str, tuple[Callable[..., Any], bool]] = {
    **{
        f"__{name}__": (getattr(operator, name), False)
        for name in (
            *("getitem", "setitem", "contains", "eq", "ne", "lt", "le", "gt", "ge", "invert"),
            *("neg", "pos", "abs", "floordiv", "truediv", "mod", "pow", "matmul", "sub", "add"),
            *("mul", "lshift", "rshift", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod"),
            *("ipow", "ilshift", "irshift", "index"),
        )
    },
    "__and__": (operator.and_, False),
    "__or__": (operator.or_, False),
    "__xor__": (operator.xor, False),
    "__iand__": (operator.iand, False),
    "__ior__": (operator.ior, False),
    "__ixor__": (operator.ixor, False),
    "__rsub__": (operator.sub, True),
    "__rdiv__": (operator.truediv, True),
    "__rtruediv__": (operator.truediv, True),
    "__rfloordiv__": (operator.floordiv, True),
    "__rmod__": (operator.mod, True),
    "__rpow__": (operator.pow, True),
    "__rmatmul__": (operator.matmul, True),
    "__rlshift__": (operator.lshift, True),
    "__rrshift__": (operator.rshift, True),
    "__rand__": (operator.and_, True),
    "__ror__": (operator.or_, True),
    "__rxor__": (operator.xor, True),
    "__bool__": (bool, False),
    "__int__": (int, False),
    "__float__": (float, False),
    "__complex__": (complex, False),
}

_OPERATOR_TAGS = {"getitem": "index"}

# Functions whose results take their shape from numbers although no tag of torch 2.13 says so.
_UNTAGGED_DYNAMIC = frozenset(
    """
    unique unique_consecutive _pack_padded_sequence _pad_packed_sequence to_sparse to_sparse_coo
    to_sparse_csr to_sparse_csc to_sparse_bsr to_sparse_bsc coalesce values indices _values
    _indices crow_indices col_indices ccow_indices row_indices from_file segment_reduce
    """.split()
)

READS_GRAD_FN = "the program reads .grad_fn"

_REFUSED = {
    "backward": "backward() writes gradients into .grad",
    "register_hook": "a hook is Python code that runs in the backward pass",
    "retain_grad": "a gradient is to be kept of a value that only the program has",
    "register_post_accumulate_grad_hook": "a hook is Python code that runs in the backward pass",
    "apply_": "apply_ calls Python for each element",
    "map_": "map_ calls Python for each element",
    "map2_": "map2_ calls Python for each element",
    "untyped_storage": "the program reaches into a tensor's storage",
    "_typed_storage": "the program reaches into a tensor's storage",
    "storage": "the program reaches into a tensor's storage",
    "set_": "set_ replaces a tensor's storage",
    "resize_": "resize_ changes a tensor's storage",
    "share_memory_": "share_memory_ moves a tensor's storage",
    "pin_memory": "pin_memory moves a tensor's storage",
    "__dlpack__": "the tensor leaves torch through DLPack",
    "as_subclass": "the program makes a tensor subclass",
    "_make_subclass": "the program makes a tensor subclass",
    "__deepcopy__": "the program deep-copies a tensor",
    "__reduce_ex__": "the program pickles a tensor",
}

_REFUSED_ATTRIBUTES = {
    "grad": "the program reads or writes .grad",
    "_grad": "the program reads or writes .grad",
    "grad_fn": f"{READS_GRAD_FN}, as registering a parameter does: make modules before",
    "_base": "the program reads ._base",
    "_backward_hooks": "a hook is Python code that runs in the backward pass",
    "_post_accumulate_grad_hooks": "a hook is Python code that runs in the backward pass",
    "__cuda_array_interface__": "the tensor leaves torch through its memory",
}

# Common functions that draw no random numbers, but that no tag of torch 2.13 vouches for.
_NEVER_RANDOM = frozenset(
    """
    linear matmul layer_norm transpose to contiguous reshape unsqueeze squeeze flatten chunk split
    unbind stack getitem __getitem__ setitem __setitem__ add_ mul_ sub_ div_ einsum type_as float
    half bfloat16 masked_fill expand_as detach softmax log_softmax item tolist conv1d conv2d conv3d
    batch_norm group_norm max_pool2d avg_pool2d adaptive_avg_pool2d zeros ones full arange tensor
    """.split()
)

# They update running statistics, or fill a buffer, behind autograd's back (torch 2.13): those of
# the first kind where one of their arguments is True.
_WRITES_IN_TRAINING = frozenset(
    """
    batch_norm instance_norm native_batch_norm cudnn_batch_norm miopen_batch_norm
    batch_norm_gather_stats batch_norm_gather_stats_with_counts batch_norm_update_stats
    rrelu_with_noise _native_batch_norm_legit
    """.split()
)
_WRITES_ALWAYS = frozenset(
    """
    _batch_norm_with_update _cummax_helper _cummin_helper fused_moving_avg_obs_fake_quant
    _fused_moving_avg_obs_fq_helper
    """.split()
)

_known: dict[Any, CallSpelling] = {}


def spelling_of(func: Any) -> CallSpelling:
    """Return how calls of `func`, as a `TorchFunctionMode` reports it, are written as nodes."""
    spelling = _known.get(func)
    if spelling is None:
        spelling = _known[func] = _spell(func)
    return spelling


def _spell(func: Any) -> CallSpelling:
    name = getattr(func, "__name__", "")
    owner = getattr(func, "__self__", None)
    if name in ("__get__", "__set__", "__delete__") and owner is not None:
        return _spell_property(name, owner)
    reading = _reading(name)
    refusal = _REFUSED.get(name)
    tags = _tags(name)
    flags = {
        "reading": reading,
        "refusal": refusal,
        "is_dynamic": torch.Tag.dynamic_output_shape in tags or name in _UNTAGGED_DYNAMIC,
        "is_pointwise": torch.Tag.pointwise in tags,
        "writes_in_training": _bare(name) in _WRITES_IN_TRAINING,
        "may_write_unseen": _bare(name) in _WRITES_ALWAYS or is_custom_operator(func),
        "may_be_random": name not in _NEVER_RANDOM
        and not (torch.Tag.core in tags and torch.Tag.nondeterministic_seeded not in tags),
    }
    operation = _operator_of(func)
    if operation is not None:
        target, swap = operation
        return CallSpelling("call_function", target, target.__name__.strip("_"), swap=swap, **flags)
    if getattr(torch.Tensor, name, None) is func:
        return CallSpelling("call_method", name, _node_name(name), **flags)
    return CallSpelling("call_function", func, _node_name(name), **flags)


def _bare(name: str) -> str:
    """Return a name without that of an overload."""
    return name.partition(".")[0]


def is_custom_operator(func: Any) -> bool:
    """Tell whether `func` is an operator of `torch.ops` that is not torch's own."""
    kinds = (OpOverload, OpOverloadPacket)
    return isinstance(func, kinds) and not str(func).startswith("aten.")


def _node_name(name: str) -> str:
    """Return a name for nodes: `conv2d`, `add_tensor`, `scaled_dot_product_attention`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|\W+", "_", name).lower() or "call"


def _operator_of(func: Any) -> tuple[Callable[..., Any], bool] | None:
    """Return the Python operator that `func` implements; `Tensor.__pow__` calls itself `pow`."""
    name = getattr(func, "__name__", "")
    for special in (name, f"__{name}__"):
        if special in _OPERATORS and getattr(torch.Tensor, special, None) is func:
            return _OPERATORS[special]
    return None


def _spell_property(access: str, owner: Any) -> CallSpelling:
    name = getattr(owner, "__name__", None) or getattr(
        getattr(owner, "fget", None), "__name__", "property"
    )
    if access == "__get__" and name in _METADATA:
        return CallSpelling(
            "call_function", getattr, name, reading=DataRead.METADATA, attribute=name
        )
    refusal = _REFUSED_ATTRIBUTES.get(name)
    if access == "__get__":
        return CallSpelling(
            "call_function", getattr, _node_name(name), attribute=name, refusal=refusal
        )
    if access == "__set__" and name == "requires_grad":
        return CallSpelling("call_function", setattr, f"set_{name}", attribute=name)
    return CallSpelling(
        "call_function",
        setattr,
        "set",
        refusal=refusal or f"the program assigns to .{name} of a tensor",
    )


def _reading(name: str) -> DataRead:
    if name in _METADATA:
        return DataRead.METADATA
    return DataRead.STATE if name in _STATE else DataRead.VALUE


def _tags(name: str) -> set[torch.Tag]:
    name = name.split(".")[0]
    bare = name.strip("_") if name.startswith("__") or name.endswith("_") else name
    # Only `__rand__` is a reflected operator; `rand` draws random numbers.
    infix = REFLECTED.get(name) or INFIX.get(bare) or INFIX.get(f"{bare}_") or bare
    name = _OPERATOR_TAGS.get(bare, infix.rstrip("_"))
    packet = getattr(torch.ops.aten, name, None) if name.isidentifier() else None
    if packet is None:
        return set()
    return {tag for overload in packet.overloads() for tag in getattr(packet, overload).tags}
