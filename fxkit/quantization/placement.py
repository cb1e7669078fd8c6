"""Where a graph is quantised: which operands of which operators, and why others are not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from fxkit.analysis.objects import GraphNode, graph
from fxkit.ir.attributes import find_attribute
from fxkit.ir.op import resolve
from fxkit.ir.types import TensorType, type_of
from fxkit.passes.properties import is_dequantised
from fxkit.quantization.config import QuantizationConfig
from fxkit.quantization.operand_table import NOT_QUANTIZED, OPERATORS, QuantizableOperator
from fxkit.quantization.rotations import is_rotation
from fxkit.quantization.specs import QuantizationSpec, TensorSpec
from fxkit.quantization.state_values import StateValues, state_values


@dataclass(frozen=True)
class QuantizedOperand:
    """An operand that is quantised.

    Attributes:
        producer: Name of the node that makes it.
        spec: How.
        is_weight: Whether it is a parameter or buffer, whose integers are stored.
        axis: A weight's axis of output channels.
    """

    producer: str
    spec: TensorSpec
    is_weight: bool = False
    axis: int = 0


@dataclass(frozen=True)
class QuantizedOperator:
    """What is decided for one operator that could be quantised.

    Attributes:
        node: Name of its node.
        operator: Its name.
        source: The user's line, or None.
        operands: What is quantised; empty where it stays in floating point.
        reason: Where the decision comes from, or why it stays.
    """

    node: str
    operator: str
    source: str | None
    operands: tuple[QuantizedOperand, ...]
    reason: str

    @property
    def is_quantized(self) -> bool:
        """Whether any operand is quantised."""
        return bool(self.operands)

    @property
    def how(self) -> str:
        """The specs of its operands, or `float`."""
        kinds = [f"{'weight' if o.is_weight else 'input'} {o.spec}" for o in self.operands]
        return ", ".join(kinds) or "float"


def placements(gm: fx.GraphModule, config: QuantizationConfig) -> tuple[QuantizedOperator, ...]:
    """Decide for each operator of a graph that can be quantised. Cost: linear in the nodes.

    Args:
        gm: The graph; where types are known, operands of other types than float are seen.
        config: Whose specs are wanted where. What holds the values of its state is quantised as
            that is, whichever operator takes it.

    Raises:
        UnsupportedError: When the graph does not have the state of the config.
    """
    found = []
    held = state_specs(state_values(gm, config.state), config)
    for node in graph(gm):
        if node.operator in OPERATORS:
            found.append(_placement(gm, node, OPERATORS[node.operator], config, held))
        elif node.operator in NOT_QUANTIZED:
            reason = NOT_QUANTIZED[node.operator]
            found.append(QuantizedOperator(node.name, node.operator, _source(node), (), reason))
    return tuple(found)


def state_specs(
    states: tuple[StateValues, ...], config: QuantizationConfig
) -> dict[str, TensorSpec]:
    """Return how each node is quantised that holds values of a state, or enters it, by name."""
    nodes = (node.name for one in states for node in (*one.members, *one.entering))
    return dict.fromkeys(nodes, config.state_spec)


def _placement(
    gm: fx.GraphModule,
    node: GraphNode,
    row: QuantizableOperator,
    config: QuantizationConfig,
    held: Mapping[str, TensorSpec],
) -> QuantizedOperator:
    spec, origin = config.spec_of(node)
    found: tuple[QuantizedOperand, ...] | str = f"{origin} keeps it in floating point"
    if spec is not None and row.float_unless_named and not config.names(node):
        found = row.float_unless_named
    elif spec is not None:
        found = _operands(gm, node.fx_node, row, spec, held)
    reason = found if isinstance(found, str) else origin
    operands = () if isinstance(found, str) else found
    return QuantizedOperator(node.name, node.operator or "", _source(node), operands, reason)


def _source(node: GraphNode) -> str | None:
    return str(node.source) if node.source is not None else None


def _operands(
    gm: fx.GraphModule,
    node: fx.Node,
    row: QuantizableOperator,
    spec: QuantizationSpec,
    held: Mapping[str, TensorSpec],
) -> tuple[QuantizedOperand, ...] | str:
    """Return the operands to quantise, or why there are none."""
    call = resolve(node)
    arguments = call.arguments if call is not None else {}
    weight = arguments.get(row.weight) if row.weight is not None else None
    stored = _stored(gm, weight)
    if isinstance(weight, fx.Node) and is_dequantised(weight):
        return f"its weight %{weight.name} is quantised already"
    found: list[QuantizedOperand] = []
    if stored is not None and isinstance(weight, fx.Node):
        refused = _refused_weight(stored, row, spec.weights)
        if refused:
            return refused
        found.append(QuantizedOperand(weight.name, spec.weights, True, row.channels % stored.ndim))
    elif spec.activations is None:
        return "its operands are activations, which the spec keeps in floating point"
    for name in row.activations:
        operand = arguments.get(name)
        if not isinstance(operand, fx.Node) or (operand is weight and stored is not None):
            continue
        if spec.activations is None:
            continue
        how = held.get(operand.name, spec.activations)
        refused = _refused_activation(operand, call.name if call else "", how, stored is not None)
        if refused:
            return refused
        found.append(QuantizedOperand(operand.name, how))
    return tuple(found) or "it has no operand in floating point"


def _stored(gm: fx.GraphModule, operand: object) -> Tensor | None:
    """Return the tensor that an operand reads from the module, or None."""
    if not isinstance(operand, fx.Node) or operand.op != "get_attr":
        return None
    value = find_attribute(gm, str(operand.target))
    return value if isinstance(value, Tensor) else None


def _refused_weight(weight: Tensor, row: QuantizableOperator, spec: TensorSpec) -> str | None:
    if not weight.is_floating_point():
        return f"its weight is {_short(weight.dtype)}"
    if weight.dtype == torch.float64:
        return "its weight is float64, which torch's quantising operators don't take"
    if spec.is_float and weight.dtype.itemsize <= spec.dtype.itemsize:
        return f"its weight is {_short(weight.dtype)}, which takes no more than {spec}"
    if not weight.numel():
        return "its weight is empty"
    if weight.ndim < 2:
        return "its weight is a vector: products with a vector have no row"
    if is_rotation(weight):
        return "its weight is a rotation, which spreads what is large before it is quantised"
    # One pass without a copy: what is not finite shows at an end of the range.
    if not all(bool(end.isfinite()) for end in weight.detach().aminmax()):
        return "its weight is not finite"
    if spec.granularity != "per_group":
        return None
    if row.summed is None or weight.ndim != 2:
        return "its weight has no groups: only rows of linear layers and embeddings have"
    length, size = weight.shape[row.summed], spec.group_size or 1
    if length % size:
        return f"its rows of {length} elements are not divided by groups of {size}"
    return None


def _refused_activation(
    operand: fx.Node, operator: str, spec: TensorSpec, has_weight: bool
) -> str | None:
    known = type_of(operand)
    if is_dequantised(operand):
        return f"its operand %{operand.name} is quantised already"
    if isinstance(known, TensorType) and not known.dtype.is_floating_point:
        return f"its operand %{operand.name} is {_short(known.dtype)}"
    if isinstance(known, TensorType) and known.dtype == torch.float64:
        return "its operand is float64, which torch's quantising operators don't take"
    if spec.is_dynamic and "conv" in operator:
        return "a convolution sums over several tokens: scales per token do not fit"
    if spec.is_dynamic and operator in ("aten.matmul", "aten.mm", "aten.addmm") and has_weight:
        return (
            "scales per token are for linear layers, which it is not: it has factors, "
            "adds no vector, or its left operand is one"
        )
    if spec.is_dynamic and operator in ("aten.bmm", "aten.matmul", "aten.mm", "aten.addmm"):
        return "its second operand is summed along tokens: scales per token do not fit"
    if spec.is_dynamic and operator == "aten.scaled_dot_product_attention":
        return "its value is summed along tokens: scales per token do not fit"
    return None


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
