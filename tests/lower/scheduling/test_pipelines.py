"""Each pass leaves loops that are sound, or decisions that can be printed, of the same kernel."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fxkit.errors import UnsupportedError
from fxkit.lower import cpp_printer
from fxkit.lower.loop_ir.interpreter import interpret
from fxkit.lower.loop_ir.loop_nest import LoopNest
from fxkit.lower.loop_ir.nest_interpreter import interpret_nest
from fxkit.lower.loop_ir.nest_verifier import verify_nest
from fxkit.lower.scheduling.pipelines import CPU, GPU, cpu_schedule, cpu_steps, scheduled, steps
from tests.lower.codegen.cuda.cases import CASES, Case, case
from tests.lower.kernels import compiled_for, difference, kernel_of

# Cases whose loops are interpreted after each pass, and those that are after the last one.
EACH = (
    "broadcast_odd gelu_chain_bf16 joined padded_evenly rotary softmax_part_of_warp "
    "softmax_special var_of_rows sum_of_two_axes mean_middle embedded_sum_down "
    "loss_of_classes one_number rows_of_nothing scanned scanned_oddly "
    "scanned_tiny scanned_twice scanned_softmax scanned_and_summed "
    "scanned_by_largest scanned_softmax_down columns_of_nothing tail_f16"
).split()
LAST = (
    "softmax_warp_odd softmax_block_odd softmax_long_odd softmax_down layer_norm several_long "
    "sum_all sum_down_odd normalised_down doubles_of_long_rows embedding_normed sum_down_bf16 "
    "scanned_block scanned_softmax_block scanned_down"
).split()


def check(nest: LoopNest, of: Case) -> None:
    verify_nest(nest)
    found, expected = ([torch.empty_like(output) for output in of.outputs] for _ in range(2))
    assert interpret_nest(nest, of.inputs, found)
    assert interpret(of.kernel, of.inputs, expected)
    for one, other in zip(found, expected, strict=True):
        is_half = one.dtype in (torch.bfloat16, torch.float16)
        assert difference(one, other) <= (1 if is_half else 8)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("is_aligned", [True, False])
def test_each_pass_keeps_what_loops_compute(name: str, is_aligned: bool) -> None:
    program, made = CASES[name]
    of = case(program, made())
    seen: list[LoopNest] = []
    for _, nest in steps(of.kernel, is_aligned=is_aligned):
        if not seen or nest.body != seen[-1].body:
            check(nest, of)
        seen.append(nest)
    assert len(seen) == len(GPU) + 1


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", LAST)
@pytest.mark.parametrize("is_aligned", [True, False])
def test_all_passes_keep_what_loops_compute(name: str, is_aligned: bool) -> None:
    program, made = CASES[name]
    of = case(program, made())
    check(scheduled(of.kernel, is_aligned=is_aligned), of)


def test_an_index_out_of_bounds_fails_the_checks_of_the_loops() -> None:
    program, made = CASES["embedding"]
    of = case(program, made())
    inputs = [t + 11 if t.dtype == torch.int64 else t for t in of.inputs]
    results = [torch.empty_like(output) for output in of.outputs]
    assert not interpret_nest(scheduled(of.kernel), inputs, results)


def test_passes_have_names_of_their_own_and_say_what_they_do() -> None:
    assert len({one.name for one in GPU}) == len(GPU)
    for one in GPU:
        text = str(type(one).__doc__)
        assert "Before" in text
        assert "fter:" in text


def tensors(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, *shape, generator=made).to(dtype)
    return x, y


# By the pass that decides something about each: a program, its inputs, and what its schedule says.
DECIDED: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...], str]] = {
    "TileCrossingAxes": (
        lambda x, y: x.t() * 2 + y.view(150, 200),
        tensors(200, 150),
        "along axis 0 by",
    ),
    "FlattenRows": (lambda x, y: x + y[0], tensors(500, 7), "joined of rows of 7"),
    "VectoriseAcrossRows": (lambda x, y: (x * y).sum(0), tensors(90, 200), "across 64 rows"),
    "TransposeRows": (lambda x, y: (x * y).amax(-1), tensors(500, 5), "transposed"),
    "PackBfloat16": (
        lambda x, y: x * y,
        tensors(40, 512, dtype=torch.bfloat16),
        "two elements of bfloat16",
    ),
    "TileRows": (lambda x, y: x * y, tensors(90_000), "in tiles of 4096"),
    "SplitRowsAcrossThreads": (lambda x, y: (x * y).sum(), tensors(90_000), "across threads"),
    "HoistRowInvariants": (
        lambda x, y: F.batch_norm(x, y[0], y[1].square()),
        tensors(50, 304),
        "before the first row",
    ),
    "UnrollShortRows": (
        lambda x, y: torch.stack([x, y]).sum(0),
        tensors(60, 70),
        "in tiles of 4096\n  sweep 0: with scalars %0",
    ),
    "SplitIndexSets": (
        lambda x, y: torch.cat([x, y], -1) * 2,
        tensors(60, 70),
        "cut where guards change",
    ),
    "UnrollAndJam": (lambda x, y: torch.exp(x) * y, tensors(50, 512), "vectors an iteration"),
    "StreamStores": (lambda x, y: x * y, tensors(1200, 1024), "past the caches"),
    "SpeculateSoftmax": (lambda x, y: F.softmax(x * y, -1), tensors(40, 320), "is known"),
    "PrefetchRows": (lambda x, y: x * y[0], tensors(9000, 128), "asked for ahead"),
}


@pytest.mark.parametrize("name", DECIDED)
def test_a_decision_can_be_left_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program, args, said = DECIDED[name]
    kernel = kernel_of(program, *args)
    without = tuple(one for one in CPU if one.name != name)
    assert said in str(cpu_schedule(kernel))
    assert said not in str(cpu_schedule(kernel, without))
    monkeypatch.setattr(cpp_printer, "cpu_schedule", lambda kernel: cpu_schedule(kernel, without))
    found, expected = compiled_for(program, *args)(*args), program(*args)
    tolerance = 1e-2 if found.dtype == torch.bfloat16 else 2e-5
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_decisions_have_names_of_their_own_and_show_before_and_after() -> None:
    assert len({one.name for one in CPU}) == len(CPU)
    for one in CPU:
        assert "  ->  " in str(type(one).__doc__)
    assert {one.name for one in CPU if not one.is_required} == {*DECIDED}


def test_what_is_required_can_not_be_left_out() -> None:
    kernel = kernel_of(lambda x, y: x * y, *tensors(3, 5))
    for one in CPU:
        if one.is_required:
            without = tuple(other for other in CPU if other is not one)
            with pytest.raises(UnsupportedError, match=f"got none of {one.name}"):
                cpu_schedule(kernel, without)


def test_passes_in_another_order_are_named() -> None:
    kernel = kernel_of(lambda x, y: x * y, *tensors(3, 5))
    for first, second in itertools.pairwise(CPU):
        swapped = tuple({first: second, second: first}.get(one, one) for one in CPU)
        with pytest.raises(UnsupportedError, match=f"got {second.name} before {first.name}"):
            cpu_schedule(kernel, swapped)


def test_steps_show_what_each_pass_decides() -> None:
    kernel = kernel_of(lambda x, y: x * y[0], *tensors(9000, 128))
    found = list(cpu_steps(kernel))
    assert [name for name, _ in found] == ["nothing decided", *(one.name for one in CPU)]
    assert str(found[0][1]) == "in no order yet"
    assert found[-1][1] == cpu_schedule(kernel)
