"""Programs that give tensors another shape in place, or `out=` another size, as functional ATen."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import fxkit
from fxkit.errors import CaptureError
from tests.operator_samples import Sample, samples

Program = Callable[..., Any]
Memory = tuple[torch.Tensor, ...]

PARTS = 8
REFUSED = "refused by torch"

# Torch 2.13 leaves what they are given as `out=` as it was.
WRONG_IN_EAGER = ("fft.ihfftn", "fft.ihfft2")


def with_out(sample: Sample, results: list[torch.Tensor], several: bool, empty: bool) -> Program:
    """Return a program that calls an operator with new memory, empty or of the right size."""

    def program(*tensors: torch.Tensor) -> Any:
        given = dict(zip(sample.tensors, tensors, strict=True))
        args, kwargs = sample.fill((sample.node.args, sample.node.kwargs), given)
        outs = [
            torch.empty(0, dtype=r.dtype) if empty else torch.zeros(r.shape, dtype=r.dtype)
            for r in results
        ]
        function: Any = sample.node.target
        made = function(*args, **kwargs, out=tuple(outs) if several else outs[0])
        return tuple(made) if several else made, outs, [one.clone() for one in outs]

    return program


def programs(part: int, parts: int, least: int) -> Iterator[tuple[str, Program, Memory]]:
    """Yield programs that call operators with so many results or more with `out=`."""
    for sample in samples(part, parts):
        is_special = sample.name in WRONG_IN_EAGER or sample.name.startswith("__")
        if sample.node.op != "call_function" or is_special:
            continue
        try:
            found, _ = sample.run()
        except RuntimeError:  # it shows memory that a copy of its operand has not
            continue
        several = isinstance(found, (tuple, list))
        results = list(found) if several else [found]
        is_dense = all(isinstance(r, torch.Tensor) and r.layout is torch.strided for r in results)
        if is_dense and len(results) >= least:
            for empty in (True, False):
                program = with_out(sample, results, several, empty)
                yield sample.name, program, tuple(sample.copies().values())


def check(name: str, program: Program, inputs: Memory) -> str:
    """Return what became of a program, which is as in eager where it is captured."""
    torch.manual_seed(0)
    try:
        wanted = program(*[x.clone() for x in inputs])
    except Exception:  # torch refuses it
        return REFUSED
    try:
        captured = fxkit.capture(program, tuple(x.clone() for x in inputs), mode="aten")
    except CaptureError as error:
        return error.message
    torch.manual_seed(0)
    assert_alike(name, wanted, captured(*[x.clone() for x in inputs]))
    return "functional"


def assert_alike(name: str, wanted: Any, got: Any) -> None:
    for a, b in zip(pytree.tree_leaves(wanted), pytree.tree_leaves(got), strict=True):
        assert a.numel() == 0 or a.stride() == b.stride(), f"{name}: {a.stride()} {b.stride()}"
        assert a.dtype == b.dtype, name
        if a.dtype.itemsize == 1 and a.dtype.is_floating_point:  # whose NaN are told apart
            a, b = a.float(), b.float()
        torch.testing.assert_close(b, a, equal_nan=True, rtol=1e-4, atol=1e-5, msg=name)


def outcomes(part: int, parts: int, least: int) -> list[str]:
    """Return what became of the programs that torch runs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [check(*program) for program in programs(part, parts, least)]
    return [outcome for outcome in found if outcome != REFUSED]


def test_operators_with_out() -> None:
    assert outcomes(3, 120, 1).count("functional") > 5


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(PARTS))
def test_all_operators_with_out(part: int) -> None:
    found = outcomes(part, PARTS, 1)
    assert found.count("functional") > 0.7 * len(found), "\n".join(sorted(set(found)))


@pytest.mark.sweep
def test_all_operators_with_several_results_and_out() -> None:
    found = outcomes(0, 1, 2)
    assert found.count("functional") > 0.7 * len(found), "\n".join(sorted(set(found)))


SQUARE = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
SQUARE = SQUARE @ SQUARE.mT + torch.eye(4)


def empties(*dtypes: torch.dtype) -> Memory:
    return tuple(torch.empty(0, dtype=dtype) for dtype in dtypes)


F32, I64, C64 = torch.float32, torch.int64, torch.complex64

OUT: dict[str, Program] = {
    "sort": lambda x: torch.sort(x, out=empties(F32, I64)),
    "max": lambda x: torch.max(x, 1, out=empties(F32, I64)).values * 2,
    "qr": lambda x: torch.linalg.qr(x, out=empties(F32, F32)),
    "slogdet": lambda x: torch.linalg.slogdet(x, out=empties(F32, F32)),
    "eig": lambda x: torch.linalg.eig(x, out=empties(C64, C64)),
    "lu_factor": lambda x: torch.linalg.lu_factor(x, out=empties(F32, torch.int32)),
    "solve": lambda x: torch.linalg.solve(x, x[:, :3], out=torch.empty(0)),
    "ldl_solve": lambda x: torch.linalg.ldl_solve(
        *torch.linalg.ldl_factor(x), x[:, :3], out=torch.empty(0)
    ),
}


def _filled(x: torch.Tensor) -> Any:
    values, places = torch.zeros(4, 4), torch.zeros(4, 4, dtype=torch.int64)
    first = values[0]
    torch.sort(x, out=(values, places))
    return first, values, places.t(), values + places


def _one_after_another(x: torch.Tensor) -> Any:
    memory = torch.empty(0)
    torch.mul(x, 2, out=memory)
    total = memory.sum()
    torch.add(x, 1, out=memory)
    return memory, total


RESHAPED: dict[str, Program] = {
    "t_": lambda x: x.t_(),
    "unsqueeze_": lambda x: x.unsqueeze_(0) + 1,
    "squeeze_": lambda x: x.squeeze_(-1),
    "transpose_": lambda x: x.transpose_(0, 1)[0],
    "swapaxes_": lambda x: (x.swapaxes_(0, -1) * 2, x),
    "twice": lambda x: x.t_().unsqueeze_(1).add_(1).sum(0),
    "written after": lambda x: x.t_().mul_(2)[1],
    "of a value": lambda x: (x * 1).t_(),
    "of a view": lambda x: (x[:2].t_(), x),
    "of a view of a value": lambda x: _of_a_view(x * 1),
    "a view between": lambda x: x.t_().unsqueeze(0).squeeze_(0),
}


def _of_a_view(y: torch.Tensor) -> Any:
    view = y[0]
    view.unsqueeze_(0)
    return view, y, view.t()


def check_whole(program: Program, x: torch.Tensor) -> None:
    """Compare captured and as a module: results, shapes, strides, and what the input is then."""
    eager, captured, alone = x.clone(), x.clone(), x.clone()
    wanted = program(eager)
    functional = fxkit.capture(program, (x.clone(),), mode="aten")
    assert_alike("captured", (wanted, eager), (functional(captured), captured))
    assert_alike("module", (wanted, eager), (functional.module()(alone), alone))
    graph = functional.graph_module.graph
    assert not any(str(node.target).endswith(("_.default", ".out")) for node in graph.nodes)


@pytest.mark.parametrize("name", OUT)
def test_out_of_several_results(name: str) -> None:
    check_whole(OUT[name], SQUARE)


@pytest.mark.parametrize("program", [_filled, _one_after_another])
def test_memory_that_is_written_by_out(program: Program) -> None:
    check_whole(program, SQUARE)


@pytest.mark.parametrize("name", RESHAPED)
def test_shapes_that_are_changed_in_place(name: str) -> None:
    check_whole(RESHAPED[name], torch.randn(3, 4))


def _view_before(x: torch.Tensor) -> Any:
    view = x.view(-1)
    x.t_()
    return view


def _resizes_a_view(x: torch.Tensor) -> Any:
    y = x * 1
    return torch.mul(x, 2, out=y[:0]), y


def _resizes_an_input(x: torch.Tensor, memory: torch.Tensor) -> Any:
    return torch.mul(x, 2, out=memory)


@pytest.mark.parametrize(
    ("program", "inputs", "reason"),
    [
        (_view_before, (SQUARE,), "view is a view of a tensor whose shape is changed afterwards"),
        (_resizes_a_view, (SQUARE,), "resizes memory that others show"),
        (_resizes_an_input, (SQUARE, torch.empty(0)), "resizes an input"),
        (lambda x: (x * 1).resize_(2, 2), (SQUARE,), "resize_ changes a tensor's storage"),
    ],
)
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_what_no_functional_graph_holds(program: Program, inputs: Memory, reason: str) -> None:
    with pytest.raises(CaptureError, match=reason):
        fxkit.capture(program, tuple(x.clone() for x in inputs), mode="aten")


@pytest.mark.parametrize("function", [torch.linalg.inv, torch.linalg.cholesky])
def test_checks_of_what_they_are_given_go_on_raising(function: Program) -> None:
    captured = fxkit.capture(function, (SQUARE,), mode="aten")
    torch.testing.assert_close(captured(SQUARE), function(SQUARE))
    with pytest.raises(RuntimeError, match=r"singular|positive-definite"):
        captured(torch.zeros(4, 4))
    with pytest.raises(RuntimeError, match=r"singular|positive-definite"):
        captured.module()(torch.zeros(4, 4))
