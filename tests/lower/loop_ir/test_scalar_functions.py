"""Each row of the table of scalar functions in all its readers: interpreter, costs, both texts."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fxkit.errors import InvalidGraphError
from fxkit.lower.building.build import build
from fxkit.lower.building.toolchain import vector_library
from fxkit.lower.codegen.cuda.printer import print_unit as print_cuda
from fxkit.lower.cpp_printer import print_unit
from fxkit.lower.loop_ir.builder import Builder
from fxkit.lower.loop_ir.interpreter import interpret
from fxkit.lower.loop_ir.loop_ir import Access, Buffer, Kernel, Store
from fxkit.lower.loop_ir.scalar_functions import COSTLY, SCALAR_FUNCTIONS, ScalarFunction
from fxkit.lower.scheduling.kernel_cost import cost_of_point
from tests.lower.codegen.cuda.shim import build_on_cpu, run_on_cpu

COMPARISONS = frozenset({"lt", "le", "gt", "ge", "eq", "ne"})
BITS = frozenset({"and", "or", "xor", "not", "shl", "shr", "mod"})
SIZE = 211
DTYPES = (torch.float32, torch.float64, torch.int64)


def takes(function: ScalarFunction, dtype: torch.dtype) -> bool:
    """Tell whether bodies of kernels hold a function over operands of a dtype."""
    if dtype.is_floating_point:
        return function.op not in BITS
    return not function.is_call and not function.builtin and function.op != "fma"


def operands(function: ScalarFunction, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return numbers for each operand; where there is a domain, some of them lie outside it."""
    generator = torch.Generator().manual_seed(len(function.op))
    if not dtype.is_floating_point:
        made = [torch.randint(1, 40, (SIZE,), generator=generator) for _ in range(function.arity)]
    else:
        made = [
            torch.randn(SIZE, dtype=dtype, generator=generator) * 2 for _ in range(function.arity)
        ]
        made[0][:7] = torch.tensor([0.0, 1.0, -1.0, float("inf"), -float("inf"), 3.0, 1e-20])
    if function.op == "select":
        made[0] = made[0] > 0
    return made


def kernel_of(function: ScalarFunction, inputs: list[torch.Tensor]) -> Kernel:
    """Return a kernel that applies a function to each element."""
    builder = Builder()
    loads = [builder.load(Access(i, (1,)), tensor.dtype) for i, tensor in enumerate(inputs)]
    dtype = torch.bool if function.op in COMPARISONS else inputs[-1].dtype
    value = builder.scalar(function.op, *loads, dtype=dtype)
    buffers = [Buffer(f"in{i}", tensor.dtype, False) for i, tensor in enumerate(inputs)]
    return Kernel(
        (SIZE,), 0, (*buffers, Buffer("out0", dtype, True)), tuple(builder.body),
        (Store(Access(len(inputs), (1,)), value.position),),
    )  # fmt: skip


def interpreted(kernel: Kernel, inputs: list[torch.Tensor]) -> torch.Tensor:
    result = torch.zeros(SIZE, dtype=kernel.buffers[-1].dtype)
    assert interpret(kernel, inputs, [result])
    return result


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def table(request) -> dict[str, tuple[Kernel, list[torch.Tensor]]]:
    """Return a kernel for each row that takes a dtype, and its operands."""
    rows = [f for f in SCALAR_FUNCTIONS.values() if takes(f, request.param)]
    inputs = {f.op: operands(f, request.param) for f in rows}
    return {f.op: (kernel_of(f, inputs[f.op]), inputs[f.op]) for f in rows}


def wrong(
    table: dict[str, tuple[Kernel, list[torch.Tensor]]], found: dict[str, torch.Tensor]
) -> Iterator[str]:
    """Say where a printed kernel differs from the interpreter by more than 4 eps."""
    for op, (kernel, inputs) in table.items():
        expected = interpreted(kernel, inputs)
        eps = torch.finfo(expected.dtype).eps if expected.is_floating_point() else 0.0
        near = torch.isclose(found[op], expected, rtol=4 * eps, atol=4 * eps, equal_nan=True)
        if not near.all():
            at = int((~near).nonzero()[0])
            given = ", ".join(str(tensor[at].item()) for tensor in inputs)
            got, wanted = found[op][at].item(), expected[at].item()
            yield f"{op}({given}) is {got}, not {wanted}; {int((~near).sum())} of {SIZE} are wrong"


def in_cpp(table: dict[str, tuple[Kernel, list[torch.Tensor]]]) -> dict[str, torch.Tensor]:
    """Build all kernels as C++ and run them."""
    text = print_unit({f"k_{op}": kernel for op, (kernel, _) in table.items()}, vector_library())
    library, found = build(text).handle, {}
    for op, (kernel, inputs) in table.items():
        found[op] = torch.zeros(SIZE, dtype=kernel.buffers[-1].dtype)
        function = getattr(library, f"k_{op}")
        function.argtypes = [ctypes.c_void_p] * len(kernel.buffers) + [ctypes.c_long]
        function.restype = None
        function(*[tensor.data_ptr() for tensor in (*inputs, found[op])], 1)
    return found


def test_printed_cpp_computes_each_row(table) -> None:
    assert list(wrong(table, in_cpp(table))) == []


def test_printed_cuda_computes_each_row(table, tmp_path: Path) -> None:
    # Threads beyond the end divide nothing by nothing: a GPU goes on, the processor stops.
    if "mod" in table:
        table = {op: known for op, known in table.items() if op not in ("div", "mod")}
    text = print_cuda({f"k_{op}": kernel for op, (kernel, _) in table.items()})
    library = build_on_cpu(text, tmp_path)
    found = {}
    for op, (kernel, inputs) in table.items():
        result = torch.zeros(SIZE, dtype=kernel.buffers[-1].dtype)
        (found[op],) = run_on_cpu(library, f"k_{op}", kernel, inputs, [result])
    assert list(wrong(table, found)) == []


def test_a_function_of_the_c_library_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    row = ScalarFunction("lgamma", torch.lgamma, cost=COSTLY, library=True)
    monkeypatch.setitem(SCALAR_FUNCTIONS, "lgamma", row)
    inputs = operands(row, torch.float64)
    table = {"lgamma": (kernel_of(row, inputs), inputs)}
    assert list(wrong(table, in_cpp(table))) == []


@pytest.mark.parametrize("function", SCALAR_FUNCTIONS.values(), ids=lambda f: f.op)
def test_a_call_costs_what_its_row_says(function: ScalarFunction) -> None:
    dtype = torch.float32 if takes(function, torch.float32) else torch.int64
    inputs = operands(function, dtype)
    kernel = kernel_of(function, inputs)
    assert cost_of_point(kernel.body) == function.cost + len(inputs)
    assert not function.library or function.cost in (1, COSTLY)


def test_what_no_row_names_or_takes_is_refused() -> None:
    builder = Builder()
    x = builder.load(Access(0, (1,)), torch.float32)
    with pytest.raises(InvalidGraphError, match=r"expected a scalar function.*got 'bessel'"):
        builder.scalar("bessel", x)
    with pytest.raises(InvalidGraphError, match="expected 2 operands of 'atan2', got 1"):
        builder.scalar("atan2", x)
