"""Families of single kernels, and of small graphs in which calls cost more than arithmetic."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.fusion.case import Family, of_function, of_module


def _chain(x: Tensor, y: Tensor) -> Tensor:
    return F.gelu(1.5 * x + y) * torch.sigmoid(y) - torch.sqrt(x.abs())


def _bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias)


def _waves(x: Tensor) -> Tensor:
    return torch.sin(x) * torch.cos(x) + torch.expm1(x)


def _gated(x: Tensor, y: Tensor) -> Tensor:
    return F.silu(x) * y


def _mish(x: Tensor) -> Tensor:
    return x * torch.tanh(F.softplus(x))


def _rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def _transposed_sum(x: Tensor, y: Tensor) -> Tensor:
    return x.t() * 2 + y


def _heads_first(x: Tensor, bias: Tensor) -> Tensor:
    return (x + bias).permute(0, 2, 1, 3).contiguous() * 0.125


def _joined(x: Tensor, y: Tensor) -> Tensor:
    return torch.cat((x * 2, y + 1), -1).relu()


def _padded(x: Tensor) -> Tensor:
    return F.pad(x, (1, 1, 1, 1))[..., :-1] * 0.5


def _softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, dim=-1)


def _viewed_softmax(x: Tensor) -> Tensor:
    return torch.softmax(x.view(-1, 8, 512) * 0.125, dim=-1)


def _masked_softmax(scores: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax((scores * 0.125).masked_fill(mask < -1, float("-inf")), dim=-1)


def _layer_norm(x: Tensor, y: Tensor) -> Tensor:
    return F.layer_norm(x + y, x.shape[-1:])


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def _rms_rotary(q: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Normalise and turn the two halves of each row, as attention does with its queries."""
    first, second = _rms_norm(q, weight).chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def _column_sums(x: Tensor) -> Tensor:
    return (x * x).sum(0)


def _row_sums(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum(-1)


def _steps(x: Tensor) -> Tensor:
    for _ in range(8):
        x = torch.relu(x * 0.5 + 1)
    return x


class _Layers(nn.Module):
    """Small layers, each followed by something pointwise."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x)) * 0.5 + x
        return x


def _small_mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)
    )


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(768, 3072), nn.GELU(), nn.Linear(3072, 768))


class _Convolutions(nn.Module):
    """Convolutions with their activations, channels last."""

    def __init__(self, count: int, channels: int) -> None:
        super().__init__()
        layers = [nn.Conv2d(channels, channels, 3, padding=1) for _ in range(count)]
        self.layers = nn.ModuleList(layers).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


_HALF = torch.bfloat16
_WIDE, _NARROW, _SQUARE = (4096, 2048), (4096, 1024), (2048, 2048)
_HALVES = (512, 64), (512, 64)

FAMILIES = {
    "pointwise": Family(
        (
            of_function("chain 4096×2048", _chain, _WIDE, _WIDE),
            of_function("chain_bf16 4096×2048", _chain, _WIDE, _WIDE, dtype=_HALF),
            of_function("bias_gelu 4096×3072", _bias_gelu, (4096, 3072), (3072,)),
            of_function("bias_gelu_small 256×3072", _bias_gelu, (256, 3072), (3072,)),
            of_function("waves 2048×2048", _waves, _SQUARE),
            of_function("gated 4096×2048", _gated, _WIDE, _WIDE),
            of_function("gated_bf16 4096×2048", _gated, _WIDE, _WIDE, dtype=_HALF),
            of_function("mish 4096×2048", _mish, _WIDE),
        ),
        goal=4,
    ),
    "movement": Family(
        (
            of_function("rotary 8×16×512×64", _rotary, (8, 16, 512, 64), (512, 64), (512, 64)),
            of_function("transposed 2048×2048", _transposed_sum, _SQUARE, _SQUARE),
            of_function("heads_first 8×512×12×64", _heads_first, (8, 512, 12, 64), (64,)),
            of_function("joined 4096×2·1024", _joined, _NARROW, _NARROW),
            of_function("joined_bf16 4096×2·1024", _joined, _NARROW, _NARROW, dtype=_HALF),
            of_function("padded 64×255×255", _padded, (64, 255, 255)),
        ),
        goal=3,
        is_memory_bound=True,
    ),
    "norms": Family(
        (
            of_function("softmax 4096×2048", _softmax, _WIDE),
            of_function("softmax_bf16 4096×2048", _softmax, _WIDE, dtype=_HALF),
            of_function("viewed_softmax 4096×512", _viewed_softmax, (512, 4096)),
            of_function("masked_softmax 4096×512", _masked_softmax, (4096, 512), (512,)),
            of_function("layer_norm(x+y) 4096×1024", _layer_norm, _NARROW, _NARROW),
            of_function("layer_norm_bf16 4096×1024", _layer_norm, _NARROW, _NARROW, dtype=_HALF),
            of_function("rms_norm 4096×1024", _rms_norm, _NARROW, (1024,)),
            of_function(
                "rms_rotary 4×16×512×128", _rms_rotary, (4, 16, 512, 128), (128,), *_HALVES
            ),
        ),
        goal=2.5,
        is_memory_bound=True,
    ),
    "sums": Family(
        (
            of_function("column_sums 4096×2048", _column_sums, _WIDE),
            of_function("column_sums_narrow 65536×32", _column_sums, (65536, 32)),
            of_function("row_sums 4096×1024", _row_sums, _NARROW, _NARROW),
        ),
        is_memory_bound=True,
    ),
    "overhead": Family(
        (
            of_function("one_kernel 64", _gated, (64,), (64,), in_microseconds=2),
            of_function("steps 8×64", _steps, (8, 64), in_microseconds=2),
            of_module("layers 20×(4×32)", lambda: _Layers(20, 32), (4, 32)),
            of_module("small_mlp 1×32", _small_mlp, (1, 32)),
        ),
        goal=15,
        has_roofline=False,
    ),
    "products": Family(
        (
            of_module("mlp 256×768×3072", _mlp, (256, 768)),
            of_module("linear 512×1024×1024", lambda: nn.Linear(1024, 1024), (512, 1024)),
            of_module("convolutions 6×64×56×56", lambda: _Convolutions(6, 64), (1, 64, 56, 56)),
        ),
        goal=1.1,
    ),
}
