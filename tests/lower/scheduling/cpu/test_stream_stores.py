"""Large results, written past the caches: the same bits as without, and only where it pays."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fxkit
from fxkit.lower import CompiledModule, to_cpp
from fxkit.lower.autotuning import non_temporal_threshold, times
from fxkit.lower.building.build import build
from tests.lower.kernels import ALWAYS, text_of
from tests.sampling import one_in

NEVER = (1 << 63) - 1


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))
    values.view(-1)[:6] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-40])
    return values.to(dtype) if dtype.is_floating_point else (values.nan_to_num() * 9).to(dtype)


def stream_from(compiled: CompiledModule, least: int) -> None:
    """Let a module write past the caches what has so many bytes."""
    library = build(compiled.source).handle
    ctypes.c_long.in_dll(library, "fx_least_streamed").value = least


def check(program: Callable[..., Any], *args: Tensor) -> None:
    """Compare what is streamed with what is not, bit by bit, and that with eager."""
    compiled = to_cpp(fxkit.symbolic_trace(program), args, policy=ALWAYS)
    assert re.search(r"if \(is_streamed.*\) fx_stream(_few)?\(", compiled.source)
    found = []
    for least in (NEVER, 0):
        stream_from(compiled, least)
        with torch.no_grad():
            found.append(compiled(*args))
    assert compiled.report().calls == 2
    plain, streamed = (it if isinstance(it, tuple) else (it,) for it in found)
    eager = program(*args)
    for one, other, expected in zip(
        plain, streamed, eager if isinstance(eager, tuple) else (eager,), strict=True
    ):
        assert torch.equal(_bits(one), _bits(other))
        torch.testing.assert_close(other, expected, rtol=1e-5, atol=1e-6, equal_nan=True)


def _bits(tensor: Tensor) -> Tensor:
    kinds = {torch.float32: torch.int32, torch.float64: torch.int64}
    return tensor.view(kinds.get(tensor.dtype, tensor.dtype))


def scaled_sum(x: Tensor, y: Tensor) -> Tensor:
    return x * 2 + y


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(1024, 1025), (1_048_577,), (3, 5, 70_001)])
def test_elements_in_order(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    check(scaled_sum, randn(*shape, dtype=dtype), randn(*shape, dtype=dtype))


def test_elements_of_one_byte() -> None:
    check(lambda x, y: x > y, randn(2049, 2049), randn(2049, 2049))


def test_several_results() -> None:
    check(lambda x, y: (x + y, x * y, x > y), randn(1030, 1030), randn(1030, 1030))


def test_rows_that_are_reduced_first() -> None:
    x, y = randn(1100, 1024).nan_to_num(0, 0, 0), randn(1024)
    check(lambda x: torch.softmax(x, -1), x)
    check(lambda x, y: F.layer_norm(x, (1024,), y), x, y)


def test_rows_put_together_of_pieces() -> None:
    x, y = randn(1100, 512), randn(1100, 528)
    check(lambda x, y: torch.cat([x * 2, y + 1], 1), x, y)
    x, y = randn(1100, 500), randn(1100, 540)
    check(lambda x, y: torch.cat([x * 2, y + 1], 1), x, y)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("width", [254, 1022, 2014])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_whose_pieces_begin_within_a_line(width: int, dtype: torch.dtype) -> None:
    x = randn((1 << 21) // width, width, dtype=dtype)
    check(lambda x: F.pad(x, (1, 1)) * 0.5, x)
    check(lambda x: (F.pad(x, (7, -5)) * 0.5, x), x)


def test_rotated_halves() -> None:
    def rotate(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return torch.cat((-second, first), -1) + x * 2

    check(rotate, randn(8, 16, 160, 64))


@pytest.mark.parametrize(
    ("width", "dtype"), one_in(3, [16, 48, 64, 128], [torch.float32, torch.float64, torch.int16])
)
def test_short_rows_that_lie_apart(width: int, dtype: torch.dtype) -> None:
    if width * dtype.itemsize % 64:
        pytest.skip("its rows are no whole lines")
    length = (1 << 23) // (12 * width * dtype.itemsize) + 5
    x, bias = randn(length, 12, width, dtype=dtype), randn(width, dtype=dtype)
    check(lambda x, y: (x + y).transpose(0, 1).contiguous(), x, bias)
    check(lambda x, y: x.transpose(0, 1) * y, x[:, :, : width // 2 * 2], randn(width, dtype=dtype))
    table = randn(length, width, dtype=dtype)
    check(lambda x, y: x.transpose(0, 1) * y, x, table)


def test_short_rows_of_which_many_are_streamed_to_no_line() -> None:
    x, y = randn(12, 9000, 32), randn(9000, 12, 32)

    def program(out: Tensor, y: Tensor) -> Tensor:
        return out.copy_(y.transpose(0, 1) * 2)

    compiled = to_cpp(fxkit.symbolic_trace(program), (x, y), policy=ALWAYS)
    memory = torch.empty(x.numel() + 3)
    for least in (NEVER, 0):
        stream_from(compiled, least)
        out = memory[3:].view(x.shape)  # lines are crossed
        compiled(out, y)
        assert torch.equal(_bits(out), _bits(y.transpose(0, 1) * 2))


def test_rows_across_memory() -> None:
    check(lambda x, y: y + x.t(), randn(1040, 1030), randn(1030, 1040))
    check(lambda x: (x + 1).view(8, 512, 3, 256).transpose(1, 2).contiguous(), randn(8, 512, 768))


def test_gradients_with_sums_over_rows() -> None:
    x, weight = randn(1100, 1024).nan_to_num(0, 0, 0), randn(1024).nan_to_num(0, 0, 0)
    given = randn(1100, 1024).nan_to_num(0, 0, 0)

    def gradients(x: Tensor, weight: Tensor, given: Tensor) -> tuple[Tensor, ...]:
        mean, size = x.mean(-1, keepdim=True), x.shape[-1]
        scale = ((x - mean).square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        normal, inner = (x - mean) * scale, given * weight
        rest = inner.sum(-1, keepdim=True) + normal * (inner * normal).sum(-1, keepdim=True)
        return scale * (inner - rest / size), (given * normal).sum(0)

    compiled = to_cpp(fxkit.symbolic_trace(gradients), (x, weight, given), policy=ALWAYS)
    expected = gradients(x, weight, given)
    for least in (NEVER, 0):
        stream_from(compiled, least)
        for found, eager in zip(compiled(x, weight, given), expected, strict=True):
            torch.testing.assert_close(found, eager, rtol=1e-4, atol=1e-4)


def test_a_check_that_fails_is_eagers_error() -> None:
    table, rows = randn(100, 1024), torch.arange(1100) % 100

    def program(rows: Tensor, table: Tensor) -> Tensor:
        return F.embedding(rows, table) * 2

    check(program, rows, table)
    compiled = to_cpp(fxkit.symbolic_trace(program), (rows, table), policy=ALWAYS)
    with pytest.raises(IndexError):
        compiled(rows + 1, table)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_any_number_of_threads(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check(scaled_sum, randn(1030, 1030), randn(1030, 1030))
    finally:
        torch.set_num_threads(before)


def test_only_large_results_of_short_computations_are_streamed() -> None:
    def is_streamed(program: Callable[..., Any], *shape: int) -> bool:
        return "fx_stream(" in text_of(program, torch.empty(*shape))

    assert is_streamed(lambda x: x + 1, 1024, 1024)
    assert is_streamed(lambda x: F.silu(x) + 1, 1024, 1024)
    assert not is_streamed(lambda x: x + 1, 1024, 1023)
    assert not is_streamed(lambda x: torch.sin(x) + 1, 1024, 1024)
    assert not is_streamed(lambda x: torch.log(torch.sinh(x)), 1024, 1024)
    assert not is_streamed(lambda x: x.sum(-1), 4096, 1024)
    turned, x = torch.empty(8, 512, 12, 64), torch.empty(8, 12, 512, 64)
    assert "fx_stream(" in text_of(lambda x, y: x + y, x, x)
    text = text_of(lambda x, y: x + y.transpose(1, 2), x, turned)  # its rows are asked for
    assert "fx_stream_few(&" in text
    assert "FX_ASK(p1 + k + 12288)" in text
    short = torch.empty(250, 5, 5, 5, 5, 32)  # no axis is long
    assert "fx_stream" not in text_of(lambda x: x + x.permute(0, 4, 3, 2, 1, 5), short)
    assert not is_streamed(lambda x: torch.softmax(x, -1), 4096, 1023)


def test_long_computations_are_streamed_where_lanes_make_them_short() -> None:
    x = torch.empty(1024, 1024)
    for program in (lambda x: F.gelu(x) + 1, lambda x: torch.exp(torch.sigmoid(x))):
        assert "is_streamed = FX_WIDE > 1 && " in text_of(program, x)
    assert "is_streamed = FX_WIDE" not in text_of(lambda x: F.silu(x) + 1, x)


def test_pairs_of_bfloat16_are_streamed_in_lanes_alone() -> None:
    x = torch.empty(2048, 2048, dtype=torch.bfloat16)
    for program in (lambda x: torch.softmax(x, -1), lambda x: x * 2 + 1):
        text = text_of(program, x)
        assert "is_streamed = FX_WIDE > 1 && " in text
        assert ", is_past" in text
    assert "is_streamed" not in text_of(
        lambda x: F.silu(x), x
    )  # takes longer to compute than to write
    assert "is_streamed" not in text_of(lambda x: x * 2, x[:, :2047])


def test_a_machine_is_asked_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[int] = []

    def measured(library: ctypes.CDLL, size: int) -> tuple[float, float]:
        asked.append(size)
        return (1.0, 2.0) if size > 1 << 23 else (1.0, 1.02)

    monkeypatch.setattr(non_temporal_threshold, "_measured", measured)
    monkeypatch.setattr(
        non_temporal_threshold, "times_path", lambda kind, texts: tmp_path / "times.json"
    )
    shapes = [(1024, 1024), (1100, 1024), (8192, 1024), (16384, 1024)]
    least = []
    for rows, columns in shapes:
        compiled = to_cpp(
            fxkit.symbolic_trace(lambda x: x - 3), (torch.empty(rows, columns),), policy=ALWAYS
        )
        library = build(compiled.source).handle
        least.append(ctypes.c_long.in_dll(library, "fx_least_streamed").value)
    assert asked == [1 << 22, 1 << 25]
    assert least == [NEVER, NEVER, 1 << 25, 1 << 26]
    times._known_in.cache_clear()
    assert non_temporal_threshold._pays(library, 1 << 25) and not non_temporal_threshold._pays(
        library, 1 << 22
    )
    assert len(asked) == 2


def test_what_is_measured_is_two_times() -> None:
    compiled = to_cpp(fxkit.symbolic_trace(scaled_sum), (randn(1100, 1024),) * 2, policy=ALWAYS)
    streamed, plain = non_temporal_threshold._measured(build(compiled.source).handle, 1 << 22)
    assert 0 < streamed < 10 and 0 < plain < 10


def test_without_memory_to_measure_in_nothing_is_streamed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def measured(library: ctypes.CDLL, size: int) -> tuple[float, float]:
        raise MemoryError

    monkeypatch.setattr(non_temporal_threshold, "_measured", measured)
    monkeypatch.setattr(
        non_temporal_threshold, "times_path", lambda kind, texts: tmp_path / "times.json"
    )
    assert not non_temporal_threshold._pays(ctypes.CDLL(None), 1 << 22)


def test_what_is_read_counts_as_it_takes_room_in_the_caches() -> None:
    x, row = torch.empty(2048, 1024), torch.empty(1024)
    result, small = x.numel() * 4, row.numel() * 4

    def asked(program: Callable[..., Any], *args: Tensor) -> int:
        (found,) = re.findall(r"= (\d+) >= fx_least_streamed", text_of(program, *args))
        return int(found)

    assert asked(lambda x: x - 3, x) == result
    assert asked(lambda x, y: x - y, x, x.clone()) == result * 3 // 2
    assert asked(lambda x: x * x - 3, x) == result
    assert asked(lambda x, y: x - y, x, row) == (2 * result + small) // 2
    assert asked(lambda y: y - torch.arange(2048)[:, None], row) == result
