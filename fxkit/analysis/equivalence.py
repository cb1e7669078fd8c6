"""Whether two programs do the same, judged against float64.

An error is that of a whole tensor: the largest difference from the float64 result, over the largest
float64 value. Ours may be twice eager's.

Of one call with a few numbers the error is a matter of luck: eager's may just be small. So where
ours is above twice eager's, but not by much, both are called again with inputs that are a little
different, and the means of their errors decide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from fxkit.analysis.observation import Observation, clone_inputs, overlaps, real_numbers
from fxkit.errors import NumericsError, UnsupportedError
from fxkit.ir.types import TensorType
from fxkit.torch_adapters import pytree

# How much worse than eager's, against float64, an error may be.
ERROR_RATIO = 2.0

# An error that is so many times what it may be is not there by chance.
_NO_CHANCE = 4.0

# How often programs are called again, and by what share at most their inputs differ then.
_DRAWS = 16
_SHARE = 2.0**-6


@dataclass(frozen=True)
class Comparison:
    """How far two results are from float64.

    Attributes:
        error: Largest absolute error of the result, over the largest finite float64 value.
        eager_error: The same for what it is compared with.
    """

    error: float
    eager_error: float

    def is_within(self, dtype: torch.dtype) -> bool:
        """Tell whether the error is at most twice eager's, or as small as can be measured.

        That is two units in the last place; for float64, which is its own reference here, 64.
        """
        return self.error <= self.allowed(dtype)

    def allowed(self, dtype: torch.dtype) -> float:
        """Return the error that the result may have."""
        units = 64 if dtype == torch.float64 else 2
        floor = units * torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
        return max(ERROR_RATIO * self.eager_error, floor)


def compare(got: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor) -> Comparison:
    """Measure two tensors against a float64 reference of the same shape."""
    scale = exact[exact.isfinite()].abs().max().item() if exact.isfinite().any() else 1.0
    scale = scale or 1.0

    def error(value: torch.Tensor) -> float:
        value = value.double()
        same = (value == exact) | (value.isnan() & exact.isnan())
        difference = torch.where(same, 0.0, (value - exact).abs()).nan_to_num(nan=torch.inf)
        return (difference.max().item() if difference.numel() else 0.0) / scale

    return Comparison(error(got), error(eager))


def assert_equivalent(
    before: Callable[..., Any],
    after: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    exact: bool = False,
    gradients: bool = True,
) -> None:
    """Check that two programs do the same to the same inputs.

    Compared are structure, shapes, dtypes, strides (but of empty tensors, where they mean nothing),
    values, what happens to the arguments, and the gradients of the inputs and parameters that
    require them. A program that brings tensors which the other has not takes parameters as
    constants, and theirs are not compared.

    Args:
        before: The program to be equal to.
        after: The program to check.
        args: Inputs; each program gets its own copy.
        kwargs: Keyword inputs.
        exact: Require equal numbers; else an error against float64 of at most twice `before`'s.
        gradients: Compare gradients too.

    Raises:
        NumericsError: On the first difference.
        UnsupportedError: One of the two can't be called.
    """
    for program in (before, after):
        _check_callable(program)
    inputs = (args, dict(kwargs or {}))
    expected, got = (Observation(program, inputs, gradients) for program in (before, after))
    truth = None if exact else Observation(before, inputs, gradients, run_wide=True)
    again = None if exact else lambda: draws(before, after, inputs, gradients)
    assert_same(expected, got, truth, again)


def _check_callable(program: Any) -> None:
    if isinstance(program, torch.export.ExportedProgram) or not callable(program):
        raise UnsupportedError(
            f"expected two programs that can be called, got {type(program).__name__}",
            hint="give functions, modules or captured programs; of an exported one its .module()",
        )


# What is called, what is checked, and what is called in float64.
Observed = tuple[Observation, Observation, Observation]


def assert_same(
    expected: Observation,
    got: Observation,
    truth: Observation | None,
    again: Callable[[], Iterator[Observed]] | None = None,
) -> None:
    """Check that two observed calls of programs did the same; see `assert_equivalent`.

    Args:
        expected: What has to come out.
        got: What came out.
        truth: The same in float64; None to require equal numbers.
        again: Calls the programs with other inputs, and gives each time the same three; None where
            that can't be done.

    Raises:
        NumericsError: On the first difference.
    """
    wrong: list[_Judged] = []
    try:
        wrong.extend(one for one in _judged(expected, got, truth) if not one.is_fine)
    except NumericsError:
        if not wrong:
            raise
        again = None
    if wrong and not (again is not None and _is_chance(wrong, again)):
        raise NumericsError(wrong[0].message)


def draws(
    before: Callable[..., Any], after: Callable[..., Any], inputs: Any, gradients: bool
) -> Iterator[Observed]:
    """Call two programs, and the first in float64, with inputs that differ a little each time.

    Args:
        before: The program to be equal to.
        after: The program to check.
        inputs: `(args, kwargs)`.
        gradients: Whether gradients are taken.
    """
    for number in range(_DRAWS):
        drawn = _shaken(inputs, number)
        yield (
            Observation(before, drawn, gradients),
            Observation(after, drawn, gradients),
            Observation(before, drawn, gradients, run_wide=True),
        )


def _shaken(inputs: Any, number: int) -> Any:
    """Return copies of inputs in which every floating-point number is a little larger or smaller.

    What is zero, infinite or no number stays so.
    """
    generator = torch.Generator().manual_seed(number)
    inputs = clone_inputs(inputs)
    with torch.no_grad():
        for tensor in pytree.tree_leaves(inputs):
            if isinstance(tensor, torch.Tensor) and _can_be_shaken(tensor):
                noise = torch.rand(tensor.shape, generator=generator, dtype=torch.float64)
                factor = 1 + _SHARE * (2 * noise - 1)
                tensor.copy_(tensor * factor.to(tensor.device, tensor.dtype))
    return inputs


def _can_be_shaken(tensor: torch.Tensor) -> bool:
    is_dense = tensor.layout == torch.strided and not overlaps(tensor)
    return is_dense and tensor.dtype.is_floating_point


def _is_chance(wrong: list[_Judged], again: Callable[[], Iterator[Observed]]) -> bool:
    """Tell whether errors are above their limits in one call, but not in the mean of many."""
    if any(one.compared.error > _NO_CHANCE * one.allowed for one in wrong):
        return False
    found: dict[str, list[_Judged]] = {}
    try:
        for observed in again():
            for one in _judged(*observed):
                found.setdefault(one.name, []).append(one)
    except Exception:  # programs may refuse other inputs: what was found holds
        return False
    return all(_mean(several).is_fine for several in found.values())


def _mean(several: list[_Judged]) -> _Judged:
    pairs = [(one.compared.error, one.compared.eager_error) for one in several]
    error, eager_error = (sum(errors) / len(several) for errors in zip(*pairs, strict=True))
    return replace(several[0], compared=Comparison(error, eager_error))


@dataclass(frozen=True)
class _Judged:
    """How far one result, or gradient, is from float64.

    Attributes:
        name: What it is.
        compared: Its error and eager's.
        dtype: Its dtype.
        unit: In what errors are told, if not in its own largest value.
        slack: The error that it may have in any case.
    """

    name: str
    compared: Comparison
    dtype: torch.dtype
    unit: str = ""
    slack: float = 0.0

    @property
    def allowed(self) -> float:
        return max(self.slack, self.compared.allowed(self.dtype))

    @property
    def is_fine(self) -> bool:
        return self.compared.error <= self.allowed

    @property
    def message(self) -> str:
        error = self.compared.error
        if self.unit:
            return (
                f"expected {self.name} with an error of at most {self.allowed:.3g} of "
                f"{self.unit}, got {error:.3g}"
            )
        return (
            f"expected {self.name} with an error of at most twice "
            f"{self.compared.eager_error:.3g}, got {error:.3g}, against float64"
        )


def _judged(
    expected: Observation, got: Observation, truth: Observation | None
) -> Iterator[_Judged]:
    """Yield how far results are from float64, where numbers may differ at all.

    Raises:
        NumericsError: Where they may not, or anything else differs.
    """
    for part in ("outputs", "arguments", "gradients"):
        wanted, found = getattr(expected, part), getattr(got, part)
        exactly = wanted if truth is None else getattr(truth, part)
        yield from _judged_trees(part, wanted, found, exactly, truth is None)
    if got.state <= expected.state:
        yield from _judged_parameters(expected, got, truth)


def _judged_parameters(
    expected: Observation, got: Observation, truth: Observation | None
) -> Iterator[_Judged]:
    """Compare the gradients of parameters that both programs read, as one long vector.

    Alone, one may be nothing but rounding: that of a bias of attention's keys is zero. An exact
    program may sum over the uses of a value in another order, so it gets the slack of float64.
    """
    names = [name for name in expected.parameters if name in got.parameters]
    wants, have = ([o.parameters[name] for name in names] for o in (expected, got))
    exact: list[Any] = wants if truth is None else [truth.parameters.get(name) for name in names]
    if not names or not all(isinstance(t, torch.Tensor) for t in (*wants, *exact)):
        return
    scale = max((_largest(t) for t in exact), default=0.0) or 1.0
    for name, want, found, exactly in zip(names, wants, have, exact, strict=True):
        if not isinstance(found, torch.Tensor) or want.shape != found.shape:
            raise NumericsError(f"expected a gradient of {name}, got {found!r}")
        own = _largest(exactly) or 1.0
        compared = compare(
            real_numbers(found.detach()),
            real_numbers(want.detach()),
            real_numbers(exactly.detach()).double(),
        )
        share = own / scale
        scaled = Comparison(compared.error * share, compared.eager_error * share)
        slack = 64 * torch.finfo(want.dtype).eps if truth is None else 0.0
        unit = "the largest gradient"
        yield _Judged(f"the gradient of {name}", scaled, want.dtype, unit, slack)


def _largest(tensor: Any) -> float:
    """Return the largest finite magnitude, or zero."""
    if not isinstance(tensor, torch.Tensor):
        return 0.0
    finite = real_numbers(tensor.detach())
    finite = finite[finite.isfinite()]
    return finite.abs().max().item() if finite.numel() else 0.0


def _judged_trees(part: str, expected: Any, got: Any, truth: Any, exact: bool) -> Iterator[_Judged]:
    expected_leaves, expected_spec = pytree.tree_flatten(expected)
    got_leaves, got_spec = pytree.tree_flatten(got)
    if expected_spec != got_spec:
        raise NumericsError(f"expected {part} of the form {expected_spec}, got {got_spec}")
    for index, (e, g, t) in enumerate(
        zip(expected_leaves, got_leaves, pytree.tree_leaves(truth), strict=True)
    ):
        judged = _judged_leaf(f"{part}[{index}]", e, g, t, exact)
        if judged is not None:
            yield judged


def _judged_leaf(name: str, expected: Any, got: Any, truth: Any, exact: bool) -> _Judged | None:
    if not isinstance(expected, torch.Tensor) or not isinstance(got, torch.Tensor):
        same = type(expected) is type(got) and (expected == got or expected != expected)
        if not same:
            raise NumericsError(f"expected {name} to be {expected!r}, got {got!r}")
        return None
    want, have = TensorType.of(expected), TensorType.of(got)
    # Autograd lays gradients out as it likes, and what is empty lies nowhere.
    if name.startswith("gradients") or not want.numel:
        have = replace(have, stride=want.stride)
    if want != have:
        raise NumericsError(
            f"expected {name} of type {want} stride {want.stride} requires_grad "
            f"{want.requires_grad}, got {have} stride {have.stride} requires_grad "
            f"{have.requires_grad}"
        )
    expected, got, truth = (real_numbers(t.detach()) for t in (expected, got, truth))
    if exact or not expected.dtype.is_floating_point:
        if not torch.equal(_without_nan(expected), _without_nan(got)) or not (
            torch.equal(expected.isnan(), got.isnan())
        ):
            raise NumericsError(f"expected {name} to equal {_short(expected)}, got {_short(got)}")
        if name.startswith("outputs") and _zeros_differ(expected, got):
            raise NumericsError(
                f"expected {name} to equal in the signs of its zeros too, got others"
            )
        return None
    return _Judged(name, compare(got, expected, truth.double()), expected.dtype)


def _without_nan(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.nan_to_num(nan=1.25, posinf=torch.inf, neginf=-torch.inf)


def _zeros_differ(expected: torch.Tensor, got: torch.Tensor) -> bool:
    zeros = expected == 0
    return not torch.equal(expected[zeros].signbit(), got[zeros].signbit())


def _short(tensor: torch.Tensor) -> str:
    return f"{tensor.flatten()[:6].tolist()}{'...' if tensor.numel() > 6 else ''}"
