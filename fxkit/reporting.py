"""`fxkit.report`: one offline HTML file about a run of passes, a compiled program or a profile."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fxkit.compiling.compiled_model import CompiledModel, program_of
from fxkit.compiling.compiler import Compiled
from fxkit.errors import UnsupportedError
from fxkit.ir.graph_arguments import check_args
from fxkit.lower import CompiledModule
from fxkit.lower.training.training_module import TrainingModule
from fxkit.passes.base import Pass
from fxkit.passes.manager.records import PassResult
from fxkit.passes.pipelines import INFERENCE
from fxkit.view.profiling.profile_result import Profile
from fxkit.view.profiling.profiler import profile
from fxkit.view.reports.program_report import program_report
from fxkit.view.reports.report_page import Report
from fxkit.view.texts.subject import runnable
from fxkit.view.texts.text_table import duration


def report(
    subject: Any,
    path: str | Path,
    args: tuple[Any, ...] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    passes: tuple[Pass, ...] = INFERENCE,
    title: str = "",
    iters: int = 10,
) -> Path:
    """Write one HTML file that tells all that is known of a subject, and needs no network.

    Args:
        subject: What `PassManager.run` returned: each pass, and the graph before and after it. A
            `CompiledModule`: regions, why others are not fused, source, and with `args` a profile
            of the graph and of the kernels. A `TrainingModule`: the same of its forward and of
            its backward, or why eager runs it. What `fxkit.compile` returned: the same of the
            graph that was compiled last. A `Profile`: where the time goes. A program
            (module, function, captured or exported program), with `args`: a copy of its graph goes
            through `passes` and is compiled, and all of that is told.
        path: The file to write.
        args: Inputs to measure with; needed for a program.
        kwargs: More inputs, by name.
        passes: The passes that a program goes through.
        title: Heading of the page; the subject's class when left out.
        iters: Runs to measure.

    Returns:
        The path.

    Raises:
        UnsupportedError: It is none of these, or a program without inputs.

    Example:
        >>> import torch, fxkit
        >>> gm = fxkit.symbolic_trace(lambda x: torch.relu(torch.relu(x)))
        >>> result = fxkit.PassManager([fxkit.passes.Canonicalise()]).run(gm)
        >>> print(fxkit.report(result, "passes.html"))
        passes.html
    """
    has_inputs = args is not None or kwargs is not None
    if args is not None:
        check_args(args)
    inputs = (tuple(args or ()), dict(kwargs or {}))
    if isinstance(subject, PassResult):
        return _of_passes(subject, title or "What the passes did").save(path)
    if isinstance(subject, CompiledModel):
        subject = program_of(subject)
    if isinstance(subject, Compiled):
        subject, has_inputs = _last_compiled(subject, has_inputs, *inputs)
    if isinstance(subject, CompiledModule):
        measured = (*inputs, iters) if has_inputs else None
        return _of_compiled(subject, title or "What was compiled", measured).save(path)
    if isinstance(subject, TrainingModule):
        return _of_training(subject, title or "What was compiled for training").save(path)
    if isinstance(subject, Profile):
        page = Report(title or subject.title).add_profile(subject).add_charts(subject)
        return page.add_environment().save(path)
    is_program = isinstance(subject, torch.export.ExportedProgram) or callable(subject)
    if not is_program:
        raise UnsupportedError(
            "expected a PassResult, a CompiledModule, a TrainingModule, a Compiled, a Profile or a "
            f"program, got {type(subject).__name__}",
            hint="pass what PassManager.run, fxkit.lower.to_cpp or fxkit.profile returned",
        )
    if not has_inputs:
        raise UnsupportedError(
            f"expected inputs to measure {type(subject).__name__} with, got none",
            hint="pass them: fxkit.report(program, path, (x,))",
        )
    with torch.no_grad():
        found = runnable(subject, *inputs)
    page = program_report(
        found.graph_module,
        found.args,
        found.kwargs,
        passes=passes,
        title=title or getattr(subject, "__name__", type(subject).__name__),
        iters=iters,
    )
    return page.save(path)


def _last_compiled(
    subject: Compiled, has_inputs: bool, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[CompiledModule, bool]:
    """Return what was compiled last, after a call, and whether it takes the inputs as they are."""
    if has_inputs:
        subject(*args, **kwargs)
    modules = [module for module in subject.compiled_modules if isinstance(module, CompiledModule)]
    if not modules:
        raise UnsupportedError(
            "expected a compiled program that has been called without gradients, got one with no "
            "such graph",
            hint="call it first under torch.no_grad(), or pass inputs: fxkit.report(fast, path, x)",
        )
    wanted = [n for n in modules[-1].graph_module.graph.nodes if n.op == "placeholder"]
    is_plain = all(isinstance(arg, torch.Tensor) for arg in args) and not kwargs
    return modules[-1], has_inputs and is_plain and len(wanted) == len(args)


def _of_passes(result: PassResult, title: str) -> Report:
    gm = result.graph_module
    return (
        Report(title, lead=f"{len(result.records)} passes over {type(gm).__name__}")
        .add_passes(result)
        .add_timeline(result)
        .add_diff(result.timeline[0].graph_module, gm)
        .add_tree(gm)
        .add_source("code", {"graph after the passes": gm.code}, language="python")
        .add_environment()
    )


def _of_compiled(
    compiled: CompiledModule,
    title: str,
    measured: tuple[tuple[Any, ...], Mapping[str, Any], int] | None,
) -> Report:
    page = Report(title).add_summary(_facts(compiled))
    page = page.add_regions(compiled.regions, compiled.kernels)
    if measured is not None:
        args, kwargs, iters = measured
        before, after = (
            profile(program, args, kwargs, iters=iters)
            for program in (compiled.graph_module, compiled)
        )
        page = page.add_profile(before, after, names=("eager", "compiled"))
    page = page.add_graph(compiled.lowered).add_tree(compiled.lowered)
    if compiled.source:
        page = page.add_source("kernels", compiled.source)
    return page.add_environment()


def _facts(compiled: CompiledModule) -> dict[str, object]:
    """Return what matters most of a compiled module."""
    found = compiled.report()
    left = [region for region in compiled.regions if region.kernel is None]
    return {
        "kernels": len(compiled.kernels),
        "nodes left to torch (ATen)": sum(len(region.nodes) for region in left),
        "the whole graph is run by": "one native call" if compiled.native_program else "Python",
        "to build and load": duration(found.build_seconds)
        + (" (from the cache)" if found.cache_hit else ""),
    }


def _of_training(module: TrainingModule, title: str) -> Report:
    found = module.report()
    page = Report(title, lead="A forward and the backward that autograd calls, as kernels.")
    facts: dict[str, object] = {
        "runs": "in eager" if found.forward is None else "as kernels",
        "calls of eager": found.eager_calls,
    }
    page = page.add_summary(facts, lead=f"Left to eager: {found.reason}." if found.reason else "")
    for part, words in ((found.forward, "Forward"), (found.backward, "Backward")):
        if part is not None:
            page = page.add_regions(part.regions, title=words)
    page = page.add_tree(module.graph_module)
    if module.source:
        page = page.add_source("kernels", module.source)
    return page.add_environment()
