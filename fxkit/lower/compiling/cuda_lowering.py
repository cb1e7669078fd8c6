"""`to_cuda`: a graph whose fused regions run as kernels on a GPU, and all else as before."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fxkit.ir.types import TensorType, type_of
from fxkit.lower.building import cuda_toolchain
from fxkit.lower.building.build import Library, build
from fxkit.lower.codegen.cuda.printer import print_unit
from fxkit.lower.compiling.compiled_module import CompiledModule
from fxkit.lower.compiling.cuda_launching import CudaCall
from fxkit.lower.compiling.inferred_types import typed
from fxkit.lower.compiling.kernel_builds import BuiltKernels, build_together
from fxkit.lower.compiling.pipeline import KernelTarget, lower_typed
from fxkit.lower.compiling.whole_operators import Choosing
from fxkit.lower.fusion.group import FusionGroup
from fxkit.lower.fusion.policy import Policy
from fxkit.lower.loop_ir.loop_ir import Kernel
from fxkit.lower.scheduling import choose_thread_mapping
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

    def refusal(self, kernel: Kernel) -> str | None:
        """Return why there is no CUDA text for a kernel, or None."""
        return choose_thread_mapping.objection(kernel)

    def objection(self, group: FusionGroup) -> str | None:
        """Return why eager is as fast for a region, or None when a kernel pays."""
        if len(group.members) >= self.min_members:
            return None
        return "no neighbour can join it, and alone eager launches a kernel for it as well"


_LEFT = Choosing.always("it is left to torch's library, on a GPU and beside it")


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
    chosen = CudaPolicy(gpu=_gpu_of(gm))
    if policy is not None:
        chosen = replace(chosen, min_members=policy.min_members, rounds=policy.rounds)
    build = functools.partial(build_kernels, gpu=chosen.gpu)
    target = KernelTarget(_LEFT, CudaCall, build)
    return lower_typed(gm, chosen, target, instruments)


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
