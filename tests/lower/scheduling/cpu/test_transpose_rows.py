"""Rows that are turned over: every length, scans, strides, dtypes, NaNs, both directions."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fxkit
from fxkit.lower import to_cpp
from fxkit.lower.scheduling.cpu.transpose_rows import COLUMNS, LONG_ROW, LONG_SCANNED_ROW
from tests.sampling import Sample

PROGRAMS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(-1),
    "amax": lambda x: x.amax(-1),
    "argmin": lambda x: x.argmin(-1),
    "var": lambda x: x.var(-1),
    "softmax": lambda x: x.softmax(-1),
    "norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "cumsum": lambda x: x.cumsum(-1),
    "largest so far": lambda x: x.cummax(-1).values,
    "where the largest was": lambda x: x.cummax(-1).indices,
    "logarithm of a sum": lambda x: x.logcumsumexp(-1),
    "sum from behind": lambda x: x.flip(-1).cumsum(-1).flip(-1),
}

SCANS = (
    "cumsum",
    "largest so far",
    "where the largest was",
    "logarithm of a sum",
    "sum from behind",
)

TOLERANCES = {
    torch.float64: 1e-12,
    torch.float32: 2e-5,
    torch.bfloat16: 2e-2,
    torch.float16: 4e-3,
}

# Less than a block of eight, several of them, one that overlaps; chunks of long rows.
LENGTHS = (2, 3, 7, 8, 9, 16, 31, LONG_SCANNED_ROW - 1, LONG_SCANNED_ROW, 100, LONG_ROW - 1)
LONG_LENGTHS = (LONG_ROW, LONG_ROW + 1, LONG_ROW + COLUMNS - 1)

# The fewest, one more, a tile, one more, and a tile and a half; of long rows, several tiles.
ROWS = (16, 17, 64, 65, 100)


def check(fn: Callable[[Tensor], Tensor], inputs: list[Tensor]) -> str:
    """Compile a program for several inputs, compare its results with eager's, return its text."""

    def program(*inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(fn(x) for x in inputs)

    module = to_cpp(fxkit.capture(program, tuple(inputs)).graph_module, tuple(inputs))
    assert all(region.kernel for region in module.regions)
    for x, found, expected in zip(inputs, module(*inputs), program(*inputs), strict=True):
        assert found.stride() == expected.stride()
        tolerance = TOLERANCES.get(x.dtype, 0)
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    return module.source


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", PROGRAMS)
def test_rows_of_any_length_and_number(name: str, some: Sample) -> None:
    shapes = [(rows, length) for length in LENGTHS[::2] for rows in ROWS]
    shapes += [(rows, length) for length in LENGTHS[1::2] for rows in ROWS[::3]]
    shapes += [(20, length) for length in (LONG_LENGTHS if name in SCANS else ())]
    source = check(PROGRAMS[name], [torch.randn(shape) for shape in some(shapes, 7)])
    assert "fx_turn(p" in source
    assert ("fx_turn_back(x" in source) == (name in (*SCANS, "softmax", "norm"))


@pytest.mark.parametrize("dtype", [*TOLERANCES, torch.int64, torch.uint8, torch.bool])
def test_elements_of_every_type(dtype: torch.dtype, some: Sample) -> None:
    names = ["sum", "amax", "cumsum"]
    names += [] if dtype == torch.bool else ["argmin"]
    names += ["softmax"] if dtype in TOLERANCES else []
    inputs = [torch.randint(0, 9, (70, length)).to(dtype) for length in (3, 10, 100)]
    assert "fx_turn(p" in "".join(check(PROGRAMS[name], inputs) for name in some(names, 2))


def test_rows_that_lie_apart_or_overlap() -> None:
    whole = torch.randn(70, 40)
    views = [whole[:, 3:10], whole[:, ::2].contiguous()[::2, 1:], whole.view(-1).unfold(0, 9, 2)]
    views += [whole.view(7, 10, 40)[:, :, 4:7], whole[1:].flip(0)]
    for name in ("sum", "argmin", "softmax", "cumsum"):
        check(PROGRAMS[name], views)


def test_what_stands_behind_a_row_stays_as_it_is() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        y[:, 2:7] = (x * 2).cumsum(-1)
        return y

    x, y = torch.randn(40, 5), torch.randn(40, 9)
    module = to_cpp(fxkit.capture(program, (x, y.clone())).graph_module, (x, y.clone()))
    torch.testing.assert_close(module(x, y.clone()), program(x, y.clone()))


def test_several_operands_and_one_for_all_rows() -> None:
    def program(x: Tensor, y: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        scores = (x * weight + y).softmax(-1)
        return scores, (scores * scale).sum(-1), (x.flip(-1) - y).amax(-1)

    inputs = torch.randn(50, 11), torch.randn(50, 11), torch.randn(11), torch.randn(50, 1)
    module = to_cpp(fxkit.capture(program, inputs).graph_module, inputs)
    assert "fx_turn(p" in module.source
    torch.testing.assert_close(module(*inputs), program(*inputs))


def test_nans_and_infinities_stay_in_their_rows() -> None:
    x = torch.randn(40, 6)
    x[3, 2], x[17, 5], x[18, 0], x[39, 1] = math.nan, math.inf, -math.inf, math.nan
    x[20] = -math.inf
    for fn in PROGRAMS.values():
        check(fn, [x])


@pytest.mark.parametrize(
    "shape", [(64, 4, torch.float32), (64, 96, torch.float32), (64, 24, torch.float64)]
)
def test_what_is_summed_well_along_its_rows_stays(shape: tuple[int, int, torch.dtype]) -> None:
    rows, length, dtype = shape
    assert "fx_turn(" not in check(PROGRAMS["sum"], [torch.randn(rows, length, dtype=dtype)])


def test_few_rows_are_left_to_vectors_along_them() -> None:
    x = torch.randn(15, 9)
    module = to_cpp(fxkit.capture(PROGRAMS["sum"], (x,)).graph_module, (x,))
    assert "fx_turn(" not in module.source


@pytest.mark.parametrize("length", [7, 300])
def test_threads_share_tiles(length: int) -> None:
    x = torch.randn(5000, length)
    for threads in (1, torch.get_num_threads()):
        torch.set_num_threads(threads)
        check(PROGRAMS["cumsum"], [x])
