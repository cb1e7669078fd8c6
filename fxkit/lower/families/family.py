"""What a family of kernels is: its folder says it once, and all that lowers a graph reads it there.

A folder of this package holds the detail of the family's instruction, the nodes that it computes,
its text and the printer of that, and the trial that tells whether torch's library is faster. The
folder's `family` module puts them together as its `FAMILY`.
"""

from __future__ import annotations

import importlib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import fx

from fxkit.lower.codegen.cpp.kernel_printer import KernelPrinter
from fxkit.lower.families.product_node import ProductNode
from fxkit.lower.fusion.emit import Emitted
from fxkit.lower.loop_ir.loop_ir import Kernel
from fxkit.lower.scheduling.row_sweeps import plan_sweeps
from fxkit.registry import Registry

Sample = tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]


class WholePrinter(KernelPrinter):
    """Writes a kernel that begins with a value made of whole tensors.

    Args:
        kernel: The kernel.
        name: Name of the function.
    """

    def __init__(self, kernel: Kernel, name: str) -> None:
        super().__init__(kernel, name, plan_sweeps(kernel))

    @classmethod
    @abstractmethod
    def texts(cls) -> tuple[str, ...]:
        """Return the texts that a kernel's text stands on, each behind those that it needs."""


def _in_no_other_way(found: ProductNode, allows_bf16x3: bool) -> tuple[ProductNode, ...]:
    return ()


@dataclass(frozen=True)
class Alone:
    """How kernels are made of nodes that nothing else shares a kernel with.

    Attributes:
        emit: Returns the kernel of a node; raises `Unfusable` where there is none.
        objection: Says why torch's library is as fast as a kernel, or None where it is slower.
        objection_by_kind: Says it for one of many sizes, which those near by share.
    """

    emit: Callable[[fx.Node, torch.nn.Module], Emitted]
    objection: Callable[[Kernel], str | None]
    objection_by_kind: Callable[[Kernel], str | None]


@dataclass(frozen=True)
class Joined:
    """How kernels are made of nodes together with the region that reads them.

    Attributes:
        find: Returns what is summed for a node; raises `Unfusable` where no kernel can.
        objection: Says why torch's library is as fast as a kernel, or None where it is slower.
        objection_by_kind: Says it for one of many sizes, which those near by share.
        others: Returns other ways to sum it, which are taken where they are faster than the library
            and than the usual one. Is also told whether numbers may be split; see
            `Product.is_bf16x3`.
    """

    find: Callable[[fx.Node, torch.nn.Module], ProductNode]
    objection: Callable[[ProductNode], str | None]
    objection_by_kind: Callable[[ProductNode], str | None]
    others: Callable[[ProductNode, bool], Sequence[ProductNode]] = _in_no_other_way


@dataclass(frozen=True)
class Family:
    """Kernels of a kind.

    Attributes:
        computes: Tells whether a node is one that the family computes.
        printers: How it is computed, see `TensorOp.way` → what prints it.
        kernels: How its nodes become kernels.
        samples: Returns programs that the family computes, each with inputs, by name. Tests hold
            them to float64 and the family's text to `TensorOp.evaluated`.
        tolerance: How many times eager's error a result may err.
    """

    computes: Callable[[fx.Node], bool]
    printers: Mapping[str, type[WholePrinter]]
    kernels: Alone | Joined
    samples: Callable[[], Mapping[str, Sample]]
    tolerance: float = 2.0


def _family_of(module: ModuleType) -> Iterator[tuple[str, Family]]:
    if hasattr(module, "__path__"):
        name = module.__name__.rpartition(".")[2]
        yield name, importlib.import_module(f"{module.__name__}.family").FAMILY


FAMILIES: Registry[Family] = Registry("family of kernels", __package__ or "", _family_of)
"""Each family by the name of its folder."""


def kernels_of(node: fx.Node) -> Alone | Joined | None:
    """Return how kernels are made of a node; None where no family computes it."""
    if node.op not in ("call_function", "call_method", "call_module"):
        return None
    return next((f.kernels for _, f in FAMILIES.items() if f.computes(node)), None)


def printer_of(kernel: Kernel) -> type[WholePrinter] | None:
    """Return what prints a kernel that begins with a value made of whole tensors."""
    return None if kernel.tensor_op is None else _printers()[kernel.tensor_op.way]


def texts_below(kernels: Iterable[Kernel]) -> tuple[str, ...]:
    """Return the texts that those of kernels stand on, each behind those that it needs."""
    printers = filter(None, map(printer_of, kernels))
    return tuple(dict.fromkeys(text for printer in printers for text in printer.texts()))


def _printers() -> dict[str, type[WholePrinter]]:
    families = [family for _, family in FAMILIES.items()]
    return {way: printer for family in families for way, printer in family.printers.items()}
