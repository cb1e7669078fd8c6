"""What a layer may compute with, by name: floats, or integers as a spec says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import fx

from fxkit.errors import UnsupportedError
from fxkit.quantization.config import QuantizationConfig
from fxkit.quantization.placement import placements
from fxkit.quantization.specs import (
    QuantizationSpec,
    int4_weight_only,
    int8_dynamic,
    int8_static,
    int8_weight_only,
)

FLOAT, BFLOAT16 = "float32", "bfloat16"

FORMATS: dict[str, QuantizationSpec | None] = {
    FLOAT: None,
    BFLOAT16: None,
    "int8": int8_static(),
    "int8_dynamic": int8_dynamic(),
    "int8_weight_only": int8_weight_only(),
    "int4": int4_weight_only(32),
}
"""Formats by name; floats have no spec."""


@dataclass(frozen=True)
class Layers:
    """The layers of a program that have a choice, and what each may take.

    Attributes:
        choices: The formats of each layer by the name of its node, `float32` first.
        specs: The spec of each format that is one of integers.
    """

    choices: Mapping[str, tuple[str, ...]]
    specs: Mapping[str, QuantizationSpec]

    def all_in(self, name: str) -> dict[str, str]:
        """Return an assignment where each layer has a format, or float32 where it can't."""
        return {layer: name if name in own else FLOAT for layer, own in self.choices.items()}


def formats_of(
    over: Iterable[str] | Mapping[str, QuantizationSpec],
) -> dict[str, QuantizationSpec | None]:
    """Return the formats that are asked for by name, float32 among them.

    Args:
        over: Names of `FORMATS`, or specs of one's own by names of one's own.

    Raises:
        UnsupportedError: When there is none but float32, a name is none of them, or two specs want
            other static scales.
    """
    found: dict[str, QuantizationSpec | None] = {FLOAT: None}
    for name in over:
        spec = over[name] if isinstance(over, Mapping) else FORMATS.get(name)
        if spec is None and name not in FORMATS:
            raise UnsupportedError(
                f"expected formats among {', '.join(FORMATS)}, got {name!r}",
                hint="a spec of your own has a name in a dict: over={'mine': spec}",
            )
        found[name] = spec
    if len(found) == 1:
        raise UnsupportedError(
            f"expected formats beside {FLOAT}, got over={tuple(over)}",
            hint=f"there are {', '.join(FORMATS)}",
        )
    static = {
        spec.activations
        for spec in found.values()
        if spec is not None and spec.activations is not None and not spec.activations.is_dynamic
    }
    if len(static) > 1:
        raise UnsupportedError(
            f"expected one way to quantise activations with static scales, got {len(static)}",
            hint="search over one at a time: ranges are found once, for all that is tried",
        )
    return found


def layers_of(gm: fx.GraphModule, formats: Mapping[str, QuantizationSpec | None]) -> Layers:
    """Return the layers of a graph that multiply by a weight, and the formats that each can take.

    Args:
        gm: The graph, of known types.
        formats: All formats, by name.
    """
    choices: dict[str, list[str]] = {}
    for name, spec in formats.items():
        if spec is None:
            continue
        for placed in placements(gm, QuantizationConfig(spec)):
            if placed.operator != "aten.embedding" and any(o.is_weight for o in placed.operands):
                choices.setdefault(placed.node, []).append(name)
    floats = [name for name, spec in formats.items() if spec is None]
    if not choices and BFLOAT16 in formats:
        for placed in placements(gm, QuantizationConfig(int8_weight_only())):
            if placed.operator != "aten.embedding" and placed.is_quantized:
                choices[placed.node] = []
    order = [node.name for node in gm.graph.nodes if node.name in choices]
    specs = {name: spec for name, spec in formats.items() if spec is not None}
    return Layers({name: (*floats, *choices[name]) for name in order}, specs)
