"""Passes over rows of halves in parts, between which results are rounded."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fxkit.lower import to_cpp
from fxkit.lower.loop_ir.loop_ir import Kernel
from fxkit.lower.loop_ir.rounded_values import unrounded
from fxkit.lower.scheduling.cpu import cpu_schedule, lanes
from fxkit.lower.scheduling.cpu.float16_loop_fission import LoopPart, rounded_parts
from fxkit.lower.scheduling.row_sweeps import plan_sweeps
from tests.lower.kernels import ALWAYS, body, kernel_of, text_of
from tests.sampling import one_in

Program = Callable[..., Tensor | tuple[Tensor, ...]]


def gelu_chain(x: Tensor, y: Tensor) -> Tensor:
    return F.gelu(1.5 * x + y) * torch.sigmoid(y) - torch.sqrt(torch.abs(x))


def several(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    z = torch.tanh(x * y)
    return z, z * 3 > y, (z * y * 5).int(), (z + y).float() * 2, z.sum(-1)


PROGRAMS: dict[str, Program] = {
    "chain": gelu_chain,
    "several": several,
    "long": lambda x, y: (((x * 1.1 + y) * 1.2 + y) * x + 1) * y - x,
    "chosen": lambda x, y: torch.where(x * 3 > y, torch.exp(x) * y, (x * y).erf() + y) * 1.7,
    "softmax": lambda x, y: torch.softmax(torch.tanh(x * 2) + y, -1) * y.exp() + x * 3,
    "norm": lambda x, y: F.layer_norm(((x * 3 + y) * y + 1) * x, x.shape[-1:]) * 3 + y * y,
    "total": lambda x, y: (torch.exp(x) * y + x * 3).sum(),
    "largest": lambda x, y: (torch.exp(x) * y).amax(-1),
    "waves": lambda x, y: torch.sin(x * 9) * y + torch.cos(y * x),
    "far_waves": lambda x, y: torch.sin(x.float() * 1e7).half() * y,
    "column": lambda x, y: torch.sigmoid(x * y[:, :1] + y[0]) * x + y,
    "mixed": lambda x, y: (torch.exp(x) * y).float() * x.float() + y,
    "gathered": lambda x, y: torch.exp(x[:, torch.arange(x.shape[1] - 1, -1, -1)] * y) * y,
    "stacked": lambda x, y: torch.stack([torch.exp(x * y) * 3, y + 1]) * 3,
    "split": lambda x, y: torch.cat([torch.exp(x * y) * 3, y * 1.3 + 1], -1) * 3,
    "summed_up": lambda x, y: torch.cumsum(torch.exp(x * y) * 3, -1),
}
CUT = set(PROGRAMS) - {"split", "summed_up"}


def inputs(*shape: int) -> tuple[Tensor, Tensor]:
    x, y = torch.randn(2, *shape, generator=torch.Generator().manual_seed(1)).half()
    x[0, 0], x[1, -1], y[2, 1] = torch.nan, torch.inf, -70
    return x, y


def outputs(program: Program, *args: Tensor) -> tuple[str, list[Tensor]]:
    module = to_cpp(fx.symbolic_trace(program), args, policy=ALWAYS)
    found = module(*args)
    return module.source, [found] if isinstance(found, Tensor) else list(found)


@pytest.mark.parametrize(("shape", "name"), one_in(2, [(5, 7), (3, 4999)], PROGRAMS))
def test_parts_compute_what_one_loop_does(
    name: str, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = inputs(*shape)
    monkeypatch.setattr(lanes, "gains_in_lanes", lambda *args, **options: False)
    text, found = outputs(PROGRAMS[name], *args)
    assert ("fx_round_halves(k" in text) == (name in CUT)
    monkeypatch.setattr(cpu_schedule, "rounded_parts", lambda kernel, one: ())
    text, expected = outputs(PROGRAMS[name], *args)
    assert "fx_round_halves(k" not in text
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours.isnan(), theirs.isnan())
        if name in ("softmax", "norm", "total"):  # sums may be added up in another order
            assert torch.allclose(ours, theirs, rtol=2e-3, atol=2e-3, equal_nan=True)
        else:
            assert torch.equal(ours.nan_to_num(1), theirs.nan_to_num(1))


def parts_of(program: Callable[..., Tensor]) -> tuple[Kernel, tuple[LoopPart, ...]]:
    x, y = inputs(8, 512)
    kernel = kernel_of(program, x, y)
    kernel = Kernel(kernel.sizes, 1, kernel.buffers, kernel.body, kernel.stores)
    (one,) = plan_sweeps(kernel).sweeps
    return kernel, rounded_parts(kernel, one)


def test_each_part_reads_what_was_rounded_before() -> None:
    kernel, parts = parts_of(gelu_chain)
    assert len(parts) == 5
    rounded: set[int] = set()
    kept: set[int] = set()
    for part in parts:
        assert set(part.reads) <= rounded | kept
        rounded |= set(part.rounds)
        kept |= set(part.keeps)
        computed = {*part.values, *part.reads}
        for p in part.values:
            wide = [o for o in kernel.body[p].operands if kernel.body[o].op != "const"]
            assert set(wide) <= computed
    assert parts[-1].stores == (0,) and not parts[-1].rounds
    assert all(kernel.body[p].op == "round" for p in rounded)


def test_a_rounding_that_storing_does_is_left_to_it() -> None:
    kernel, parts = parts_of(lambda x, y: torch.exp(x * y) * 3)
    (store,) = kernel.stores
    assert kernel.body[store.value].op == "round"
    assert unrounded(kernel, 0) == kernel.body[store.value].operands[0]
    assert all(store.value not in (*part.rounds, *part.values) for part in parts)


def test_choices_are_made_again_rather_than_kept() -> None:
    kernel, parts = parts_of(lambda x, y: torch.where(x > y, torch.exp(x * y) * 3, x * 1.7))
    (choice,) = [p for p, i in enumerate(kernel.body) if i.op == "gt"]
    assert not any(choice in (*part.keeps, *part.reads) for part in parts)
    assert choice in parts[-1].values


def test_a_few_roundings_without_functions_stay_in_one_loop() -> None:
    x, y = inputs(8, 512)
    for program in (lambda x, y: x * y + x, lambda x, y: (x * 1.1 + y) * 1.2, lambda x, y: x.exp()):
        assert "fx_round_halves(" not in body(text_of(program, x, y))
    for program in (lambda x, y: ((x * 1.1 + y) * 1.2 + y) * x, lambda x, y: x.exp() * y):
        assert "fx_round_halves(" in body(text_of(program, x, y))
        assert "fx_round_halves(" not in body(text_of(program, x.bfloat16(), y.bfloat16()))
