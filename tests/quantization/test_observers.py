"""Observers: their ranges, odd values, and merging."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxkit import quantization as q
from fxkit.errors import FxkitError, UnsupportedError
from fxkit.quantization import OBSERVERS, RangeObserver
from fxkit.quantization.affine import parameters_of, quantized_tensor

ONE_RANGE = sorted(OBSERVERS)
BY_CHANNEL = ["min_max", "moving_average"]


def seen_by(name: str, *batches: torch.Tensor, axis: int | None = None) -> RangeObserver:
    observer = OBSERVERS[name](axis=axis)
    for batch in batches:
        observer(batch)
    return observer


def test_the_files_of_the_folder_are_the_observers() -> None:
    assert ONE_RANGE == ["entropy", "min_max", "moving_average", "mse", "percentile"]
    with pytest.raises(FxkitError, match="min_max"):
        OBSERVERS["none"]


@pytest.mark.parametrize("name", ONE_RANGE)
def test_a_range_lies_within_what_was_seen_and_holds_most_of_it(name: str) -> None:
    batches = [torch.randn(64, 100) * 3 + 1 for _ in range(4)]
    found = seen_by(name, *batches).value_range()
    values = torch.cat(batches).double()
    assert values.min() <= found.low and found.high <= values.max()
    inside = (values >= found.low) & (values <= found.high)
    assert inside.double().mean() > 0.98
    assert found.notes == ()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["min_max", "mse", "percentile", "entropy"])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e5])
def test_two_halves_merged_are_the_whole(name: str, scale: float) -> None:
    batches = [torch.randn(50, 8) * scale * 4**index for index in range(4)]
    whole = seen_by(name, *batches).value_range()
    first, second = seen_by(name, *batches[:2]), seen_by(name, *batches[2:])
    first.merge(second)
    assert torch.equal(first.value_range().low, whole.low)
    assert torch.equal(first.value_range().high, whole.high)
    assert first.count == 4 * 50 * 8


@pytest.mark.parametrize("name", ONE_RANGE)
@pytest.mark.parametrize("largest", [3e38, -3e38, 1e300, 1e-40])
def test_ranges_of_very_large_and_very_small_values(name: str, largest: float) -> None:
    values = torch.linspace(-0.5, 0.5, 101).double() * largest
    values[3] = largest
    found = seen_by(name, values).value_range()
    assert found.low.isfinite() and found.high.isfinite()
    assert values.min() <= found.low < found.high <= values.max()


@pytest.mark.parametrize("name", ONE_RANGE)
def test_outliers_that_are_not_finite_are_counted_and_left_out(name: str) -> None:
    values = torch.rand(100)
    values[3], values[4], values[5] = torch.nan, torch.inf, -torch.inf
    found = seen_by(name, values, torch.full((4,), torch.nan)).value_range()
    assert 0 <= found.low <= found.high <= 1
    assert found.notes == ("7 values are not finite",)


@pytest.mark.parametrize("name", ONE_RANGE)
def test_what_saw_nothing_or_only_zeros_says_so(name: str) -> None:
    nothing = seen_by(name, torch.empty(0, 3), torch.tensor([1, 2]))
    assert nothing.value_range().notes == ("no value was seen in calibration",)
    zeros = seen_by(name, torch.zeros(5)).value_range()
    assert zeros.low == zeros.high == 0
    assert zeros.notes == ("all values are 0",)


@pytest.mark.parametrize("name", BY_CHANNEL)
def test_channels_have_ranges_of_their_own(name: str) -> None:
    values = torch.stack([torch.linspace(-k, 2 * k, 7) for k in (1.0, 10.0, 0.1)], 1)
    found = seen_by(name, values[None], axis=2).value_range()
    torch.testing.assert_close(found.low, torch.tensor([-1, -10, -0.1]).double())
    torch.testing.assert_close(found.high, torch.tensor([2, 20, 0.2]).double())
    empty = values.clone()
    empty[:, 1] = torch.nan
    assert seen_by(name, empty, axis=1).value_range().high[1] == 0


@pytest.mark.parametrize("name", sorted({*ONE_RANGE} - {*BY_CHANNEL}))
def test_histograms_have_no_channels(name: str) -> None:
    with pytest.raises(FxkitError, match="got one for each channel"):
        OBSERVERS[name](axis=1)


def test_observers_of_another_kind_are_not_merged() -> None:
    with pytest.raises(FxkitError, match="expected an observer like MinMaxObserver"):
        seen_by("min_max").merge(seen_by("moving_average"))


def test_ranges_against_outliers() -> None:
    values = torch.randn(100_000)
    values[0] = 300.0
    high = {name: float(seen_by(name, values).value_range().high) for name in ONE_RANGE}
    assert high["min_max"] == 300
    assert high["percentile"] < 6
    assert high["entropy"] < 30


@pytest.mark.parametrize("make", [torch.randn, torch.rand, lambda n: F.gelu(torch.randn(n))])
@pytest.mark.parametrize("outlier", [0.0, 8.0, -40.0])
@pytest.mark.parametrize("bits", [4, 8])
def test_no_range_has_less_error_than_that_of_least_squares(
    make: Callable[[int], torch.Tensor], outlier: float, bits: int
) -> None:
    values = torch.cat([make(20_000), torch.tensor([outlier])])
    spec = q.TensorSpec(torch.uint8, 0, 2**bits - 1, "affine")

    def error(low: float, high: float) -> float:
        ends = (torch.tensor(end, dtype=torch.float64) for end in (low, high))
        found = parameters_of(*ends, spec)
        back = (quantized_tensor(values, found, spec).long() - found.zero_point) * found.scale
        return float((back - values).double().square().sum())

    observer = OBSERVERS["mse"](bits=bits)
    observer(values)
    found = observer.value_range()
    best = error(float(found.low), float(found.high))
    least, largest = float(values.min()), float(values.max())
    shares = [1.0, 0.97, 0.9, 0.8, 0.6, 0.4, 0.25]
    tried = [error(least * low, largest * high) for low in shares for high in shares]
    assert best <= 1.03 * min(tried)


def test_least_squares_keep_few_values_whatever_they_are() -> None:
    for values in ([3.0], [-2.0], [0.0, 5.0], [1e-9, -1e-9], [1e30, 1.0], [1e-40]):
        found = seen_by("mse", torch.tensor(values)).value_range()
        low, high = min(0.0, *values), max(0.0, *values)
        ends = float(found.low.clamp(max=0)), float(found.high.clamp(min=0))
        seen = torch.tensor(values).double()
        assert min(0.0, float(seen.min())) <= ends[0] <= ends[1] <= max(0.0, float(seen.max()))
        assert ends[1] - ends[0] >= 0.9 * (high - low)


class SecondLargest(RangeObserver):
    """Keeps the second largest magnitude: one outlier does not count."""

    def __init__(self, bits: int = 8, axis: int | None = None) -> None:
        super().__init__(bits, axis)
        self.largest = torch.zeros(2, dtype=torch.float64)

    def watch(self, values: torch.Tensor, finite: torch.Tensor) -> None:
        self.largest = torch.cat((self.largest, values[finite].abs())).topk(2).values

    def found(self) -> tuple[torch.Tensor, torch.Tensor]:
        return -self.largest[1:], self.largest[1:]

    def merge_state(self, other: RangeObserver) -> None:
        assert isinstance(other, SecondLargest)
        self.largest = torch.cat((self.largest, other.largest)).topk(2).values


def test_a_class_of_ones_own_is_an_observer() -> None:
    data = [(torch.tensor([[1.0, -2.0, 0.5, 50.0]]),)]
    spec = q.int8_static(observer=SecondLargest)
    prepared = q.prepare(nn.Linear(4, 3).eval(), data[0], spec)
    q.calibrate(prepared, data)
    (observer,) = prepared.observers.values()
    assert float(observer.value_range().high) == 2.0
    with pytest.raises(UnsupportedError, match="a name, or a class of RangeObserver"):
        q.TensorSpec(observer=nn.Linear)  # type: ignore[arg-type]


class Given(RangeObserver):
    """Returns what a test wants for a range."""

    result: Any = ()

    def watch(self, values: torch.Tensor, finite: torch.Tensor) -> None:
        values.zero_()  # its own copy

    def found(self) -> Any:
        return self.result


@pytest.mark.parametrize(
    "result",
    [
        (torch.nan, 1.0),
        (-torch.inf, 1.0),
        (1.0, -1.0),
        (torch.zeros(3), torch.ones(3)),
        (torch.zeros(0), torch.ones(0)),
        (1.0,),
        None,
        ("a", "b"),
    ],
    ids=str,
)
def test_what_is_no_range_is_refused(result: Any) -> None:
    kind = type("Odd", (Given,), {"result": result})
    data = [(torch.rand(2, 4),)]
    with pytest.raises(UnsupportedError, match=r"expected Odd\.found to return"):
        q.quantize(nn.Linear(4, 3).eval(), q.int8_static(observer=kind), data)


def test_numbers_and_tensors_of_any_float_type_are_ranges() -> None:
    data = [(torch.rand(2, 4),)]
    for result in ((-1, 2), (torch.tensor(-1.0), torch.tensor([2.0]).half())):
        kind = type("Odd", (Given,), {"result": result})
        prepared = q.prepare(nn.Linear(4, 3).eval(), data[0], q.int8_static(observer=kind))
        q.calibrate(prepared, data)
        (observer,) = prepared.observers.values()
        assert observer.value_range().high == 2 and data[0][0].any()


class TakesNothing(Given):
    def __init__(self) -> None:
        super().__init__()


class CallsNoBase(Given):
    def __init__(self, bits: int = 8, axis: int | None = None) -> None:
        self.mine = bits


class Fails(Given):
    def watch(self, values: torch.Tensor, finite: torch.Tensor) -> None:
        raise ValueError("of mine")


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (TakesNothing, "observer=TakesNothing to be made with bits= and axis="),
        (CallsNoBase, "whose __init__ does not call that of RangeObserver"),
        (Fails, r"Fails\.watch to learn from values, got ValueError: of mine"),
        (RangeObserver, r"RangeObserver\.watch to learn from values, got TypeError"),
    ],
)
def test_observers_that_fail_are_named(kind: type[RangeObserver], told: str) -> None:
    with pytest.raises(FxkitError, match=told):
        q.quantize(nn.Linear(4, 3).eval(), q.int8_static(observer=kind), [(torch.rand(2, 4),)])


def test_an_observer_without_a_merge_says_so() -> None:
    halves = Given(), Given()
    for half in halves:
        half(torch.rand(3))
    with pytest.raises(UnsupportedError, match=r"Given\.merge_state to learn from another"):
        halves[0].merge(halves[1])
