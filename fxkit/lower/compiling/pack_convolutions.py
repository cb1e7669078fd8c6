"""Pack the weights of convolutions, and keep images in channels-last layout between them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from fxkit.errors import PassError
from fxkit.ir.op import resolve
from fxkit.ir.session import EditSession
from fxkit.ir.types import TensorType, set_type, type_of
from fxkit.lower.autotuning.times import MIN_TERMS
from fxkit.lower.building.toolchain import has_compiler
from fxkit.lower.compiling.layout_of_images import ImageLayoutPropagation
from fxkit.lower.families.convolutions.autotune import unpacked_is_faster
from fxkit.lower.families.convolutions.nodes import has_channels_innermost, has_kernel
from fxkit.lower.library_calls import packed_convolution as packed
from fxkit.lower.library_calls.onednn import Settings
from fxkit.passes.base import Pass, PassContext
from fxkit.passes.canonicalise_copies import CanonicaliseCopies
from fxkit.passes.layers.layers import Layer, layer_of
from fxkit.passes.layers.refused import Refused
from fxkit.passes.manager.instruments import Instrument
from fxkit.passes.manager.manager import PassManager

# Fewer multiplications than these, in all convolutions of a graph, cost less than what a packed
# convolution takes to find its weight: nothing is packed then, but kernels pay.
MIN_WORK = 1 << 21

# So few in one convolution that no kernel computes run fastest as they are; so does one that uses
# each number of its weight less often than this, since the weight is read once more at each call to
# find whether it changed.
MIN_LAYER_WORK = 1 << 17
MIN_USES = 32

# Parts of fewer channels than these may be slower than eager, which takes all of them at once.
FEW_CHANNELS = 16

# Fewer convolutions of dense windows gain less than it costs to turn their images, in and out.
FEWEST_DENSE = 2


def pack_convolutions(
    gm: fx.GraphModule,
    args: tuple[Any, ...],
    on_failure: Callable[[Pass, PassError], bool] | None = None,
    instruments: Iterable[Instrument] = (),
) -> None:
    """Run `PackConvolutions` on a graph whose types are known, if it has any convolution.

    Images whose layout changes are then copied by kernels, which join what reads them.

    Args:
        gm: The graph.
        args: Its inputs.
        on_failure: As `PassManager` takes it.
        instruments: What is told of the passes.
    """
    if any((call := resolve(node)) and call.name == "aten.conv2d" for node in gm.graph.nodes):
        passes = (PackConvolutions(), CanonicaliseCopies())
        PassManager(
            passes,
            verify="structure",
            args=args,
            on_failure=on_failure,
            instruments=instruments,
        ).run(gm)


@dataclass(frozen=True)
class PackConvolutions(Pass):
    """Replace 2d convolutions by packed ones; a batch norm behind one becomes a part of it.

    Serves graphs that are about to be lowered for inference. Parameters and statistics are operands
    of the new calls, so that they may change from one call to the next.

    Rewrites:
        %c = aten.conv2d(%x, self.w); return aten.batch_norm(%c, self.g, self.b, self.m, self.v)
            →  %l = aten.contiguous(%x, channels_last)
               %c = fxkit.convolution(%l, self.w, None, self.m, self.v, self.g, self.b)
               return aten.contiguous(%c)
    """

    numerics: ClassVar[str] = "close"

    def apply(self, edit: EditSession, context: PassContext) -> None:
        """Visit the nodes in order. Cost: linear in the edges."""
        packer = _Packer(edit)
        if packer.has_too_few():
            return
        if packer.work() < MIN_WORK:
            packer.leave_all_but_kernels()
            if packer.work() and has_compiler():
                packer.visit_all(context)
        elif packed.is_available():  # which waits for the binding
            packer.visit_all(context)


@dataclass(frozen=True)
class _Found:
    """A convolution that can be packed.

    Attributes:
        layer: The convolution.
        norm: The batch norm that alone reads it, or None.
        operands: What follows the input among the operands of the packed one.
    """

    layer: Layer
    norm: fx.Node | None
    operands: tuple[Any, ...]

    @property
    def result(self) -> fx.Node:
        """The node whose value the packed convolution computes."""
        return self.layer.node if self.norm is None else self.norm


class _Packer(ImageLayoutPropagation):
    """Replaces convolutions, and lets what reads them follow their layout."""

    def __init__(self, edit: EditSession) -> None:
        super().__init__(edit)
        self._found = {found.layer.node: found for found in self._convolutions()}
        self._norms = {found.norm for found in self._found.values()} - {None}

    def work(self) -> int:
        """Return the number of multiplications in the convolutions that can be packed."""
        return sum(_work(found.layer) for found in self._found.values())

    def has_too_few(self) -> bool:
        """Tell whether all that could be packed are dense windows, too few of them to pay.

        Convolutions of single pixels and of each channel for itself are bound by memory, where
        kernels are ahead; and a batch norm behind one is another pass that is saved.
        """
        found = self._found.values()
        return len(found) < FEWEST_DENSE and all(map(_is_plain_window, found))

    def leave_all_but_kernels(self) -> None:
        """Leave the convolutions that no kernel computes as they are."""
        self._found = {n: f for n, f in self._found.items() if _has_kernel(f.layer)}
        self._norms = {found.norm for found in self._found.values()} - {None}

    def visit(self, node: fx.Node) -> None:
        """Replace a convolution, or let a node take operands in their new layout."""
        if node in self._norms:
            return
        if node in self._found:
            self._pack(self._found[node])
        elif any(operand in self.before for operand in node.all_input_nodes):
            self._follow(node)

    def _pack(self, found: _Found) -> None:
        layer, result = found.layer, found.result
        call, old = resolve(layer.node), type_of(result)
        image = call.arguments["input"] if call is not None else None  # it may be a packed one now
        known = type_of(image) if isinstance(image, fx.Node) else None
        if not isinstance(image, fx.Node) or not isinstance(known, TensorType):
            raise Refused(f"the type of what %{layer.node.name} takes is not known")
        source = self._image(image, known, layer)
        with self.edit.on_behalf_of([layer.node], "pack_convolutions"):
            operands = [self._read_early(operand, layer.node) for operand in found.operands]
            args = (source, *operands)
            new = self.edit.insert("call_function", packed.operator(), args, {}, before=layer.node)
        self.weights.replaced(result, self.weights.inserted(new))
        self.edit.replace(result, new)
        if found.norm is not None:
            self.edit.erase(layer.node)
        self._note(new, old)

    def _read_early(self, operand: Any, place: fx.Node) -> Any:
        """Return what a norm reads, read in front of the convolution."""
        if not isinstance(operand, fx.Node) or operand < place:
            return operand
        read = self.edit.get_attr(str(operand.target), before=place)
        set_type(read, type_of(operand))
        return self.weights.inserted(read)

    def _convolutions(self) -> Iterator[_Found]:
        for node in self.edit.graph.nodes:
            layer = layer_of(node, self.weights)
            if isinstance(layer, Layer) and self._is_possible(layer):
                found = self._with_norm(layer)
                if self._pays(found):
                    yield found

    def _is_possible(self, layer: Layer) -> bool:
        """Tell whether a layer is a plain 2d convolution of float32 images."""
        arguments = layer.call.arguments
        known, made = type_of(layer.input), type_of(layer.node)
        if layer.axes != 2 or layer.is_transposed or not isinstance(known, TensorType):
            return False
        is_plain = isinstance(made, TensorType) and len(made.shape) == 4
        numbers = [*_pair(arguments["stride"]), *_pair(arguments["padding"])]
        return (
            is_plain
            and not known.is_symbolic
            and known.device.type == "cpu"
            and known.dtype == layer.weight.dtype == torch.float32
            and all(isinstance(number, int) for number in numbers)
            and _is_read(layer.weight_operand)
            and (layer.bias_operand is None or _is_read(layer.bias_operand))
            and _is_without_gaps(layer.weight)
            and packed.parts_of(layer.weight.shape, layer.groups) is not None
        )

    def _pays(self, found: _Found) -> bool:
        """Tell whether a layer is surely a kernel, or large enough for oneDNN."""
        layer = found.layer
        enough = max(MIN_LAYER_WORK, MIN_USES * layer.weight.numel())
        if _is_surely_kernel(layer):
            return True
        return _work(layer) >= enough and not _is_slower_in_parts(found)

    def _image(self, image: fx.Node, known: TensorType, layer: Layer) -> fx.Node:
        """Return an image whose channels are innermost, whatever the strides of single pixels."""
        return image if has_channels_innermost(known) else super()._image(image, known, layer)

    def _with_norm(self, layer: Layer) -> _Found:
        arguments = layer.call.arguments
        settings = (
            *(_pair(arguments[name]) for name in ("stride", "padding", "dilation")),
            layer.groups,
        )
        norm, statistics, eps = None, (None,) * 4, 0.0
        reader = next(iter(layer.node.users)) if len(layer.node.users) == 1 else None
        call = resolve(reader) if reader is not None else None
        if reader is not None and call is not None and call.name == "aten.batch_norm":
            taken = call.arguments
            names = ("running_mean", "running_var", "weight", "bias")
            operands = tuple(taken[name] for name in names)
            if taken["training"] is False and self._are_constant(operands):
                norm, statistics, eps = reader, operands, float(taken["eps"])
        weight = (layer.weight_operand, layer.bias_operand)
        operands = (*weight, *statistics, eps, *settings, packed.new_slot())
        return _Found(layer, norm, operands)

    def _are_constant(self, operands: tuple[Any, ...]) -> bool:
        mean, variance, *others = operands
        needed = [mean, variance, *(o for o in others if o is not None)]
        return all(_is_read(o) and self.weights.value(o) is not None for o in needed)


def _is_without_gaps(weight: torch.Tensor) -> bool:
    """Tell whether a weight lies in order, with its windows or its channels innermost."""
    return weight.is_contiguous() or weight.is_contiguous(memory_format=torch.channels_last)


def _work(layer: Layer) -> int:
    """Return the number of multiplications of a convolution."""
    made = type_of(layer.node)
    shape = made.shape if isinstance(made, TensorType) else ()
    return math.prod(int(size) for size in shape) * math.prod(layer.weight.shape[1:])


def _is_slower_in_parts(found: _Found) -> bool:
    """Tell whether a layer that oneDNN would convolve in thin parts is faster as it is."""
    layer, known = found.layer, type_of(found.layer.input)
    parts = packed.parts_of(layer.weight.shape, layer.groups)
    if not parts or len(parts) == 1 or parts[0][1] >= FEW_CHANNELS or not has_compiler():
        return False
    assert isinstance(known, TensorType)
    *_, stride, padding, dilation, groups, _ = found.operands
    settings = Settings(stride, padding, dilation, groups)
    has_norm = found.norm is not None
    return unpacked_is_faster(known.shape, layer.weight, settings, has_norm=has_norm)


def _is_plain_window(found: _Found) -> bool:
    """Tell whether a convolution of windows is dense, without a norm, and its image turned."""
    layer, known = found.layer, type_of(found.layer.input)
    is_dense = layer.groups == 1 and math.prod(layer.weight.shape[2:]) > 1
    is_turned = isinstance(known, TensorType) and not has_channels_innermost(known)
    return is_dense and is_turned and found.norm is None


def _is_surely_kernel(layer: Layer) -> bool:
    """Tell whether a kernel computes a layer, without a trial of whether it is faster."""
    return _has_kernel(layer) and (layer.groups > 1 or _work(layer) < MIN_TERMS)


def _has_kernel(layer: Layer) -> bool:
    return has_kernel(layer.weight.shape, layer.groups)


def _is_read(operand: Any) -> bool:
    """Tell whether an operand is a parameter or buffer, read where it is."""
    return isinstance(operand, fx.Node) and operand.op == "get_attr"


def _pair(value: Any) -> tuple[Any, ...]:
    """Return a setting of two axes as two numbers."""
    if isinstance(value, (list, tuple)):
        return tuple(value) if len(value) == 2 else tuple(value) * 2
    return (value, value)
