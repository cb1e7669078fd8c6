"""Kernel or library: which products, convolutions and attentions kernels compute, and fuse with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from fxkit.analysis.effects import effects_of
from fxkit.ir.op import resolve
from fxkit.ir.types import TensorType, type_of
from fxkit.lower.families.family import Alone, Joined, kernels_of
from fxkit.lower.families.product_node import ProductNode
from fxkit.lower.families.products.bias import has_bias
from fxkit.lower.families.products.packing_autotune import packing_pays
from fxkit.lower.fusion.emit import Emitted
from fxkit.lower.fusion.group import FusionGroup
from fxkit.lower.fusion.kernel_faults import KernelFaults
from fxkit.lower.loop_ir.index import row_major
from fxkit.lower.loop_ir.loop_ir import Unfusable

Objection = Callable[[Alone | Joined, Any], str | None]
"""Says of how a node becomes a kernel, and of what it becomes, why torch is as fast, or None."""


def objection(kernels: Alone | Joined, found: Any) -> str | None:
    """Return why torch's library is as fast for what a kernel can compute, or None."""
    return kernels.objection(found)


def objection_by_kind(kernels: Alone | Joined, found: Any) -> str | None:
    """Do as `objection` for one of many sizes: those near by get the same answer."""
    return kernels.objection_by_kind(found)


def _never_pays(found: ProductNode, adds_bias: bool) -> bool:
    """Leave weights as they are: what is packed for one call would be packed for each."""
    return False


@dataclass(frozen=True)
class Choosing:
    """How to choose between a kernel and torch's library.

    Attributes:
        objection: Says why torch is as fast for what a kernel can compute, or None.
        packing_pays: Tells of a layer, and of whether the library adds its bias, whether that is
            faster with the weight packed.
        allows_bf16x3: Whether numbers may be split where that is faster; see `Product.is_bf16x3`.
    """

    objection: Objection
    packing_pays: Callable[[ProductNode, bool], bool]
    allows_bf16x3: bool = False

    @classmethod
    def by_speed(cls) -> Choosing:
        """Choose what is faster at the sizes of the graph."""
        return cls(objection, packing_pays)

    @classmethod
    def by_kind(cls) -> Choosing:
        """Choose the same for sizes near by, so that the kernels built for one serve others."""
        return cls(objection_by_kind, _never_pays)

    @classmethod
    def all_library(cls, reason: str | None) -> Choosing:
        """Leave all of them to the library, for a reason; None: kernels compute all they can."""
        return cls(lambda kernels, found: reason, _never_pays)


@dataclass(frozen=True)
class Choices:
    """What kernels compute beside the regions, and what is left to torch's library.

    Attributes:
        products: The products and convolutions.
        alone: The kernels of nodes that are computed with nothing else, as attention.
        reasons: Why torch computes the others.
    """

    products: Products
    alone: dict[fx.Node, Emitted]
    reasons: dict[fx.Node, str]

    def __str__(self) -> str:
        kernels = [n.name for n in (*self.products.found, *self.alone)]
        lines = [f"{name}: a kernel" for name in kernels]
        return "\n".join([*lines, *(f"{n.name}: {why}" for n, why in self.reasons.items())])


@dataclass
class Products:
    """The products of a graph.

    Attributes:
        found: The products that kernels compute, by node.
        followed: Position of a region among the steps → the product whose result it alone reads.
        reasons: The other products, each with the reason why torch computes it.
        biased: Position of a region → those of them with a bias whose result it alone reads.
        packed: Those of them that the library computes with a weight which was packed once.
    """

    found: dict[fx.Node, ProductNode] = field(default_factory=dict)
    followed: dict[int, ProductNode] = field(default_factory=dict)
    reasons: dict[fx.Node, str] = field(default_factory=dict)
    biased: dict[int, list[ProductNode]] = field(default_factory=dict)
    packed: set[fx.Node] = field(default_factory=set)

    def is_deferred(self, node: fx.Node) -> bool:
        """Tell whether a product is computed together with the region that reads it."""
        return any(product.node is node for product in self.followed.values())


def choose_kernels(
    gm: fx.GraphModule,
    steps: Sequence[fx.Node | FusionGroup],
    choosing: Choosing,
    faults: KernelFaults,
) -> Choices:
    """Choose which products, convolutions and attentions kernels compute.

    Args:
        gm: The module; every node has its type.
        steps: The graph in the order in which it runs.
        choosing: Says where the library is as fast.
        faults: Takes note of nodes whose family raises, which torch computes.
    """
    products = _choose_products(gm, steps, choosing, faults)
    alone, reasons = _choose_alone(gm, steps, choosing.objection, faults)
    return Choices(products, alone, products.reasons | reasons)


def _choose_products(
    gm: fx.GraphModule,
    steps: Sequence[fx.Node | FusionGroup],
    choosing: Choosing,
    faults: KernelFaults,
) -> Products:
    """Choose the products that kernels compute, and the regions that they are fused with."""
    result = Products()
    place = _places(steps)
    for position, step in enumerate(steps):
        kernels = None if isinstance(step, FusionGroup) else kernels_of(step)
        if isinstance(step, FusionGroup) or not isinstance(kernels, Joined):
            continue
        try:
            found = kernels.find(step, gm)
            found, reason = _fastest(kernels, found, choosing)
        except Unfusable as error:
            result.reasons[step] = error.message
            continue
        except Exception as error:
            result.reasons[step] = faults.note((step,), error)
            continue
        region = _only_reader(step, steps, place)
        if region is not None and any(map(_writes, steps[position + 1 : region])):
            region = None
        if reason is None:
            result.found[step] = found
            if region is not None:
                result.followed.setdefault(region, found)
            continue
        if has_bias(found) and region is not None:
            result.biased.setdefault(region, []).append(found)
        adds_bias = has_bias(found) and region is None
        if _has_constant_weight(found) and choosing.packing_pays(found, adds_bias):
            result.packed.add(step)
            reason = f"{reason}; its weight is packed once"
        result.reasons[step] = reason
    return result


def _has_constant_weight(found: ProductNode) -> bool:
    """Tell whether a node is a linear layer, its weight a parameter or buffer laid out in order."""
    call, weight = resolve(found.node), found.operands[1]
    if call is None or call.name != "aten.linear" or not isinstance(weight, fx.Node):
        return False
    known = type_of(weight)
    is_read = weight.op == "get_attr" and isinstance(known, TensorType)
    return is_read and known.stride == tuple(row_major(known.shape))


def _fastest(
    kernels: Joined, found: ProductNode, choosing: Choosing
) -> tuple[ProductNode, str | None]:
    """Return a node as it is summed fastest, and why torch is as fast as that, or None."""
    objection = choosing.objection
    for other in kernels.others(found, choosing.allows_bf16x3):
        if objection(kernels, other) is None:
            return other, None
    return found, objection(kernels, found)


def _choose_alone(
    gm: fx.GraphModule,
    steps: Sequence[fx.Node | FusionGroup],
    objection: Objection,
    faults: KernelFaults,
) -> tuple[dict[fx.Node, Emitted], dict[fx.Node, str]]:
    """Choose the nodes that kernels compute with nothing else, as attention.

    Returns:
        The kernels by node, and the reasons why torch computes the others.
    """
    found: dict[fx.Node, Emitted] = {}
    reasons: dict[fx.Node, str] = {}
    for step in steps:
        kernels = None if isinstance(step, FusionGroup) else kernels_of(step)
        if isinstance(step, FusionGroup) or not isinstance(kernels, Alone):
            continue
        try:
            emitted = kernels.emit(step, gm)
            reason = objection(kernels, emitted.kernel)
        except Unfusable as error:
            reasons[step] = error.message
            continue
        except Exception as error:
            reasons[step] = faults.note((step,), error)
            continue
        if reason is None:
            found[step] = emitted
        else:
            reasons[step] = reason
    return found, reasons


def _places(steps: Sequence[fx.Node | FusionGroup]) -> dict[fx.Node, int]:
    """Return the position of the step that computes a node."""
    place: dict[fx.Node, int] = {}
    for position, step in enumerate(steps):
        nodes = step.coordinates if isinstance(step, FusionGroup) else (step,)
        place.update(dict.fromkeys(nodes, position))
    return place


def _only_reader(
    node: fx.Node, steps: Sequence[fx.Node | FusionGroup], place: dict[fx.Node, int]
) -> int | None:
    """Return the position of the region that alone reads a node, if there is one."""
    readers = {place.get(user) for user in node.users}
    if len(readers) != 1:
        return None
    reader = readers.pop()
    return reader if reader is not None and isinstance(steps[reader], FusionGroup) else None


def _writes(step: fx.Node | FusionGroup) -> bool:
    """Tell whether a step may change memory that a product reads."""
    if isinstance(step, FusionGroup):
        return False
    effects = effects_of(step)
    return bool(effects.writes) or effects.is_opaque or effects.is_global
