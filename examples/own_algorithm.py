"""An algorithm of your own: scales of weights that cut the largest off where results gain.

Run it: python examples/own_algorithm.py
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from fxkit import quantization as q

SHARES = [1.0 - step / 40 for step in range(20)]


def cut_ranges(prepared: q.PreparedProgram, batches: Iterable[Any]) -> tuple[q.WeightChoice, ...]:
    """Choose a scale for each weight by the error of its layer's results."""
    return q.choose_weights(prepared, batches, _best)


def _best(problem: q.WeightProblem) -> q.StoredWeight:
    start = problem.start
    tried = []
    for share in SHARES:
        found = q.QuantizationParameters(
            start.parameters.scale * share, start.parameters.zero_point
        )
        tried.append(q.StoredWeight.within(problem.weight, start.axis, problem.spec, found))
    return min(tried, key=lambda stored: float(problem.error(stored).sum()))


if __name__ == "__main__":
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 16)).eval()
    batches = [(torch.randn(64, 128),) for _ in range(4)]
    symmetric = q.TensorSpec(torch.int8, -7, 7, "symmetric")  # four bits, one scale a weight
    prepared = q.prepare(model, batches[0], q.QuantizationSpec(None, symmetric))
    for row in cut_ranges(prepared, batches):
        print(f"{row.path}: {row.before:.1f} -> {row.after:.1f} dB")
    print(f"{q.report(q.convert(prepared), prepared, batches).sqnr[0]:.1f} dB in the end")
