"""The C++ text of kernels: pure, without headers, in the loops that were meant."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

import fxkit
from fxkit.analysis.tensor_types import propagate_types
from fxkit.lower import to_cpp
from fxkit.lower.compiling.plan import make_plan
from fxkit.lower.cpp_printer import show_schedule
from fxkit.lower.fusion.partitioner import partition
from fxkit.lower.scheduling.row_sweeps import plan_sweeps
from tests.lower.kernels import body, compiled_for, kernel_of, text_of


def test_a_chain_as_text() -> None:
    x, b = torch.randn(60, 1000), torch.randn(1000)
    assert (
        body(text_of(lambda x, b: torch.relu(x + b) * 2, x, b))
        == """\
extern "C" void k(const float* __restrict in0, const float* __restrict in1, \
float* __restrict out0, long threads) {
  #pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (long tile = 0; tile < 60; ++tile) {
    const long i0 = tile;
    const float* const p0 = in0 + i0 * 1000;
    const float* const p1 = in1;
    float* const p2 = out0 + i0 * 1000;
    #pragma omp simd
    for (long j = 0; j < 1000; ++j) {
      const float v0 = p0[j];
      const float v1 = p1[j];
      const float v2 = v0 + v1;
      const float v4 = v2 < 0.0f ? 0.0f : v2;
      const float v6 = v4 * 2.0f;
      p2[j] = v6;
    }
  }
}
"""
    )


def test_kernels_of_little_work_ask_for_no_threads() -> None:
    def parallel(*shape: int) -> bool:
        text = text_of(lambda x: torch.relu(x + 1).t(), torch.randn(shape)[:, ::2])
        return "#pragma omp parallel" in text

    assert not parallel(30, 20)
    assert parallel(3000, 20)


def test_text_is_the_same_each_time_and_includes_nothing() -> None:
    x = torch.randn(7, 9)

    def fn(x: torch.Tensor) -> Any:
        return F.softmax(torch.sin(x) + torch.cos(x), -1), x.double().exp()

    assert text_of(fn, x) == text_of(fn, x)
    assert "#include" not in text_of(fn, x)


def test_dense_tensors_are_walked_as_one_axis() -> None:
    x = torch.randn(3, 5, 7).permute(2, 0, 1)
    assert kernel_of(lambda x: x * 2 + 1, x).sizes == (105,)
    y = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert kernel_of(lambda y: y * 2 + 1, y).sizes == (120,)


def test_broadcasting_is_a_stride_of_nought() -> None:
    kernel = kernel_of(lambda x, y: x * y + 1, torch.randn(4, 1, 6), torch.randn(5, 1))
    loads = [i.detail.strides for i in kernel.body if i.op == "load"]
    assert kernel.sizes == (4, 5, 6)
    assert loads == [(6, 0, 1), (0, 1, 0)]


def test_softmax_takes_three_passes_and_keeps_the_powers() -> None:
    plan = plan_sweeps(kernel_of(lambda x: F.softmax(x, -1), torch.randn(4, 100)))
    assert [len(p.reductions) for p in plan.sweeps] == [1, 1, 0]
    assert plan.buffers == (3,)
    assert plan.sweeps[2].buffered == (3,)
    assert [p.stores for p in plan.sweeps] == [(), (), (0,)]


def test_rows_too_long_for_the_cache_are_computed_again() -> None:
    plan = plan_sweeps(kernel_of(lambda x: F.softmax(x, -1), torch.randn(1, 100_000)))
    assert plan.buffers == ()
    assert plan.sweeps[2].buffered == ()
    assert 3 in plan.sweeps[2].values


def test_a_load_is_not_buffered() -> None:
    plan = plan_sweeps(kernel_of(lambda x: x - x.mean(-1, keepdim=True), torch.randn(4, 100)))
    assert plan.buffers == ()


def test_reductions_down_columns_run_over_neighbouring_rows() -> None:
    x = torch.randn(30, 100)
    assert "long l = 0" in text_of(lambda x: x.sum(0), x)
    assert "long l = 0" not in text_of(lambda x: x.sum(1), x)
    assert "long l = 0" not in text_of(lambda x: x.sum(0), x.t())


def test_vector_functions_are_declared_where_the_library_has_them() -> None:
    x = torch.randn(30, 100)
    simd = '__attribute__((simd("notinbranch"), const)) float sinhf(float)'
    assert simd in text_of(lambda x: torch.sinh(x), x)
    assert simd not in text_of(lambda x: torch.sinh(x), x, glibc=None)
    assert "simd" not in text_of(lambda x: torch.asin(x), x, glibc=(2, 31)).split("void k")[0]
    assert "float expf" not in text_of(lambda x: torch.exp(x), x)


def test_equal_regions_share_a_kernel() -> None:
    gm = fx.symbolic_trace(lambda x: torch.tanh(torch.sort(torch.tanh(x * 2))[0] * 2))
    propagate_types(gm, (torch.randn(64, 64),))
    plan = make_plan(gm, partition(gm))
    assert len(plan.calls) == 2
    assert len(plan.kernels) == 1


def test_bfloat16_is_rounded_where_it_can_have_changed() -> None:
    x = torch.randn(9, 63).bfloat16()
    text = body(text_of(lambda x: torch.relu(-x.abs() + 1) * 3, x))
    assert text.count("fx_round_quiet_bf16(") == 2  # the sum and the product, not what chooses
    assert "fx_to_quiet_bf16(" in text
    assert "fx_to_bf16(" in body(text_of(lambda x, y: (x * y).bfloat16(), x, x.float()))


def test_what_follows_an_exponential_may_shorten_it() -> None:
    x = torch.randn(8, 64)
    assert "fx_exp_plus_one(" in body(text_of(lambda x: 1 / (1 + torch.exp(x)), x))
    assert "fx_exp_plus_one(" not in body(text_of(lambda x: 2 + torch.exp(x), x))
    assert "fx_exp_plus_one(" not in body(text_of(lambda x: 1 + torch.exp(x), x.double()))
    assert "fx_exp_down(" in body(text_of(lambda x: torch.exp(x.clamp(max=3.0)), x))
    assert "fx_exp_down(" not in body(text_of(lambda x: torch.exp(x.clamp(max=300.0)), x))
    assert "fx_exp_down(" in body(text_of(lambda x: torch.exp(x * x * -0.5), x))
    assert "fx_exp_down(" not in body(text_of(lambda x: torch.exp(x * x * 0.5), x))
    assert "fx_exp_down(" not in body(text_of(lambda x: torch.exp(x * 2 * -0.5), x))
    assert "fx_exp_down(" not in body(text_of(lambda x: torch.exp(x.clamp(min=3.0)), x))


def test_an_exponential_of_which_shares_are_used_keeps_a_factor() -> None:
    def powers(x: torch.Tensor) -> torch.Tensor:
        return (x - x.amax(-1, keepdim=True)).exp()

    def with_sum(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = powers(x).sum(-1, keepdim=True)
        return powers(x) / total, total

    x = torch.randn(8, 64)
    assert "fx_exp_raised(" in body(text_of(lambda x: x.softmax(-1), x))
    assert "fx_exp_raised(" in body(text_of(lambda x: x.softmax(-1) * 2 - x, x))
    for fn in (
        lambda x: x.log_softmax(-1),
        lambda x: x.logsumexp(-1),
        lambda x: powers(x) * x.softmax(-1),
        lambda x: powers(x).sum(-1) + x.softmax(-1).amax(-1),
        with_sum,
    ):
        assert "fx_exp_raised(" not in body(text_of(fn, x))
        torch.testing.assert_close(fxkit.compile(fn)(x), fn(x))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factor", [0.125, 0.5, 2.0**-30, 2.0, 0.3, -0.5, 2.0**-101])
def test_a_power_of_two_in_front_of_a_softmax_takes_no_product(
    dtype: torch.dtype, factor: float
) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x * factor, -1)

    x = torch.randn(8, 64).to(dtype)
    x[1, 3], x[2, 4:6], x[3, 5], x[4] = torch.nan, torch.inf, -torch.inf, -torch.inf
    x[5], x[6, 1], x[7] = 1e-40, 3e38, x[7] * 1e-38
    text = body(text_of(fn, x))
    assert ("fx_fma(" in text) == (factor in (0.125, 0.5, 2.0**-30))
    assert "exp_raised(" in text
    torch.testing.assert_close(compiled_for(fn, x)(x), fn(x), equal_nan=True)


def test_functions_are_as_fine_as_the_rounding_of_their_results() -> None:
    x = torch.randn(8, 64).bfloat16()
    for name, fn in {
        "exp_raised": lambda x: x.softmax(-1),
        "sigmoid": lambda x: 1 - torch.sigmoid(x),
        "gated": lambda x: torch.nn.functional.silu(x) * 2,
    }.items():
        assert f"fx_coarse_{name}(" in body(text_of(fn, x))
        for dtype in (torch.float16, torch.float32):
            assert "fx_coarse_" not in body(text_of(fn, x.to(dtype)))
    for fn in (
        lambda x: x.float().softmax(-1).bfloat16() + x.float().softmax(-1),
        lambda x: (1 - torch.sigmoid(x.float())).bfloat16(),
        lambda x: torch.softmax(x, -1, dtype=torch.float32),
        lambda x: (x.float() / (2 + torch.exp(-x.float()))).bfloat16(),
        lambda x: (torch.sigmoid(x.float()) * x).sum(-1),
    ):
        assert "fx_coarse_" not in body(text_of(fn, x))


def test_an_exponential_that_is_needed_elsewhere_is_taken_once() -> None:
    x = torch.randn(4, 100)
    text = body(text_of(lambda x: (1 + torch.exp(x)) * torch.exp(x).sum(-1, keepdim=True), x))
    assert text.count("fx_exp") == 1


def test_the_tanh_of_a_softplus_takes_no_logarithm() -> None:
    x = torch.randn(8, 64)
    for fn in (
        lambda x: F.mish(x),  # fx can't trace what is not a function of Python
        lambda x: x * torch.tanh(F.softplus(x)),
        lambda x: torch.tanh(torch.log1p(torch.exp(x * 2))),
    ):
        assert "fx_tanh_softplus(" in body(text_of(fn, x))
    for fn in (
        lambda x: x.log1p().tanh(),
        lambda x: (y := torch.exp(x)) * torch.tanh(torch.log1p(y)),
    ):
        assert "fx_tanh_log1p(" in body(text_of(fn, x))
    for fn in (
        lambda x: torch.tanh(F.softplus(x, threshold=2.0)),
        lambda x: torch.tanh(F.softplus(x, beta=2.0)),
        lambda x: torch.tanh(torch.where(x > 20, x * 2, torch.log1p(torch.exp(x)))),
        lambda x: torch.tanh(torch.where(x * 2 > 20, x, torch.log1p(torch.exp(x)))),
    ):
        assert "fx_tanh(" in body(text_of(fn, x))


def test_a_bound_that_is_a_number_keeps_nans_and_zeros() -> None:
    x = torch.randn(8)
    assert "? 2.0f : v" in body(text_of(lambda x: x.clamp(max=2.0), x))
    assert "fx_max(" in body(text_of(lambda x, y: torch.maximum(x, y), x, x + 1))


def test_what_bfloat16_has_is_stored_without_rounding() -> None:
    x = torch.randn(9, 63).bfloat16()
    for fn in (
        lambda x: torch.relu(-x),
        lambda x: x * 2,
        lambda x: torch.cat((x * 4.0, x.abs()), -1),
        lambda x: (x * 3).clamp(max=1.0),
    ):
        assert "fx_to_held_bf16(" in body(text_of(fn, x))
    for fn in (
        lambda x: x * 3,
        lambda x: x * 0.5,  # a subnormal number loses its last bit
    ):
        assert "fx_to_held_bf16(" not in body(text_of(fn, x))
    assert "fx_to_held_bf16(" not in body(text_of(lambda x: x.bfloat16(), x.float()))
    assert "fx_round" not in body(text_of(lambda x: torch.relu(x * 2), x))
    assert "fx_round" in body(text_of(lambda x: torch.relu(x.half() * 2), x.float()))


def test_bools_in_memory_are_bytes_which_the_compiler_makes_vector_code_of() -> None:
    def program(mask: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        centred = torch.where(mask, x, 0.0) - x.mean(1, keepdim=True)
        return (centred > 0) & mask.t()

    mask, x = torch.randn(40, 40) > 0, torch.randn(40, 40)
    module = to_cpp(fx.symbolic_trace(program), (mask, x))
    assert "bool*" not in module.source and "unsigned char* __restrict" in module.source
    assert torch.equal(module(mask, x), program(mask, x))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_an_integer_that_becomes_a_float_again_is_one_however_it_gets_there(
    dtype: torch.dtype,
) -> None:
    """A compiler that sees nothing happen to an integer would leave the float as it was."""

    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        v = x.to(dtype)
        same = (v & v, v | v, v + 0, torch.maximum(v, v), torch.where(x > 1, v, v), v ^ 0, v * 1)
        return tuple(integers.to(torch.float32) for integers in same)

    x = torch.randn(3, 100) * 9
    x[0, :4] = torch.tensor([math.nan, math.inf, -math.inf, 3e19])
    compiled = to_cpp(fx.symbolic_trace(program), (x,))
    for ours, eagers in zip(compiled(x), program(x), strict=True):
        assert torch.equal(ours, eagers)


def test_a_schedule_shows_the_kernel_that_passes_have_rewritten() -> None:
    x = torch.randn(60, 70)
    unrolled = show_schedule(kernel_of(lambda x: torch.stack([x * 2, x + 1]).sum(0), x))
    schedule, rewritten = unrolled.split("of the kernel as it is computed:")
    assert "along rows" in schedule
    assert "reduce_add" not in rewritten
    assert "store out0" in rewritten
    assert "as it is computed" not in show_schedule(kernel_of(lambda x: torch.softmax(x, -1), x))
