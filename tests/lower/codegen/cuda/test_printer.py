"""The CUDA text of kernels: pure, without headers, laid out as the sizes ask for."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from fxkit.lower.codegen.cuda.nest_printer import CudaNestPrinter, index_type
from fxkit.lower.codegen.cuda.printer import nests_of, print_kernel, print_unit, scratch_bytes
from fxkit.lower.loop_ir.loop_ir import Kernel
from fxkit.lower.loop_ir.loop_nest import ThreadMapping
from fxkit.lower.scheduling.gpu.choose_thread_mapping import choose_mapping, objection
from fxkit.lower.scheduling.gpu.hold_in_registers import held_in_registers
from tests.lower.codegen.cuda.cases import CASES, Program, case, layer_norm, softmax


def kernel_of(program: Program, *args: torch.Tensor) -> Kernel:
    return case(program, args).kernel


def mapping_of(program: Program, *args: torch.Tensor) -> ThreadMapping:
    mapping = nests_of(kernel_of(program, *args))[0].mapping
    assert mapping is not None
    return mapping


def rows(
    program: Program, length: int, count: int = 2, dtype: Any = torch.float32
) -> ThreadMapping:
    return mapping_of(program, torch.zeros(count, length, dtype=dtype))


def test_a_chain_as_text() -> None:
    text = print_kernel(
        kernel_of(lambda x, b: torch.relu(x + b) * 2, *CASES["broadcast"][1]()), "k"
    )
    assert (
        text[: text.index('extern "C" __global__ void __launch_bounds__(128, 1)\nk_gpu_loose')]
        == """\
extern "C" __global__ void __launch_bounds__(128, 1)
k_gpu(const float* __restrict__ in0, const float* __restrict__ in1, float* __restrict__ out0) {
  const int block = (int)blockIdx.x;
  const int thread = (int)threadIdx.x;
  const int tile = block * 128 + thread;
  if (tile < 90) {
    const int i0 = tile / 10;
    const int j_tile = tile % 10;
    const int j = j_tile * 4;
    float m0[4];
    fx_load(m0, in0 + i0 * 40 + j);
    float m1[4];
    fx_load(m1, in1 + j);
    float o0[4];
    #pragma unroll
    for (int l = 0; l < 4; ++l) {
      const float v0 = m0[l];
      const float v1 = m1[l];
      const float v2 = v0 + v1;
      const float v4 = fx_max(v2, 0.0f);
      const float v6 = v4 * 2.0f;
      o0[l] = v6;
    }
    fx_store(out0 + i0 * 40 + j, o0);
  }
}

"""
    )


def test_a_launcher_looks_at_the_alignment_of_all_buffers() -> None:
    text = print_kernel(kernel_of(lambda x: x * 2 + 1, torch.zeros(64)), "k")
    assert (
        text[text.index('extern "C" int') :]
        == """\
extern "C" int k(void* const* buffers, void* scratch, void* stream, int device) {
  FX_DEVICE(device);
  if ((((unsigned long)buffers[0] | (unsigned long)buffers[1]) & 15) == 0) {
    FX_LAUNCH(k_gpu, 1, 1, 128, stream, (const float*)buffers[0], (float*)buffers[1]);
  } else {
    FX_LAUNCH(k_gpu_loose, 1, 1, 128, stream, (const float*)buffers[0], (float*)buffers[1]);
  }
  return FX_ERROR();
}
"""
    )


@pytest.mark.parametrize("name", ["softmax_long", "gelu_chain_bf16", "mean_and_max_down"])
def test_text_is_the_same_each_time_and_includes_nothing(name: str) -> None:
    program, made = CASES[name]
    kernel = kernel_of(program, *made())
    text = print_unit({"k": kernel})
    assert text == print_unit({"k": kernel_of(program, *made())})
    assert "#include" not in text
    assert "__builtin" not in text


def test_rows_get_as_many_threads_as_their_length_asks_for() -> None:
    assert [rows(softmax, n).group for n in (4, 16, 64, 128, 1000, 1024)] == [1, 4, 16, 32, 32, 32]
    assert [rows(softmax, n).group for n in (2048, 4096, 16384, 32768)] == [128, 256, 1024, 1024]
    assert rows(softmax, 40_000).items == 0
    assert rows(softmax, 32768).items == 8
    assert rows(softmax, 16384, dtype=torch.float64).items == 4
    assert rows(softmax, 16388, dtype=torch.float64).items == 0


def test_long_rows_are_shared_where_there_are_few() -> None:
    assert rows(softmax, 80_000, count=1).splits == 10
    kernel = kernel_of(softmax, torch.zeros(1, 80_000))
    assert scratch_bytes(kernel) == 48 + 80  # a float and a double for each of ten blocks
    two = kernel_of(softmax, torch.zeros(2, 80_000))
    many = Kernel((1000, 80_000), 1, two.buffers, two.body, two.stores)
    assert choose_mapping(many).splits == 1
    assert scratch_bytes(many) == 0


def test_what_is_read_once_is_held_in_registers() -> None:
    kernel = kernel_of(softmax, torch.zeros(4, 512))
    held = held_in_registers(kernel, choose_mapping(kernel))
    assert held.spans == {0: (0, 1), 3: (1, 2)}
    text = print_kernel(kernel, "k")
    assert text.count("fx_load(") == 1
    assert text.count("fx_exp(") == 2  # one of them where memory is not aligned


def test_no_more_is_held_than_half_of_the_registers() -> None:
    for length in (2048, 8192, 32_768):
        args = (torch.zeros(2, length), torch.zeros(length), torch.zeros(length))
        kernel = kernel_of(layer_norm, *args)
        mapping = choose_mapping(kernel)
        held = held_in_registers(kernel, mapping)
        assert held.values
        at_once = max(
            sum(first <= border < last for first, last in held.spans.values())
            for border in range(3)
        )
        assert at_once * mapping.items * mapping.width <= 65536 // mapping.threads // 2


def test_widths_follow_the_smallest_elements_that_lie_together() -> None:
    def width(program: Program, *args: torch.Tensor) -> int:
        return mapping_of(program, *args).width

    assert width(lambda x: x * 2 + 1, torch.zeros(64)) == 4
    assert width(lambda x: x * 2 + 1, torch.zeros(64, dtype=torch.bfloat16)) == 8
    assert width(lambda x: x * 2 + 1, torch.zeros(63)) == 4  # the last ones are counted
    assert width(lambda x, b: x * b + 1, torch.zeros(8, 63), torch.zeros(63)) == 1
    assert width(lambda x: x[:, 1:] * 2 + 1, torch.zeros(8, 65)) == 1
    assert width(lambda x, y: x[:, ::2] * y + 1, torch.zeros(8, 64), torch.zeros(8, 32)) == 4


def test_parts_of_a_join_are_read_whole_where_they_begin_and_end_at_a_width() -> None:
    def text(name: str) -> str:
        program, made = CASES[name]
        printed = print_kernel(kernel_of(program, *made()), "k")
        return printed[: printed.index("k_gpu_loose")]

    even, uneven = text("joined"), text("joined_oddly")
    assert re.findall(r"if \((.*)\) fx_load\(m\d+, (in\d)", even) == [
        ("((j) < ((int)8L))", "in0"),
        ("(!((j) < ((int)8L)))", "in1"),
    ]
    assert "fx_load" not in uneven
    assert "fx_store" in uneven


def test_reductions_down_columns_run_over_neighbouring_rows() -> None:
    x = torch.zeros(600, 256)
    assert mapping_of(lambda x: x.sum(0), x).is_across
    assert not mapping_of(lambda x: x.sum(1), x).is_across
    assert not mapping_of(lambda x: x.sum(0), x.t()).is_across


def test_addresses_are_wide_only_where_they_must_be() -> None:
    kernel = kernel_of(lambda x: x * 2 + 1, torch.zeros(64))
    assert index_type(kernel) == "int"
    large = Kernel((2**31,), 0, kernel.buffers, kernel.body, kernel.stores)
    assert index_type(large) == "long"
    assert "const long j = j_tile * 4;" in print_kernel(large, "k")


def test_a_launch_has_no_more_blocks_than_a_grid_takes() -> None:
    kernel = kernel_of(lambda x: x * 2 + 1, torch.zeros(64))
    large = Kernel((2**33,), 0, kernel.buffers, kernel.body, kernel.stores)
    (launch,) = CudaNestPrinter(nests_of(large)[0], "k").launches()
    assert launch.across == 65536


def test_nothing_is_launched_for_no_elements() -> None:
    kernel = kernel_of(lambda x: x * 2 + 1, torch.zeros(64))
    empty = Kernel((0,), 0, kernel.buffers, kernel.body, kernel.stores)
    assert "FX_LAUNCH(k" not in print_kernel(empty, "k")


def test_what_is_not_printed_is_named() -> None:
    assert objection(kernel_of(softmax, torch.zeros(4, 8))) is None
    scan = kernel_of(lambda x: torch.cumsum(x * 2, -1), torch.zeros(4, 80))
    assert objection(scan) is None
    long = Kernel((4, 80_000), 1, scan.buffers, scan.body, scan.stores)
    assert "scans few long rows" in str(objection(long))
    assert objection(Kernel((400, 80_000), 1, scan.buffers, scan.body, scan.stores)) is None
    again = kernel_of(lambda x: torch.cumsum(x, -1).softmax(-1), torch.zeros(4, 80))
    assert "scan a row more than once" in str(objection(again))
    logs = kernel_of(lambda x: torch.logcumsumexp(x * 2, -1), torch.zeros(4, 80))
    assert "reduces in a way" in str(objection(logs))
    rows = kernel_of(softmax, torch.zeros(4, 8))
    many = Kernel((2**31, 8), 1, rows.buffers, rows.body, rows.stores)
    assert "more rows than a grid has blocks" in str(objection(many))
