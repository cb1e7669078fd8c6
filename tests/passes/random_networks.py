"""Random small networks out of the layers that the passes for inference look for."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from torch import nn

_WIDTH = 4


class RandomNetwork(nn.Module):
    """Applies random layers and functions to random earlier results of one shape.

    All images are [batch, 4, height, width]; some steps lead through another layout, write in
    place, use a layer twice, or join and split channels.

    Args:
        seed: What decides the network.
        steps: How many steps it has.
    """

    def __init__(self, seed: int, steps: int = 12) -> None:
        super().__init__()
        self.choices = random.Random(seed)
        self.plan = [self.choices.choice(_STEPS) for _ in range(steps)]
        self.picks = [[self.choices.random() for _ in range(4)] for _ in range(steps)]
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.convs = nn.ModuleList(_convolution(self.choices) for _ in range(3))
            self.norms = nn.ModuleList(_norm(self.choices) for _ in range(3))
            self.linears = nn.ModuleList(
                nn.Linear(_WIDTH, _WIDTH, bias=self.choices.random() < 0.5) for _ in range(3)
            )

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return the last results.

        Args:
            x: float[batch, 4, height, width]
        """
        values = [x * 1]
        for step, picks in zip(self.plan, self.picks, strict=True):
            value = values[-1 - int(picks[0] * min(len(values), 3))]
            other = values[int(picks[1] * len(values))]
            values.append(step(self, value, other, picks))
        return values[-2:]


def _convolution(choices: random.Random) -> nn.Module:
    size = choices.choice([1, 3])
    groups, bias = choices.choice([1, 1, 2, 4]), choices.random() < 0.5
    kind = nn.ConvTranspose2d if choices.random() < 0.2 else nn.Conv2d
    return kind(_WIDTH, _WIDTH, size, padding=size // 2, groups=groups, bias=bias)


def _norm(choices: random.Random) -> nn.Module:
    norm = nn.BatchNorm2d(_WIDTH, affine=choices.random() < 0.8)
    nn.init.normal_(norm.running_mean)
    nn.init.uniform_(norm.running_var, 0.5, 2)
    if norm.affine:
        nn.init.uniform_(norm.weight, choices.choice([-1.0, 0.4]), 1.6)
        nn.init.normal_(norm.bias)
    return norm.eval()


def _pick(layers: nn.ModuleList, pick: float) -> nn.Module:
    return layers[int(pick * len(layers))]


def _convolve(net, x, other, picks):
    return _pick(net.convs, picks[2])(x)


def _normalise(net, x, other, picks):
    return _pick(net.norms, picks[2])(x)


def _convolve_and_normalise(net, x, other, picks):
    return _pick(net.norms, picks[3])(_pick(net.convs, picks[2])(x))


def _activate(net, x, other, picks):
    functions = (torch.relu, torch.sigmoid, F.leaky_relu, F.dropout, torch.tanh)
    function = functions[int(picks[2] * len(functions))]
    return function(x, 0.5, False) if function is F.dropout else function(x)


def _write(net, x, other, picks):
    return (x.relu_ if picks[2] < 0.5 else x.tanh_)() if picks[3] < 0.3 else x.clone().relu_()


def _pool(net, x, other, picks):
    function = F.max_pool2d if picks[2] < 0.5 else F.avg_pool2d
    return function(x, 3, 1, 1)


def _add(net, x, other, picks):
    return x + other


def _join(net, x, other, picks):
    return torch.cat([x[:, :2], other[:, 2:]], 1)


def _mix_channels(net, x, other, picks):
    rows = x.permute(0, 2, 3, 1)
    return _pick(net.linears, picks[2])(rows).permute(0, 3, 1, 2)


def _mix_twice(net, x, other, picks):
    rows = x.permute(0, 2, 3, 1)
    gate = torch.sigmoid(net.linears[0](rows)) * _pick(net.linears, picks[2])(rows)
    return gate.permute(0, 3, 1, 2)


def _turn(net, x, other, picks):
    return torch.tanh(x.transpose(2, 3) * 2).transpose(2, 3)


def _reverse(net, x, other, picks):
    return x.flip(1).contiguous() + (other if picks[2] < 0.5 else 1)


_STEPS = [
    _convolve, _normalise, _convolve_and_normalise, _convolve_and_normalise, _activate, _activate,
    _write, _pool, _add, _join, _mix_channels, _mix_twice, _turn, _reverse,
]  # fmt: skip
