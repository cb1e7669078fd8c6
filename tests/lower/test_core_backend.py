"""The example of a backend: an interpreter of the loop IR in C++ runs all architectures."""

from __future__ import annotations

import importlib.util
import random
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import fxkit
from fxkit.errors import UnsupportedError
from fxkit.lower import CompiledModule, Policy, to_backend
from fxkit.lower.loop_ir.bits import Bits
from fxkit.lower.loop_ir.builder import Builder, Ref
from fxkit.lower.loop_ir.interpreter import interpret
from fxkit.lower.loop_ir.loop_ir import Access, Buffer, Instruction, Kernel, Store
from fxkit.lower.loop_ir.scalar_functions import SCALAR_FUNCTIONS
from fxkit.passes.decomposition.core_operators import CORE_OPERATORS
from tests.architectures import CONVOLUTIONAL, HUGGING_FACE, Inputs, convolutional
from tests.generated_text import DOCS
from tests.lower.test_architectures import hold_to_float64

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers and pytorchcv warn at import

QUICK = ("bert", "mixtral", "convnext")


def _example() -> ModuleType:
    path = DOCS.parent / "examples" / "core_backend.py"
    spec = importlib.util.spec_from_file_location("core_backend", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


EXAMPLE = _example()


def check(net: torch.nn.Module, inputs: Inputs) -> None:
    """Hold a model on the backend to float64, with nothing left to eager; say what it took."""
    modules: list[CompiledModule] = []

    def backend(gm: Any, args: tuple[Any, ...]) -> CompiledModule:
        modules.append(EXAMPLE.compile_for_core(gm, args))
        return modules[-1]

    hold_to_float64(fxkit.compile(net, backend=backend), net, inputs)
    (module,) = modules
    report = module.report()
    assert report.calls and not report.eager_calls and not report.kernel_misses
    left = set(EXAMPLE.operators_left(module))
    assert left <= EXAMPLE.FROM_TORCH
    print(len(module.plan.calls), "kernels, by torch:", *sorted(left))


@pytest.mark.parametrize("name", QUICK)
def test_an_architecture_runs(name: str) -> None:
    torch.manual_seed(0)
    net, make = HUGGING_FACE[name]()
    check(net, make(2))


@pytest.mark.sweep
@pytest.mark.parametrize("name", [name for name in HUGGING_FACE if name not in QUICK])
def test_every_transformer_runs(name: str) -> None:
    test_an_architecture_runs(name)


@pytest.mark.sweep
@pytest.mark.parametrize("name", CONVOLUTIONAL)
def test_every_convolutional_net_runs(name: str) -> None:
    torch.manual_seed(0)
    net, make = convolutional(name)
    check(net, make(1))


# Each instruction, held to torch by the interpreter that shares nothing with this one.

FLOATS = (torch.float32, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
OF_INTEGERS = frozenset(
    {*"add sub mul div mod neg abs max min lt le gt ge eq ne and or xor shl shr not".split()}
)
COMPARISONS = frozenset("lt le gt ge eq ne".split())
OF_INTEGERS_ALONE = frozenset("and or xor shl shr not".split())


def numbers(dtype: torch.dtype, shape: tuple[int, ...], op: str = "") -> Tensor:
    if dtype == torch.bool:
        return torch.rand(shape) < 0.5
    if not dtype.is_floating_point:
        low, high = (1, 7) if op in ("div", "mod", "shl", "shr") else (-128, 128)
        return torch.randint(low, high, shape).to(dtype)
    made = torch.randn(shape, dtype=torch.float64) * 3
    special = torch.tensor([0.0, -0.0, 1.0, -1.0, torch.inf, -torch.inf, torch.nan, 0.5])
    made.view(-1)[: len(special)] = special.double()[torch.randperm(len(special))]
    return made.to(dtype)


def buffers(inputs: list[Tensor], output: torch.dtype) -> tuple[Buffer, ...]:
    read = [Buffer(f"in{n}", t.dtype, False) for n, t in enumerate(inputs)]
    return (*read, Buffer("out0", output, True))


def run(kernel: Kernel, inputs: list[Tensor], shape: tuple[int, ...]) -> tuple[bool, Tensor]:
    """Run a kernel on the backend, hold it to fxkit's own interpreter, and return its result."""
    made, expected = (torch.zeros(shape, dtype=kernel.buffers[-1].dtype) for _ in range(2))
    addresses = [t.data_ptr() for t in (*inputs, made)]
    holds = not EXAMPLE.interpreted(kernel)(*addresses, 1)
    assert holds == interpret(kernel, inputs, [expected])
    if holds:
        torch.testing.assert_close(made, expected, rtol=1e-6, atol=1e-6, equal_nan=True)
    return holds, made


@pytest.mark.parametrize("op", SCALAR_FUNCTIONS)
def test_scalar_functions(op: str) -> None:
    kinds = () if op in OF_INTEGERS_ALONE or op == "mod" else FLOATS
    kinds += INTEGERS if op in OF_INTEGERS else ()
    if op in ("shl", "shr", "div", "mod", "neg", "abs", "sub"):
        kinds = tuple(kind for kind in kinds if kind != torch.bool)
    for dtype in kinds or FLOATS:
        torch.manual_seed(0)
        arity = SCALAR_FUNCTIONS[op].arity
        inputs = [numbers(dtype, (5, 9), op) for _ in range(arity)]
        if op == "select":
            inputs[0] = numbers(torch.bool, (5, 9))
        builder = Builder()
        refs = [builder.load(Access(n, (9, 1)), t.dtype) for n, t in enumerate(inputs)]
        result = torch.bool if op in COMPARISONS else inputs[-1].dtype
        value = builder.scalar(op, *refs, dtype=result)
        store = Store(Access(arity, (9, 1)), value.position)
        kernel = Kernel((5, 9), 0, buffers(inputs, result), tuple(builder.body), (store,))
        run(kernel, inputs, (5, 9))


def folded(monoid: str, dtype: torch.dtype, is_scan: bool) -> tuple[Kernel, list[Tensor]]:
    builder = Builder()
    x = numbers(dtype, (3, 11))
    x = torch.nan_to_num(x, 0.5, 2.0, -2.0) if monoid in ("add", "mul") and dtype in FLOATS else x
    value = builder.load(Access(0, (11, 1)), dtype)
    made = builder.scan(monoid, value) if is_scan else builder.reduce(monoid, value)
    store = Store(Access(1, (11, 1) if is_scan else (1, 0)), made.position)
    return Kernel((3, 11), 1, buffers([x], dtype), tuple(builder.body), (store,)), [x]


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.int32, torch.bool])
def test_reductions_and_scans(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    monoids = ("and", "or") if dtype == torch.bool else ("add", "mul", "max", "min")
    for monoid in monoids:
        kernel, inputs = folded(monoid, dtype, False)
        run(kernel, inputs, (3,))
        if dtype != torch.bool:
            kernel, inputs = folded(monoid, dtype, True)
            run(kernel, inputs, (3, 11))
    if dtype == torch.float64:
        kernel, inputs = folded("logaddexp", dtype, True)
        run(kernel, inputs, (3, 11))


def test_rows_without_elements_give_what_a_fold_begins_with() -> None:
    for monoid, start in {"add": 0.0, "mul": 1.0, "max": -torch.inf, "min": torch.inf}.items():
        builder = Builder()
        made = builder.reduce(monoid, builder.load(Access(0, (0, 1)), torch.float32))
        kernel = Kernel(
            (2, 0), 1, buffers([torch.empty(0)], torch.float32), tuple(builder.body),
            (Store(Access(1, (1, 0)), made.position),),
        )  # fmt: skip
        found = torch.zeros(2)
        EXAMPLE.interpreted(kernel)(0, found.data_ptr(), 1)
        assert found.tolist() == [start] * 2


def test_sums_over_rows_roundings_guards_and_checks() -> None:
    torch.manual_seed(2)
    x, ids = torch.randn(4, 6).bfloat16(), torch.tensor([2, 0, 3, 1])
    builder = Builder()
    index = builder.load(Access(1, (1, 0)), torch.int64)
    holds = builder.check(index < 4)
    guard = builder.index((0, 1)) < 4
    read = builder.load(Access(0, (0, 1), scales=(6,)), torch.bfloat16, [index], guard & holds, 7.5)
    rounded = (read * 1.7).cast(torch.bfloat16)
    half = rounded.cast(torch.float32).cast(torch.float16)
    store = Store(Access(2, (0, 1)), half.position, is_sum=True)
    kernel = Kernel(
        (4, 6), 1, buffers([x, ids], torch.float32), tuple(builder.body), (store,)
    )  # fmt: skip
    assert run(kernel, [x, ids], (6,))[0]
    assert not run(kernel, [x, ids + 1], (6,))[0]


def test_random_bodies() -> None:
    ops = ("add", "sub", "mul", "max", "min", "lt", "select", "tanh", "floor", "neg", "abs", "eq")
    for seed in range(40):
        draw = random.Random(seed)
        torch.manual_seed(seed)
        sizes = tuple(draw.choice((1, 2, 3, 5)) for _ in range(draw.randint(1, 3)))
        rank = draw.randint(0, len(sizes))
        inputs = [torch.randn(200).to(draw.choice(FLOATS)) for _ in range(2)]
        builder = Builder()
        values: list[Ref] = []
        for n, t in enumerate(inputs):
            strides = tuple(draw.choice((0, 1, 3, 7)) for _ in sizes)
            loaded = builder.load(Access(n, strides, draw.randint(0, 9)), t.dtype)
            values.append(loaded.cast(torch.float32))
        for _ in range(draw.randint(1, 8)):
            op = draw.choice(ops)
            operands = [draw.choice(values) for _ in range(SCALAR_FUNCTIONS[op].arity)]
            if op == "select":
                operands[0] = operands[0] > 0
            is_bool = op in COMPARISONS
            made = builder.scalar(op, *operands, dtype=torch.bool if is_bool else torch.float32)
            values.append(made.cast(torch.float32))
            if rank and draw.random() < 0.3:
                values.append(builder.reduce(draw.choice(("add", "max")), values[-1]))
        strides = torch.empty(sizes).stride()
        store = Store(Access(2, strides), values[-1].position)
        kernel = Kernel(
            sizes, rank, buffers(inputs, torch.float32), tuple(builder.body), (store,)
        )  # fmt: skip
        if not kernel.row_wide[store.value] and rank:
            continue  # it is stored once a row
        run(kernel, inputs, sizes)


# What it refuses, and what is said of it.


def test_what_it_has_no_code_for_is_refused() -> None:
    body = (Instruction("const", (), torch.float32, Bits(1.0)),
            Instruction("bessel", (0,), torch.float32))  # fmt: skip
    kernel = Kernel((2,), 0, buffers([], torch.float32), body, (Store(Access(0, (1,)), 1),))
    with pytest.raises(UnsupportedError, match="got no instruction bessel"):
        EXAMPLE.interpreted(kernel)
    gm = fxkit.symbolic_trace(lambda x: torch.fft.fft(x).real)
    with pytest.raises(UnsupportedError, match=r"of this backend, got aten\._fft_r2c"):
        EXAMPLE.compile_for_core(gm, (torch.randn(4),))


def test_operators_that_it_takes_from_torch_are_core_operators() -> None:
    core = {name.rpartition(".")[0] for name in CORE_OPERATORS}
    assert core >= EXAMPLE.FROM_TORCH


def test_the_documentation_counts_what_a_backend_brings() -> None:
    told = " ".join((DOCS / "core_operators.md").read_text().split())
    assert f"{len(EXAMPLE.FROM_TORCH)} core operators" in told
    assert f"{len(SCALAR_FUNCTIONS)} scalar functions" in told


def test_a_backend_leaves_gradients_and_other_types_to_the_graph() -> None:
    gm = fxkit.symbolic_trace(lambda x: torch.softmax(x * 2, -1))
    module = fxkit.lower.to_backend(gm, (torch.randn(3, 5),), make=EXAMPLE.interpreted)
    x = torch.randn(3, 5, requires_grad=True)
    assert module(x).requires_grad
    assert torch.equal(module(torch.randn(2, 5).double()).sum(-1).round(), torch.ones(2).double())
    with torch.no_grad():
        torch.testing.assert_close(module(x), torch.softmax(x * 2, -1))
    assert module.report().calls == 1 and sum(module.report().eager_calls.values()) == 2


def test_a_policy_refuses_kernels_for_a_backend() -> None:
    class NoReductions(Policy):
        def refusal(self, kernel: Kernel) -> str | None:
            return "this processor reduces nothing" if kernel.folds_rows else None

    gm = fxkit.symbolic_trace(lambda x: torch.softmax((x * 2).tanh(), -1))
    x = torch.randn(3, 5)
    module = fxkit.lower.to_backend(
        gm, (x,), make=EXAMPLE.interpreted, policy=NoReductions(min_members=1)
    )
    torch.testing.assert_close(module(x), gm(x))
    assert "this processor reduces nothing" in module.explain("softmax")


def test_a_backend_that_makes_no_function_is_told() -> None:
    gm = fxkit.symbolic_trace(lambda x: x.exp() * 2)
    with pytest.raises(UnsupportedError, match=r"expected make to return a function .* got None"):
        to_backend(gm, (torch.ones(4),), make=lambda kernel: None)  # type: ignore[arg-type]


def test_what_a_backend_raises_in_a_call_is_raised() -> None:
    def broken(*addresses: int) -> int:
        raise LookupError(f"{len(addresses)} addresses")

    gm = fxkit.symbolic_trace(lambda x: x.exp() * 2)
    module = to_backend(gm, (torch.ones(4),), make=lambda kernel: broken)
    with pytest.raises(LookupError, match="3 addresses"):
        module(torch.ones(4))
