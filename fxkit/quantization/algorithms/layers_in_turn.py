"""Weights chosen layer by layer: each for what those before it, already quantised, give it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, fx

from fxkit.errors import UnsupportedError
from fxkit.ir.session import EditSession
from fxkit.passes.base import Pass, PassContext
from fxkit.quantization.affine import decibels
from fxkit.quantization.algorithms.input_moments import InputMoments, run_all
from fxkit.quantization.algorithms.watch_inputs import Look, WatchInputs
from fxkit.quantization.algorithms.weight_choice import (
    WantedWeight,
    WeightChoice,
    WeightProblem,
    wanted_weights,
)
from fxkit.quantization.batches import Batch
from fxkit.quantization.preparation import PreparedProgram, apply
from fxkit.quantization.stored_layers import StoredLayer
from fxkit.quantization.stored_weight import StoredWeight

TRUST = 0.5
"""How far weights stay from making up for errors of inputs, times inputs over examples."""


@dataclass(frozen=True)
class ReadWeights(Pass):
    """Let a graph read tensors in place of weights.

    Rewrites:
        %w = self.fc.weight  →  %w = self.fc_weight_rounded

    Attributes:
        tensors: What stands for a weight, by its path.
    """

    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    is_idempotent: ClassVar[bool] = False
    numerics: ClassVar[str] = "changed"

    def apply(self, edit: EditSession, context: PassContext) -> None:
        """Replace each read. Cost: linear."""
        for node in list(edit.graph.nodes):
            value = self.tensors.get(str(node.target)) if node.op == "get_attr" else None
            if value is not None:
                read = edit.add_attribute(f"{node.target}_rounded", value, before=node)
                edit.replace_uses(node, read)
                edit.erase(node)


def choose_in_turn(
    prepared: PreparedProgram,
    batches: Iterable[Batch],
    choose: Callable[[WeightProblem], StoredWeight],
) -> tuple[WeightChoice, ...]:
    """Choose integers of all weights as `choose_weights` does, one input after the other.

    The weight that a layer should have makes up for the errors of what it is given. The program and
    one with the integers chosen so far are run once with each batch for each input of layers.
    Another copy of the weights is held meanwhile.

    Args:
        prepared: Gets the integers; `convert` stores them.
        batches: For each call a tuple of positional inputs, or a dict of keyword inputs.
        choose: Takes a weight, and returns its integers.

    Raises:
        UnsupportedError: When there are no batches.
    """
    batches = list(batches)
    if not batches:
        raise UnsupportedError("expected some batches to learn from, got none")
    wanted = wanted_weights(prepared)
    programs = _Programs(prepared, {path: one.weight for path, one in wanted.items()})
    chosen: dict[str, StoredWeight] = {}
    rows = []
    for stage in _stages(wanted):
        for path, inputs in programs.inputs(stage, batches).items():
            one = wanted[path]
            target = one.layer.weight(inputs.target(one.layer.matrix(one.weight.double())))
            target = target.to(one.weight.dtype)
            start = prepared.choices.stored(path, target, one.operand.axis, one.operand.spec)
            problem = WeightProblem(one.layer, target, start, inputs.rough)
            new = choose(problem)
            before, after = (float(problem.error(which).sum()) for which in (start, new))
            chosen[path] = new if after < before else start
            programs.rounded[path].copy_(chosen[path].restored())
            signal = problem.signal()
            figures = decibels(signal, before), decibels(signal, min(before, after))
            rows.append(WeightChoice(path, one.layer.node, *figures))
    prepared.choices.weights.update(chosen)
    return tuple(rows)


def _stages(wanted: Mapping[str, WantedWeight]) -> list[list[str]]:
    """Return the paths of weights whose layers take one input, in the order of the graph."""
    found: dict[tuple[int, str], list[str]] = {}
    for path, one in wanted.items():
        found.setdefault((one.graph, one.layer.input), []).append(path)
    return list(found.values())


@dataclass
class _Inputs:
    """What a layer multiplies: exactly, and where the layers before it are quantised.

    Attributes:
        rough: Sums over the rows of the second kind.
        cross: float64[groups, in, in], sums of x y' for rows x of the first kind, y of the second.
    """

    rough: InputMoments
    cross: Tensor

    @classmethod
    def of(cls, exact: Tensor, rough: Tensor) -> _Inputs:
        finite = (exact.isfinite() & rough.isfinite()).all(-1).all(0)
        exact, rough = exact[:, finite], rough[:, finite]
        return cls(InputMoments.of(rough), (exact.float().mT @ rough.float()).double())

    def add(self, other: _Inputs) -> None:
        self.rough.add(other.rough)
        self.cross += other.cross

    def target(self, matrix: Tensor) -> Tensor:
        """Return what a matrix should be for rough rows, float64[groups, out, in].

        It is the least squares of exact results, drawn towards the matrix where rows are few.
        """
        second = self.rough.second
        share = max(TRUST * second.shape[-1] / max(self.rough.count, 1), 1e-3)
        amount = share * second.diagonal(dim1=-2, dim2=-1).mean(-1)
        held = amount.where(amount > 0, 1.0)[:, None, None] * torch.eye(
            second.shape[-1], dtype=second.dtype
        )
        wanted = matrix @ (self.cross + held)
        return torch.linalg.solve(second + held, wanted.mT).mT


class _Programs:
    """The program, and one whose weights are those chosen so far; what both give to layers."""

    def __init__(self, prepared: PreparedProgram, weights: Mapping[str, Tensor]) -> None:
        self.rounded = {path: weight.clone() for path, weight in weights.items()}
        self.paths: frozenset[str] = frozenset()
        self.seen: tuple[list[tuple[str, Tensor]], ...] = [], []
        self.exact, self.rough = prepared.remake(), prepared.remake()
        apply(self.exact, WatchInputs(self._watch(self.seen[0])))
        apply(self.rough, WatchInputs(self._watch(self.seen[1])))
        apply(self.rough, ReadWeights(self.rounded))

    def _watch(
        self, seen: list[tuple[str, Tensor]]
    ) -> Callable[[fx.GraphModule, Sequence[StoredLayer]], Look | None]:
        def watch(gm: fx.GraphModule, layers: Sequence[StoredLayer]) -> Look | None:
            wanted = [layer for layer in layers if layer.path in self.rounded]

            def show(value: Tensor) -> None:
                now = [layer for layer in wanted if layer.path in self.paths]
                seen.extend((layer.path, layer.rows(value)) for layer in now)

            return show if wanted else None

        return watch

    def inputs(self, paths: Iterable[str], batches: Iterable[Batch]) -> dict[str, _Inputs]:
        """Return what the layers of some weights multiply, summed up over batches."""
        self.paths = frozenset(paths)
        found: dict[str, _Inputs] = {}
        for batch in batches:
            for program, seen in zip((self.exact, self.rough), self.seen, strict=True):
                seen.clear()
                run_all(program, [batch])
            for (path, exact), (_, rough) in zip(*self.seen, strict=True):
                made = _Inputs.of(exact, rough)
                if path in found:
                    found[path].add(made)
                else:
                    found[path] = made
        return found
