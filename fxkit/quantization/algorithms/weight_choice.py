"""Integers of weights, chosen by what layers multiply them with; algorithms say how."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fxkit.errors import FxkitError, UnsupportedError
from fxkit.ir.attributes import find_attribute
from fxkit.ir.types import TensorType
from fxkit.quantization.affine import decibels
from fxkit.quantization.algorithms.input_moments import InputMoments, input_moments
from fxkit.quantization.batches import Batch
from fxkit.quantization.pair_safe import made_pair_safe
from fxkit.quantization.placement import QuantizedOperand, placements
from fxkit.quantization.preparation import PreparedProgram, as_prepared
from fxkit.quantization.specs import TensorSpec
from fxkit.quantization.stored_layers import StoredLayer, stored_layers
from fxkit.quantization.stored_weight import StoredWeight


@dataclass(frozen=True, eq=False)
class WeightProblem:
    """A weight whose integers are sought, as matrices of a layer's groups.

    Attributes:
        layer: The first layer that multiplies it.
        weight: The weight, floating point.
        start: Its integers so far.
        moments: What its layers multiply it with.
    """

    layer: StoredLayer
    weight: Tensor
    start: StoredWeight
    moments: InputMoments

    @property
    def spec(self) -> TensorSpec:
        """How it is stored."""
        return self.start.spec

    @property
    def matrix(self) -> Tensor:
        """float64[groups, out, in], the weight."""
        return self.layer.matrix(self.weight.double())

    def steps(self) -> tuple[Tensor, Tensor]:
        """Return scale and zero point of each element, float64[groups, out, in] each."""
        found = self.start.by_element()
        return (
            self.layer.matrix(found.scale.double()),
            self.layer.matrix(found.zero_point.double()),
        )

    def stored(self, matrix: Tensor) -> StoredWeight:
        """Return the weight with other integers, [groups, out, in]."""
        integers = self.layer.weight(matrix).to(self.spec.dtype).contiguous()
        if self.spec.is_pair_safe:
            integers = made_pair_safe(integers, self.start.axis)
        return replace(self.start, integers=integers)

    def error(self, stored: StoredWeight) -> Tensor:
        """Return the squared error of results by output channel, float64[groups, out]."""
        return self.moments.error(self.layer.matrix(stored.restored()) - self.matrix)

    def signal(self) -> float:
        """Return the power of the products of the float weight."""
        return float(self.moments.error(self.matrix).sum())


@dataclass(frozen=True)
class WeightChoice:
    """What an algorithm gained for one weight.

    Attributes:
        path: The weight's qualified name.
        layer: Name of the first layer that multiplies it.
        before: dB of the layer's products for the integers that it had; inf without an error.
        after: dB for those that were chosen.
    """

    path: str
    layer: str
    before: float
    after: float


def choose_weights(
    prepared: PreparedProgram,
    batches: Iterable[Batch],
    choose: Callable[[WeightProblem], StoredWeight],
) -> tuple[WeightChoice, ...]:
    """Choose integers of all weights that are going to be quantised, and keep what is better.

    Nothing is chosen when one choice fails.

    Args:
        prepared: Gets the integers; `convert` stores them.
        batches: For each call a tuple of positional inputs, or a dict of keyword inputs.
        choose: Takes a weight, and returns its integers.

    Raises:
        UnsupportedError: When there are no batches, or `choose` fails or returns what is no choice.
    """
    problems = weight_problems(prepared, batches)
    chosen, rows = {}, []
    for problem in problems:
        new, path = _chosen(problem, choose), problem.layer.path
        before = float(problem.error(problem.start).sum())
        after = float(problem.error(new).sum())
        if after < before:
            chosen[path] = new
        signal = problem.signal()
        figures = decibels(signal, before), decibels(signal, min(before, after))
        rows.append(WeightChoice(path, problem.layer.node, *figures))
    prepared.choices.weights.update(chosen)
    return tuple(rows)


def _chosen(
    problem: WeightProblem, choose: Callable[[WeightProblem], StoredWeight]
) -> StoredWeight:
    """Return what an algorithm chooses, once it is sure that a graph can hold it."""
    name, path = getattr(choose, "__name__", type(choose).__name__), problem.layer.path
    try:
        new = choose(problem)
    except FxkitError:
        raise
    except Exception as error:
        raise UnsupportedError(
            f"expected {name} to choose integers for {path}, got {type(error).__name__}: {error}"
        ) from error
    wrong = _why_not(new, problem)
    if wrong is not None:
        raise UnsupportedError(
            f"expected {name} to return a StoredWeight for {path}, got {wrong}",
            hint="start with problem.start, problem.stored(integers) or StoredWeight.within(...)",
        )
    return new


def _why_not(new: object, problem: WeightProblem) -> str | None:
    """Return why a graph can't hold what an algorithm returned."""
    if not isinstance(new, StoredWeight):
        return type(new).__name__
    start, spec = problem.start, problem.spec
    if not new.fits(problem.weight, start.axis, spec) or new.integers.dtype != spec.dtype:
        return f"integers {TensorType.of(new.integers)} that are stored as {new.spec}"
    if new.integers.numel() and not (
        spec.low <= int(new.integers.min()) and int(new.integers.max()) <= spec.high
    ):
        return f"integers that leave {spec.low} to {spec.high}"
    found, wanted = new.parameters, start.parameters
    for name in ("scale", "zero_point"):
        one, other = getattr(found, name), getattr(wanted, name)
        if one.shape != other.shape:
            return f"a {name} of shape {list(one.shape)} where it has {list(other.shape)}"
    if not bool((found.scale.isfinite() & (found.scale > 0)).all()):
        return "scales that are not finite and above 0"
    return None


def weight_problems(prepared: PreparedProgram, batches: Iterable[Batch]) -> list[WeightProblem]:
    """Return the weights of a prepared program that layers multiply and that are quantised.

    Raises:
        UnsupportedError: When there are no batches.
    """
    wanted = wanted_weights(prepared)
    layers = [one.layer for one in wanted.values()]
    moments = input_moments(prepared.remake(), layers, batches)
    found = []
    for path, one in wanted.items():
        if path in moments:
            operand = one.operand
            start = prepared.choices.stored(path, one.weight, operand.axis, operand.spec)
            found.append(WeightProblem(one.layer, one.weight, start, moments[path]))
    return found


@dataclass(frozen=True, eq=False)
class WantedWeight:
    """A weight that layers multiply and that is going to be quantised.

    Attributes:
        graph: In which graph of the program.
        layer: The first layer that multiplies it.
        weight: The weight, floating point.
        operand: How it is quantised.
    """

    graph: int
    layer: StoredLayer
    weight: Tensor
    operand: QuantizedOperand


def wanted_weights(prepared: PreparedProgram) -> dict[str, WantedWeight]:
    """Return the weights that layers multiply and whose integers are sought, by path, in order.

    Those that are stored in floating point are nearest to what they were, and are left as they are.

    Raises:
        UnsupportedError: When all of them are stored in floating point.
    """
    wanted: dict[str, WantedWeight] = {}
    floats: dict[str, TensorSpec] = {}
    for number, gm in enumerate(as_prepared(prepared).graph_modules):
        nodes = {node.name: node for node in gm.graph.nodes}
        operands = {
            str(nodes[operand.producer].target): operand
            for placement in placements(gm, prepared.config)
            for operand in placement.operands
            if operand.is_weight
        }
        for layer in stored_layers(gm):
            if layer.path in operands and operands[layer.path].spec.is_float:
                floats[layer.path] = operands[layer.path].spec
            elif layer.path in operands and layer.path not in wanted:
                weight = find_attribute(gm, layer.path).detach()
                wanted[layer.path] = WantedWeight(number, layer, weight, operands[layer.path])
    if floats and not wanted:
        path, spec = next(iter(floats.items()))
        raise UnsupportedError(
            f"expected weights that are stored as integers, got {path} stored as {spec}",
            hint="floats are the nearest ones already, and are stored without an algorithm",
        )
    return wanted


def inverse_factor(second: Tensor, damping: float) -> Tensor:
    """Return U, upper triangular, with U' U = inverse(second + damping), float64[..., n, n].

    Args:
        second: Symmetric, float64[..., n, n], without negative eigenvalues.
        damping: Share of the mean of the diagonal that is added to it.
    """
    diagonal = second.diagonal(dim1=-2, dim2=-1)
    amount = damping * diagonal.mean(-1, keepdim=True)
    amount = amount.where(amount > 0, 1.0)
    damped = second + torch.diag_embed(amount.expand_as(diagonal))
    lower = torch.linalg.cholesky(damped)
    return torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True)
