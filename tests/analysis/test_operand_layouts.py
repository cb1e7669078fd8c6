"""Types of what is computed of several tensors, whatever their layouts."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from fxkit import symbolic_trace
from fxkit.analysis.tensor_types import propagate_types
from fxkit.analysis.type_inference.fake_tensors import as_fake, fake_mode, new_fake_mode
from fxkit.ir.types import TensorType
from fxkit.lower import to_cpp
from tests import layouts
from tests.lower.kernels import ALWAYS
from tests.sampling import Sample, one_in

LAYOUTS = {
    "dense": torch.randn(2, 3),
    "turned": torch.randn(3, 2).t(),
    "rows expanded": torch.randn(1, 3).expand(2, 3),
    "columns expanded": torch.randn(2, 1).expand(2, 3),
    "a row": torch.randn(3),
}
TRIPLES = list(itertools.product(LAYOUTS, repeat=3))[::3]


BINARY = {
    **{name: getattr(torch, name) for name in (
        "add", "sub", "mul", "div", "maximum", "fmin", "atan2", "hypot", "pow", "fmod", "remainder",
        "lt", "eq", "rsub", "floor_divide", "copysign", "xlogy", "logaddexp", "logical_and",
    )},
    "rounded": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "bounded": lambda x, y: torch.clamp(x, max=y),
    "filled": lambda x, y: x.masked_fill(y > 0, 1.0),
    "relu's gradient": lambda x, y: torch.ops.aten.threshold_backward(x, y, 0),
    "leaky relu's gradient": lambda x, y: torch.ops.aten.leaky_relu_backward(x, y, 0.1, False),
    "hardtanh's gradient": lambda x, y: torch.ops.aten.hardtanh_backward(x, y, -1, 1),
    "tanh's gradient": torch.ops.aten.tanh_backward,
}  # fmt: skip
DTYPES = [
    (torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16), (torch.float32, torch.bfloat16), (torch.int64, torch.int64),
]  # fmt: skip


@pytest.mark.parametrize(("dtypes", "name"), one_in(len(DTYPES), DTYPES, BINARY))
def test_two_operands(name: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    program = BINARY[name]
    for a, b in itertools.product(LAYOUTS.values(), repeat=2):
        args = (_as_dtype(a, dtypes[0]), _as_dtype(b, dtypes[1]))
        try:
            expected = program(*args)
        except RuntimeError:  # as for whole numbers with "gradients"
            continue
        known: Any = propagate_types(symbolic_trace(lambda x, y: program(x, y)), args)
        assert (known.stride, known.dtype) == (expected.stride(), expected.dtype)


def _as_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ones of a dtype that lie in memory as a tensor does."""
    return torch.ones(6, dtype=dtype).as_strided(tensor.shape, tensor.stride())


@pytest.mark.parametrize(
    "program",
    [
        torch.clamp,
        torch.ops.aten.clamp.Tensor,
        lambda x, low, high: x.clip(low, high),
        lambda x, low, high: torch.clamp(x, max=high, min=low),
    ],
)
def test_strides_are_those_of_eager(program: Callable[..., Tensor]) -> None:
    gm = symbolic_trace(lambda x, low, high: program(x, low, high))
    args = (LAYOUTS["rows expanded"], LAYOUTS["a row"], LAYOUTS["turned"])
    known: Any = propagate_types(gm, args)
    assert isinstance(known, TensorType)
    assert (known.shape, known.stride) == ((2, 3), torch.clamp(*args).stride()) == ((2, 3), (1, 2))


def test_kernels_lay_out_their_results_as_eager() -> None:
    def program(*tensors: Tensor) -> tuple[Tensor, ...]:
        known = dict(zip(LAYOUTS, tensors, strict=True))
        return tuple(torch.clamp(known[a], known[b], known[c]) + 0 for a, b, c in TRIPLES)

    graph = fx.Graph()
    places = {name: graph.placeholder(f"x{i}") for i, name in enumerate(LAYOUTS)}
    graph.output(tuple(
        graph.call_function(torch.clamp, tuple(places[name] for name in triple))
        for triple in TRIPLES
    ))  # fmt: skip
    args = tuple(LAYOUTS.values())
    lowered = to_cpp(fx.GraphModule(torch.nn.Module(), graph), args, policy=ALWAYS)
    for found, expected in zip(lowered(*args), program(*args), strict=True):
        assert found.stride() == expected.stride()
        torch.testing.assert_close(found, expected)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("operator", layouts.OPERATORS, ids=str)
def test_larger_operators(operator: Any, dtype: torch.dtype, some: Sample) -> None:
    for one, other in some(itertools.product(layouts.LAYOUTS.values(), repeat=2), 12):
        x, y = (lay(torch.rand(layouts.SHAPE)).to(dtype) for lay in (one, other))
        args = layouts.OPERATORS[operator](x, y)
        mode = new_fake_mode()
        with mode:
            fakes = pytree.tree_map_only(Tensor, lambda it, mode=mode: as_fake(mode, it), args)
            found = pytree.tree_leaves(operator(*fakes))
        try:
            made = pytree.tree_leaves(operator(*args))
        except RuntimeError:  # no kernel for these types together
            continue
        for fake, real in zip(found, made, strict=True):
            assert (fake.shape, fake.stride()) == (real.shape, real.stride())


def test_a_copy_lies_as_it_is_asked_to() -> None:
    x = torch.randn(2, 1, dtype=torch.bfloat16).expand(2, 3).t()
    gm = symbolic_trace(lambda x: x.clone(memory_format=torch.contiguous_format))
    known: Any = propagate_types(gm, (x,))
    with fake_mode() as mode:
        found = torch.clone(as_fake(mode, x), memory_format=torch.contiguous_format)
    assert known.stride == found.stride() == (2, 1)


def test_gradients_are_followed_as_before() -> None:
    x = LAYOUTS["rows expanded"].detach().requires_grad_()
    gm = symbolic_trace(lambda x, a, b: torch.clamp(x, a, b))
    known: Any = propagate_types(gm, (x, LAYOUTS["dense"], LAYOUTS["turned"]))
    assert known.requires_grad
