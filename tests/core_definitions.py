"""Which of torch's operators are defined by which core ones, as `DecomposeToCore` finds it."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import fx

import fxkit
from fxkit.errors import CaptureError, FxkitError
from fxkit.passes import DecomposeToAten, DecomposeToCore
from fxkit.passes.decomposition.core_operators import is_core
from fxkit.passes.manager.manager import PassManager
from tests.operator_samples import Sample, samples


@dataclass(frozen=True)
class CoreDefinition:
    """What an operator is lowered to.

    Attributes:
        core: Operators of the core set, sorted.
        rest: What else is left, sorted; nothing where the set is closed for the operator.
    """

    core: tuple[str, ...]
    rest: tuple[str, ...] = ()

    def row(self, name: str) -> str:
        """Return the line of the page."""
        told = ", ".join(f"`{one}`" for one in self.core) or "its operand"
        if self.rest:
            told = f"not closed: {', '.join(f'`{one}`' for one in self.rest)}"
        return f"| `{name}` | {told} |"


def definitions(part: int, parts: int) -> dict[str, CoreDefinition]:
    """Return what every `parts`-th entry of torch's table is lowered to, by its first sample."""
    found: dict[str, CoreDefinition] = {}
    for sample in samples(part, parts):
        if sample.name not in found and sample.node.op == "call_function":
            found[sample.name] = _definition(sample)
    return found


def _definition(sample: Sample) -> CoreDefinition:
    try:
        with warnings.catch_warnings(), patch(_SEEDING, _without_seeding):
            warnings.simplefilter("ignore")
            gm = _lowered(sample)
    except (FxkitError, RuntimeError, TypeError, ValueError, NotImplementedError, AttributeError):
        return CoreDefinition((), ("no graph",))
    called = [n.target for n in gm.graph.nodes if n.op in ("call_function", "call_method")]
    names = {t if isinstance(t, str) else str(t) for t in called if not _is_python(t)}
    core = {str(target) for target in called if is_core(target)}
    return CoreDefinition(tuple(sorted(core)), tuple(sorted(names - core)))


# torch's entries of random operators seed the generator around the call, which no graph holds.
_SEEDING = "torch.testing._internal.common_methods_invocations.wrapper_set_seed"


def _without_seeding(operator: Any, *args: Any, **kwargs: Any) -> Any:
    return operator(*args, **kwargs)


def _lowered(sample: Sample) -> fx.GraphModule:
    nodes, args = list(sample.tensors), tuple(sample.tensors.values())

    def call(*tensors: torch.Tensor) -> Any:
        given = dict(zip(nodes, tensors, strict=True))
        own, keywords = sample.fill((sample.node.args, sample.node.kwargs), given)
        return sample.node.target(*own, **keywords)  # type: ignore[operator]

    try:
        gm = fxkit.capture(call, args, mode="aten").graph_module
    except CaptureError:  # what makes tensors, or draws numbers, is a node as it is
        graph = sample.node.graph
        graph.output(sample.node)
        gm = fx.GraphModule(torch.nn.Module(), graph)
    PassManager([DecomposeToAten(), DecomposeToCore()], args=args, verify="structure").run(gm)
    return gm


def _is_python(target: Any) -> bool:
    return getattr(target, "__module__", "") in ("_operator", "operator")


def page_of(found: Mapping[str, CoreDefinition]) -> str:
    """Return the page: counts, then a line for each entry."""
    closed = {name: one.core for name, one in found.items() if not one.rest}
    uses = Counter(one for core in closed.values() for one in core)
    most = ", ".join(f"`{name}` {count}" for name, count in uses.most_common(20))
    lines = [
        f"{len(found)} entries of torch's table of operators: {len(closed)} are computed by core "
        f"operators alone, {len(found) - len(closed)} are not closed. "
        f"{sum(len(core) == 1 for core in closed.values())} are one core operator; "
        f"{len(uses)} core operators occur. The most used: {most}.",
        "",
        "| operator | core operators |",
        "|---|---|",
    ]
    return "\n".join([*lines, *(found[name].row(name) for name in sorted(found))])
