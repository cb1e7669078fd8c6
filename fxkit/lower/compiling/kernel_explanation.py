"""One kernel's way as text: nodes, loop IR, schedule or loops, C++ or CUDA, and where it lies."""

from __future__ import annotations

import re

import torch

from fxkit.errors import UnsupportedError
from fxkit.ir.printer import format_node
from fxkit.ir.provenance import source_of
from fxkit.lower.compiling.compiled_module import CompiledModule
from fxkit.lower.compiling.lower_report import Region
from fxkit.lower.compiling.tuning import known_times
from fxkit.lower.cpp_printer import show_schedule
from fxkit.lower.runtime.kernel_call import KernelCall
from fxkit.lower.scheduling.pipelines import show_steps


def explain_kernel(module: CompiledModule, name: str) -> str:
    """Return the way from the nodes of a kernel to its text.

    Args:
        module: What was compiled.
        name: The kernel's name in the report, as `kernel_0`.

    Raises:
        UnsupportedError: When there is no such kernel.
    """
    from fxkit.lower.compiling.cuda_launching import CudaCall  # it loads the printer of CUDA

    if name not in module.kernels:
        raise UnsupportedError(
            f"expected one of {', '.join(module.kernels) or 'no kernels'}, got {name!r}",
            hint="`report()` lists the kernels",
        )
    regions = [region for region in module.regions if region.kernel == name]
    kernel = module.kernels[name]
    parts = [f"{name}"]
    parts += [f"nodes of {region.name}:\n{_nodes(module, region)}" for region in regions]
    parts.append(f"loop IR:\n{kernel}")
    calls = [call for region in regions if (call := module.plan.calls.get(region.name))]
    on_cpu = not any(isinstance(call, CudaCall) for call in calls)
    shown = f"schedule:\n{show_schedule(kernel)}" if on_cpu else f"loops:\n{show_steps(kernel)}"
    parts.append(shown)
    parts.append(f"text:\n{_text(module, name)}")
    library = module.built.libraries.get(name)
    parts.append("it has not been built" if library is None else f"built: {library.path}")
    parts += [_times(call) for call in calls[:1] if on_cpu]
    return "\n\n".join(filter(None, parts))


def _nodes(module: CompiledModule, region: Region) -> str:
    nodes = {node.name: node for node in module.graph_module.graph.nodes}
    lines = []
    for name in region.nodes:
        source = source_of(nodes[name])
        lines.append(f"  {format_node(nodes[name])}" + (f"    # {source}" if source else ""))
    return "\n".join(lines)


def _text(module: CompiledModule, name: str) -> str:
    """Return the function of a kernel out of the text of all."""
    function = re.escape(module.built.functions.get(name, name))
    found = re.search(rf"^extern[^\n]*\b{function}\(.*?^}}", module.source, re.M | re.S)
    return module.source if found is None else found[0]


def _times(call: KernelCall) -> str:
    times = known_times(call, torch.get_num_threads())
    if times is None:
        return ""
    return "measured: " + ", ".join(f"{name} {s * 1e6:.1f} us" for name, s in times.items())
