"""What layers multiply, summed up over batches: means and second moments of their rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from fxkit.errors import UnsupportedError
from fxkit.quantization.algorithms.watch_inputs import Look, WatchInputs
from fxkit.quantization.batches import Batch, call_with
from fxkit.quantization.preparation import Program, apply
from fxkit.quantization.stored_layers import StoredLayer


@dataclass
class InputMoments:
    """Sums over the rows that a layer multiplies; rows that are not finite are left out.

    The squared error of a layer's results is tr(D second D'), where D is what its matrix is off by:
    with these sums an algorithm compares weights without running the layer again.

    Attributes:
        count: How many rows there were.
        sums: float64[groups, in].
        magnitudes: float64[groups, in], sums of absolute values.
        second: float64[groups, in, in], sums of x x'.
    """

    count: int
    sums: Tensor
    magnitudes: Tensor
    second: Tensor

    @classmethod
    def of(cls, rows: Tensor) -> InputMoments:
        """Return the sums of some rows, [groups, n, in]."""
        finite = rows.isfinite().all(-1).all(0)
        rows = rows if bool(finite.all()) else rows[:, finite]
        rows = rows.float() if rows.dtype != torch.float64 else rows
        return cls(
            rows.shape[1],
            rows.double().sum(1),
            rows.abs().double().sum(1),
            (rows.mT @ rows).double(),
        )

    def add(self, other: InputMoments) -> None:
        """Add the sums of other rows."""
        self.count += other.count
        self.sums += other.sums
        self.magnitudes += other.magnitudes
        self.second += other.second

    @property
    def mean(self) -> Tensor:
        """float64[groups, in]; 0 without rows."""
        return self.sums / max(self.count, 1)

    def error(self, difference: Tensor) -> Tensor:
        """Return the squared error of results by output channel, float64[groups, out].

        Args:
            difference: float64[groups, out, in], what the matrix is off by.
        """
        return ((difference @ self.second) * difference).sum(-1)


def input_moments(
    program: Program, layers: Iterable[StoredLayer], batches: Iterable[Batch]
) -> dict[str, InputMoments]:
    """Return the sums of what layers multiply, by the paths of their weights.

    Layers with one weight are summed up together.

    Args:
        program: What is run; it gets a probe at each input.
        layers: Layers of its graphs; what others that have their weights multiply counts too.
        batches: For each call a tuple of positional inputs, or a dict of keyword inputs.

    Raises:
        UnsupportedError: When there are no batches.
    """
    paths = {layer.path for layer in layers}
    found: dict[str, InputMoments] = {}

    def watch(gm: fx.GraphModule, layers: Sequence[StoredLayer]) -> Look | None:
        wanted = [layer for layer in layers if layer.path in paths]

        def show(value: Tensor) -> None:
            made: dict[tuple[object, ...], InputMoments] = {}
            for layer in wanted:
                window = layer.shape[2:] if "conv" in layer.operator else ()
                key = (window, *map(str, layer.options.values()))
                if key not in made:
                    made[key] = InputMoments.of(layer.rows(value))
                _add(found, layer.path, made[key])

        return show if wanted else None

    apply(program, WatchInputs(watch))
    run_all(program, batches)
    return found


def run_all(program: Program, batches: Iterable[Batch]) -> None:
    """Run a program with each batch, without gradients.

    Raises:
        UnsupportedError: When there are no batches.
    """
    is_empty = True
    with torch.no_grad():
        for batch in batches:
            is_empty = False
            call_with(program, batch)
    if is_empty:
        raise UnsupportedError("expected some batches to learn from, got none")


def _add(found: dict[str, InputMoments], path: str, new: InputMoments) -> None:
    if path in found:
        found[path].add(new)
        return
    copies = (new.sums.clone(), new.magnitudes.clone(), new.second.clone())
    found[path] = InputMoments(new.count, *copies)
