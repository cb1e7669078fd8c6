"""Kernels with gradients, of libraries, operators and functions, for other dtypes and for GPUs."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fxkit
from fxkit import cli
from fxkit.authoring.kernels.trial import TrialOptions
from fxkit.errors import BuildError, NumericsError, UnsupportedError
from fxkit.lower import Policy
from fxkit.lower.building import cuda_toolchain, toolchain
from fxkit.patterns.match_results import Match

ACT = """
#include <cstdint>
template <class T> void act(const T* x, const T* b, T* out, int64_t x_numel) {
  for (int64_t i = 0; i < x_numel; ++i) {
    float sum = (float)(T)((float)x[i] + (float)b[i]);
    out[i] = (T)((sum < 0 ? 0 : sum) * 0.5f);
  }
}
"""


def act(x: Tensor, b: Tensor) -> Tensor:
    return torch.relu(x + b) * 0.5


def are_alike(match: Match) -> bool:
    return match.type("x").shape == match.type("b").shape


def chain(x: Tensor) -> Tensor:
    return (act(x * 2, x.sin()) + 1).tanh()


def check_in_graph(kernel: fxkit.authoring.kernels.AuthoredKernel) -> str:
    """Compile a program with a kernel, compare, and return the report."""
    x = torch.randn(33, 17)
    program = fxkit.compile(chain, kernels=[kernel])
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(program(x), chain(x))
    return program.report()


def cube(x: Tensor, k: float) -> Tensor:
    return torch.tanh(x * x * x) * k


def cube_gradient(grad: Tensor, x: Tensor, k: float) -> Tensor:
    t = torch.tanh(x * x * x)
    return grad * k * (1 - t * t) * 3 * x * x


CUBE = """
#include <cmath>
template <class T> void cube(const T* x, T* out, long x_numel, double k) {
  for (long i = 0; i < x_numel; ++i) out[i] = std::tanh(x[i] * x[i] * x[i]) * (T)k;
}
"""


def test_a_kernel_with_a_gradient_is_used_in_training() -> None:
    kernel = fxkit.kernel(cube, cpp=CUBE, gradient=cube_gradient, always=True)
    assert kernel.prove() == 48
    x = torch.randn(200, 30, dtype=torch.float64, requires_grad=True)
    program = fxkit.compile(lambda x: (cube(x + 1, 2.0) * 3).sum(), kernels=[kernel])
    for _ in range(2):
        got = torch.autograd.grad(program(x), x)
        torch.testing.assert_close(got, torch.autograd.grad((cube(x + 1, 2.0) * 3).sum(), x))
    assert "kernel cube used at mul, mul_1, tanh, mul_2" in program.report()
    small = torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: kernel(x, 0.5), small)


def test_a_wrong_gradient_is_found() -> None:
    kernel = fxkit.kernel(cube, cpp=CUBE, gradient=lambda grad, x, k: grad * k)
    with pytest.raises(NumericsError, match=r"gradients\[0\]"):
        kernel.prove()


def test_elements_of_half_precision_are_computed_as_eager_rounds_them() -> None:
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    kernel = fxkit.kernel(act, cpp=ACT, where=are_alike, dtypes=dtypes)
    assert kernel.prove() == 48
    for dtype in dtypes:
        x, b = torch.randn(2, 9, 31).to(dtype)
        assert torch.equal(kernel(x, b), act(x, b))
    x = torch.randn(4, 4, dtype=torch.float64)
    assert torch.equal(kernel(x, x), act(x, x))  # by the pattern


def library(folder: Path) -> Path:
    source = folder / "act.cpp"
    source.write_text(
        'extern "C" void act(const float* x, const float* b, float* out, long n) {\n'
        "  for (long i = 0; i < n; ++i) { float v = x[i] + b[i]; out[i] = v < 0 ? 0 : v * 0.5f; }\n"
        "}\n"
    )
    command = [toolchain.current().compiler, "-O1", "-shared", "-fPIC", str(source)]
    subprocess.run([*command, "-o", str(folder / "libact.so")], check=True)
    return folder / "libact.so"


DECLARED = "void act(const float* x, const float* b, float* out, long x_numel)"


def test_a_library_that_is_there_already(tmp_path: Path) -> None:
    path = library(tmp_path)
    kernel = fxkit.kernel(act, library=path, signature=DECLARED, where=are_alike, always=True)
    assert "kernel act used at add, relu, mul_1" in check_in_graph(kernel)
    lacking = fxkit.kernel(
        act, library=path, signature=DECLARED.replace("act", "gone"), where=are_alike
    )
    with pytest.raises(NumericsError, match="to return 0, got another number in all"):
        lacking.prove()
    with pytest.raises(UnsupportedError, match="expected the signature of a function"):
        fxkit.kernel(act, library=path)
    with pytest.raises(UnsupportedError, match="expected a library, got"):
        fxkit.kernel(act, library=tmp_path / "gone.so", signature=DECLARED)


@torch.library.custom_op("fxkit_tests::act", mutates_args=())
def act_operator(x: Tensor, b: Tensor) -> Tensor:
    return torch.relu(x + b) * 0.5


@pytest.mark.parametrize(
    "call", [torch.ops.fxkit_tests.act.default, lambda x, b: torch.clamp(x + b, min=0) / 2]
)
def test_operators_of_torch_and_functions_of_python(call: Callable[..., Tensor]) -> None:
    kernel = fxkit.kernel(act, call=call, always=True)
    assert kernel.prove() == 48
    assert "kernel act used at add, relu, mul_1" in check_in_graph(kernel)


def test_a_function_that_computes_something_else_is_found() -> None:
    with pytest.raises(NumericsError, match="expected act to compute its pattern"):
        fxkit.kernel(act, call=lambda x, b: torch.relu(x + b) * 0.51).prove()


def doubled(x: Tensor) -> tuple[Tensor, Tensor]:
    return x * 1, x + x


ALIASES: dict[str, Callable[..., object]] = {
    "got result 0 in that of x": lambda x: (x, x * 2),
    "got result 1 in that of result 0": lambda x: (lambda t: (t[0], t[1]))(
        torch.stack([x, x * 2])
    ),
    "expected doubled to compute its pattern, got another result": lambda x: (
        x.clone(), x.add_(x).clone(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("told", ALIASES)
def test_memory_that_is_shared_or_written_is_found(told: str) -> None:
    kernel = fxkit.kernel(doubled, call=ALIASES[told])
    with pytest.raises(NumericsError, match=re.escape(told)) as caught:
        kernel.prove()
    assert "inputs: x=f32[" in str(caught.value)


def test_one_build_serves_all_sizes() -> None:
    kernel = fxkit.kernel(act, cpp=ACT, where=are_alike, dtypes=(torch.float32,), always=True)
    program = fxkit.compile(chain, kernels=[kernel], dynamic=True)
    with torch.no_grad():
        for rows in (3, 7, 33, 1, 0, 64):
            x = torch.randn(rows, 5)
            torch.testing.assert_close(program(x), chain(x))
    assert "kernel act used" in program.report()
    assert program.builds <= 3  # empty and single rows are kinds of their own


def test_a_trial_takes_in_what_fxkit_would_fuse() -> None:
    kernel = fxkit.kernel(act, cpp=ACT, where=are_alike)
    x = torch.randn(8, 8)
    gm = fxkit.capture(chain, (x,)).graph_module
    (match,) = fxkit.find(gm, kernel.rule)
    options = TrialOptions((), Policy())
    assert {n.name for n in options.around(match)} == {"add", "relu", "mul_1"}
    options.look_at(gm)
    found = {n.name for n in options.around(match)}
    assert found == {"mul", "sin", "add", "relu", "mul_1", "add_1", "tanh"}


CUDA = """
#include <cstdint>
__global__ void each(const float* x, const float* b, float* out, int64_t n) {
  int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
  if (i < n) { float v = x[i] + b[i]; out[i] = v < 0 ? 0 : v * 0.5f; }
}
void act(const float* x, const float* b, float* out, int64_t x_numel, cudaStream_t stream) {
  if (x_numel) each<<<(x_numel + 255) / 256, 256, 0, stream>>>(x, b, out, x_numel);
}
"""


@pytest.mark.skipif(cuda_toolchain.nvcc() is None, reason="there is no nvcc")
def test_a_cuda_source_is_built_by_nvcc_and_left_out_on_the_processor() -> None:
    kernel = fxkit.kernel(act, cuda=CUDA, where=are_alike)
    assert kernel.natives["cuda"].path.is_file()
    assert "kernel act left out: it has no source for cpu" in check_in_graph(kernel)
    broken = fxkit.kernel(act, cuda=CUDA.replace("v * 0.5f", "nowhere"))
    with pytest.raises(BuildError, match=r'kernel\(5\): error: identifier "nowhere"'):
        _ = broken.natives["cuda"].path


@pytest.mark.gpu
def test_a_cuda_kernel_computes_its_pattern() -> None:
    kernel = fxkit.kernel(act, cuda=CUDA, where=are_alike, always=True)
    assert kernel.prove("cuda") == 48
    x = torch.randn(33, 17, device="cuda")
    program = fxkit.compile(chain, kernels=[kernel])
    with torch.no_grad():
        torch.testing.assert_close(program(x), chain(x))
    assert "kernel act used" in program.report()


def test_the_command_line_proves_the_kernels_of_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cube.cpp").write_text(CUBE)
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch, fxkit\n"
        "def cube(x, k):\n    return torch.tanh(x * x * x) * k\n"
        "kernel = fxkit.kernel(cube, cpp='cube.cpp', dtypes=(torch.float64,))\n"
    )
    assert cli.main(["prove-kernels", str(file)]) == 0
    assert capsys.readouterr().out == "cube on cpu: holds on 48 inputs\n"
    (tmp_path / "cube.cpp").write_text(CUBE.replace("* (T)k", "- (T)k"))
    assert cli.main(["prove-kernels", str(file)]) == 1
    assert "cube on cpu: expected cube to compute its pattern" in capsys.readouterr().out
    file.write_text("")
    assert cli.main(["prove-kernels", str(file)]) == 1
    assert "expected kernels in mine.py, got none" in capsys.readouterr().err


@pytest.mark.parametrize("options", [{"cpp": ACT}, {"call": act}])
def test_vmap_equals_a_loop(options: dict[str, Any]) -> None:
    kernel = fxkit.kernel(act, where=are_alike, **options)
    x, b = torch.randn(5, 4, 3), torch.randn(4, 3)
    looped = torch.stack([kernel(row, b) for row in x])
    torch.testing.assert_close(torch.vmap(kernel.operator, (0, None))(x, b), looped)
    moved = torch.vmap(kernel.operator, (2, None), out_dims=1)(x.permute(1, 2, 0), b)
    torch.testing.assert_close(moved, looped.transpose(0, 1))
    assert torch.vmap(kernel.operator, (0, None))(x[:0], b).shape == (0, 4, 3)


def test_vmap_of_several_results_and_under_autograd() -> None:
    x = torch.randn(6, 4, dtype=torch.float64)
    two = fxkit.kernel(doubled, call=lambda x: (x * 1, x + x))
    for ours, theirs in zip(torch.vmap(two.operator)(x), doubled(x), strict=True):
        torch.testing.assert_close(ours, theirs)
    kernel = fxkit.kernel(cube, call=cube, gradient=cube_gradient)
    x.requires_grad_()
    got = torch.autograd.grad(torch.vmap(lambda row: kernel.operator(row, 0.5))(x).sum(), x)
    torch.testing.assert_close(got, torch.autograd.grad(cube(x, 0.5).sum(), x))


def test_a_function_for_one_kind_of_device_is_not_called_on_another() -> None:
    def launch(x: Tensor, b: Tensor) -> Tensor:
        raise AssertionError("it launches on a GPU")

    kernel = fxkit.kernel(act, call=launch, devices=("cuda",), always=True)
    assert kernel.serves("cuda") and not kernel.serves("cpu")
    assert "kernel act left out: it has no source for cpu" in check_in_graph(kernel)
    x = torch.randn(3)
    assert torch.equal(kernel(x, x), act(x, x))  # by the pattern
    with pytest.raises(UnsupportedError, match="expected devices= to list kinds of devices"):
        fxkit.kernel(act, call=launch, devices="cuda")
    with pytest.raises(NumericsError, match="act does not run on cpu"):
        kernel.prove()


def test_a_function_of_triton_is_launched_by_one_of_python() -> None:
    jitted = type("JITFunction", (), {"__module__": "triton.runtime.jit"})()
    with pytest.raises(UnsupportedError, match="to be a function that launches on a grid") as error:
        fxkit.kernel(act, call=jitted)
    assert "kernel[grid]" in (error.value.hint or "")


@pytest.mark.gpu
def test_a_kernel_of_triton_computes_its_pattern() -> None:
    triton = pytest.importorskip("triton")
    from tests.authoring.kernels.triton_act import launch

    assert triton.__version__
    kernel = fxkit.kernel(act, call=launch, devices=("cuda",), where=are_alike, always=True)
    assert kernel.prove("cuda") == 48


GENERIC_CUDA = """
#include <cstdint>
template <class T> __global__ void each(const T* x, const T* b, T* out, int64_t n) {
  int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
  if (i < n) { T v = x[i] + b[i]; out[i] = v < 0 ? T(0) : v * T(0.5); }
}
template <class T> int act(const T* x, const T* b, T* out, int64_t x_numel, cudaStream_t stream) {
  if (x_numel) each<<<(x_numel + 255) / 256, 256, 0, stream>>>(x, b, out, x_numel);
  return cudaGetLastError() != cudaSuccess;
}
"""


@pytest.mark.skipif(cuda_toolchain.nvcc() is None, reason="there is no nvcc")
@pytest.mark.parametrize("capability", cuda_toolchain.CAPABILITIES)
def test_the_call_of_a_cuda_source_compiles_for_each_kind_of_gpu(
    capability: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_toolchain, "_capability", lambda gpu: capability)
    dtypes = (torch.float32, torch.float64)
    kernel = fxkit.kernel(act, cuda=GENERIC_CUDA, where=are_alike, dtypes=dtypes)
    native = kernel.natives["cuda"]
    assert f"arch=compute_{capability},code=sm_{capability}" in native.source.tools.flags
    assert f"sm_{capability}".encode() in native.path.read_bytes()
    x = torch.randn(3)
    assert torch.equal(kernel(x, x), act(x, x))  # by the pattern: there is no GPU
    assert kernel.serves("cuda") and not kernel.serves("cpu")
