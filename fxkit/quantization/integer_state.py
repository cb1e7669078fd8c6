"""Hold the state of a quantised program, such as a decoder's cache, in integers between calls."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from fxkit.analysis.editing import edit
from fxkit.errors import UnsupportedError
from fxkit.ir.op import resolve
from fxkit.ir.printer import format_node, format_source
from fxkit.ir.session import EditSession
from fxkit.ir.types import TensorType, type_of
from fxkit.quantization.held_sizes import hold_sizes
from fxkit.quantization.operands import take_instead
from fxkit.quantization.preparation import graph_module_of
from fxkit.quantization.state_values import StateValues, is_rounding, state_values
from fxkit.torch_adapters import pytree
from fxkit.torch_adapters.quantized_operators import quantized_operators

_QUANTIZE = "quantized_decomposed.quantize_per_tensor"
_MOST_STEPS_OF_HALVES = 255
"""float16 and bfloat16 tell so many steps apart, and no more."""

_SIZES = frozenset(f"aten.{name}" for name in ("size", "sym_size", "dim", "numel", "sym_numel"))


@dataclass(frozen=True)
class IntegerState:
    """How integers stand for a state: x is stored as
    clamp(round(x / scale) + zero_point, low, high).

    Attributes:
        dtype: The type of the integers.
        scale: One step.
        zero_point: The integer that stands for 0.
        low: The least integer.
        high: The largest one.
        float_dtype: What the program computes with.
    """

    dtype: torch.dtype
    scale: float
    zero_point: int
    low: int
    high: int
    float_dtype: torch.dtype = torch.float32

    def quantize(self, values: Tensor) -> Tensor:
        """Return the integers for a tensor of floats, of the same shape."""
        quantize = quantized_operators().quantize_per_tensor.default
        return quantize(values, self.scale, self.zero_point, self.low, self.high, self.dtype)

    def dequantize(self, integers: Tensor) -> Tensor:
        """Return the floats that integers stand for, of the same shape."""
        return quantized_operators().dequantize_per_tensor.default(
            integers, *self.numbers, **self.keywords
        )

    @property
    def numbers(self) -> tuple[float, int, int, int, torch.dtype]:
        """What the quantising operators take behind a tensor."""
        return self.scale, self.zero_point, self.low, self.high, self.dtype

    @property
    def keywords(self) -> dict[str, Any]:
        """What the dequantising operator takes beside that."""
        return {} if self.float_dtype == torch.float32 else {"out_dtype": self.float_dtype}


def hold_in_integers(
    quantized: Any, state: Mapping[str, int | None]
) -> tuple[fx.GraphModule, dict[str, IntegerState]]:
    """Let a quantised program take and return its state in integers, such as a decoder's cache.

    Rewrites:
        %q = quantize_per_tensor(%past, …); %d = dequantize_per_tensor(%q, …)
        %n = quantize_per_tensor(%new, …); %e = dequantize_per_tensor(%n, …)
        %y = aten.cat([%d, %e]); return %y
        →
        %n = quantize_per_tensor(%new, …); %y = aten.cat([%past, %n]); return %y

    What moves and joins the state moves and joins integers; whatever else reads it reads what the
    integers stand for. Results are those of `quantized` for a state that was quantised and
    dequantised, bit for bit; where a view of it is summed, the order of the sum may be another.

    Args:
        quantized: What `convert` made with a config that has this `state`, or another graph that
            quantises the state with one scale; it stays as it is.
        state: Names of inputs, and for each the index of the result that goes into the next call,
            or None where the program writes the input in place.

    Returns:
        A graph that shares the parameters of `quantized`, and by the name of each input how
        integers stand for it: to make the first state, and to read the last.

    Raises:
        UnsupportedError: When there is no such input or result, it is not quantised, or with
            several scales, states are joined with each other, or written in place before the end.
            A call of the graph raises it for states of other sizes than captured ones, along axes
            where the program gives something else than the graph: it reads their sizes.
    """
    gm = graph_module_of(quantized)
    held: dict[str, IntegerState] = {}
    copied = fx.GraphModule(gm, copy.deepcopy(gm.graph))
    with edit(copied, by="hold_in_integers") as session:
        for values in state_values(copied, state):
            held[values.name] = _how(values)
            _Holder(session, values, held[values.name]).run()
    hold_sizes(quantized, copied, held)
    return copied, held


def _how(values: StateValues) -> IntegerState:
    """Return how a state is quantised wherever it is.

    Raises:
        UnsupportedError: When it is not, or with several scales.
    """
    known = type_of(values.input)
    dtype = known.dtype if isinstance(known, TensorType) else torch.float32
    own = [*values.members, *_behind(values.entering)]
    readers = [user for node in values.members for user in node.users]
    found = {_numbers(node): node for node in own if _is_quantize(node)} or {
        _numbers(node): node for node in readers if _is_quantize(node)
    }
    if not found:
        raise UnsupportedError(
            f"expected a state that is quantised, got {_told(values)} in float",
            node=format_node(values.input),
            hint=f"QuantizationConfig(..., state={{{values.name!r}: {values.index}}}) quantises it",
        )
    if len(found) > 1:
        told = " and ".join(
            f"scale {scale:.6g}, zero point {zero} at %{node.name}"
            for (scale, zero, *_), node in list(found.items())[:2]
        )
        raise UnsupportedError(
            f"expected one scale for {_told(values)}, got {told}",
            hint=f"QuantizationConfig(..., state={{{values.name!r}: {values.index}}}) gives them "
            "one",
        )
    ((scale, zero, low, high, integers),) = found
    if dtype != torch.float32 and high - low > _MOST_STEPS_OF_HALVES:
        kind = str(dtype).removeprefix("torch.")
        raise UnsupportedError(
            f"expected a state of at most 8 bits, as its floats are {kind}, got "
            f"{high - low + 1} integers for {values.name!r}"
        )
    return IntegerState(integers, scale, zero, low, high, dtype)


def _told(values: StateValues) -> str:
    result = "" if values.index is None else f" and result {values.index}"
    return f"input {values.name!r}{result}"


def _is_quantize(node: fx.Node) -> bool:
    call = resolve(node)
    return call is not None and call.name == _QUANTIZE


def _numbers(node: fx.Node) -> tuple[Any, ...]:
    """Return scale, zero point, range and type of a node that quantises or dequantises."""
    call = resolve(node)
    arguments = {} if call is None else call.arguments
    names = ("scale", "zero_point", "quant_min", "quant_max", "dtype")
    return tuple(arguments.get(name) for name in names)


def _behind(entering: Mapping[fx.Node, None]) -> list[fx.Node]:
    """Return what quantised values, where they are dequantised."""
    return [
        operand for node in entering if is_rounding(node) for operand in node.all_input_nodes[:1]
    ]


class _Holder:
    """Rewrites what holds one state."""

    def __init__(self, edit: EditSession, values: StateValues, how: IntegerState) -> None:
        self.edit = edit
        self.values = values
        self.how = how
        self.ops = quantized_operators()
        self.integers: dict[fx.Node, fx.Node] = {}
        self.floats: dict[fx.Node, fx.Node] = {}

    def run(self) -> None:
        """Let members hold integers, and others read what these stand for."""
        members = self.values.members
        readers = {node: [user for user in node.users if user not in members] for node in members}
        for node in self.values.entering:
            self.integers[node] = self._entering(node)
        for node in members:
            self._member(node)
        for node, users in readers.items():
            for user in users:
                if user.op != "output":
                    self._read(node, user)
        self._return()
        for node in reversed([*members, *self.values.entering]):
            if node.op != "placeholder" and is_rounding(node) and not node.users:
                self.edit.erase(node)

    def _is_ours(self, node: fx.Node) -> bool:
        return is_rounding(node) and _numbers(node) == self.how.numbers

    def _entering(self, node: fx.Node) -> fx.Node:
        """Return the integers of new values: those that they were dequantised from, or new ones."""
        source = node.all_input_nodes[0] if self._is_ours(node) else node
        if source is not node and _is_quantize(source) and self._is_ours(source):
            return source
        quantize = self.ops.quantize_per_tensor.default
        return self.edit.call(quantize, node, *self.how.numbers, after=node)

    def _member(self, node: fx.Node) -> None:
        """Let one node take integers where it took floats."""
        if is_rounding(node):
            self.integers[node] = self.integers[node.all_input_nodes[0]]
            return
        self.integers[node] = node
        if node is not self.values.input:
            take_instead(self.edit, node, self.integers)
        self.edit.retype(node, _of_integers(type_of(node), self.how.dtype))

    def _read(self, node: fx.Node, user: fx.Node) -> None:
        """Let a user of a member, which is no member, read integers or floats, as it did."""
        integers = self.integers[node]
        if _is_quantize(node) or _asks_for_sizes(user):
            take_instead(self.edit, user, {node: integers})
        elif _is_quantize(user) and self._is_ours(user):
            self.edit.replace(user, integers)
        else:
            take_instead(self.edit, user, {node: self._floats(node)})

    def _floats(self, node: fx.Node) -> fx.Node:
        """Return what the integers of a member stand for."""
        integers = self.integers[node]
        if integers in self.floats:
            return self.floats[integers]
        if isinstance(type_of(integers), (tuple, list)):
            raise UnsupportedError(
                f"expected parts of state {self.values.name!r} to be taken one by one, got all "
                "of them taken at once",
                node=format_node(integers),
                source=format_source(integers),
            )
        made = self.edit.call(
            self.ops.dequantize_per_tensor.default,
            integers,
            *self.how.numbers,
            after=integers if integers.op != "placeholder" else self._last_input(),
            **self.how.keywords,
        )
        self.floats[integers] = made
        return made

    def _last_input(self) -> fx.Node:
        return list(self.edit.graph.find_nodes(op="placeholder"))[-1]

    def _return(self) -> None:
        """Return the integers; where a result besides holds the state, what they stand for."""
        leaves, spec = pytree.tree_flatten(self.edit.graph.output_node().args[0])
        for index, leaf in enumerate(leaves):
            if index == self.values.index:
                leaves[index] = self.integers[leaf]
            elif isinstance(leaf, fx.Node) and leaf in self.values.members:
                leaves[index] = self._floats(leaf)
        self.edit.set_output(pytree.tree_unflatten(leaves, spec))


def _of_integers(known: Any, dtype: torch.dtype) -> Any:
    """Return the type of a node, or of a list of tensors, with integers in place of floats."""
    if isinstance(known, TensorType):
        return replace(known, dtype=dtype, requires_grad=False)
    if isinstance(known, (tuple, list)):
        return type(known)(_of_integers(one, dtype) for one in known)
    return known


def _asks_for_sizes(node: fx.Node) -> bool:
    """Tell whether a node looks at the shape of what it takes, and at no value."""
    call = resolve(node)
    if call is None:
        return False
    attribute = call.arguments.get("1") if call.name == "python.getattr" else None
    return call.name in _SIZES or attribute == "shape"
