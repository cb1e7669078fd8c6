"""A small network trained on scikit-learn's digits keeps its accuracy in 8 bits, and in 4."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxkit import quantization as q

WEIGHTS_OF_4_BITS = q.QuantizationSpec(
    q.int8_static().activations, q.TensorSpec(torch.int8, -8, 7, "symmetric", "per_channel")
)
SPECS = {"eight bits": (q.int8_static(), 0.3), "weights of four bits": (WEIGHTS_OF_4_BITS, 1.0)}
SEEDS = (0, 1, 2)


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(),
        nn.Linear(512, 10),
    )  # fmt: skip


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return images and labels to train with, and others to judge."""
    sets = pytest.importorskip("sklearn.datasets", reason="scikit-learn is not installed")
    found = sets.load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(0))
    x = torch.from_numpy(found.images).float()[order, None] / 16
    y = torch.from_numpy(found.target)[order]
    return x[:1200], y[:1200], x[1200:], y[1200:]


def batches(x: Tensor, y: Tensor, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    for part in order.split(60):
        yield x[part], y[part]


def train(program: nn.Module, x: Tensor, y: Tensor, epochs: int, rate: float) -> None:
    optimizer = torch.optim.Adam(program.parameters(), lr=rate)
    for epoch in range(epochs):
        if epoch == epochs - 1 and isinstance(program, q.QatProgram):
            program.freeze()
        for images, labels in batches(x, y, epoch):
            optimizer.zero_grad()
            F.cross_entropy(program(images), labels).backward()
            optimizer.step()


@torch.no_grad()
def accuracy(program: Any, x: Tensor, y: Tensor) -> float:
    """Return how many of a hundred are right."""
    return 100 * float((program(x).argmax(1) == y).double().mean())


@pytest.mark.sweep
@pytest.mark.parametrize("learn_steps", [False, True])
@pytest.mark.parametrize("name", SPECS)
def test_digits_are_read_as_well(name: str, learn_steps: bool) -> None:
    spec, lost = SPECS[name]
    x, y, others, labels = digits()
    found = []
    for seed in SEEDS:
        torch.manual_seed(seed)
        model = network().train()
        train(model, x, y, 8, 2e-3)
        exact = accuracy(model.eval(), others, labels)
        trained = q.prepare_qat(model, (x[:60],), spec, batches=[(x,)], learn_steps=learn_steps)
        train(trained, x, y, 4, 5e-4)
        quantized = q.convert(trained.eval())
        found.append((exact, accuracy(quantized, others, labels)))
    print(found)
    exact, ours = (sum(figures) / len(SEEDS) for figures in zip(*found, strict=True))
    assert exact > 97
    assert ours >= exact - lost
