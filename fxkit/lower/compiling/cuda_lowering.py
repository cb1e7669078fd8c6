"""`to_cuda`: a graph whose fused regions run as kernels on a GPU, and all else as before."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fxkit.errors import PassError
from fxkit.ir.op import resolve
from fxkit.ir.types import TensorType, type_of
from fxkit.lower.building import cuda_toolchain
from fxkit.lower.building.build import Library, build
from fxkit.lower.codegen.cuda.printer import print_unit
from fxkit.lower.compiling.compiled_module import CompiledModule
from fxkit.lower.compiling.convolve_integers import ConvolveIntegers
from fxkit.lower.compiling.cuda_launching import CudaCall
from fxkit.lower.compiling.group_scales import SpellOutGroups
from fxkit.lower.compiling.inferred_types import typed
from fxkit.lower.compiling.kernel_builds import BuiltKernels, build_together
from fxkit.lower.compiling.library_integer_products import (
    CallIntegerProducts,
    reason_to_stay_float,
)
from fxkit.lower.compiling.multiply_activations import MultiplyActivations
from fxkit.lower.compiling.multiply_integers import MultiplyIntegers
from fxkit.lower.compiling.pipeline import KernelTarget, LoweringState, lower, lower_typed
from fxkit.lower.compiling.token_scales import NAMESPACE
from fxkit.lower.compiling.whole_operators import Choosing
from fxkit.lower.fusion.group import FusionGroup
from fxkit.lower.fusion.policy import Policy
from fxkit.lower.loop_ir.loop_ir import Kernel
from fxkit.lower.scheduling.gpu import choose_thread_mapping
from fxkit.passes.base import Pass
from fxkit.passes.manager.instruments import Instrument

_FIRST_GPU = torch.device("cuda", 0)


@dataclass(frozen=True)
class CudaPolicy(Policy):
    """When a kernel on a GPU pays: when it saves a pass over memory, and so a launch.

    Attributes:
        gpu: The device that kernels run on.
    """

    gpu: torch.device = _FIRST_GPU

    @property
    def device(self) -> torch.device:
        """Where kernels run; what lies elsewhere is left to eager."""
        return self.gpu

    @property
    def sums_over_rows(self) -> bool:
        """Whether kernels that reduce rows take in sums over all rows: their blocks share none."""
        return False

    def refusal(self, kernel: Kernel) -> str | None:
        """Return why there is no CUDA text for a kernel, or None."""
        return choose_thread_mapping.objection(kernel)

    def objection(self, group: FusionGroup) -> str | None:
        """Return why eager is as fast for a region, or None when a kernel pays."""
        takes_several = any(_takes_several(member.node) for member in group.members)
        if takes_several or len(group.members) >= self.min_members:
            return None
        return "no neighbour can join it, and alone eager launches a kernel for it as well"


def _takes_several(node: fx.Node) -> bool:
    """Tell whether eager launches more than one kernel for a node."""
    call = resolve(node)
    return call is not None and call.name.startswith(NAMESPACE)


INTEGER_PASSES = (
    MultiplyIntegers("cuda", reason_to_stay_float),
    MultiplyActivations(),
    CallIntegerProducts(),
    ConvolveIntegers(),
    SpellOutGroups(),
)
"""What makes products of integers of a quantised graph on a GPU."""

_LEFT = Choosing.all_library("it is left to torch's library, on a GPU and beside it")


def to_cuda(
    gm: fx.GraphModule,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    policy: Policy | None = None,
    instruments: tuple[Instrument, ...] = (),
) -> CompiledModule:
    """Compile what is pointwise, reduces or moves elements into fused kernels for a GPU.

    Kernels run on the device of the first input or parameter that is on a GPU, on the stream that
    is current when they are called, and are not waited for. All other nodes run in ATen as before.
    When gradients are on and asked for, the original graph runs.

    Args:
        gm: A graph of torch-level or ATen-level calls. It is not changed, but for the types that
            are recorded on its nodes.
        args: Inputs of the types to compile for; fake tensors serve as well.
        kwargs: Keyword inputs.
        policy: When a kernel pays; of `Policy`, only `min_members` and `rounds` matter here.
        instruments: What is told of each step.

    Returns:
        A module that is called like `gm`. Without nvcc, or when it fails, a warning is given and
        the module runs the original graph.

    Raises:
        InvalidGraphError: When an input is missing, or a node can't take its operands; names the
            node, its source line and the types.
        UnsupportedError: When `gm` is no `GraphModule`, or `args` is not a tuple.
    """
    typed(gm, args, kwargs)
    chosen = _policy_for(gm, policy)
    return lower_typed(gm, chosen, _target_on(chosen.gpu), instruments)


def changed_to_cuda(
    gm: fx.GraphModule,
    args: tuple[Any, ...],
    policy: Policy | None = None,
    on_failure: Callable[[Pass, PassError], bool] | None = None,
    instruments: tuple[Instrument, ...] = (),
) -> CompiledModule:
    """Do as `to_cuda` with a graph that may change: a quantised one multiplies its integers.

    Args:
        gm: The graph.
        args: Inputs of the types to compile for.
        policy: As `to_cuda` takes it.
        on_failure: As `PassManager` takes it, for the passes that change the graph.
        instruments: What is told of each step.
    """
    typed(gm, args)
    chosen = _policy_for(gm, policy)
    target = _target_on(chosen.gpu)
    return lower(
        LoweringState(
            gm, args, policy=chosen, target=target, packs=True, on_failure=on_failure,
            instruments=instruments,
        )
    )  # fmt: skip


def _policy_for(gm: fx.GraphModule, policy: Policy | None) -> CudaPolicy:
    chosen = CudaPolicy(gpu=_gpu_of(gm))
    if policy is None:
        return chosen
    return replace(chosen, min_members=policy.min_members, rounds=policy.rounds)


def _target_on(gpu: torch.device) -> KernelTarget:
    build = functools.partial(build_kernels, gpu=gpu)
    return KernelTarget(_LEFT, CudaCall, build, INTEGER_PASSES, packs_convolutions=False)


def build_kernels(kernels: Mapping[str, Kernel], gpu: torch.device | None = None) -> BuiltKernels:
    """Build kernels with nvcc for a GPU: all in one unit, and one by one where that fails."""

    def build_library(some: Mapping[str, Kernel]) -> tuple[Library, str]:
        source = print_unit(some)
        return build(source, tools=cuda_toolchain.current(gpu)), source

    return build_together(kernels, build_library) if kernels else BuiltKernels()


def _gpu_of(gm: fx.GraphModule) -> torch.device:
    """Return the GPU of the first node that has a tensor on one; the first GPU where none has."""
    for node in gm.graph.nodes:
        known = type_of(node) if node.op != "output" else None
        if isinstance(known, TensorType) and known.device.type == "cuda":
            return known.device
    return _FIRST_GPU
