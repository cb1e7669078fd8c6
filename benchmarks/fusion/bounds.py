"""What the machine allows a case, and what its exact result is."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import fxkit
from benchmarks.fusion.case import Work
from benchmarks.fusion.ways import Way, in_turn, medians, tensors_of


def run(work: Work) -> tuple[Tensor, ...]:
    """Run a case in eager: its results, or its gradients where these are wanted."""
    result = work.program(*work.args)
    if not work.wanted:
        return tensors_of(result)
    return torch.autograd.grad(result, work.wanted, torch.ones_like(result))


def exact(work: Work) -> tuple[Tensor, ...]:
    """Return the results of a case in float64."""
    program: Callable[..., Any] = work.program
    args = tuple(_wide(arg) for arg in work.args)
    if not isinstance(program, nn.Module):
        return run(Work(program, args))
    program = copy.deepcopy(program).double()
    if not work.wanted:
        return run(Work(program, args))
    inputs = tuple(wide for wide in args if wide.requires_grad)
    return run(Work(program, args, (*inputs, *program.parameters())))


def _wide(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor.detach().double().requires_grad_(tensor.requires_grad)


def error(results: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> float:
    """Return the distance from exact results over their size, by norms over all of them."""
    pairs = list(zip(results, wanted, strict=True))
    distance = math.hypot(*(float((got.double() - true).norm()) for got, true in pairs))
    return distance / math.hypot(*(float(true.norm()) for _, true in pairs))


def bytes_moved(work: Work) -> int:
    """Return the bytes that a case has to read and write when nothing is read twice.

    A backward reads the inputs and the gradient of the result, and writes the gradients that are
    wanted.
    """
    read = [*work.args]
    if isinstance(work.program, nn.Module):
        read += [*work.program.parameters(), *work.program.buffers()]
    results = list(tensors_of(work.program(*work.args)))
    if work.wanted:
        return 2 * _bytes(read) + 2 * _bytes(results) + _bytes(work.wanted)
    return _bytes(read) + _bytes(results)


def _bytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def operations(work: Work) -> int:
    """Return the floating-point operations of a case's products and convolutions.

    A backward takes twice as many as its forward.
    """
    with FlopCounterMode(display=False) as counter:
        work.program(*work.args)
    return counter.get_total_flops() * (3 if work.wanted else 1)


def peak() -> float:
    """Return the most floating-point operations per second that a large product reaches.

    In float32, of torch's library or of a kernel, whichever is faster.
    """
    a, b = torch.ones(1024, 1024), torch.ones(1024, 1024)
    fast = fxkit.compile(torch.mm)
    with torch.no_grad():
        ways = {"torch": Way(lambda: torch.mm(a, b)), "fxkit": Way(lambda: fast(a, b))}
        fast(a, b)
        return 2 * 1024**3 / min(medians(in_turn(ways, 8)).values())
