"""The recorder of symbolic sizes.

The program runs on real tensors. Where it asks a tensor that depends on a symbolic size for its
shape, a node reads that size and a stand-in is given for the number, so that what is computed of it
is written down as nodes too. Whatever a program does with the number itself is noted as a fact.
"""

from __future__ import annotations

import operator
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import fx

from fxkit.torch_adapters.transforms import current_level
from fxkit.tracing.environment.environment_walk import EnvironmentWalk
from fxkit.tracing.guarding.plain_values import READABLE
from fxkit.tracing.recorder.calls import CallSpelling, DataRead, spelling_of
from fxkit.tracing.recorder.recorder import Recorder
from fxkit.tracing.values.refusals import Refusal
from fxkit.tracing.values.symbolic_scalars import SYMBOLIC, SymbolicScalar, plain

_aten = torch.ops.aten

# What these give does not change with the sizes of a tensor of a known number of axes.
_WITHOUT_SIZES = frozenset(
    """
    dtype device layout ndim requires_grad is_cuda is_cpu is_meta is_mps is_xpu is_mkldnn is_sparse
    is_sparse_csr is_quantized is_nested is_vulkan is_ipu is_xla is_mtia is_maia itemsize dim
    ndimension element_size is_floating_point is_complex is_signed get_device has_names
    result_type promote_types can_cast is_tensor
    """.split()
)
_COUNTS = frozenset({"numel", "nelement"})
_DIVISIONS = (operator.floordiv, operator.mod, operator.truediv)


@dataclass(frozen=True, slots=True)
class SizeFact:
    """A value computed of sizes that the program used as it was.

    Attributes:
        node: Computes it.
        value: What it was.
        source: The user's line that used it, as a traceback writes it.
    """

    node: fx.Node
    value: Any
    source: str | None


class SizeRecorder(Recorder):
    """Records a program whose tensors have symbolic sizes.

    Args:
        leaves: The tensor arguments, with the names that their placeholders ask for.
        environment: Where tensors and modules from outside of the arguments lie.
        boundary: The frame in which the user's program is called.
        free: The free axes of each tensor argument, by its index.

    Attributes:
        facts: What was used of sizes as it was.
    """

    def __init__(
        self,
        leaves: Iterable[tuple[str, torch.Tensor]],
        environment: EnvironmentWalk,
        boundary: FrameType,
        free: Mapping[int, frozenset[int]],
    ) -> None:
        self.facts: list[SizeFact] = []
        self._sizes: dict[tuple[Any, ...], SymbolicScalar] = {}
        self._is_closed = False
        self._axes: dict[fx.Node, frozenset[int]] = {}
        super().__init__(leaves, environment, boundary)
        self._axes = {self.placeholders[index]: axes for index, axes in free.items()}
        self._sized: set[fx.Node] = set(self._axes)

    # What stand-ins tell ------------------------------------------------------------------------

    @property
    def _is_off(self) -> bool:
        return self._is_closed or self.failure is not None

    @property
    def traces_scalars(self) -> bool:
        """Whether nodes are appended; they are, too, once the program has ended."""
        is_off = self._is_off or self._is_suspended
        return not is_off and threading.get_ident() == self._thread

    def close(self) -> None:
        """Let go of the tensors of the program; stand-ins that are left are plain numbers now."""
        self._is_closed = True
        super().close()

    def append_scalar(self, target: Any, args: tuple[Any, ...], value: Any) -> fx.Node:
        """Append a node that computes a scalar of sizes."""
        if self._frames.is_active:
            self._location = self._frames.locate(sys._getframe(3))
        node = self._emit(target, args)
        node.meta.pop("nn_module_stack", None)
        self.scalars[node] = value
        self._sized.add(node)
        return node

    def _guard_domain(self, target: Callable[..., Any], operands: tuple[Any, ...]) -> None:
        if target in _DIVISIONS and type(operands[1]) in SYMBOLIC:
            args = (operands[1].fx_node, 0)
            self.guard_scalar(self.append_scalar(operator.ne, args, True), True)

    def fix(self, scalar: Any) -> Any:
        """Note that the value of a stand-in is used, and return it."""
        if not self._is_off:
            self.guard_scalar(scalar.fx_node, scalar.value)
        return scalar.value

    def guard_scalar(self, node: fx.Node, value: Any) -> None:
        """Note a fact: a scalar of sizes was used as it was."""
        if node in self._fixed:
            return
        self._fixed.add(node)
        trace = self._location.trace
        if self._frames.is_active:
            trace = self._frames.locate(sys._getframe(2)).trace or trace
        self.facts.append(SizeFact(node, value, trace))

    # Calls --------------------------------------------------------------------------------------

    def _handle(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        if self._is_off or self._is_suspended or torch.compiler.is_dynamo_compiling():
            return self._run(func, args, kwargs)
        spelling = spelling_of(func)
        if current_level() != self._entry_level:
            self.refuse("torch.func shows other sizes inside than its tensors have")
            return self._run(func, args, kwargs)
        if spelling.reading is DataRead.STATE:
            self.fix_all((args, kwargs))
            return super()._handle(func, types, plain(args), plain(kwargs))
        if spelling.reading is DataRead.METADATA:
            return self._metadata(func, spelling, types, args, kwargs)
        return self._record(func, spelling, types, args, kwargs)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        return func(*plain(args), **plain(kwargs))

    def _create(
        self, op: str, target: Any, args: tuple[Any, ...], kwargs: Any, name: str | None
    ) -> fx.Node:
        node = super()._create(op, target, args, kwargs, name)
        if any(operand in self._sized for operand in node.all_input_nodes):
            self._sized.add(node)
        return node

    def _metadata(
        self, func: Any, spelling: CallSpelling, types: Any, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        name = spelling.attribute or spelling.name
        self.fix_all((args, kwargs))
        args, kwargs = plain(args), plain(kwargs)
        if self._tainted and self._reads_tainted(args):
            return super()._handle(func, types, args, kwargs)
        tensors = [it for it in (*args, *kwargs.values()) if isinstance(it, torch.Tensor)]
        if name in _WITHOUT_SIZES or not any(map(self._has_symbolic_sizes, tensors)):
            return self._run(func, args, kwargs)
        try:
            self._location = self._frames.locate(sys._getframe(3))
            return self._sizes_of(func, name, spelling, args, kwargs)
        except Refusal as refusal:
            self.refuse(refusal.reason, refusal.hint)
            return self._run(func, args, kwargs)

    def _has_symbolic_sizes(self, tensor: torch.Tensor) -> bool:
        value = self._values.get(id(tensor))
        return value is not None and value.node in self._sized

    def _sizes_of(
        self,
        func: Any,
        name: str,
        spelling: CallSpelling,
        args: tuple[Any, ...],
        kwargs: Any,
    ) -> Any:
        result, tensor = self._run(func, args, kwargs), args[0]
        node = self.node_of(tensor)
        if name in ("shape", "size") and isinstance(result, torch.Size):
            return torch.Size([self._size(node, axis, size) for axis, size in enumerate(result)])
        if name == "size" and type(result) is int:
            axis = args[1] if len(args) > 1 else kwargs["dim"]
            return self._size(node, axis % tensor.dim(), result)
        if name == "__len__":
            return self._size(node, 0, result)
        if name in _COUNTS:
            return self._number((_aten.sym_numel.default, node), result)
        if name == "stride" and isinstance(result, tuple):
            return tuple([self._stride(node, axis, item) for axis, item in enumerate(result)])
        if name == "stride" and type(result) is int:
            axis = args[1] if len(args) > 1 else kwargs["dim"]
            return self._stride(node, axis % tensor.dim(), result)
        return self._other(node, spelling, args, kwargs, result)

    def _size(self, node: fx.Node, axis: int, size: int) -> Any:
        axes = self._axes.get(node)
        if axes is not None and axis not in axes:
            return size
        return self._number((_aten.sym_size.int, node, axis), size)

    def _stride(self, node: fx.Node, axis: int, stride: int) -> Any:
        return self._number((_aten.sym_stride.int, node, axis), stride)

    def _number(self, key: tuple[Any, ...], value: int) -> SymbolicScalar:
        known = self._sizes.get(key)
        if known is None:
            known = self._sizes[key] = self.stand_in(value, self._emit(key[0], key[1:]))
        return known

    def _other(
        self, node: fx.Node, spelling: CallSpelling, args: tuple[Any, ...], kwargs: Any, result: Any
    ) -> Any:
        """Note a fact about what a tensor says of itself, such as whether it is contiguous."""
        if type(result) not in READABLE:
            raise Refusal(f"the program reads {spelling.name} of a tensor of symbolic sizes")
        rest = (spelling.attribute,) if spelling.attribute else args[1:]
        node_args = (node, *(self._argument(arg, spelling.target) for arg in rest))
        node_kwargs = {key: self._argument(arg, spelling.target) for key, arg in kwargs.items()}
        read = self._create(spelling.op, spelling.target, node_args, node_kwargs, None)
        self.scalars[read] = result
        self.guard_scalar(read, result)
        return result
