"""A report of a program: what went in, what each pass did, what was fused, where time goes."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import fx

from fxkit.analysis.equivalence import compare
from fxkit.analysis.float64 import widened
from fxkit.analysis.observation import clone_inputs
from fxkit.lower.compiling.compiled_module import CompiledModule
from fxkit.lower.compiling.lowering import to_cpp
from fxkit.passes.base import Pass
from fxkit.passes.manager.manager import PassManager
from fxkit.passes.manager.records import PassResult
from fxkit.torch_adapters import pytree
from fxkit.view.profiling.instrument import tensors_in
from fxkit.view.profiling.profiler import profile
from fxkit.view.reports.report_page import Report
from fxkit.view.texts.text_table import plural, quantity


def program_report(
    gm: fx.GraphModule,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    passes: Iterable[Pass],
    title: str = "program",
    iters: int = 10,
) -> Report:
    """Run passes over a copy of a graph, compile it, measure both, and tell all of it.

    Args:
        gm: The graph; it is left as it is.
        args: Inputs to measure with.
        kwargs: More inputs, by name.
        passes: The passes, in order.
        title: What the program is called.
        iters: Runs to measure.

    Returns:
        The report; `.save("report.html")` writes it.
    """
    given = dict(kwargs or {})
    with torch.no_grad():
        work = _copied(gm)
        result = PassManager(tuple(passes), args=args, kwargs=given).run(work)
        compiled = to_cpp(work, args, given)
        before = profile(gm, args, given, iters=iters)
        after = profile(compiled, args, given, iters=iters)
        errors = errors_against_float64(
            {"eager": gm, "after the passes": work, "compiled": compiled}, args, given
        )
    report = (
        Report(title, lead="What went in, what each pass did, what was fused, where time goes.")
        .add_summary(_facts(gm, result, compiled))
        .add_environment()
        .add_tree(result.timeline[0].graph_module)
        .add_passes(result)
        .add_timeline(result)
        .add_regions(compiled.regions, compiled.kernels)
        .add_profile(before, after, names=("eager", "compiled"))
        .add_charts(after)
    )
    if errors:
        report = report.add_errors(errors)
    if compiled.source:
        report = report.add_source("kernels", compiled.source)
    return report.add_source("code", {"graph after the passes": work.code}, language="python")


def _copied(gm: fx.GraphModule) -> fx.GraphModule:
    with warnings.catch_warnings():
        # torch 2.13 warns of its own class when it copies what torch.export returned.
        warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)`", FutureWarning)
        return copy.deepcopy(gm)


def _facts(gm: fx.GraphModule, result: PassResult, compiled: CompiledModule) -> dict[str, str]:
    fused = [region for region in compiled.regions if region.kernel is not None]
    size = sum(parameter.numel() for parameter in gm.parameters())
    return {
        "nodes": f"{len(gm.graph.nodes)} → {len(result.graph_module.graph.nodes)}",
        "parameters": quantity(size),
        "passes that changed it": str(sum(record.modified for record in result.records)),
        "rewrites": str(sum(sum(record.rewrites.values()) for record in result.records)),
        "kernels": f"{len({r.kernel for r in fused})} for {plural(len(fused), 'region')}",
    }


def errors_against_float64(
    programs: Mapping[str, Callable[..., Any]], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, float]:
    """Return the largest relative error of each program; the first one, in float64, is the truth.

    Returns:
        Nothing when the program returns no floating point tensors, or can't run in float64.
    """
    first = next(iter(programs.values()))
    with torch.no_grad():
        results = {
            name: _floats(program(*clone_inputs(args), **clone_inputs(dict(kwargs))))
            for name, program in programs.items()
        }
        try:
            wide = clone_inputs((args, dict(kwargs)), widen=True)
            truth = _floats(widened(first)(*wide[0], **wide[1]))
        except RuntimeError:
            return {}
    if not truth or any(len(found) != len(truth) for found in results.values()):
        return {}
    return {
        name: max(compare(a, a, b).error for a, b in zip(found, truth, strict=True))
        for name, found in results.items()
    }


def _floats(value: Any) -> list[torch.Tensor]:
    leaves = list(tensors_in(pytree.tree_leaves(value)))
    return [tensor for tensor in leaves if tensor.is_floating_point()]
