"""torch's own pointwise operators, written again as functions of scalars, pass torch's samples.

Values, dtypes, promotion and broadcasting are held to torch's on all samples of torch's table of
operators (OpInfo); so are gradients, where torch has them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import fxkit
from fxkit.authoring.operators.elementwise import ElementwiseOperator
from tests import opinfos
from tests.authoring.torch_definitions import DEFINITIONS
from tests.lower.kernels import compile_all
from tests.sampling import Sample, runs_every_case

DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
          torch.bfloat16, torch.float16, torch.float32, torch.float64)  # fmt: skip

SAMPLES = 2  # of each dtype; and as many of those that torch compares with NumPy
SAMPLES_IN_SWEEPS = 5
MOST_ELEMENTS = 20_000  # of what is compared with NumPy, where no sweeps run; a few have a million

# Arguments of torch's that say which operator it is, or where the result is written.
CHOICES = {"inplace", "rounding_mode", "approximate", "reduction"}

LOSSES = {name for name in DEFINITIONS if name.endswith("_loss")}

# In Python bools are integers in arithmetic; in torch these keep them.
KEEPS_BOOLS = {
    "abs", "add", "__radd__", "addcmul", "mul", "__rmul__", "sign", "sgn", "square", "sub", "fmod",
    "remainder", "pow", "__rpow__", "floor_divide", "heaviside", "positive", "floor", "ceil",
    "trunc", "lerp", "ldexp", "conj_physical", "nn.functional.threshold", "masked_fill",
}  # fmt: skip


# Which torch computes of integers by another formula: in integers, with bounds that are rounded.
ONLY_FLOATS = {"nan_to_num", "nn.functional.hardtanh", "div.trunc_rounding"}


@dataclass(frozen=True)
class Call:
    """A call of an operator of torch, and that of the definition."""

    expected: torch.Tensor
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    in_float64: Callable[[], torch.Tensor]
    leaves: list[torch.Tensor]


@functools.cache
def table() -> dict[str, Any]:
    return {f"{i.name}.{i.variant_test_name}".rstrip("."): i for i in opinfos.table().op_db}


@functools.cache
def operator_of(name: str) -> ElementwiseOperator:
    spelled = f"as_{name.replace('.', '_')}"  # `rsub` and `__rsub__` are two
    return fxkit.operator(namespace="torch_table", name=spelled)(DEFINITIONS[name])


def given(name: str, sample: Any, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return what the definition takes of a sample."""
    args = (sample.input, *sample.args)
    if name == "where":
        args = (args[1], args[0], args[2])
    kwargs = {key: value for key, value in sample.kwargs.items() if key not in CHOICES}
    if name == "nn.functional.prelu":
        lead = (-1, *[1] * max(args[0].ndim - 2, 0)) if args[0].ndim else ()
        weight = args[1] if len(args) > 1 else kwargs.pop("weight")
        args = (args[0], weight.reshape(lead))
    if name == "nan_to_num":
        largest = torch.finfo(dtype).max if dtype.is_floating_point else 0.0
        names = ("nan", "posinf", "neginf")
        kwargs = dict(zip(names, args[1:], strict=False)) | kwargs
        usual = dict(zip(names, (0.0, largest, -largest), strict=True))
        kwargs = {n: usual[n] if kwargs.get(n) is None else kwargs[n] for n in names}
        args = args[:1]
    if name == "logit" and kwargs.get("eps", 0.0) is None:
        kwargs.pop("eps")
    return args, kwargs


def calls(name: str, dtype: torch.dtype, **options: Any) -> Iterator[Call]:
    """Yield torch's samples of an operator that torch itself takes."""
    info = table()[name]
    torch.manual_seed(0)
    is_reduced = name in LOSSES  # in their first samples
    most = SAMPLES_IN_SWEEPS if runs_every_case() or is_reduced else SAMPLES
    samples = itertools.islice(info.sample_inputs("cpu", dtype, **options), most)
    others = () if options else filter(is_small, info.reference_inputs("cpu", dtype))
    for sample in itertools.chain(samples, itertools.islice(others, 2, 2 + 3 * most, 3)):
        if (
            sample.kwargs.get("reduction", "none") != "none"
            or (name in LOSSES and "reduction" not in sample.kwargs)
            or sample.kwargs.get("approximate", "none") != "none"
        ):
            continue
        args, kwargs = given(name, sample, dtype)
        numbers = (torch.Tensor, bool, int, float)
        if not all(isinstance(v, numbers) for v in (*args, *kwargs.values())):
            continue
        if any(isinstance(v, torch.Tensor) and v.is_complex() for v in args):
            continue
        if name == "clamp" and len(args) + len(kwargs) < 3:
            continue
        try:
            expected = info.op(sample.input, *sample.args, **sample.kwargs)
        except (RuntimeError, TypeError, ValueError):
            continue
        everything = (sample.input, *sample.args, *sample.kwargs.values())
        leaves = [v for v in everything if isinstance(v, torch.Tensor) and v.requires_grad]
        yield Call(expected, args, kwargs, functools.partial(in_float64, info, sample), leaves)


def is_small(sample: Any) -> bool:
    size = sample.input.numel() if isinstance(sample.input, torch.Tensor) else 1
    return runs_every_case() or size <= MOST_ELEMENTS


def in_float64(info: Any, sample: Any) -> torch.Tensor:
    def widened(value: Any) -> Any:
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.double() if is_float else value

    wide = [widened(value) for value in (sample.input, *sample.args)]
    return info.op(*wide, **{key: widened(value) for key, value in sample.kwargs.items()})


def check(call: Call, operator: ElementwiseOperator) -> None:
    found = operator(*call.args, **call.kwargs)
    check_result(found, call)


def check_result(found: torch.Tensor, call: Call) -> None:
    """Hold a result to torch's; one of 16 bits may be nearer to float64, as torch rounds steps."""
    expected = call.expected
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    if found.dtype in (torch.bfloat16, torch.float16):
        exact = call.in_float64().to(found.dtype)
        is_nearer = (found.double() - exact).abs() <= (expected.double() - exact).abs()
        found = torch.where(is_nearer, expected, found)  # NaN is near to nothing
    torch.testing.assert_close(found, expected, equal_nan=True)


def dtypes_of(name: str) -> list[torch.dtype]:
    found = [d for d in DTYPES if d in table()[name].dtypes]
    if name in ONLY_FLOATS:
        found = [d for d in found if d.is_floating_point]
    return [d for d in found if d is not torch.bool or name not in KEEPS_BOOLS]


by_name = pytest.mark.parametrize("name", DEFINITIONS)


@pytest.mark.one_in(2)
@by_name
@pytest.mark.filterwarnings("ignore")
def test_samples_of_all_dtypes(name: str, monkeypatch: pytest.MonkeyPatch, some: Sample) -> None:
    monkeypatch.setenv("FXKIT_BACKEND", "eager")  # kernels have a test of their own below
    operator = operator_of(name)
    count = 0
    dtypes = some(dtypes_of(name), 1)
    for dtype in dtypes:
        for call in calls(name, dtype):
            check(call, operator)
            count += 1
    assert count >= min(3, len(dtypes))


@pytest.mark.one_in(3)
@by_name
@pytest.mark.sampled
@pytest.mark.filterwarnings("ignore")
def test_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not table()[name].supports_autograd:
        pytest.skip("torch has none")
    monkeypatch.setenv("FXKIT_BACKEND", "eager")
    operator = operator_of(name)
    for call in calls(name, torch.float64, requires_grad=True):
        operands = call.leaves
        if not call.expected.requires_grad or not operands:
            continue
        grad = torch.randn_like(call.expected)
        options: dict[str, Any] = {"allow_unused": True, "materialize_grads": True}
        expected = torch.autograd.grad(call.expected, operands, grad, **options)
        found = torch.autograd.grad(operator(*call.args, **call.kwargs), operands, grad, **options)
        torch.testing.assert_close(found, expected, equal_nan=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32], ids=str)
def test_kernels(dtype: torch.dtype, some: Sample) -> None:
    names = [name for name in DEFINITIONS if dtype in dtypes_of(name)]
    most = len(some(range(2), 1))
    found = [(name, call) for name in names for call in itertools.islice(calls(name, dtype), most)]
    spelled = [(operator_of(name).overload, *spelled_out(name, call)) for name, call in found]
    compiled, inputs, _ = compile_all(spelled)
    with torch.no_grad():
        results = compiled(*inputs)
    for (_, call), result in zip(found, results, strict=True):
        check_result(result, call)


def spelled_out(name: str, call: Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments as the operator of a graph takes them: tensors for numbers."""
    operator = operator_of(name)
    given = operator._with_tensors(operator._arguments(call.args, call.kwargs))
    return tuple(given), {}


def test_there_are_many() -> None:
    assert len(DEFINITIONS) >= 60
