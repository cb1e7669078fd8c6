"""CUDA text through nvcc, for GPUs of compute capability 8.0 and 9.0: spills, sizes of accesses."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import fx

from fxkit.lower import CompiledModule
from fxkit.lower.building import cuda_toolchain
from fxkit.lower.codegen.cuda.printer import print_unit
from fxkit.lower.compiling.cuda_lowering import CudaPolicy
from fxkit.lower.compiling.inferred_types import typed
from fxkit.lower.compiling.kernel_builds import BuiltKernels
from fxkit.lower.compiling.pipeline import KernelTarget, lower_typed
from fxkit.lower.compiling.whole_operators import Choosing
from fxkit.lower.loop_ir.loop_ir import Kernel
from tests.lower.codegen.cuda.cases import (
    CASES,
    Made,
    Program,
    case,
    layer_norm,
    randn,
    rms_norm,
    softmax,
)
from tests.lower.kernels import compile_all
from tests.lower.operators import reduction_cases
from tests.lower.operators.scalar_cases import cases, function_of, named
from tests.sampling import one_in, runs_every_case

pytestmark = pytest.mark.skipif(cuda_toolchain.nvcc() is None, reason="needs nvcc")

SMALL = (
    "gelu_chain gelu_chain_bf16 broadcast angles rotary softmax_part_of_warp softmax_warp "
    "softmax_long softmax_f16 layer_norm rms_norm several sum_all sum_down sum_down_bf16 "
    "normalised_down doubles_of_rows embedding embedding_normed embedded_sum_down "
    "wrapped_sum wrapped_product wrapped_size wrapped_difference scanned scanned_block "
    "scanned_twice scanned_down scanned_softmax_block"
).split()

# The longest rows that each kind of thread holds in registers.
LARGE: dict[str, tuple[Program, Made]] = {
    "softmax_1k": (softmax, lambda: (randn(2, 1024),)),
    "softmax_16k": (softmax, lambda: (randn(2, 16_384),)),
    "softmax_32k": (softmax, lambda: (randn(2, 32_768),)),
    "softmax_32k_odd": (softmax, lambda: (randn(2, 32_767),)),
    "softmax_16k_doubles": (softmax, lambda: (randn(2, 16_384, dtype=torch.float64),)),
    "layer_norm_32k": (layer_norm, lambda: (randn(2, 32_768), randn(32_768), randn(32_768))),
    "rms_norm_32k_bf16": (
        rms_norm,
        lambda: (randn(2, 32_768, dtype=torch.bfloat16), randn(32_768, dtype=torch.bfloat16)),
    ),
    "several_operators_16k": (
        lambda x, y: torch.softmax(torch.sigmoid(x + y) * y, -1) + torch.tanh(x),
        lambda: (randn(2, 16_384), randn(2, 16_384)),
    ),
}

# Functions of which every access to memory, for each element of a row, is of sixteen bytes.
WHOLE = (
    "gelu_chain gelu_chain_bf16 broadcast rotary softmax_part_of_warp softmax_warp softmax_f16 "
    "layer_norm rms_norm doubles_of_rows softmax_1k softmax_32k layer_norm_32k rms_norm_32k_bf16 "
    "several_operators_16k"
).split()


class Resources(NamedTuple):
    """What a function takes: registers, bytes spilled, and bytes of arrays outside of registers."""

    registers: int
    spilled: int
    frame: int


@dataclass(frozen=True)
class Assembled:
    """What nvcc made for one kind of GPU.

    Attributes:
        resources: What each function takes.
        accesses: Function → its accesses to memory, as PTX.
    """

    resources: dict[str, Resources]
    accesses: dict[str, list[str]]


def nvcc(*arguments: str) -> str:
    command = [str(cuda_toolchain.nvcc()), *cuda_toolchain.FLAGS, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:4000]
    return done.stderr


def table_kernels() -> dict[str, Kernel]:
    """Return the kernels of a part of the tables of operators, for each kind of number."""
    found: dict[str, Kernel] = {}
    for dtype, part in (
        (torch.float32, slice(0, None, 5)),
        (torch.float64, slice(1, None, 11)),
        (torch.bfloat16, slice(2, None, 11)),
        (torch.int64, slice(3, None, 11)),
    ):
        rows = cases(dtype, (601,))[part]
        calls = [(function_of(r), (a[0],), named(r, a, k)) for r, a, k in rows]
        if dtype == torch.float32:
            rows_of = reduction_cases.cases((3, 5, 64), dtype)[::7]
            calls += [(function, args, options) for _, function, args, options in rows_of]
        compiled, _, _ = compile_all(calls, lowering=_unbuilt)
        found |= {f"{dtype}_{n}".removeprefix("torch."): k for n, k in compiled.kernels.items()}
    return found


def _unbuilt(gm: fx.GraphModule, args: tuple[Any, ...]) -> CompiledModule:
    typed(gm, args)
    policy = CudaPolicy(min_members=1, gpu=torch.device("cpu"))
    target = KernelTarget(Choosing.by_speed(), build=lambda kernels: BuiltKernels())
    return lower_typed(gm, policy, target)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    programs = {**{name: CASES[name] for name in SMALL}, **LARGE}
    kernels = {f"run_{n}": case(fn, made()).kernel for n, (fn, made) in programs.items()}
    kernels |= table_kernels()
    path = tmp_path_factory.mktemp("nvcc") / "kernels.cu"
    path.write_text(print_unit(kernels))
    return path


@pytest.fixture(scope="module")
def builds(source: Path) -> Iterator[dict[str, Future[Assembled]]]:
    """Compile once for each kind of GPU, at the same time; for the last one alone but in sweeps."""
    capabilities = cuda_toolchain.CAPABILITIES
    asked = capabilities if runs_every_case() else capabilities[-1:]
    with ThreadPoolExecutor() as pool:
        yield {name: pool.submit(assemble, source, name) for name in asked}


@pytest.fixture(scope="module", params=one_in(2, reversed(cuda_toolchain.CAPABILITIES)))
def assembled(builds: dict[str, Future[Assembled]], request: pytest.FixtureRequest) -> Assembled:
    return builds[request.param].result()


def assemble(source: Path, capability: str) -> Assembled:
    """Compile for a kind of GPU; nvcc keeps the PTX that it assembles."""
    folder = source.parent / capability
    folder.mkdir()
    log = nvcc(
        *("-cubin", f"-arch=sm_{capability}", "-Xptxas", "-v", "--keep"),
        *("--keep-dir", str(folder), str(source), "-o", str(folder / "kernels.cubin")),
    )
    (ptx,) = folder.glob("*.ptx")
    return Assembled(_resources(log), _accesses(ptx.read_text()))


def _resources(log: str) -> dict[str, Resources]:
    found = re.findall(
        r"Function properties for (\w+)\n"
        r"\s+(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads\n"
        r"ptxas info\s+: Used (\d+) registers",
        log,
    )
    return {
        name: Resources(int(used), int(out) + int(back), int(frame))
        for name, frame, out, back, used in found
    }


def _accesses(ptx: str) -> dict[str, list[str]]:
    functions = re.split(r"\.entry (\w+)\(", ptx)[1:]
    return {
        name: re.findall(r"\b(?:ld|st)\.global\S*", body)
        for name, body in zip(functions[::2], functions[1::2], strict=True)
    }


def test_no_function_spills(assembled: Assembled) -> None:
    assert len(assembled.resources) > 2 * (len(SMALL) + len(LARGE) + 60) - 10
    assert {name for name, one in assembled.resources.items() if one.spilled} == set()


def test_tiles_lie_in_registers(assembled: Assembled) -> None:
    framed = {name for name, one in assembled.resources.items() if one.frame}
    assert {name for name in framed if name.startswith("run_")} == set()
    assert len(framed) <= 6  # CUDA's own tangent has a table of its own


def test_what_lies_together_is_accessed_by_sixteen_bytes(assembled: Assembled) -> None:
    for name in WHOLE:
        accesses = assembled.accesses[f"run_{name}_gpu"]
        assert any(a.startswith("ld.") for a in accesses), name
        assert any(a.startswith("st.") for a in accesses), name
        assert all(re.search(r"\.v4\.[bfu]32|\.v2\.[bfu]64", a) for a in accesses), (name, accesses)


def test_integers_that_wrap_are_not_taken_for_larger_ones(assembled: Assembled) -> None:
    """What would always hold, if integers did not wrap, would be written without a look at them."""
    for name in ("sum", "product", "size", "difference"):
        accesses = assembled.accesses[f"run_wrapped_{name}_gpu"]
        assert any(access.startswith("ld.") for access in accesses), name


def test_sums_down_columns_read_by_sixteen_bytes(assembled: Assembled) -> None:
    for name in ("sum_down", "sum_down_bf16"):
        loads = [a for a in assembled.accesses[f"run_{name}_gpu_launch0"] if a.startswith("ld.")]
        assert loads
        assert all(".v4." in a for a in loads)


def test_long_rows_fit_into_the_registers_of_a_block(assembled: Assembled) -> None:
    for name in ("softmax_32k", "softmax_32k_odd", "layer_norm_32k", "rms_norm_32k_bf16"):
        assert assembled.resources[f"run_{name}_gpu"].registers <= 64
