"""Writes, views, random numbers, gradients, modes, kinds of tensors."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.constructs.case import Case, construct, x


@construct
def argument_written() -> Case:
    def fn(a: Any) -> Any:
        a.mul_(2)
        a[0] = 7.0
        return a.sum()

    return Case(fn, lambda: (x(),), lambda: (x(2, 4),))


@construct
def view_written() -> Case:
    def fn(a: Any) -> Any:
        b = a.clone()
        b.view(-1)[::2].add_(1)
        b.T[0] *= 3
        return b

    return Case(fn, lambda: (x(),), lambda: (x(2, 6),))


@construct
def arguments_that_are_one() -> Case:
    shared = x()

    def fn(a: Any, b: Any) -> Any:
        a.add_(1)
        return a * b

    def same() -> Any:
        shared.copy_(x())
        return shared, shared

    return Case(fn, lambda: (x(), x()), same)


@construct
def arguments_that_overlap() -> Case:
    def fn(a: Any, b: Any) -> Any:
        a.add_(1)
        return b * 2

    def overlap() -> Any:
        base = x(6)
        return base[:4], base[2:]

    return Case(fn, lambda: (x(4), x(4)), overlap)


@construct
def result_is_an_argument() -> Case:
    def fn(a: Any) -> Any:
        return a.contiguous(), a

    return Case(fn, lambda: (x(),), lambda: (x(4, 3).T,))


@construct
def layout_decides() -> Case:
    def fn(a: Any) -> Any:
        return a.view(-1) if a.is_contiguous() else a.reshape(-1) + 1

    return Case(fn, lambda: (x(),), lambda: (x().T,))


@construct
def dtype_changes() -> Case:
    return Case(lambda a: a / 2 + 1, lambda: (x(),), lambda: (x().to(torch.bfloat16),))


@construct
def integers_come() -> Case:
    return Case(lambda a: a.sum() * 2, lambda: (x(),), lambda: (torch.arange(12),))


@construct
def rank_changes() -> Case:
    def fn(a: Any) -> Any:
        if a.dim() == 2:
            a = a.unsqueeze(0)
        return F.avg_pool1d(a, 2)

    return Case(fn, lambda: (x(3, 4),), lambda: (x(2, 3, 4),))


@construct
def batch_of_nothing() -> Case:
    return Case(lambda a: a.relu().sum(0), lambda: (x(3, 4),), lambda: (x(3, 4)[:0],))


@construct
def dropout_and_noise() -> Case:
    def fn(a: Any, training: bool) -> Any:
        return F.dropout(a, 0.5, training) + torch.randn_like(a)

    return Case(fn, lambda: (x(), True), lambda: (x(), False))


@construct
def generator_given() -> Case:
    generator = torch.Generator()

    def change(kind: str) -> None:
        generator.manual_seed(1 if kind == "A" else 2)

    return Case(
        lambda a: a + torch.rand(4, generator=generator),
        lambda: (x(),),
        change=change,
        state=generator.get_state,
    )


@construct
def gradients_wanted() -> Case:
    return Case(
        lambda a: (a * 2, a.requires_grad),
        lambda: (x(),),
        lambda: (x().requires_grad_(),),
    )


@construct
def gradient_mode_outside() -> Case:
    weight = nn.Parameter(torch.ones(4))

    def fn(a: Any) -> Any:
        return (a * weight).requires_grad

    def change(kind: str) -> None:
        torch.set_grad_enabled(kind == "A")

    return Case(fn, lambda: (x(),), change=change)


@construct
def gradient_mode_inside() -> Case:
    def fn(a: Any) -> Any:
        with torch.no_grad():
            b = a * 2
        return b, a + b

    return Case(fn, lambda: (x().requires_grad_(),), lambda: (x(2, 4).requires_grad_(),))


@construct
def autocast_outside() -> Case:
    layer = nn.Linear(4, 4)

    def change(kind: str) -> None:
        torch.set_autocast_enabled("cpu", kind == "B")
        torch.set_autocast_dtype("cpu", torch.bfloat16)

    return Case(lambda a: layer(a), lambda: (x(),), change=change)


@construct
def autocast_inside() -> Case:
    layer = nn.Linear(4, 4)

    def fn(a: Any, on: bool) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):
            return layer(a)

    return Case(fn, lambda: (x(), True), lambda: (x(), False))


@construct
def default_dtype() -> Case:
    def change(kind: str) -> None:
        torch.set_default_dtype(torch.float32 if kind == "A" else torch.float64)

    return Case(lambda a: a.sum() + torch.ones(2) * 0.1, lambda: (x(),), change=change)


@construct
def custom_autograd() -> Case:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: Any) -> Any:
            return a * 2

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0] * 5

    def fn(a: Any) -> Any:
        b = Double.apply(a).sum()
        return b.detach(), torch.autograd.grad(b, a)[0]

    return Case(fn, lambda: (x().requires_grad_(),), lambda: (x(2, 4).requires_grad_(),))


@construct
def gradient_in_the_program() -> Case:
    def fn(a: Any) -> Any:
        a = a.detach().requires_grad_()
        energy = (a**3).sum()
        return torch.autograd.grad(energy, a)[0]

    return Case(fn, lambda: (x(),), lambda: (x(2, 4),))


@construct
def functional_gradient() -> Case:
    return Case(
        lambda a: torch.func.grad(lambda b: (b**3).sum())(a), lambda: (x(),), lambda: (x(2, 4),)
    )


@construct
def vectorised_map() -> Case:
    return Case(
        lambda a: torch.vmap(lambda row: row.softmax(0) * row.sum())(a),
        lambda: (x(),),
        lambda: (x(2, 4),),
    )


@construct
def checkpointed_block() -> Case:
    layer = nn.Linear(4, 4)

    def fn(a: Any) -> Any:
        return checkpoint(lambda b: layer(b).relu(), a, use_reentrant=False)

    return Case(fn, lambda: (x(),), lambda: (x(2, 4),))


@construct
def tensor_subclass() -> Case:
    class Tagged(torch.Tensor):
        pass

    return Case(lambda a: a * 2 + 1, lambda: (x(),), lambda: (x().as_subclass(Tagged),))


@construct
def sparse_argument() -> Case:
    return Case(lambda a: a @ torch.ones(4, 2), lambda: (x(),), lambda: (x().relu().to_sparse(),))


@construct
def inference_mode_inside() -> Case:
    @torch.inference_mode()
    def fn(a: Any) -> Any:
        return a * 2, torch.is_inference_mode_enabled()

    return Case(fn, lambda: (x(),), lambda: (x(2, 4),))


@construct
def recurrent_network() -> Case:
    cell = nn.LSTMCell(4, 3)

    def fn(parts: Any) -> Any:
        state = None
        for part in parts:
            state = cell(part, state)
        return state

    return Case(fn, lambda: (x(2, 3, 4),), lambda: (x(4, 3, 4),))


@construct
def packed_sequence() -> Case:
    lstm = nn.LSTM(4, 3)

    def fn(a: Any, lengths: Any) -> Any:
        packed = nn.utils.rnn.pack_padded_sequence(a, lengths, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(lstm(packed)[0])

    return Case(
        fn, lambda: (x(3, 2, 4), torch.tensor([2, 3])), lambda: (x(3, 2, 4), torch.tensor([1, 3]))
    )


@construct
def deep_copy_inside() -> Case:
    import copy

    layer = nn.Linear(4, 4)
    return Case(lambda a: copy.deepcopy(layer)(a), lambda: (x(),), lambda: (x(2, 4),))


@construct
def constant_tensor_made_inside() -> Case:
    def fn(a: Any) -> Any:
        window = torch.tensor([0.25, 0.5, 0.25])
        return F.conv1d(a[None], window.view(1, 1, 3)) if a.shape[0] == 1 else a * window[1]

    return Case(fn, lambda: (x(1, 8),), lambda: (x(2, 8),))


@construct
def identity_of_a_result() -> Case:
    def fn(a: Any) -> Any:
        b = a.to(torch.float32)
        return b is a, b + 1

    return Case(fn, lambda: (x(),), lambda: (x().double(),))


@construct
def complex_numbers() -> Case:
    def fn(a: Any) -> Any:
        return torch.view_as_real(torch.fft.rfft(a)).square().sum(-1)

    return Case(fn, lambda: (x(3, 4),), lambda: (x(3, 6),))
