"""Each pass for a GPU leaves loops that are sound and compute what their kernel means."""

from __future__ import annotations

import pytest
import torch

from fxkit.lower.loop_ir.interpreter import interpret
from fxkit.lower.loop_ir.loop_nest import LoopNest
from fxkit.lower.loop_ir.nest_interpreter import interpret_nest
from fxkit.lower.loop_ir.nest_verifier import verify_nest
from fxkit.lower.scheduling.pipelines import GPU, scheduled, steps
from tests.lower.codegen.cuda.cases import CASES, Case, case
from tests.lower.kernels import difference

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
