"""Programs that use the sizes of their tensors in every way that comes to mind."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Tensor = torch.Tensor


def reshapes(x: Tensor) -> Any:
    batch, length = x.shape
    return x.reshape(length * batch), x.view(-1), x.unflatten(1, (1, length)), x.T.flatten()


def compares(x: Tensor) -> Tensor:
    if x.shape[1] > 4:
        return x * 2
    return x + 1 if x.size(0) % 2 else x - 1


def returns_numbers(x: Tensor) -> Any:
    return x.shape, x.numel(), len(x), x.shape[0] * 2 + 1, {"ratio": x.shape[0] / x.shape[1]}


def prints(x: Tensor) -> Tensor:
    print("shape", tuple(x.shape), f"{x.shape[1]:>4}|{x.size(0)}", f"{x.shape[0]:d}", x.shape)
    return x.relu()


def counts_up(x: Tensor) -> Tensor:
    for index in range(x.shape[1]):
        x = x + index
    return x


def scales(x: Tensor) -> Tensor:
    return x / math.sqrt(x.shape[-1]) + x * x.shape[0] ** -0.5 + x.mean() / x.shape[1]


def makes_masks(x: Tensor) -> Tensor:
    length = x.shape[1]
    mask = torch.arange(length)[None] <= torch.arange(length)[:, None]
    return (x[:, None] * torch.ones(length, length)).masked_fill(~mask, -1.0)


def slices(x: Tensor) -> Any:
    half = x.shape[1] // 2
    return x[:, :half], x[:, half:], x[:, -half:], x[..., : x.shape[1] - 1], x[x.shape[0] - 1]


def pads(x: Tensor) -> Tensor:
    missing = (4 - x.shape[1] % 4) % 4
    return F.pad(x, (0, missing)).view(x.shape[0], -1, 4)


def splits(x: Tensor) -> Any:
    return [part.sum() for part in x.split(2, 1)], x.chunk(2, 0), [row.max() for row in x]


def squeezes(x: Tensor) -> Any:
    y = x[:, :1].squeeze()
    return y, y.dim(), x.sum(1, keepdim=True).squeeze(-1)


def asks_kind(x: Tensor) -> Tensor:
    size = x.shape[1]
    if type(size) is int and isinstance(size, int):
        return x * 3
    return x * 5


def looks_up(x: Tensor) -> Tensor:
    table = {3: 10.0, 5: 20.0, 6: 30.0}
    return x * table.get(x.shape[1], 1.0) + (x.shape[0] in (2, 3))


@functools.cache
def _memoised(size: int) -> float:
    return size * 1.5


def memoises(x: Tensor) -> Tensor:
    return x * _memoised(x.shape[1])


def serialises(x: Tensor) -> Any:
    return json.dumps([int(x.shape[0]), float(x.shape[1])]), str(x.shape[0]), repr(x.shape)


def rounds(x: Tensor) -> Any:
    size = x.shape[1]
    return (
        x[:, : math.ceil(size / 2)],
        x[:, : int(size * 0.5)],
        round(size / 3),
        math.floor(size * 0.7),
        divmod(size, 3),
        max(size, x.shape[0]),
        min(x.shape),
        abs(-size),
        -size // 2,
        size**2,
        2**size,
        size & 1,
        sum(x.shape),
        math.prod(x.shape),
    )


def interpolates(x: Tensor) -> Tensor:
    image = x[None, None]
    bigger = F.interpolate(image, scale_factor=2.0, mode="nearest")
    return F.interpolate(bigger, size=(x.shape[0] + 1, x.shape[1]), mode="bilinear")


def broadcasts(x: Tensor) -> Any:
    ones = x.new_ones(x.shape[1])
    return x + ones, torch.broadcast_shapes(x.shape, (1,)), x.expand(2, *x.shape).clone()


def shapes_of_results(x: Tensor) -> Any:
    found = x[x > 0]
    return found * 2, found.shape[0], torch.cat([x, x]).shape[0], (x @ x.T).shape


def reads_values(x: Tensor) -> Tensor:
    if x.sum() > 0:
        return x * x.shape[0]
    return x - x.shape[1]


def writes(x: Tensor) -> Any:
    x[:, 0] = x.shape[0]
    x.add_(x.shape[1])
    return x


def strides(x: Tensor) -> Any:
    y = x.transpose(0, 1)
    return y.stride(), y.is_contiguous(), x.stride(0), y.contiguous().view(x.shape[1], -1)


def drops_out(x: Tensor) -> Tensor:
    return F.dropout(x, 0.5) * torch.rand(x.shape[0], 1)


def unbinds(x: Tensor) -> Tensor:
    first, *rest = x
    return first + len(rest)


def zips(x: Tensor) -> Any:
    return [i * row for i, row in enumerate(x)], torch.stack([x] * 2).shape


def raises(x: Tensor) -> Tensor:
    if x.shape[1] == 7:
        raise ValueError(f"no {x.shape[1]}")
    return x.view(x.shape[0], -1)


def divides(x: Tensor) -> Any:
    try:
        return x * (6 // (x.shape[0] - 3))
    except ZeroDivisionError:
        return x - 100


class Counter(nn.Module):
    """Keeps the sizes that it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.last = 0
        self.seen: list[int] = []
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = x.shape[1]
        self.seen.append(x.shape[0] * 2)
        return x * self.calls


class Table(nn.Module):
    """Makes a table anew when it is too short, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.length = 4

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > self.length:
            self.length = x.shape[1]
            self.table = torch.arange(float(self.length))
        return x + self.table[: x.shape[1]]


class Norm(nn.Module):
    """Has running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x[:, None]) * x.shape[0]


@dataclass
class Output:
    """What a model returns."""

    values: Tensor
    length: int
    sizes: list[int]


def gives_dataclass(x: Tensor) -> Output:
    return Output(x.exp(), x.shape[1], [*x.shape, x.shape[0] - 1])


class Cache:
    """Grows at each call."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.length = 0

    def update(self, new: Tensor) -> Tensor:
        self.keys = new if self.keys is None else torch.cat([self.keys, new], 1)
        self.length = self.keys.shape[1]
        return self.keys


def extends(x: Tensor, cache: Cache) -> Tensor:
    keys = cache.update(x)
    return torch.softmax(keys, 1)[:, -x.shape[1] :] * cache.length


FUNCTIONS = [
    *(reshapes, compares, returns_numbers, prints, counts_up, scales, makes_masks, slices, pads),
    *(splits, squeezes, asks_kind, looks_up, memoises, serialises, rounds, interpolates),
    *(broadcasts, shapes_of_results, reads_values, writes, strides, drops_out, unbinds, zips),
    *(raises, divides, gives_dataclass),
]
MODULES = [Counter, Table, Norm]


def keeps_in_containers(x: Tensor) -> Any:
    size = x.shape[1]
    return (
        {size: x, "s": slice(0, size, 2)},
        x.shape[:1] + x.shape[1:],
        [[size], (size, {"n": size})],
    )


class Sizes(nn.Module):
    """Keeps tensors and numbers by size."""

    def __init__(self) -> None:
        super().__init__()
        self.by_size: dict[int, int] = {}

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[1]
        if size not in self.by_size:
            self.by_size[size] = size * x.shape[0]
        return x * self.by_size[size]


FUNCTIONS.append(keeps_in_containers)
MODULES.append(Sizes)


def asks_others(x: Tensor) -> Any:
    weight = torch.ones(3, 5)
    same = torch.is_same_size(weight, x)
    return weight.size(x.shape[1] % 2), same, x.size(x.dim() - 1), x.stride(x.shape[0] % 2)


@functools.cache
def _doubled(size: int) -> int:
    return size * 2


def memoises_sizes(x: Tensor) -> Any:
    return torch.zeros(_doubled(x.shape[1]), x.shape[0]), _doubled(x.shape[0])


def switches_gradients(x: Tensor) -> Any:
    with torch.set_grad_enabled(x.shape[1] > 4):
        y = x * x.shape[0]
    return y, torch.is_grad_enabled()


def gathers(x: Tensor) -> Any:
    index = torch.arange(x.shape[0]) % 2
    chosen = x.gather(1, index[:, None])
    return chosen, x[index], x.index_select(0, index[:1]), torch.cat([index[:1], index]).shape


def maps(x: Tensor) -> Any:
    return torch.vmap(lambda row: row * x.shape[0] + row.shape[0])(x)


FUNCTIONS += [asks_others, memoises_sizes, switches_gradients, gathers, maps]


def adds_products(x: Tensor) -> Tensor:
    return torch.baddbmm(x.sum(0)[None, None], x[:, :, None], x[:, None, :], beta=0.5)


def repeats(x: Tensor) -> Any:
    y = torch.repeat_interleave(x, 2, -1)
    z = x.repeat_interleave(repeats=3, dim=0)
    return y.view(y.shape[0], -1, 2), z.reshape(3, z.shape[0] // 3, -1)


def upsamples(x: Tensor) -> Any:
    image = x[:, None, None].expand(-1, 2, 3, -1)
    return F.interpolate(image, scale_factor=2.0, mode="bilinear"), F.unfold(image, (2, 1))


def transforms(x: Tensor) -> Tensor:
    return torch.fft.fft(torch.fft.fft(x, dim=-1), dim=0).real


def recurs(x: Tensor) -> Any:
    kept = torch.zeros(x.shape[0], 2)
    weights = torch.ones(8, 1), torch.ones(8, 2)
    return torch.lstm_cell(x[:, :1], (kept, kept), *weights)


SERVED = [pads, adds_products, repeats, upsamples, recurs]
FUNCTIONS += [*SERVED[1:], transforms]
