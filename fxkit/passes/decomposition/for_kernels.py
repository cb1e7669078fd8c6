"""Functions and operators of torch by what they call, where kernels compute that better."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from fxkit.analysis.tensor_types import infer_type
from fxkit.ir.compositions import composition_of, is_made_in_kernels
from fxkit.ir.op import Call
from fxkit.ir.types import TensorType, type_of
from fxkit.passes.decomposition.decompositions import Decomposition, Entry, function_of, nodes_in
from fxkit.passes.decomposition.recording import RecordedValue
from fxkit.passes.decomposition.replaying import replay
from fxkit.passes.decomposition.torch_calls import record_calls
from fxkit.passes.decomposition.unrecordable import Unrecordable
from fxkit.torch_adapters import pytree

# What decompositions make of a batch normalisation in evaluation: it returns two empty tensors too.
_FROZEN_BATCH_NORM = "aten._native_batch_norm_legit_no_training"

Condition = Callable[[Mapping[str, Any]], bool]


def _always(arguments: Mapping[str, Any]) -> bool:
    return True


def _is_repeated(arguments: Mapping[str, Any]) -> bool:
    return arguments.get("n", 1) != 1


def _of_number(arguments: Mapping[str, Any]) -> bool:
    """Tell whether a quantile is given by a number: eager raises for some that tensors hold."""
    return isinstance(arguments.get("q"), (int, float))


# Python functions of torch: the functions that they call take their place.
FUNCTIONS: Mapping[str, Condition] = {
    "torch.nn.functional.multi_head_attention_forward": _always,
    "opaque.torch.nn.functional.multi_head_attention_forward": _always,
    "torch.nn.functional.local_response_norm": _always,
    **dict.fromkeys((f"opaque.torch.functional.atleast_{n}d" for n in (1, 2, 3)), _always),
}

# Operators of which ATen has no kernel either: the ones that it calls take their place.
OPERATORS: Mapping[str, Condition] = {
    **dict.fromkeys(
        (
            "aten.isclose", "aten.trapezoid", "aten.trapz", "aten.einsum",
            "aten.cumulative_trapezoid", "aten.gradient", "aten.inner", "torch.tensordot",
        ),
        _always,
    ),
    **dict.fromkeys(("aten.quantile", "aten.nanquantile"), _of_number),
    "aten.diff": _is_repeated,
}  # fmt: skip


# Losses that reduce twice: each row to a number, which a kernel does, and then those numbers.
LOSSES: Mapping[str, Any] = {
    "aten.cross_entropy_loss": F.cross_entropy,
    "torch.nn.functional.triplet_margin_loss": F.triplet_margin_loss,
    "torch.nn.functional.cosine_embedding_loss": F.cosine_embedding_loss,
    "torch.nn.functional.multi_margin_loss": F.multi_margin_loss,
}


class ForKernels(Decomposition):
    """What torch itself computes by other calls, where kernels take those in."""

    def entry(self, node: fx.Node, call: Call) -> Entry | None:
        """Return what puts the calls that a call makes in its place, where a table has it."""
        if node.target is LOSSES.get(call.name):
            return self._by_rows
        if is_made_in_kernels(call.operator.overload):
            return self._by_definition
        if call.name == _FROZEN_BATCH_NORM and _is_first_alone(node):
            return self._normalise
        if FUNCTIONS.get(call.name, _never)(call.arguments):
            return self._by_functions
        return self._by_operators if OPERATORS.get(call.name, _never)(call.arguments) else None

    def _by_definition(self, node: fx.Node, call: Call) -> None:
        """Put what an operator was defined by in the place of its call."""
        definition = composition_of(call.operator.overload)
        self.replay(node, definition, (node.args, node.kwargs))

    def _normalise(self, node: fx.Node, call: Call) -> None:
        """Normalise by given statistics, without results that nobody reads."""
        given = call.arguments
        names = ("input", "weight", "bias", "running_mean", "running_var")
        operands = [given[name] for name in names]
        norm = torch.ops.aten.batch_norm.default
        made = self._made(node, norm, *operands, False, given["momentum"], given["eps"], False)
        for user in list(node.users):
            self.edit.replace(user, made)
        self.edit.erase(node)

    def _by_rows(self, node: fx.Node, call: Call) -> None:
        """Reduce a loss to a number for each row, and these."""
        function: Any = node.target
        bound = inspect.signature(function).bind(*node.args, **node.kwargs)
        bound.apply_defaults()
        given = bound.arguments
        kind = given["reduction"]
        if kind not in ("mean", "sum") or not _has_rows(function, given):
            return
        given["reduction"] = "none"
        losses = self._made(node, function, *bound.args, **bound.kwargs)
        if kind == "mean" and function is not F.cross_entropy:
            self.edit.replace(node, self._made(node, torch.mean, losses))
            return
        result = self._made(node, torch.sum, losses)
        if kind == "mean":
            counts = self._made(node, torch.ne, given["target"], given["ignore_index"])
            result = self._made(node, torch.div, result, self._made(node, torch.sum, counts))
        self.edit.replace(node, result)

    def _made(self, before: fx.Node, function: Any, *args: Any, **kwargs: Any) -> fx.Node:
        new = self.edit.call(function, *args, before=before, **kwargs)
        infer_type(new)
        return new

    def _by_operators(self, node: fx.Node, call: Call) -> None:
        if node.op not in ("call_function", "call_method"):
            raise Unrecordable("it is a module")
        known = set(self.edit.graph.find_nodes(op="call_function", target=_BMM))
        self.replay(node, function_of(node), (node.args, node.kwargs))
        for made in self.edit.graph.find_nodes(op="call_function", target=_BMM):
            if made not in known and _is_of_dots(made):
                self._multiply(made)

    def _multiply(self, node: fx.Node) -> None:
        """Multiply and add what is a product of rows with columns."""
        row, column = node.args
        turned = self._made(node, torch.ops.aten.transpose.int, column, 1, 2)
        product = self._made(node, torch.ops.aten.mul.Tensor, row, turned)
        dots = self._made(node, torch.ops.aten.sum.dim_IntList, product, [-1], True)
        self.edit.replace(node, dots)

    def _by_functions(self, node: fx.Node, call: Call) -> None:
        if node.op != "call_function" or not isinstance(node.target, FunctionType):
            raise Unrecordable("it is called in another way than as a function")
        nodes = list(dict.fromkeys(nodes_in(pytree.tree_leaves((node.args, node.kwargs)))))
        places = {operand: RecordedValue(None, n) for n, operand in enumerate(nodes)}
        args, kwargs = pytree.tree_map_only(
            fx.Node, places.__getitem__, (tuple(node.args), dict(node.kwargs))
        )
        recording = record_calls(node.target, args, kwargs, [self.operand_type(n) for n in nodes])
        self.give(node, replay(self.edit, recording, nodes, node))


def _is_first_alone(node: fx.Node) -> bool:
    """Tell whether the first of several results is taken, and no other."""
    return all(user.target is operator.getitem and user.args[1] == 0 for user in node.users)


def _has_rows(function: Any, given: Mapping[str, Any]) -> bool:
    """Tell whether a kernel computes the losses of rows that a call asks for."""
    if given["size_average"] is not None or given["reduce"] is not None:
        return False
    tensors = [type_of(v) for v in given.values() if isinstance(v, fx.Node)]
    if not all(isinstance(known, TensorType) for known in tensors):
        return False
    scores = tensors[0]
    if scores.dtype not in (torch.float32, torch.float64) or len(scores.shape) < 2:
        return False
    if function is not F.cross_entropy:
        return True
    is_plain = given["weight"] is None and not given["label_smoothing"]
    return is_plain and tensors[1].dtype == torch.int64


_BMM = torch.ops.aten.bmm.default


def _is_of_dots(node: fx.Node) -> bool:
    """Tell whether each product of a batch is a single number, of floats that do not round."""
    known = type_of(node)
    return known.shape[1:] == (1, 1) and known.dtype in (torch.float32, torch.float64)


def _never(arguments: Mapping[str, Any]) -> bool:
    return False
