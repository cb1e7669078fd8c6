"""Attention as a value of the loop IR, and the nodes that compute it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx

from fxkit.ir.op import Attribute, resolve
from fxkit.ir.types import TensorType, short_dtype, type_of
from fxkit.lower.fusion.candidates import operand_type
from fxkit.lower.fusion.emit import Emitted
from fxkit.lower.loop_ir.loop_ir import Access, Buffer, Instruction, Kernel, Store, Unfusable
from fxkit.lower.loop_ir.tensor_op import Numbers, TensorOp

# Scores of so many keys, for the least number of queries at a time, still fit into the cache.
MAX_KEYS = 32768


@dataclass(frozen=True, slots=True)
class Attention(TensorOp):
    """The detail of an instruction `attention`, the only one of its kernel.

    Buffers 0, 1 and 2 are queries, keys and values; 3 is the mask, where there is one. All strides
    are in elements: batch, head, row, step.

    Attributes:
        batch: Number of sequences.
        heads: Number of query heads.
        shared: Number of query heads that share a head of keys and values.
        queries: Number of queries.
        keys: Number of keys.
        depth: Length of a query and of a key.
        width: Length of a value.
        query: Strides of the queries.
        key: Strides of the keys.
        value: Strides of the values.
        mask: Strides of the mask: batch, head, query, key; None without a mask.
        is_choice: Whether the mask says what may be seen; else it is added to the scores.
        is_causal: Whether a query sees only the keys up to its own position.
        scale: What scores are multiplied by.
    """

    batch: int
    heads: int
    shared: int
    queries: int
    keys: int
    depth: int
    width: int
    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    mask: tuple[int, ...] | None
    is_choice: bool
    is_causal: bool
    scale: float

    functions: ClassVar[frozenset[str]] = frozenset({"fx_exp"})

    @property
    def op(self) -> str:
        """The name of the instruction."""
        return "attention"

    @property
    def terms(self) -> int:
        """Number of multiplications."""
        return self.batch * self.heads * self.queries * self.keys * (self.depth + self.width)

    @property
    def cost(self) -> int:
        """Estimate of the operations for one element; keys and values are read once."""
        readers = max(self.queries * self.shared * self.width, 1)
        return 1 + self.keys // 4 + self.keys * (self.depth + self.width) // readers

    def renumbered(self, numbers: Numbers) -> Attention:
        """Return it with its sizes and strides replaced."""
        names = ("batch", "heads", "shared", "queries", "keys", "depth", "width")
        sizes: dict[str, Any] = {name: numbers.one(getattr(self, name)) for name in names}
        return replace(
            self,
            **sizes,
            query=numbers.all_of(self.query),
            key=numbers.all_of(self.key),
            value=numbers.all_of(self.value),
            mask=None if self.mask is None else numbers.all_of(self.mask),
        )

    def evaluated(self, memory: Sequence[torch.Tensor]) -> torch.Tensor:
        """Attend by torch."""
        pairs, kept = (self.batch, self.heads), (self.batch, self.heads // self.shared)
        query = memory[0].as_strided((*pairs, self.queries, self.depth), self.query)
        key = memory[1].as_strided((*kept, self.keys, self.depth), self.key)
        value = memory[2].as_strided((*kept, self.keys, self.width), self.value)
        scores = query @ key.repeat_interleave(self.shared, 1).mT * self.scale
        if self.mask is not None:
            mask = memory[3].as_strided((*pairs, self.queries, self.keys), self.mask)
            scores = scores.masked_fill(~mask, -torch.inf) if self.is_choice else scores + mask
        if self.is_causal:
            hidden = torch.ones(self.queries, self.keys, dtype=torch.bool).triu(1)
            scores = scores.masked_fill(hidden, -torch.inf)
        weights = torch.softmax(scores, -1).masked_fill((scores == -torch.inf).all(-1, True), 0)
        return weights @ value.repeat_interleave(self.shared, 1)

    def __str__(self) -> str:
        kind = " causal" if self.is_causal else "" if self.mask is None else " masked"
        sizes = f"{self.batch} x {self.heads} x [{self.queries}, {self.depth}]"
        return f"{sizes} over [{self.keys}, {self.width}]{kind}"


def is_attention(node: fx.Node) -> bool:
    """Tell whether a node computes attention."""
    call = resolve(node)
    return call is not None and call.name == "aten.scaled_dot_product_attention"


def emit_attention(node: fx.Node, root: torch.nn.Module) -> Emitted:
    """Return the kernel of an attention node.

    Raises:
        Unfusable: When no kernel can compute it.
    """
    call = resolve(node)
    if call is None:
        raise Unfusable("it is no known operator")
    arguments = call.arguments
    if arguments.get("dropout_p"):
        raise Unfusable("it draws random numbers")
    operands = [arguments[name] for name in ("query", "key", "value")]
    mask = arguments.get("attn_mask")
    operands += [] if mask is None else [mask]
    types = [checked_operand(operand, root) for operand in operands]
    result = checked_result(node)
    for known in (*types[:3], result):
        if known.dtype != torch.float32:
            raise Unfusable(f"it computes in {short_dtype(known.dtype)}, as torch's library does")
    is_causal, scale = bool(arguments.get("is_causal")), arguments.get("scale")
    return attention_kernel(node, attention_of(types, is_causal, scale), operands, types)


def attention_kernel(
    node: fx.Node, detail: Attention, operands: Sequence[Any], types: Sequence[TensorType]
) -> Emitted:
    """Return the kernel of a node that computes attention and nothing else."""
    result = checked_result(node)
    buffers = [Buffer(f"in{p}", known.dtype, False) for p, known in enumerate(types)]
    buffers.append(Buffer("out0", torch.float32, True))
    kernel = Kernel(
        (detail.batch, detail.heads, detail.queries, detail.width),
        1,
        tuple(buffers),
        (Instruction(detail.op, (), torch.float32, detail),),
        (Store(Access(len(types), _padded(result.stride)), 0),),
    )
    return Emitted(kernel, tuple(operands), ((node, 0),))


def checked_result(node: fx.Node) -> TensorType:
    """Return the type of attention's result.

    Raises:
        Unfusable: When it is not known, or empty.
    """
    result = type_of(node)
    if not isinstance(result, TensorType) or result.stride is None or not result.numel:
        raise Unfusable("the type of its result is not known")
    return result


def checked_operand(operand: Any, root: torch.nn.Module) -> TensorType:
    """Return the type of an operand that attention can read.

    Raises:
        Unfusable: When it can't.
    """
    if not isinstance(operand, (fx.Node, Attribute)):
        raise Unfusable("one of its operands is no tensor")
    known = operand_type(operand, root)
    if not isinstance(known, TensorType) or known.stride is None:
        raise Unfusable("an operand is no strided tensor")
    if known.device.type != "cpu":
        raise Unfusable(f"an operand is on {known.device}, whose library computes attention")
    if not all(isinstance(size, int) for size in known.shape):
        raise Unfusable("the shape of an operand is symbolic")
    if known.numel == 0 or len(known.shape) > 4:
        raise Unfusable("an operand has no elements or more than four dimensions")
    return known


def attention_of(
    types: Sequence[TensorType], is_causal: bool = False, scale: float | None = None
) -> Attention:
    """Return sizes and strides of attention.

    Args:
        types: Those of query, key, value and perhaps a mask.
        is_causal: Whether a query sees only the keys up to its own position.
        scale: What scores are multiplied by; one over the root of the depth where left out.

    Raises:
        Unfusable: When no kernel can compute it.
    """
    query, key, value = types[:3]
    if any(len(known.shape) not in (3, 4) for known in (query, key, value)):
        raise Unfusable("its operands have neither three nor four dimensions")
    q, k, v = (_sizes(known.shape) for known in (query, key, value))
    if k[:3] != v[:3] or q[0] != k[0] or q[1] % k[1] or q[3] != k[3]:
        raise Unfusable("its operands broadcast")
    if k[2] > MAX_KEYS:
        raise Unfusable(f"scores of {k[2]} keys do not fit into the cache")
    mask, is_choice = None, False
    if len(types) == 4:
        mask, is_choice = _mask(types[3], (q[0], q[1], q[2], k[2]))
    return Attention(
        batch=q[0],
        heads=q[1],
        shared=q[1] // k[1],
        queries=q[2],
        keys=k[2],
        depth=q[3],
        width=v[3],
        query=_padded(query.stride),
        key=_padded(key.stride),
        value=_padded(value.stride),
        mask=mask,
        is_choice=is_choice,
        is_causal=is_causal,
        scale=1 / math.sqrt(q[3]) if scale is None else float(scale),
    )


def _mask(known: TensorType, shape: tuple[int, ...]) -> tuple[tuple[int, ...], bool]:
    if known.dtype not in (torch.bool, torch.float32):
        raise Unfusable(f"its mask is {short_dtype(known.dtype)}")
    sizes = _sizes(known.shape)
    if any(size not in (1, whole) for size, whole in zip(sizes, shape, strict=True)):
        raise Unfusable("its mask is larger than its scores")
    strides = zip(sizes, _padded(known.stride), strict=True)
    return tuple(stride if size > 1 else 0 for size, stride in strides), known.dtype == torch.bool


def _sizes(shape: Sequence[int]) -> tuple[int, ...]:
    return (*[1] * (4 - len(shape)), *shape)


def _padded(strides: Sequence[int] | None) -> tuple[int, ...]:
    given = tuple(strides or ())
    return (*[0] * (4 - len(given)), *given)
