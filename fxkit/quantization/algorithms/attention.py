"""Write attention out as two products with a softmax between, whose operands can be quantised.

Weights are divided by their sum behind the second product. So the greatest weight of each row is 1
where it is quantised, however many keys there are, as in "SageAttention: Accurate 8-Bit Attention
for Plug-and-Play Inference Acceleration" (Zhang et al., 2024).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from fxkit.analysis.tensor_types import infer_type
from fxkit.ir.op import Call, resolve
from fxkit.ir.session import EditSession
from fxkit.ir.types import TensorType, type_of
from fxkit.passes.base import Pass, PassContext
from fxkit.quantization.preparation import Program, apply, graph_of

_ATTENTION = "aten.scaled_dot_product_attention"

# Product → its right operand.
_PRODUCTS = {"aten.mm": "mat2", "aten.bmm": "mat2", "aten.matmul": "other"}


@dataclass(frozen=True)
class DecomposeAttention(Pass):
    """Write `scaled_dot_product_attention` out, and a softmax before a product.

    Rewrites:
        %y = aten.scaled_dot_product_attention(%q, %k, %v, %m)
        →
        %t = aten.transpose(%k, -2, -1); %s = aten.matmul(%q, %t); %u = aten.mul(%s, 1 / sqrt(d))
        %a = aten.add(%u, %m); %g = aten.amax(%a, -1, True); %l = aten.sub(%a, %g)
        %e = aten.exp(%l); %n = aten.sum(%e, -1, True)
        %p = aten.matmul(%e, %v); %y = aten.div(%p, %n)
    """

    numerics: ClassVar[str] = "close"

    def apply(self, edit: EditSession, context: PassContext) -> None:
        """Write out each attention without dropout. Cost: linear."""
        for node in list(edit.graph.nodes):
            call = resolve(node)
            if call is not None and call.name in _PRODUCTS:
                self._divide_last(edit, node, call)
            if call is None or call.name != _ATTENTION:
                continue
            if call.arguments.get("dropout_p"):
                context.notes.append(f"%{node.name} stays: it draws random numbers")
            elif not isinstance(type_of(call.arguments["query"]), TensorType):
                context.notes.append(f"%{node.name} stays: its types are not known")
            elif not _has_known_heads(call):
                context.notes.append(f"%{node.name} stays: sizes of its heads are not known")
            else:
                with edit.on_behalf_of([node], "decompose_attention"):
                    edit.replace(node, _Attention(edit, node).written_out(call.arguments))

    def _divide_last(self, edit: EditSession, node: fx.Node, call: Call) -> None:
        """Divide a product by the sums of its left operand, where a softmax divided that."""
        weights, value = call.arguments["self"], call.arguments[_PRODUCTS[call.name]]
        softmax = resolve(weights) if isinstance(weights, fx.Node) else None
        if softmax is None or softmax.name != "aten.softmax" or len(weights.users) != 1:
            return
        scores = softmax.arguments["self"]
        known, before = type_of(weights), type_of(scores)
        if not isinstance(known, TensorType) or not isinstance(before, TensorType):
            return
        last = len(known.shape) - 1
        if last < 1 or softmax.arguments["dim"] not in (-1, last):
            return
        if before.dtype != known.dtype or known.dtype == torch.float16:
            return
        with edit.on_behalf_of([node, weights], "decompose_attention"):
            edit.replace(node, _Attention(edit, node).weighted(scores, value))
            edit.erase(weights)


def decompose_attention(
    model: Any, args: tuple[Any, ...] = (), *, kwargs: Mapping[str, Any] | None = None
) -> Program:
    """Return a program that computes what a model does, with attention written out.

    Each `scaled_dot_product_attention` becomes two matrix products: of queries and keys, and of
    exp(score - greatest score) and values, which is divided by the sums of its weights. So does a
    product whose left operand is a softmax that nothing else reads. A spec for all then quantises
    the four operands, and `fxkit.compile` multiplies integers, in one kernel where nothing else
    reads what lies between. Attention with dropout stays.

    Args:
        model: A module, function, captured program or `torch.fx.GraphModule`.
        args: Example inputs to capture with.
        kwargs: Example keyword inputs.

    Raises:
        CaptureError: When the model is not one graph.
    """
    return apply(graph_of(model, args, kwargs), DecomposeAttention())


def _has_known_heads(call: Call) -> bool:
    """Tell whether it is known how many heads of queries share one of keys, if they do."""
    if not call.arguments.get("enable_gqa"):
        return True
    types = [type_of(call.arguments[name]) for name in ("query", "key")]
    return all(
        isinstance(known, TensorType) and isinstance(known.shape[-3], int) for known in types
    )


class _Attention:
    """Builds what stands for attention, right before it."""

    def __init__(self, edit: EditSession, node: fx.Node) -> None:
        self._edit = edit
        self._node = node

    def written_out(self, given: Mapping[str, Any]) -> fx.Node:
        """Return the node that computes what attention did."""
        query, key, value = (given[name] for name in ("query", "key", "value"))
        known = type_of(query)
        assert isinstance(known, TensorType)
        if given.get("enable_gqa"):
            key, value = (self._shared(one, int(known.shape[-3])) for one in (key, value))
        scale = (
            self._scale(query, known.shape[-1]) if given.get("scale") is None else given["scale"]
        )
        turned = self._call(torch.transpose, key, -2, -1)
        if known.dtype == torch.float16:  # scores that are not scaled may be too large for it
            scores = self._call(torch.matmul, self._call(torch.mul, query, scale), turned)
        else:
            scores = self._call(torch.mul, self._call(torch.matmul, query, turned), scale)
        mask = self._mask(given.get("attn_mask"), known.dtype)
        if given.get("is_causal"):
            scores = self._call(torch.add, scores, self._hidden(query, key, scores))
        elif mask is not None:
            scores = self._call(torch.add, scores, mask)
        result = self.weighted(scores, value)
        if mask is None:
            return result
        # A query that may see nothing gives zeros.
        is_blind = self._call(torch.all, self._call(torch.eq, mask, -torch.inf), -1, keepdim=True)
        return self._call(torch.masked_fill, result, is_blind, 0.0)

    def weighted(self, scores: fx.Node, value: fx.Node) -> fx.Node:
        """Return the mean of values, each weighted by its score.

        In float16 weights are divided first: sums of values may be too large for it.
        """
        known = type_of(scores)
        if isinstance(known, TensorType) and known.dtype == torch.float16:
            return self._call(torch.matmul, self._call(torch.softmax, scores, -1), value)
        greatest = self._call(torch.amax, scores, -1, keepdim=True)
        weights = self._call(torch.exp, self._call(torch.sub, scores, greatest))
        total = self._call(torch.sum, weights, -1, keepdim=True)
        return self._call(torch.div, self._call(torch.matmul, weights, value), total)

    def _scale(self, query: fx.Node, depth: Any) -> fx.Node | float:
        """Return one over the root of the length of a query."""
        if isinstance(depth, int):
            return 1 / math.sqrt(depth)
        size = self._call(".size", query, -1)
        return self._call(operator.truediv, 1.0, self._call(math.sqrt, size))

    def _hidden(self, query: fx.Node, key: fx.Node, scores: fx.Node) -> fx.Node:
        """Return what hides the keys that come after a query, [queries, keys]."""
        known = type_of(query)
        assert isinstance(known, TensorType)
        size = [type_of(one).shape[-2] for one in (query, key)]  # type: ignore[union-attr]
        if all(isinstance(one, int) for one in size):
            hidden = torch.full(size, -torch.inf, dtype=known.dtype, device=known.device).triu(1)
            read = self._edit.add_attribute("hidden_keys", hidden, before=self._node)
            infer_type(read)
            return read
        matrix = scores
        for _ in known.shape[:-2]:
            matrix = self._call(torch.select, matrix, 0, 0)
        return self._call(torch.triu, self._call(torch.full_like, matrix, -torch.inf), 1)

    def _mask(self, mask: fx.Node | None, dtype: torch.dtype) -> fx.Node | None:
        """Return what is added to scores for a mask."""
        known = None if mask is None else type_of(mask)
        if not isinstance(known, TensorType) or known.dtype != torch.bool:
            return mask
        added = self._call(torch.where, mask, 0.0, -torch.inf)
        return added if dtype == torch.float32 else self._call(torch.Tensor.to, added, dtype)

    def _shared(self, value: fx.Node, heads: int) -> fx.Node:
        """Repeat heads of keys or values, each for several heads of queries."""
        known = type_of(value)
        assert isinstance(known, TensorType)
        count = int(known.shape[-3])
        if count == heads:
            return value
        sizes = [-1] * (len(known.shape) + 1)
        sizes[-3] = heads // count
        apart = self._call(torch.unsqueeze, value, -3)
        return self._call(torch.flatten, self._call(torch.Tensor.expand, apart, sizes), -4, -3)

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        made = self._edit.call(target, *args, before=self._node, **kwargs)
        infer_type(made)
        return made
