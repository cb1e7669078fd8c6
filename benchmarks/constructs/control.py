"""Branches, loops and errors that depend on shapes, on numbers in tensors, on Python values."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch import nn

from benchmarks.constructs.case import Case, construct, x


@construct
def branch_on_shape() -> Case:
    return Case(
        lambda a: a * 2 if a.shape[0] > 2 else a - 1, lambda: (x(3, 4),), lambda: (x(2, 4),)
    )


@construct
def branch_on_sum() -> Case:
    def fn(a: Any) -> Any:
        if a.sum() > 0:
            return a * 2
        return a - 1

    return Case(fn, lambda: (x(),), lambda: (-x(),))


@construct
def branch_on_argument() -> Case:
    return Case(lambda a, flag: a + 1 if flag else a - 1, lambda: (x(), True), lambda: (x(), False))


@construct
def branch_on_dtype() -> Case:
    def fn(a: Any) -> Any:
        return a.float() / 2 if a.dtype == torch.int64 else a * 3

    return Case(fn, lambda: (x(),), lambda: (torch.arange(4),))


@construct
def optional_argument() -> Case:
    def fn(a: Any, mask: Any = None) -> Any:
        return a if mask is None else a.masked_fill(mask, 0.0)

    return Case(fn, lambda: (x(),), lambda: (x(), x() > 0))


@construct
def item_in_arithmetic() -> Case:
    return Case(lambda a: a * a.max().item(), lambda: (x(),), lambda: (x() * 3,))


@construct
def while_on_a_norm() -> Case:
    def fn(a: Any) -> Any:
        steps = 0
        while a.norm() > 1:
            a, steps = a / 2, steps + 1
        return a, steps

    return Case(fn, lambda: (x(),), lambda: (x() * 5,))


@construct
def range_of_a_tensor() -> Case:
    def fn(a: Any, n: Any) -> Any:
        for _ in range(int(n)):
            a = a * 1.5
        return a

    return Case(fn, lambda: (x(), torch.tensor(2)), lambda: (x(), torch.tensor(3)))


@construct
def loop_over_rows() -> Case:
    def fn(a: Any) -> Any:
        total = torch.zeros(4)
        for number, row in enumerate(a):
            total = total + row * number
        return total

    return Case(fn, lambda: (x(3, 4),), lambda: (x(5, 4),))


@construct
def mask_selects_rows() -> Case:
    def fn(a: Any) -> Any:
        kept = a[a > 0]
        return kept.sum() / max(kept.shape[0], 1)

    return Case(fn, lambda: (x(),), lambda: (-x(),))


@construct
def nonzero_and_unique() -> Case:
    def fn(a: Any) -> Any:
        return a.nonzero().shape[0] * torch.unique(a.round()).float()

    return Case(fn, lambda: (x(),), lambda: (x() * 4,))


@construct
def assert_on_a_value() -> Case:
    def fn(a: Any) -> Any:
        assert (a < 3).all(), "too large"
        return a + 1

    return Case(fn, lambda: (x(),), lambda: (x() * 5,))


@construct
def error_raised_on_a_value() -> Case:
    def fn(a: Any) -> Any:
        if torch.isnan(a).any():
            raise ValueError("not a number")
        return a.relu()

    return Case(fn, lambda: (x(),), lambda: (x() / 0 * 0,))


@construct
def error_caught() -> Case:
    def fn(a: Any, b: Any) -> Any:
        try:
            return a @ b
        except RuntimeError:
            return a @ b.T

    return Case(fn, lambda: (x(3, 4), x(4, 3)), lambda: (x(3, 4), x(3, 4)))


@construct
def error_caught_at_every_call() -> Case:
    def fn(a: Any, names: Any) -> Any:
        try:
            scale = names["missing"]
        except KeyError:
            scale = 2.0
        return a * scale

    return Case(fn, lambda: (x(), {}), lambda: (x(), {"missing": 5.0}))


@construct
def error_from_torch() -> Case:
    return Case(lambda a, b: a + b, lambda: (x(3), x(3)), lambda: (x(3), x(4)))


@construct
def finally_block() -> Case:
    log: list[str] = []

    def fn(a: Any) -> Any:
        try:
            return a * 2
        finally:
            log.append("done")

    return Case(fn, lambda: (x(),), state=lambda: list(log))


@construct
def early_exit() -> Case:
    layers = [nn.Linear(4, 4) for _ in range(3)]

    def fn(a: Any) -> Any:
        for layer in layers:
            a = torch.tanh(layer(a))
            if a.abs().max() < 0.6:
                return a
        return a * 10

    return Case(fn, lambda: (x(),), lambda: (x() * 0.01,))


@construct
def mixture_of_experts() -> Case:
    experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    gate = nn.Linear(4, 3)

    def fn(a: Any) -> Any:
        out = torch.zeros_like(a)
        choice = gate(a).argmax(-1)
        for number, expert in enumerate(experts):
            chosen = (choice == number).nonzero().squeeze(-1)
            if chosen.numel():
                out = out.index_add(0, chosen, expert(a[chosen]))
        return out

    return Case(fn, lambda: (x(6, 4),), lambda: (-x(6, 4),))


@construct
def sampling_loop() -> Case:
    embed, head = nn.Embedding(7, 4), nn.Linear(4, 7)

    def fn(token: Any, count: int) -> Any:
        tokens = [token]
        for _ in range(count):
            probabilities = head(embed(tokens[-1])).softmax(-1)
            tokens.append(torch.multinomial(probabilities, 1).squeeze(-1))
            if tokens[-1].item() == 0:
                break
        return torch.stack(tokens)

    return Case(fn, lambda: (torch.tensor(1), 3), lambda: (torch.tensor(2), 4))


@construct
def tolist_and_split() -> Case:
    def fn(a: Any, sizes: Any) -> Any:
        return [part.sum() for part in a.split(sizes.tolist())]

    return Case(fn, lambda: (x(6), torch.tensor([2, 4])), lambda: (x(6), torch.tensor([1, 2, 3])))


@construct
def data_dependent_slice() -> Case:
    def fn(a: Any, lengths: Any) -> Any:
        return a[:, : int(lengths.max())].mean()

    return Case(
        fn, lambda: (x(2, 6), torch.tensor([2, 3])), lambda: (x(2, 6), torch.tensor([5, 1]))
    )


@construct
def recursion_on_a_tree() -> Case:
    def fold(tree: Any) -> Any:
        return sum(map(fold, tree)) * 2 if isinstance(tree, list) else tree

    return Case(lambda tree: fold(tree), lambda: ([x(), [x(), x()]],), lambda: ([[x()], x()],))


@construct
def context_manager_of_the_user() -> Case:
    settings = {"scale": 1.0}

    @contextlib.contextmanager
    def scaled(by: float) -> Any:
        before = settings["scale"]
        settings["scale"] = by
        try:
            yield
        finally:
            settings["scale"] = before

    def fn(a: Any) -> Any:
        with scaled(3.0):
            b = a * settings["scale"]
        return b + settings["scale"]

    def change(kind: str) -> None:
        settings["scale"] = 1.0 if kind == "A" else 7.0

    return Case(fn, lambda: (x(),), change=change, state=lambda: dict(settings))


@construct
def partial_application() -> Case:
    def scale(a: Any, by: float, *, shift: float) -> Any:
        return a * by + shift

    return Case(functools.partial(scale, shift=1.0), lambda: (x(), 2.0), lambda: (x(), 3.0))


@construct
def torch_size_as_data() -> Case:
    def fn(a: Any) -> Any:
        batch, width = a.shape
        return a.reshape(width, batch) + batch * torch.arange(batch)

    return Case(fn, lambda: (x(3, 4),), lambda: (x(2, 6),))
