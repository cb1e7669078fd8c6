"""Fusing what follows a user's kernel with it, where the kernel offers a hook for that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import fx

from fxkit.analysis.effects import effects_of
from fxkit.authoring.kernels.epilogue import Epilogue, epilogue_of
from fxkit.authoring.kernels.native import NativeKernel
from fxkit.authoring.kernels.native_call import make_call
from fxkit.authoring.kernels.registration import register_operator
from fxkit.ir.session import EditSession
from fxkit.ir.types import TensorType, type_of
from fxkit.lower.compiling.native_operators import call_natively
from fxkit.lower.fusion.emit import Emitted
from fxkit.lower.fusion.group import FusionGroup
from fxkit.lower.fusion.kernel_faults import KernelFaults
from fxkit.lower.fusion.partitioner import partition
from fxkit.lower.fusion.policy import Policy
from fxkit.passes.base import Pass, PassContext


class KernelWithHook(Protocol):
    """What fusing asks of a kernel; see `AuthoredKernel`."""

    name: str
    operator: Any
    reference: Callable[..., Any]
    natives: Mapping[str, NativeKernel]
    captures: tuple[tuple[str, type], ...]
    with_epilogues: dict[Any, tuple[Any, NativeKernel]]

    @property
    def has_hook(self) -> bool:
        """Whether what follows it may be fused with it."""
        ...


@dataclass(frozen=True)
class FuseEpilogues(Pass):
    """Put what follows a kernel with a hook into the kernel: pointwise operators nobody else reads.

    Attributes:
        kernels: The kernels.
        policy: When fxkit's own kernels pay.
        fused: Takes note of which nodes went into which: name of the kernel's node → theirs.
    """

    kernels: tuple[KernelWithHook, ...]
    policy: Policy
    fused: dict[str, tuple[str, ...]] = field(default_factory=dict)

    numerics: ClassVar[str] = "close"
    is_idempotent: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Take the options as they are."""

    def apply(self, edit: EditSession, context: PassContext) -> None:
        """Divide the graph into kernels, and take the regions that read a hook's result."""
        owners = {k.operator: k for k in self.kernels if k.has_hook}
        placed = [node for node in edit.graph.nodes if node.target in owners]
        if not placed:
            return

        def joins(group: FusionGroup, root: torch.nn.Module) -> bool:
            return any(read.target in owners for read in group.reads)

        plan = partition(edit.gm, self.policy, joins, KernelFaults())
        for position, group in enumerate(plan.steps):
            emitted = plan.emitted.get(position)
            if isinstance(group, fx.Node) or emitted is None:
                continue
            read = [node for node in emitted.inputs if node in placed]
            if len(read) == 1 and isinstance(read[0], fx.Node):
                self._fuse(edit, owners[read[0].target], read[0], group, emitted)

    def __str__(self) -> str:
        return f"{self.name}({', '.join(kernel.name for kernel in self.kernels)})"

    def _fuse(
        self,
        edit: EditSession,
        kernel: KernelWithHook,
        node: fx.Node,
        group: FusionGroup,
        emitted: Emitted,
    ) -> None:
        nodes = sorted(group.coordinates)
        others = [o for o in emitted.inputs if o is not node]
        (last, _), *more = emitted.outputs
        if more or any(user not in group.coordinates for user in node.users):
            return
        known = [type_of(o) if isinstance(o, fx.Node) else None for o in (*_tensors(node), *others)]
        if not all(isinstance(t, TensorType) and t.stride is not None for t in known):
            return
        if type_of(last).requires_grad or not _is_quiet(node, last):
            return
        epilogue = epilogue_of(emitted, node, tuple(known))  # type: ignore[arg-type]
        if epilogue is None:
            return
        taken = {operand for member in nodes for operand in member.all_input_nodes}
        if not taken <= {node, *others, *nodes}:
            return
        following = _module(edit.gm, (node, *others), nodes, last)
        operator = _operator(kernel, following, len(others), epilogue)
        with edit.on_behalf_of([node, *nodes], self.name):
            new = edit.insert("call_function", operator, (*node.args, *others), {}, before=last)
            edit.replace(last, new)
        self.fused[node.name] = tuple(member.name for member in nodes)


def _tensors(node: fx.Node) -> list[Any]:
    return [a for a in node.args if isinstance(a, fx.Node)]


def _is_quiet(first: fx.Node, last: fx.Node) -> bool:
    """Tell whether nothing from one node to another has an effect that others could see."""
    node = first
    while node is not last:
        if not effects_of(node).is_pure:
            return False
        node = node.next
    return True


def _module(
    gm: fx.GraphModule, inputs: Sequence[Any], nodes: Sequence[fx.Node], last: fx.Node
) -> fx.GraphModule:
    """Return some nodes as a module that takes all that they read."""
    graph = fx.Graph()
    copies = {node: graph.placeholder(f"operand_{n}") for n, node in enumerate(inputs)}
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(copies[last])
    return fx.GraphModule(gm, graph)


def _operator(
    kernel: KernelWithHook, following: fx.GraphModule, others: int, epilogue: Epilogue
) -> Any:
    """Return the operator of a kernel with what follows it; made once for each such thing."""
    key = (epilogue, following.code)
    if key in kernel.with_epilogues:
        return kernel.with_epilogues[key][0]
    own = kernel.natives["cpu"]
    count = len(own.captures)

    def reference(*values: Any) -> Any:
        return following(kernel.reference(*values[:count]), *values[count:])

    names = tuple(f"epilogue_{number}" for number in range(others))
    native = NativeKernel(
        own.source,
        replace(own.arguments, operands=(*own.arguments.operands, *names), behind=names),
        own.dtypes,
        own.computed,
        own.workspace,
        reference,
        (*own.captures, *names),
        epilogue,
    )
    captures = (*kernel.captures, *((name, torch.Tensor) for name in names))
    name = f"{kernel.name}_with_epilogue"
    operator = register_operator(name, captures, 1, native, reference, None)
    call_natively(operator, lambda values: make_call(native, operator, values))
    kernel.with_epilogues[key] = operator, native
    return operator
