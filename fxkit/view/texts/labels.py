"""What is written on a node: its operator, its constants, its type, and the family it belongs to.

Trees, drawings, profiles and reports all take their words from here, so that a node is called the
same everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxkit.ir.node_kinds import COMPUTES_NOTHING
from fxkit.ir.op import Attribute, Call, resolve
from fxkit.ir.provenance import Source, provenance_of, source_of
from fxkit.ir.text_table import columns
from fxkit.ir.types import TensorType, type_of

FAMILIES = {
    "input": "inputs and outputs",
    "contraction": "matrix products, convolutions, attention",
    "reduction": "reductions, softmax, norms",
    "pointwise": "element by element",
    "layout": "views and copies",
    "lookup": "lookups, gathers, constants",
    "kernel": "compiled kernels",
    "opaque": "unknown calls",
    "other": "everything else",
}
"""Colour families of nodes, with what the legend says of each."""

_FAMILY_WORDS = (
    (
        "contraction",
        r"linear|addmm|b?mm|matmul|baddbmm|dot|mv|einsum|bilinear|convolution|.*conv\d?d?"
        r"|conv_transpose\dd|.*attention.*|addmv|outer|tensordot|lstm|gru",
    ),
    (
        "reduction",
        r".*norm|norm|.*softmax|softmax|sum|mean|var|std|var_mean|prod|amax|amin|argmax|argmin"
        r"|logsumexp|cumsum|cumprod|any|all|.*pool\dd(_with_indices)?|topk|sort",
    ),
    (
        "layout",
        r"view|reshape|transpose|permute|expand|expand_as|t|unsqueeze|squeeze|flatten|unflatten"
        r"|contiguous|clone|slice|select|split|chunk|unbind|cat|stack|repeat|narrow|movedim|to"
        r"|_to_copy|alias|detach|view_as|getitem|getattr|size|pad|roll|flip|tile|as_strided"
        r"|split_with_sizes|repeat_interleave|lift_fresh_copy|copy|constant_pad_nd",
    ),
    (
        "lookup",
        r"embedding.*|gather|index|index_select|take.*|scatter.*|one_hot|arange|full|full_like"
        r"|zeros.*|ones.*|empty.*|tensor|scalar_tensor|get_attr|eye|rand.*",
    ),
    (
        "pointwise",
        r"add|sub|mul|div|neg|pow|where|dropout|gelu|relu6?|silu|tanh|sigmoid|exp|log|sqrt|rsqrt"
        r"|masked_fill|clamp|abs|type_as|float|half|bool|long|rsub|lt|le|gt|ge|eq|ne",
    ),
)
_PATTERNS = tuple((family, re.compile(words)) for family, words in _FAMILY_WORDS)
_KERNEL = re.compile(r"(^|[._])(kernel|region|fused)([._0-9]|$)")


@dataclass(frozen=True, slots=True)
class Label:
    """The words of one node.

    Attributes:
        name: The node's name in its graph.
        operator: `aten.linear`; `input`, `output` or `constant` for what is no call.
        short: The operator as a drawing shows it: `linear`.
        constants: Its arguments that are no tensors, as text: `1, 2`; for a kernel the nodes that
            it computes: `add + layer_norm`.
        type: Shape and dtype, `f32[2,3]`; "" when nothing is known.
        family: One of `FAMILIES`.
        source: The user's source line, when it was recorded.
    """

    name: str
    operator: str
    short: str
    constants: str
    type: str
    family: str
    source: Source | None


def label_of(node: fx.Node) -> Label:
    """Describe a node; costs no more than one look at its operator and its metadata."""
    call = None if node.op in COMPUTES_NOTHING else resolve(node)
    operator = operator_name(node, call)
    family = _family(node, operator, call)
    return Label(
        name=node.name,
        operator=operator,
        short=short_operator(operator),
        constants=_computed(node) if family == "kernel" else _constants(node, call),
        type=_output_type(node) if node.op == "output" else type_text(type_of(node)),
        family=family,
        source=source_of(node),
    )


def operator_name(node: fx.Node, call: Call | None = None) -> str:
    """Return the identity of a node's operator, or what the node is when it is no call."""
    fixed = {"placeholder": "input", "get_attr": "constant", "output": "output"}
    if node.op in fixed:
        return fixed[node.op]
    call = call or resolve(node)
    return call.operator.name if call is not None else _target_text(node)


def short_operator(name: str) -> str:
    """Drop the namespace: `aten.layer_norm` → `layer_norm`, `opaque.a.b.f` → `f`."""
    return name.rpartition(".")[2] or name


def type_text(value_type: Any, *, limit: int = 3) -> str:
    """Return a type as text; tuples longer than `limit` are cut with their count."""
    if value_type is None:
        return ""
    if isinstance(value_type, TensorType):
        return str(value_type)
    if isinstance(value_type, (tuple, list)):
        shown = [type_text(item) or "?" for item in list(value_type)[:limit]]
        if len(value_type) > limit:
            shown.append(f"… {len(value_type)} values")
        return f"({', '.join(shown)})"
    if isinstance(value_type, dict):
        shown = [f"{key}: {type_text(item) or '?'}" for key, item in list(value_type.items())]
        return "{" + ", ".join(shown[:limit]) + (", …" if len(shown) > limit else "") + "}"
    return clip(repr(value_type), 40)


def clip(text: str, width: int) -> str:
    """Cut text to `width` columns, with an ellipsis where something is missing."""
    if columns(text) <= width:
        return text
    kept = ""
    for character in text:
        if columns(kept) + columns(character) > width - 1:
            break
        kept += character
    return kept.rstrip() + "…"


def one_line(text: str) -> str:
    """Show line breaks and other control characters as escapes, so that a label stays one line."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _target_text(node: fx.Node) -> str:
    if isinstance(node.target, str):
        return f"{node.op.removeprefix('call_')}.{node.target}"
    return f"opaque.{getattr(node.target, '__qualname__', None) or repr(node.target)}"


def _output_type(node: fx.Node) -> str:
    operands = node.all_input_nodes
    if len(operands) == 1:
        return type_text(type_of(operands[0]))
    return f"{len(operands)} values"


def _constants(node: fx.Node, call: Call | None) -> str:
    if node.op == "get_attr":
        return one_line(str(node.target))
    if node.op in ("placeholder", "output"):
        return ""
    if call is not None and call.operator.name == "python.getitem" and len(node.args) > 1:
        return one_line(clip(_value_text(node.args[1]), 60))
    if call is not None and call.operator.schema is not None:
        return one_line(clip(", ".join(_schema_constants(call)), 60))
    parts = [_value_text(arg) for arg in node.args if not _has_node(arg)]
    parts += [f"{key}={_value_text(arg)}" for key, arg in node.kwargs.items() if not _has_node(arg)]
    return one_line(clip(", ".join(parts), 60))


def _computed(node: fx.Node) -> str:
    """Name the nodes that a kernel stands for, where that was recorded."""
    replaced = provenance_of(node).replaced
    return "" if replaced == (node.name,) else one_line(clip(" + ".join(replaced), 60))


def _schema_constants(call: Call) -> Iterator[str]:
    """Write what is neither a tensor nor the schema's default; what has a default by its name."""
    for argument in call.operator.schema.arguments:
        value = call.arguments.get(argument.name)
        if value is None or _has_node(value) or isinstance(value, (Attribute, torch.Tensor)):
            continue
        if not argument.has_default_value():
            yield _value_text(value)
        elif value != argument.default_value:
            yield f"{argument.name}={_value_text(value)}"


def _has_node(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(_has_node(item) for item in value)
    if isinstance(value, dict):
        return any(_has_node(item) for item in value.values())
    return isinstance(value, fx.Node)


def _value_text(value: Any) -> str:
    if isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
        return str(value).removeprefix("torch.")
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, fx.Node):
        return f"%{value.name}"
    if isinstance(value, slice):
        ends = [value.start, value.stop, *([] if value.step is None else [value.step])]
        return ":".join("" if end is None else _value_text(end) for end in ends)
    if isinstance(value, (tuple, list)):
        return f"[{','.join(_value_text(item) for item in value)}]"
    if value is Ellipsis:
        return "..."
    return repr(value)


def _family(node: fx.Node, operator: str, call: Call | None) -> str:
    if node.op in ("placeholder", "output"):
        return "input"
    short = short_operator(operator).rstrip("_")
    if _KERNEL.search(operator) or _KERNEL.search(node.name):
        return "kernel"
    for family, pattern in _PATTERNS:
        if (not operator.startswith("opaque.")) and pattern.fullmatch(short):
            return family
    if node.op == "get_attr":
        return "lookup"
    return _family_by_schema(call)


def _family_by_schema(call: Call | None) -> str:
    if call is None or call.operator.is_opaque:
        return "opaque"
    tags = call.operator.overload.tags if call.operator.overload is not None else []
    if torch.Tag.pointwise in tags:
        return "pointwise"
    if torch.Tag.reduction in tags:
        return "reduction"
    return "other"
