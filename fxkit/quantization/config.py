"""Which spec holds for which operator of a program."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fxkit.analysis.objects import GraphNode
from fxkit.errors import UnsupportedError
from fxkit.ir.op import operator_name, resolve
from fxkit.quantization.operand_table import OPERATORS
from fxkit.quantization.specs import QuantizationSpec, TensorSpec
from fxkit.quantization.state_values import check_state


@dataclass(frozen=True)
class QuantizationConfig:
    """Specs by operator and by module; the most particular one holds.

    A node goes before a module's pattern, that before an operator, and that before `spec`. None
    keeps in float.

    Attributes:
        spec: What holds where nothing else says so, or None.
        by_module: Specs by glob over the path of the module that an operator ran in.
        by_operator: Specs by operator in any spelling, such as `F.conv2d`.
        by_node: Specs by the names of nodes, as reports and comparisons call them.
        where: Tells whether an operator is quantised at all; it takes an object of `fxkit.graph`.
        shares_scales: Whether activations that hold the same values, moved or joined, get one
            scale, so that integers could be moved in their place; joined ones may get coarser.
        state: Inputs that the next call gets a result of this one for, such as the cache of a
            decoder: by their names in the graph, the index of that result, or None for those that
            the program writes in place. They are quantised with one scale, so that
            `hold_in_integers` can hold them in integers between calls.
        state_spec: How they are; int8 where nothing is said.
    """

    spec: QuantizationSpec | None
    by_module: Mapping[str, QuantizationSpec | None] = field(default_factory=dict)
    by_operator: Mapping[Any, QuantizationSpec | None] = field(default_factory=dict)
    by_node: Mapping[str, QuantizationSpec | None] = field(default_factory=dict)
    where: Callable[[GraphNode], bool] | None = None
    shares_scales: bool = False
    state: Mapping[str, int | None] = field(default_factory=dict)
    state_spec: TensorSpec = field(
        default_factory=lambda: TensorSpec(scheme="affine", observer="mse")
    )

    def __post_init__(self) -> None:
        """Check what the specs are and that operators are known.

        Raises:
            UnsupportedError: When a value is no spec, a key of `by_operator` is no operator that
                can be quantised, or `state_spec` is in floating point or has several scales.
        """
        mappings = (self.by_module, self.by_operator, self.by_node)
        for value in (self.spec, *(one for kind in mappings for one in kind.values())):
            if value is not None and not isinstance(value, QuantizationSpec):
                raise UnsupportedError(
                    f"expected a QuantizationSpec or None, got {value!r}",
                    hint="fxkit.quantization.int8_static() makes one",
                )
        for operator in self.by_operator:
            if operator_name(operator) not in OPERATORS:
                raise UnsupportedError(
                    f"expected an operator that can be quantised, got {operator!r}",
                    hint=f"these can be: {', '.join(OPERATORS)}",
                )
        if self.where is not None and not callable(self.where):
            raise UnsupportedError(
                f"expected where to be a function of a node, got {self.where!r}",
                hint='where=lambda node: "head" not in node.module_path',
            )
        check_state(self.state)
        if self.state_spec.granularity != "per_tensor" or self.state_spec.is_float:
            raise UnsupportedError(
                f"expected a state_spec in integers with one scale, got {self.state_spec}",
                hint="TensorSpec(granularity='per_tensor')",
            )

    @property
    def specs(self) -> tuple[QuantizationSpec, ...]:
        """All specs that hold somewhere."""
        mappings = (self.by_module, self.by_operator, self.by_node)
        found = (self.spec, *(one for kind in mappings for one in kind.values()))
        return tuple(one for one in found if one is not None)

    def spec_of(self, node: GraphNode) -> tuple[QuantizationSpec | None, str]:
        """Return the spec of an operator, and where it comes from, as text."""
        if self.where is not None and not self.where(node):
            return None, "config: where"
        if node.name in self.by_node:
            return self.by_node[node.name], f"config: by_node[{node.name!r}]"
        path = node.module_path
        for pattern, spec in self.by_module.items():
            if fnmatch.fnmatchcase(path, pattern):
                return spec, f"config: by_module[{pattern!r}]"
        call = resolve(node.fx_node)
        for operator, spec in self.by_operator.items():
            if call is not None and call.name == operator_name(operator):
                return spec, f"config: by_operator[{call.name}]"
        return self.spec, "config: spec"

    def names(self, node: GraphNode) -> bool:
        """Tell whether it has an entry for an operator's node, or for the operator itself."""
        call = resolve(node.fx_node)
        operators = (operator_name(operator) for operator in self.by_operator)
        return node.name in self.by_node or (call is not None and call.name in operators)
