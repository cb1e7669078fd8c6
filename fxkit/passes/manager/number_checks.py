"""Whether a pass kept the numbers, and, when it did not, the node where they begin to differ.

Each state of the module is run once: what it gave before a pass is known from the check of the pass
before. The run in float64 is kept as long as passes keep the numbers.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxkit.analysis.equivalence import Comparison, Observed, assert_same, compare, draws
from fxkit.analysis.float64 import in_float64, widened_module
from fxkit.analysis.observation import Observation, clone_inputs, overlaps
from fxkit.errors import NumericsError
from fxkit.ir.printer import format_node, format_source
from fxkit.ir.provenance import KEY as PROVENANCE_KEY
from fxkit.ir.provenance import provenance_of
from fxkit.passes.manager.written_state import (
    exchange_back,
    exchanged_since,
    put_back,
    tables_of,
    values_of,
    written_since,
)
from fxkit.passes.subjects import graph_inputs


class NumbersCheck:
    """Compares what a module computes before and after each pass.

    Args:
        gm: The module; its code is up to date.
        args: Inputs.
        kwargs: Keyword inputs.
    """

    def __init__(
        self, gm: fx.GraphModule, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        self._gm = gm
        self._inputs = (args, dict(kwargs))
        self._known = self._observe()
        self._truth: Observation | None = None
        self._values = values_of(gm)
        self._tables = tables_of(gm)

    @property
    def written(self) -> tuple[str, ...]:
        """Names of the parameters and buffers that the pass wrote to, and of what it exchanged."""
        return exchanged_since(self._tables) + written_since(self._values)

    def prepare(self, numerics: str) -> None:
        """Take what has to be taken before a pass runs: the numbers in float64."""
        self._values = values_of(self._gm)
        self._tables = tables_of(self._gm)
        if numerics == "close" and self._truth is None:
            self._truth = Observation(self._gm, self._inputs, True, run_wide=True)

    def put_back(self) -> None:
        """Let parameters, buffers and modules be what they were before the pass."""
        exchange_back(self._tables)
        put_back(self._values)

    def check(self, numerics: str, before: Callable[[], fx.GraphModule]) -> None:
        """Compare the module as it is now with what it was before.

        Args:
            numerics: What the pass says of itself, as in `Pass`.
            before: Makes the module as it was before.

        Raises:
            NumericsError: When it computes other numbers.
        """
        now = self._observe()
        if numerics == "changed":
            self._truth = None
        else:
            is_close = numerics == "close"
            again = (lambda: self._draws(before())) if is_close and not self.written else None
            assert_same(self._known, now, self._truth if is_close else None, again)
        self._known = now

    def locate(self, before: fx.GraphModule, numerics: str) -> NodeDifference | None:
        """Return where the module's numbers begin to differ from those of another state of it."""
        with _buffers_kept(before), _buffers_kept(self._gm):
            return _first_difference(before, self._gm, self._inputs, exact=numerics == "exact")

    def _draws(self, before: fx.GraphModule) -> Iterator[Observed]:
        with _buffers_kept(before), _buffers_kept(self._gm):
            yield from draws(before, self._gm, self._inputs, True)

    def _observe(self) -> Observation:
        with _buffers_kept(self._gm):
            return Observation(self._gm, self._inputs, True)


@dataclass(frozen=True)
class NodeDifference:
    """Where the numbers of two modules begin to differ.

    Attributes:
        node: The first node that differs, as text.
        source: The user's line of it.
        error: Its error against float64, relative to the largest value.
        error_before: The error of the node that it stands for.
        largest: The largest error of any node.
        largest_at: The name of that node.
    """

    node: str
    source: str | None
    error: float
    error_before: float
    largest: float
    largest_at: str

    def __str__(self) -> str:
        return (
            f"{self.node} has an error of {self.error:.3g} against float64, where it had "
            f"{self.error_before:.3g}; the largest is {self.largest:.3g}, of %{self.largest_at}"
        )


@contextlib.contextmanager
def _buffers_kept(gm: fx.GraphModule) -> Iterator[None]:
    """Put the buffers back that a run changes, such as running statistics.

    One in which elements share memory, as an expanded one, can't be written to, by a run neither.
    """
    kept = [(b, b.detach().clone()) for b in gm.buffers() if not overlaps(b)]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)


def _first_difference(
    before: fx.GraphModule, after: fx.GraphModule, inputs: Any, *, exact: bool
) -> NodeDifference | None:
    old, new = _values(before, inputs), _values(after, inputs)
    truth = _values(widened_module(before), inputs, widen=True)
    partners = _partners(before.graph, after.graph)
    first: tuple[fx.Node, Comparison] | None = None
    largest, largest_at = -1.0, ""
    for node in after.graph.nodes:
        partner = partners.get(node.name, "")
        value, was = new.get(node.name), old.get(partner)
        compared = _compare(value, was, truth.get(partner))
        if compared is None or value is None or was is None:
            continue
        if compared.error > largest:
            largest, largest_at = compared.error, node.name
        wrong = not (_is_equal(value, was) if exact else compared.is_within(value.dtype))
        if first is None and wrong:
            first = node, compared
    if first is None:
        return None
    node, compared = first
    return NodeDifference(format_node(node), format_source(node), compared.error,
                      compared.eager_error, largest, largest_at)  # fmt: skip


def _compare(value: Any, was: Any, exactly: Any) -> Comparison | None:
    """Compare a tensor with what its partner was, when both are of one shape and dtype."""
    if not all(isinstance(v, torch.Tensor) for v in (value, was, exactly)):
        return None
    if value.shape != was.shape or value.dtype != was.dtype:
        return None
    if not value.dtype.is_floating_point:
        return Comparison(0.0 if torch.equal(value, was) else math.inf, 0.0)
    return compare(value, was, exactly.double())


def _is_equal(value: torch.Tensor, was: torch.Tensor) -> bool:
    return bool(((value == was) | (value.isnan() & was.isnan())).all())


def _partners(before: fx.Graph, after: fx.Graph) -> dict[str, str]:
    """Return, for nodes of the later graph, the node of the earlier that each stands for."""
    names = {node.name for node in before.nodes}
    stands_for = {provenance_of(n).replaced[-1]: n.name for n in before.nodes
                  if provenance_of(n).replaced}  # fmt: skip
    found: dict[str, str] = {}
    for node in after.nodes:
        if node.name in names:
            found[node.name] = node.name
            continue
        took_over = any(user.name in names or user.op == "output" for user in node.users)
        origin = node.meta.get(PROVENANCE_KEY)
        if took_over and origin is not None and origin.replaced:
            partner = stands_for.get(origin.replaced[-1])
            if partner is not None:
                found[node.name] = partner
    return found


def _values(
    gm: fx.GraphModule, inputs: Any, *, widen: bool = False
) -> dict[str, torch.Tensor | None]:
    """Run a graph node by node and keep a copy of each tensor."""
    args, kwargs = clone_inputs(inputs, widen=widen)
    recorder = _Values(gm)
    ordered = graph_inputs(gm.graph, args, kwargs)
    generator = torch.random.get_rng_state()
    try:
        with torch.no_grad(), in_float64() if widen else contextlib.nullcontext():
            recorder.run(*ordered, enable_io_processing=False)
    finally:
        torch.random.set_rng_state(generator)
    return recorder.found


class _Values(fx.Interpreter):
    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.extra_traceback = False
        self.found: dict[str, torch.Tensor | None] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        self.found[n.name] = value.clone() if isinstance(value, torch.Tensor) else None
        return value


def explained(error: NumericsError, difference: NodeDifference | None) -> str:
    """Return the message of a failed comparison with the place where it begins."""
    return error.message if difference is None else f"{error.message}; {difference}"
