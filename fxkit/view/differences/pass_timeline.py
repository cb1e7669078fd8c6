"""What a run of passes did, step by step, in one page: the graph with a slider over the passes."""

from __future__ import annotations

from fxkit.errors import UnsupportedError
from fxkit.passes.manager.records import PassResult
from fxkit.view.differences.diffing import diff
from fxkit.view.differences.graph_states import TimelineStep, TimelineView


def timeline(result: PassResult, *, title: str = "", max_nodes: int = 160) -> TimelineView:
    """Show what each pass of a run did to the graph, with the rules that fired.

    Passes that changed nothing are left out.

    Args:
        result: What `PassManager.run` returned.
        title: What it is called; the module's class when left out.
        max_nodes: How many boxes are shown at first, about.

    Returns:
        A value with `.html()` and `.save(path)`, which a notebook shows with a slider.

    Raises:
        UnsupportedError: When it is no result of a run of passes.

    Example:
        >>> import torch, fxkit
        >>> gm = fxkit.symbolic_trace(lambda x: torch.relu(torch.relu(x)).sin())
        >>> fxkit.timeline(fxkit.PassManager([fxkit.passes.Canonicalise()]).run(gm))
        passes: 1 step
        0  input: 5 nodes
        1  canonicalise: 4 nodes; 2 replaced; relu_of_relu × 1
    """
    if not isinstance(result, PassResult):
        raise UnsupportedError(
            f"expected a PassResult, got {type(result).__name__}",
            hint="pass what PassManager.run returned",
        )
    states = [result.timeline[0].graph_module]
    steps = [TimelineStep("input", states[0])]
    for i, record in enumerate(result.records, start=1):
        if not record.modified:
            continue
        states.append(result.timeline[i].graph_module)
        steps.append(
            TimelineStep(
                title=record.name,
                graph_module=states[-1],
                rules=dict(record.rewrites.most_common()),
                notes=tuple(record.notes),
                seconds=record.seconds,
                diff=diff(states[-2], states[-1], journal=record.changes),
            )
        )
    return TimelineView(title or "passes", tuple(steps), max_nodes)
