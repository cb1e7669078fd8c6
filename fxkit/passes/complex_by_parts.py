"""Compute with complex numbers by their real and imaginary parts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from fxkit.analysis.effects import AliasSets, effects_of
from fxkit.analysis.tensor_types import infer_type
from fxkit.ir.op import Call, resolve
from fxkit.ir.session import EditSession
from fxkit.ir.types import TensorType, type_of
from fxkit.passes.base import Pass, PassContext

# A part of a complex value: a real tensor, or a number.
Part = fx.Node | float
Pair = tuple[Part, Part]

_PART_OF = {torch.complex64: torch.float32, torch.complex128: torch.float64}

_VIEWS = frozenset(
    """aten.reshape aten.view aten.unsqueeze aten.squeeze aten.transpose aten.permute aten.t
    aten.expand aten.flatten aten.unflatten aten.select aten.slice aten.narrow aten.movedim
    aten.contiguous aten.clone aten.alias aten.positive aten.mT python.getitem
    python.identity""".split()
)


@dataclass(frozen=True)
class ComplexByParts(Pass):
    """Replace complex arithmetic by real arithmetic where sizes, angles or parts are asked for.

    A complex value is replaced where all that comes of it is real in the end; one that is returned,
    written to, viewed as real numbers, or taken by anything else stays, and so does what it is made
    of: eager's kernels multiply complex numbers as fast as memory gives them. Sizes and angles are
    what they are slow at. Numbers are those of eager, whose product is the same four products.

    Rewrites:
        %p = aten.mul(%z, %f); return aten.abs(%p)
            →  %a = aten.select(aten.view_as_real(%z), -1, 0); …; return aten.hypot(%re, %im)
    """

    numerics: ClassVar[str] = "close"

    def apply(self, edit: EditSession, context: PassContext) -> None:
        """Find the values that can be replaced, then replace them. Cost: linear in the edges."""
        calls = {node: call for node in edit.graph.nodes if (call := resolve(node)) is not None}
        if not any(_is_end(node, calls) for node in calls):
            return
        alias_sets = AliasSets(edit.graph)
        inner = _replaceable(calls, alias_sets)
        parts = _Parts(edit, calls)
        for node in list(edit.graph.nodes):
            if node in inner:
                parts.split(node)
            elif node in calls and _pays(node, calls, inner) and not _is_written(node, alias_sets):
                parts.leave(node)
        for node in reversed(inner):
            edit.erase(node)


def _replaceable(calls: Mapping[fx.Node, Call], alias_sets: AliasSets) -> dict[fx.Node, None]:
    """Return the complex values all of whose users can be replaced or are real, in order."""
    complex_nodes = [n for n in calls if _complex_dtype(n) is not None]
    found = {n: None for n in complex_nodes if _is_known(n, calls) and not alias_sets.writers(n)}
    waiting = list(found)
    while waiting:
        node = waiting.pop()
        if node not in found or all(u in found or _ends(u, node, calls) for u in node.users):
            continue
        del found[node]
        waiting.extend(node.all_input_nodes)
    return found


def _is_written(node: fx.Node, alias_sets: AliasSets) -> bool:
    return any(alias_sets.writers(operand) for operand in node.all_input_nodes)


def _is_end(node: fx.Node, calls: Mapping[fx.Node, Call]) -> bool:
    """Tell whether a call makes real numbers of complex ones."""
    source = _source(calls[node])
    if calls[node].name not in _ENDS or _complex_dtype(source) is None:
        return False
    return not type_of(source).requires_grad  # where it is zero, a size by parts has no gradient


def _pays(node: fx.Node, calls: Mapping[fx.Node, Call], inner: Mapping[fx.Node, None]) -> bool:
    """Tell whether a call is to be computed from the parts of its operand."""
    if not _is_end(node, calls):
        return False
    return _source(calls[node]) in inner or calls[node].name in _COMPUTED_ENDS


def _complex_dtype(node: Any) -> torch.dtype | None:
    known = type_of(node) if isinstance(node, fx.Node) else None
    if not isinstance(known, TensorType) or known.dtype not in _PART_OF:
        return None
    return known.dtype


def _is_known(node: fx.Node, calls: Mapping[fx.Node, Call]) -> bool:
    """Tell whether a complex value is made in a way that has a spelling by parts."""
    name, arguments = calls[node].name, calls[node].arguments
    if name in _VIEWS:
        return _complex_dtype(next(iter(arguments.values()))) == _complex_dtype(node)
    if name not in _COMPUTED and name != "aten.view_as_complex":
        return False
    if arguments.get("alpha", 1) != 1 or arguments.get("out") is not None:
        return False
    whole = _complex_dtype(node) or torch.complex64
    operands = [arguments[name] for name in _COMPUTED.get(name, (("self",),))[0]]
    return all(_fits(operand, whole, _PART_OF[whole]) for operand in operands)


def _fits(operand: Any, whole: torch.dtype, part: torch.dtype) -> bool:
    if not isinstance(operand, fx.Node):
        return isinstance(operand, (int, float, complex))
    known = type_of(operand)
    return isinstance(known, TensorType) and known.dtype in (whole, part)


def _source(call: Call) -> Any:
    return next(iter(call.arguments.values()), None)


def _ends(user: fx.Node, node: fx.Node, calls: Mapping[fx.Node, Call]) -> bool:
    """Tell whether a user makes real numbers of a complex value, in memory of their own."""
    if user not in calls or not _is_end(user, calls) or _source(calls[user]) is not node:
        return False
    # The parts of a complex tensor lie two apart, which shows where they are returned.
    is_seen = any(u.op == "output" or user in effects_of(u).aliases for u in user.users)
    return calls[user].name in _COMPUTED_ENDS or not is_seen


class _Parts:
    def __init__(self, edit: EditSession, calls: Mapping[fx.Node, Call]) -> None:
        self._edit = edit
        self._calls = calls
        self._pairs: dict[fx.Node, Pair] = {}

    def split(self, node: fx.Node) -> None:
        """Compute the parts of a complex value."""
        call = self._calls[node]
        emit = functools.partial(self._emit, node)
        with self._edit.on_behalf_of([node], "complex_by_parts"):
            if call.name == "aten.view_as_complex":
                self._pairs[node] = self._taken(node, call.arguments["self"])
            elif call.name in _VIEWS:
                operand = _source(call)
                pair = self._pair(operand, node)
                self._pairs[node] = tuple(self._shown(node, operand, part) for part in pair)  # type: ignore[assignment]
            else:
                names, compute = _COMPUTED[call.name]
                pairs = [self._pair(call.arguments[name], node) for name in names]
                self._pairs[node] = compute(emit, *pairs)

    def leave(self, node: fx.Node) -> None:
        """Replace what makes real numbers of a complex value."""
        emit = functools.partial(self._emit, node)
        call = self._calls[node]
        with self._edit.on_behalf_of([node], "complex_by_parts"):
            pair = self._pair(_source(call), node)
            result = _ENDS[call.name](emit, *pair)
            if not isinstance(result, fx.Node):  # the part of a number
                result = emit(torch.full_like, pair[0] if result is pair[1] else pair[1], result)
            self._edit.replace(node, result)

    def _pair(self, operand: Any, before: fx.Node) -> Pair:
        if not isinstance(operand, fx.Node):
            return float(operand.real), float(operand.imag)
        if operand in self._pairs:
            return self._pairs[operand]
        if _complex_dtype(operand) is None:
            return operand, 0.0
        if operand not in self._calls or effects_of(operand).aliases:  # it may be a conjugate
            operand = self._emit(before, torch.resolve_conj, operand)
        return self._taken(before, self._emit(before, torch.view_as_real, operand))

    def _taken(self, before: fx.Node, pairs: Any) -> Pair:
        return (
            self._emit(before, torch.select, pairs, -1, 0),
            self._emit(before, torch.select, pairs, -1, 1),
        )

    def _shown(self, node: fx.Node, operand: Any, part: Part) -> Part:
        """Show a part as the whole is shown."""
        new = self._edit.copy(node, lambda n: part if n is operand else n, before=node)
        infer_type(new)
        return new

    def _emit(self, before: fx.Node, function: Any, *operands: Any) -> fx.Node:
        new = self._edit.call(function, *operands, before=before)
        infer_type(new)
        return new


Emit = Callable[..., Part]


def _mul(emit: Emit, a: Pair, b: Pair) -> Pair:
    if not isinstance(a[0], fx.Node):
        a, b = b, a
    real = emit(torch.sub, _times(emit, a[0], b[0]), _times(emit, a[1], b[1]))
    return real, emit(torch.add, _times(emit, a[0], b[1]), _times(emit, a[1], b[0]))


def _times(emit: Emit, a: Part, b: Part) -> Part:
    if isinstance(a, fx.Node):
        return emit(torch.mul, a, b)
    return emit(torch.mul, b, a) if isinstance(b, fx.Node) else a * b


def _plus(emit: Emit, a: Part, b: Part) -> Part:
    if isinstance(a, fx.Node):
        return emit(torch.add, a, b)
    return emit(torch.add, b, a) if isinstance(b, fx.Node) else a + b


def _minus(emit: Emit, a: Part, b: Part) -> Part:
    if isinstance(a, fx.Node):
        return emit(torch.sub, a, b)
    return emit(torch.rsub, b, a) if isinstance(b, fx.Node) else a - b


def _each(combine: Callable[..., Part]) -> Callable[..., Pair]:
    return lambda emit, a, b: (combine(emit, a[0], b[0]), combine(emit, a[1], b[1]))


def _negative(emit: Emit, part: Part) -> Part:
    return emit(torch.neg, part) if isinstance(part, fx.Node) else -part


def _polar(emit: Emit, size: Pair, angle: Pair) -> Pair:
    turned = emit(torch.cos, angle[0]), emit(torch.sin, angle[0])
    return emit(torch.mul, size[0], turned[0]), emit(torch.mul, size[0], turned[1])


# Operator identity → its operands, and how the parts of its result are made of theirs.
_COMPUTED: Mapping[str, tuple[tuple[str, ...], Callable[..., Pair]]] = {
    "aten.mul": (("self", "other"), _mul),
    "aten.add": (("self", "other"), _each(_plus)),
    "aten.sub": (("self", "other"), _each(_minus)),
    "aten.neg": (("self",), lambda e, a: (_negative(e, a[0]), _negative(e, a[1]))),
    "aten.polar": (("abs", "angle"), _polar),
    "aten.complex": (("real", "imag"), lambda e, a, b: (a[0], b[0])),
    **dict.fromkeys(
        ("aten.conj", "aten._conj", "aten.conj_physical"),
        (("self",), lambda e, a: (a[0], _negative(e, a[1]))),
    ),
}

# What makes real numbers of complex ones.
_ENDS: Mapping[str, Callable[..., Part]] = {
    "aten.real": lambda e, a, b: a,
    "aten.imag": lambda e, a, b: b,
    "aten.abs": lambda e, a, b: e(torch.hypot, a, b),
    "aten.angle": lambda e, a, b: e(torch.Tensor.contiguous, e(torch.atan2, b, a)),
}
_COMPUTED_ENDS = ("aten.abs", "aten.angle")
