"""The metric of a search that has none of its own: dB of results against those in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fxkit.quantization.affine import decibels
from fxkit.quantization.batches import Batch, call_with
from fxkit.torch_adapters import pytree


class SignalToNoise:
    """Tells dB of a program's results against those of another one, over all examples.

    Args:
        exact: The program in float32.
        batch_of: Returns the batch of an example.
    """

    def __init__(self, exact: Callable[..., Any], batch_of: Callable[[Any], Batch]) -> None:
        self.exact = exact
        self.batch_of = batch_of

    def __call__(self, program: Callable[..., Any], examples: Sequence[Any]) -> float:
        """Return the dB of all results that are floats; the worst where there are several."""
        signals: dict[int, float] = {}
        noises: dict[int, float] = {}
        for example in examples:
            batch = self.batch_of(example)
            pairs = zip(
                _floats(call_with(self.exact, batch)),
                _floats(call_with(program, batch)),
                strict=True,
            )
            for place, (wanted, found) in enumerate(pairs):
                signals[place] = signals.get(place, 0.0) + float(wanted.square().sum())
                difference = float((wanted - found).square().sum())
                noises[place] = noises.get(place, 0.0) + difference
        return min(decibels(signals[place], noises[place]) for place in signals)


def _floats(result: Any) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves(result)
    return [t.double() for t in leaves if isinstance(t, torch.Tensor) and t.is_floating_point()]
