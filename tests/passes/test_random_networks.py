"""The passes for inference on random networks: the same numbers, types and writes as before."""

from __future__ import annotations

import pytest
import torch

import fxkit
from fxkit.passes import (
    BatchOperators,
    ChannelsLast,
    FoldBatchNorm,
    MergeLayers,
    RemoveInferenceNoOps,
    SinkCasts,
    SinkTransposes,
    SplitLayers,
)
from fxkit.passes.manager.manager import PassManager
from tests.passes.random_networks import RandomNetwork

PASSES = (
    RemoveInferenceNoOps(), SinkTransposes(), SinkCasts(), FoldBatchNorm(), MergeLayers(),
    ChannelsLast(), BatchOperators(fewest=2), SplitLayers(),
)  # fmt: skip


def check(seed: int) -> None:
    """Run all passes over one network, each checked against the one before."""
    module = RandomNetwork(seed).requires_grad_(False).double()
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 4, 5, 6, generator=generator, dtype=torch.float64)
    gm = fxkit.symbolic_trace(module) if seed % 2 else fxkit.capture(module, (x,)).graph_module
    PassManager(PASSES, verify="numerics", args=(x,)).run(gm)


@pytest.mark.parametrize("seed", range(12))
def test_random_network(seed: int) -> None:
    check(seed)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(12, 300))
def test_another_random_network(seed: int) -> None:
    check(seed)
