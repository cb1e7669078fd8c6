"""Programs that read or change what lies outside of their arguments."""

from __future__ import annotations

import collections
import functools
import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.constructs.case import Case, construct, x

SCALE = 1.0
TABLE: dict[str, float] = {}
WEIGHT = torch.ones(4)


def _set_globals(kind: str) -> None:
    global SCALE, WEIGHT
    SCALE = 1.0 if kind == "A" else 4.0
    WEIGHT = torch.ones(4) if kind == "A" else torch.full((4,), 2.0)
    TABLE["scale"] = SCALE


@construct
def attribute_of_a_module() -> Case:
    class Net(nn.Module):
        scale = 1.0

        def forward(self, a: Any) -> Any:
            return a * self.scale

    net = Net()
    net.scale = 2.0
    return Case(net, lambda: (x(),), change=lambda k: setattr(net, "scale", 2.0 + (k == "B")))


@construct
def attribute_of_a_class() -> Case:
    class Net(nn.Module):
        scale = 1.0

        def forward(self, a: Any) -> Any:
            return a * self.scale

    return Case(Net(), lambda: (x(),), change=lambda k: setattr(Net, "scale", 2.0 + (k == "B")))


@construct
def attribute_of_a_config() -> Case:
    config = SimpleNamespace(inner=SimpleNamespace(activation="relu"))

    class Net(nn.Module):
        def forward(self, a: Any) -> Any:
            return getattr(torch, config.inner.activation)(a)

    def change(kind: str) -> None:
        config.inner.activation = "relu" if kind == "A" else "tanh"

    return Case(Net(), lambda: (x(),), change=change)


@construct
def number_in_a_global() -> Case:
    return Case(lambda a: a * SCALE, lambda: (x(),), change=_set_globals)


@construct
def tensor_in_a_global() -> Case:
    return Case(lambda a: a * WEIGHT, lambda: (x(),), change=_set_globals)


@construct
def number_in_a_table() -> Case:
    return Case(lambda a: a + TABLE.get("scale", 0.0), lambda: (x(),), change=_set_globals)


@construct
def global_in_a_helper() -> Case:
    return Case(lambda a: _helper(a).relu(), lambda: (x(),), change=_set_globals)


def _helper(a: Any) -> Any:
    return a - SCALE


@construct
def function_replaced() -> Case:
    holder = SimpleNamespace(act=torch.relu)

    def change(kind: str) -> None:
        holder.act = torch.relu if kind == "A" else torch.sigmoid

    return Case(lambda a: holder.act(a), lambda: (x(),), change=change)


@construct
def closure_cell() -> Case:
    factor = 1.0

    def fn(a: Any) -> Any:
        return a * factor

    def change(kind: str) -> None:
        nonlocal factor
        factor = 1.0 if kind == "A" else 5.0

    return Case(fn, lambda: (x(),), change=change)


@construct
def counter_in_an_attribute() -> Case:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, a: Any) -> Any:
            self.calls += 1
            return a * self.calls

    net = Net()
    return Case(net, lambda: (x(),), state=lambda: net.calls)


@construct
def result_kept_in_an_attribute() -> Case:
    class Net(nn.Module):
        def forward(self, a: Any) -> Any:
            self.last = a.relu()
            return self.last + 1

    net = Net()
    net.last = None
    return Case(net, lambda: (x(),), lambda: (-x(),), state=lambda: net.last)


@construct
def buffer_replaced() -> Case:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, a: Any) -> Any:
            self.mean = 0.9 * self.mean + 0.1 * a.mean(0)
            return a - self.mean

    net = Net()
    return Case(net, lambda: (x(),), lambda: (x() * 2,), state=lambda: net.mean)


@construct
def buffer_updated_in_place() -> Case:
    class Net(nn.Module):
        mean: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, a: Any) -> Any:
            self.mean.mul_(0.9).add_(a.mean(0), alpha=0.1)
            return a - self.mean

    net = Net()
    return Case(net, lambda: (x(),), lambda: (x() * 2,), state=lambda: net.mean)


@construct
def lazy_buffer() -> Case:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mask: Any = None

        def forward(self, a: Any) -> Any:
            size = a.shape[0]
            if self.mask is None or self.mask.shape[0] < size:
                self.mask = torch.ones(size, size).tril()
            mask: Any = self.mask
            return mask[:size, :size] @ a

    net = Net()
    return Case(net, lambda: (x(3, 4),), lambda: (x(5, 4),), state=lambda: net.mask)


@construct
def growing_cache_in_an_attribute() -> Case:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.keys = torch.zeros(0, 4)

        def forward(self, a: Any) -> Any:
            self.keys = torch.cat([self.keys, a])
            return a @ self.keys.T

    net = Net()
    return Case(net, lambda: (x(1, 4),), lambda: (x(2, 4),), state=lambda: net.keys)


@construct
def growing_cache_in_an_argument() -> Case:
    def fn(a: Any, cache: Any) -> Any:
        cache["keys"] = torch.cat([cache["keys"], a])
        return a @ cache["keys"].T

    return Case(fn, lambda: (x(1, 4), {"keys": x(2, 4)}), lambda: (x(1, 4), {"keys": x(3, 4)}))


@construct
def list_as_a_log() -> Case:
    log: list[Any] = []

    def fn(a: Any) -> Any:
        b = a * 2
        log.append(b.shape[0])
        return b

    return Case(fn, lambda: (x(3, 4),), lambda: (x(2, 4),), state=lambda: list(log))


@construct
def list_of_tensors_kept() -> Case:
    history: list[Any] = []

    def fn(a: Any) -> Any:
        history.append(a + 1)
        return a * 2

    return Case(fn, lambda: (x(),), lambda: (-x(),), state=lambda: list(history))


@construct
def list_read_in_a_loop() -> Case:
    scales = [1.0, 2.0]

    def fn(a: Any) -> Any:
        for scale in scales:
            a = a * scale + 1
        return a

    def change(kind: str) -> None:
        scales[:] = [1.0, 2.0] if kind == "A" else [3.0, 1.0, 2.0]

    return Case(fn, lambda: (x(),), change=change)


@construct
def deque_as_a_window() -> Case:
    window: collections.deque[Any] = collections.deque(maxlen=2)

    def fn(a: Any) -> Any:
        window.append(a)
        return sum(window)

    return Case(fn, lambda: (x(),), lambda: (x() * 2,), state=lambda: list(window))


@construct
def set_of_names() -> Case:
    enabled = {"scale"}

    def fn(a: Any) -> Any:
        return a * 2 if "scale" in enabled else a

    def change(kind: str) -> None:
        enabled.add("scale") if kind == "A" else enabled.discard("scale")

    return Case(fn, lambda: (x(),), change=change)


@construct
def memoised_helper() -> Case:
    @functools.lru_cache(maxsize=8)
    def positions(size: int) -> Any:
        return torch.arange(size, dtype=torch.float32)[:, None]

    return Case(lambda a: a + positions(a.shape[0]), lambda: (x(3, 4),), lambda: (x(2, 4),))


@construct
def memo_in_a_dict() -> Case:
    memo: dict[int, Any] = {}

    def fn(a: Any) -> Any:
        if a.shape[0] not in memo:
            memo[a.shape[0]] = torch.eye(a.shape[0])
        return memo[a.shape[0]] @ a

    return Case(fn, lambda: (x(3, 4),), lambda: (x(2, 4),), state=lambda: dict(memo))


@construct
def environment_flag() -> Case:
    name = "BENCHMARK_CONSTRUCT_FLAG"

    def fn(a: Any) -> Any:
        return a * 2 if os.environ.get(name) == "1" else a + 1

    def change(kind: str) -> None:
        os.environ[name] = "0" if kind == "A" else "1"

    return Case(fn, lambda: (x(),), change=change)


@construct
def numpy_constant_changed() -> Case:
    table = np.array([1.0, 2.0, 3.0, 4.0])

    def fn(a: Any) -> Any:
        return a * float(table[1])

    return Case(fn, lambda: (x(),), change=lambda kind: table.fill(2.0 + (kind == "B")))


@construct
def property_with_a_rule() -> Case:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._scale = 1.0

        @property
        def scale(self) -> float:
            return self._scale * 2

        def forward(self, a: Any) -> Any:
            return a * self.scale

    net = Net()
    return Case(net, lambda: (x(),), change=lambda k: setattr(net, "_scale", 1.0 + (k == "B")))


@construct
def submodule_replaced() -> Case:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    others = {"A": net[1], "B": nn.Tanh()}
    return Case(net, lambda: (x(),), change=lambda kind: setattr(net, "1", others[kind]))


@construct
def parameter_replaced() -> Case:
    net = nn.Linear(4, 4)
    weights = {"A": net.weight, "B": nn.Parameter(torch.eye(4))}
    return Case(net, lambda: (x(),), change=lambda kind: setattr(net, "weight", weights[kind]))


@construct
def parameter_written() -> Case:
    net = nn.Linear(4, 4)

    def change(kind: str) -> None:
        with torch.no_grad():
            net.weight.fill_(0.5 + (kind == "B"))

    return Case(net, lambda: (x(),), change=change)


@construct
def training_flag() -> Case:
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4))
    return Case(
        net,
        lambda: (x(6, 4),),
        change=lambda kind: _train(net, kind == "A"),
        state=lambda: list(net.state_dict().values()),
    )


def _double_it(module: Any, args: Any, out: Any) -> Any:
    return out * 2


def _train(net: nn.Module, flag: bool) -> None:
    net.train(flag)


@construct
def forward_hook_added() -> Case:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    handles: list[Any] = []

    def change(kind: str) -> None:
        if kind == "B":
            handles.append(net[0].register_forward_hook(_double_it))
        else:
            while handles:
                handles.pop().remove()

    return Case(net, lambda: (x(),), change=change)


@construct
def hook_that_records() -> Case:
    net, seen = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), []

    def keep(module: Any, args: Any, out: Any) -> None:
        seen.append(out.detach())

    net[1].register_forward_hook(keep)
    return Case(net, lambda: (x(),), lambda: (-x(),), state=lambda: list(seen))


@construct
def tied_weights() -> Case:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: Any) -> Any:
            return self.head(self.embed(ids))

    return Case(Net(), lambda: (torch.tensor([1, 2]),), lambda: (torch.tensor([0, 4, 2]),))


@construct
def parametrised_weight() -> Case:
    net = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    return Case(net, lambda: (x(),), lambda: (x(2, 4),))


@construct
def descriptor_state() -> Case:
    class Ramp:
        value = 0.0

        def __get__(self, owner: Any, kind: Any) -> float:
            return self.value

    ramp = Ramp()

    class Net:
        amount = ramp

        def __call__(self, a: Any) -> Any:
            return a + self.amount

    return Case(Net(), lambda: (x(),), change=lambda k: setattr(ramp, "value", float(k == "B")))


@construct
def default_argument_changed() -> Case:
    def fn(a: Any, scale: Any = [1.0]) -> Any:  # noqa: B006
        return a * scale[0]

    def change(kind: str) -> None:
        fn.__defaults__[0][0] = 1.0 if kind == "A" else 6.0  # pyright: ignore

    return Case(fn, lambda: (x(),), change=change)


@construct
def method_of_an_object() -> Case:
    class Model:
        def __init__(self) -> None:
            self.weight, self.bias = torch.eye(4), 1.0

        def apply(self, a: Any) -> Any:
            return a @ self.weight + self.bias

    model = Model()
    return Case(
        model.apply, lambda: (x(),), change=lambda k: setattr(model, "bias", 1.0 + (k == "B"))
    )


@construct
def slots_object() -> Case:
    class Options:
        __slots__ = ("gain",)

    options = Options()
    options.gain = 1.0
    return Case(
        lambda a: a * options.gain,
        lambda: (x(),),
        change=lambda kind: setattr(options, "gain", 1.0 + (kind == "B")),
    )


@construct
def iterator_that_advances() -> Case:
    numbers = iter(range(1, 100))
    return Case(lambda a: a * next(numbers), lambda: (x(),))
