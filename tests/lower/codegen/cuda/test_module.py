"""`to_cuda`: what is fused for a GPU, what is left to eager and why, and that it runs there."""

from __future__ import annotations

import contextlib
import ctypes
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import fxkit
from fxkit.ir.types import type_of_value
from fxkit.lower import CompiledModule, Policy, to_cpp, to_cuda
from fxkit.lower.building import cuda_toolchain
from fxkit.lower.building.build import Order
from fxkit.lower.building.toolchain import Linking
from fxkit.lower.codegen.cuda.printer import print_unit
from fxkit.lower.compiling.cuda_launching import CudaCall
from fxkit.lower.compiling.cuda_lowering import build_kernels
from fxkit.lower.compiling.kernel_explanation import explain_kernel
from fxkit.lower.loop_ir.interpreter import interpret
from fxkit.lower.runtime.devices import is_on_gpu
from tests.lower.codegen.cuda.cases import CASES, Case, case, randn
from tests.lower.codegen.cuda.on_cpu import LaunchedCall, ShimLowering
from tests.lower.codegen.cuda.shim import build_on_cpu
from tests.lower.kernels import difference

needs_nvcc = pytest.mark.skipif(cuda_toolchain.nvcc() is None, reason="needs nvcc")


def on_gpu(*shapes: tuple[int, ...], device: str = "cuda:0") -> tuple[torch.Tensor, ...]:
    """Return tensors on a GPU that need not be there: they have no memory."""
    with FakeTensorMode():
        return tuple(torch.empty(shape, device=device) for shape in shapes)


def program(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = F.layer_norm(x * 2 + 1, (64,), w)
    return y @ y.t(), torch.logcumsumexp(torch.sigmoid(y) * 2, -1)


@pytest.fixture
def unbuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take kernels for built, without a compiler."""
    from fxkit.lower.building import build
    from fxkit.lower.compiling import cuda_lowering

    class Anything:
        def __getattr__(self, name: str) -> Any:
            return ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 999)

    def library(*texts: str, tools: Any) -> build.Library:
        return build.Library(Anything(), build.Path("none"), 0.0, False)  # type: ignore[arg-type]

    monkeypatch.setattr(cuda_lowering, "build", library)
    monkeypatch.setattr(cuda_lowering.cuda_toolchain, "current", lambda gpu: None)


def compiled_for(
    fn: Callable[..., Any], args: tuple[torch.Tensor, ...], **options: Any
) -> CompiledModule:
    return to_cuda(fxkit.symbolic_trace(fn), args, **options)


@pytest.mark.usefixtures("unbuilt")
def test_regions_on_a_gpu_are_fused_and_the_rest_has_reasons() -> None:
    module = compiled_for(program, on_gpu((64, 64), (64,)))
    fused = [region.nodes for region in module.regions if region.kernel]
    assert fused == [("mul", "add", "layer_norm", "sigmoid", "mul_1")]
    reasons = {region.name: region.reason for region in module.regions if region.reason}
    assert "reduces in a way" in str(reasons["logcumsumexp"])
    assert reasons["matmul"] == "its result is on cuda:0, whose library computes products"
    assert "__global__" in module.source
    assert "fx_fold<" in module.source


@pytest.mark.usefixtures("unbuilt")
def test_a_kernel_is_explained_by_its_loops_after_each_pass() -> None:
    text = explain_kernel(compiled_for(program, on_gpu((64, 64), (64,))), "kernel_0")
    names = re.findall(r"^(\w+):$", text[text.index("loops:") :], re.M)
    assert names[:4] == ["loops", "plain_nest", "SplitLanes", "MapRows"]
    assert text.index("parallel i0 < 64:") < text.index("block block < ")


@pytest.mark.usefixtures("unbuilt")
def test_an_operator_alone_is_left_to_eager_unless_asked_for() -> None:
    args = on_gpu((64, 64))
    alone = compiled_for(lambda x: torch.softmax(x, -1), args)
    assert [r.reason for r in alone.regions] == [
        "no neighbour can join it, and alone eager launches a kernel for it as well"
    ]
    asked = compiled_for(lambda x: torch.softmax(x, -1), args, policy=Policy(min_members=1))
    assert [r.kernel for r in asked.regions] == ["kernel_0"]


@pytest.mark.usefixtures("unbuilt")
def test_each_device_is_served_by_its_own_function() -> None:
    gm = fxkit.symbolic_trace(lambda x: torch.tanh(x * 2 + 1))
    gpu, cpu = on_gpu((64, 64)), (torch.zeros(64, 64),)
    assert [r.kernel for r in to_cuda(gm, gpu).regions] == ["kernel_0"]
    assert all("on cpu" in str(r.reason) for r in to_cuda(gm, cpu).regions)
    assert [r.kernel for r in to_cpp(gm, cpu).regions] == ["kernel_0"]
    assert all("on cuda:0" in str(r.reason) for r in to_cpp(gm, gpu).regions)


@pytest.mark.usefixtures("unbuilt")
def test_tensors_of_several_devices_are_not_mixed() -> None:
    first, second = on_gpu((8, 8)), on_gpu((8, 8), device="cuda:1")
    module = compiled_for(lambda x, y: (x * 2 + 1, y * 2 + 1), (*first, *second))
    assert [r.nodes for r in module.regions if r.kernel] == [("mul", "add")]
    assert [r.reason for r in module.regions if r.reason] == [
        "it reads or makes a tensor on cuda:1"
    ] * 2


@pytest.mark.usefixtures("unbuilt")
def test_inputs_elsewhere_run_the_original_graph() -> None:
    module = compiled_for(program, on_gpu((64, 64), (64,)))
    args = (torch.randn(64, 64), torch.randn(64))
    for found, expected in zip(module(*args), program(*args), strict=True):
        torch.testing.assert_close(found, expected)
    assert module.report().eager_calls == {"the type of input x is another": 1}


def test_without_nvcc_the_graph_runs_in_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_toolchain, "nvcc", lambda: None)
    with pytest.warns(UserWarning, match="expected nvcc, got none"):
        module = compiled_for(program, on_gpu((64, 64), (64,)))
    assert not any(region.kernel for region in module.regions)


def test_inputs_and_parameters_say_where_a_graph_runs() -> None:
    gm = fxkit.symbolic_trace(lambda x: x * 2)
    assert not is_on_gpu(gm, (torch.zeros(2),))
    assert is_on_gpu(gm, on_gpu((2,)))


def test_flags_name_the_gpu_or_the_usual_ones() -> None:
    assert cuda_toolchain.targets("90") == ("-gencode", "arch=compute_90,code=sm_90")
    assert "arch=compute_80,code=sm_80" in cuda_toolchain.targets(None)
    assert "arch=compute_90,code=compute_90" in cuda_toolchain.targets(None)


def test_each_kind_of_gpu_has_libraries_of_its_own() -> None:
    keys = {
        Order(("text",), cuda_toolchain.for_capability(sys.executable, capability), Linking()).key
        for capability in ("80", "90", None)
    }
    assert len(keys) == 3


Launched = Callable[[str], tuple[CudaCall, Case]]


@pytest.fixture
def launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], tuple[CudaCall, Case]]:
    """Return what makes calls that launch CUDA text under a shim, as on a GPU."""
    stream = SimpleNamespace(cuda_stream=0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)

    def call_for(name: str) -> tuple[CudaCall, Case]:
        program, made = CASES[name]
        one = case(program, made())
        types = [[type_of_value(t) for t in some] for some in (one.inputs, one.outputs)]
        call = CudaCall("region_0", one.kernel, *types, lambda *given: "eager's")
        call.bind(build_on_cpu(print_unit({"kernel_0": one.kernel}), tmp_path), "kernel_0")
        call._device = torch.device("cpu", 0)
        return call, one

    return call_for


@pytest.mark.parametrize("name", ["layer_norm_of_sum", "softmax_long", "several"])
def test_a_call_makes_its_results_and_scratch_memory(launched: Launched, name: str) -> None:
    call, one = launched(name)
    assert bool(call.scratch_bytes) == (name == "softmax_long")
    expected = [torch.empty_like(output) for output in one.outputs]
    interpret(one.kernel, one.inputs, expected)
    for found, right in zip(_as_tuple(call(*one.inputs)), expected, strict=True):
        assert difference(found, right) <= 8
    assert (call.calls, call.misses) == (1, 0)


def test_a_call_with_other_types_runs_in_eager(launched: Launched) -> None:
    call, one = launched("gelu_chain")
    x, y = one.inputs
    for other in (x.double(), x[:5], x.t().contiguous().t(), torch.ops.aten._neg_view(x)):
        assert call(other, y) == "eager's"
    assert (call.calls, call.misses) == (0, 4)


def test_a_launch_that_fails_leaves_its_region_to_eager(launched: Launched) -> None:
    call, one = launched("gelu_chain")
    call._function = lambda *arguments: 719
    with pytest.warns(UserWarning, match="can be launched, got CUDA's error 719"):
        assert call(*one.inputs) == "eager's"
    assert call(*one.inputs) == "eager's"
    assert call.calls == 0


def two_kernels(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return results of kernels with a product between them; one needs scratch memory."""
    a = torch.softmax(x * 2, -1)
    b = torch.tanh(a @ y + 1) * 3
    return a, b, (a * a).sum(-1) + b.sum()


def test_the_binding_launches_a_whole_graph(tmp_path: Path) -> None:
    x, y = randn(2, 40_000), randn(40_000, 3)
    module = ShimLowering(tmp_path, LaunchedCall)(fxkit.symbolic_trace(two_kernels), (x, y))
    assert module.native_program is not None
    assert any(call.scratch_bytes for call in module._plan.calls.values())
    with torch.no_grad():
        exact = two_kernels(x.double(), y.double())
        for _ in range(2):
            for found, eager, right in zip(module(x, y), two_kernels(x, y), exact, strict=True):
                error, bound = ((t - right).abs().max() for t in (found, eager))
                assert (found.dtype, found.stride()) == (eager.dtype, eager.stride())
                assert error <= 2 * bound + 1e-6 * right.abs().max()
    assert module.native_program.calls == 2
    assert module.native_program.stand_ins == 0


def test_where_the_binding_can_not_launch_python_stands_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    out_of_bounds = torch.tensor([0, 50])
    table = randn(5, 8)
    lowered = ShimLowering(tmp_path, LaunchedCall)
    gm = fxkit.symbolic_trace(lambda i, t: t[i] * 2)
    module = lowered(gm, (out_of_bounds % 5, table))
    with torch.no_grad():
        torch.testing.assert_close(module(out_of_bounds % 5, table), table[[0, 0]] * 2)
        with pytest.raises(IndexError), pytest.warns(UserWarning, match="got CUDA's error 710"):
            module(out_of_bounds, table)
    assert module.native_program.stand_ins == 1


@needs_nvcc
def test_a_library_is_built_loaded_and_found_again(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FXKIT_CACHE_DIR", str(tmp_path))
    args = on_gpu((64, 64), (64,))
    module = compiled_for(program, args)
    assert [r.kernel for r in module.regions if r.kernel] == ["kernel_0"]
    assert not module.cache_hit
    again = compiled_for(program, args)
    assert again.cache_hit


@needs_nvcc
@pytest.mark.skipif(torch.cuda.is_available(), reason="looks at what is reported without a GPU")
def test_a_launch_without_a_gpu_reports_an_error(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FXKIT_CACHE_DIR", str(tmp_path))
    from tests.lower.codegen.cuda.cases import case

    fn, made = CASES["one_element"]
    built = build_kernels({"kernel_0": case(fn, made()).kernel})
    launch = built.libraries["kernel_0"].handle.kernel_0
    assert launch((ctypes.c_void_p * 2)(), None, None, 0) != 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_a_gpu_computes_what_eager_does(name: str) -> None:
    fn, made = CASES[name]
    args = tuple(arg.cuda() for arg in made())
    gm = fxkit.capture(fn, args).graph_module
    module = to_cuda(gm, args, policy=Policy(min_members=1))
    assert any(region.kernel for region in module.regions), module.report()
    with torch.no_grad():
        found, eager = module(*args), fn(*args)
        exact = fn(*[a.double() if a.is_floating_point() else a for a in args])
    for ours, theirs, right in zip(*map(_as_tuple, (found, eager, exact)), strict=True):
        assert ours.device == theirs.device
        if not ours.dtype.is_floating_point or not right.isfinite().all():
            assert difference(ours.cpu(), theirs.cpu()) <= 8
            continue
        least = 2 * torch.finfo(ours.dtype).eps * float(right.abs().max())
        bound = max(2 * float((theirs.double() - right).abs().max()), least)
        assert float((ours.double() - right).abs().max()) <= bound
    assert module.report().kernel_misses == 0


@pytest.mark.gpu
def test_kernels_run_on_the_current_stream() -> None:
    fn, made = CASES["layer_norm_of_sum"]
    args = tuple(arg.cuda() for arg in made())
    module = to_cuda(fxkit.capture(fn, args).graph_module, args)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(stream):
        found = module(*args)
    torch.cuda.current_stream().wait_stream(stream)
    torch.testing.assert_close(found, fn(*args))


@pytest.mark.gpu
def test_kernels_are_recorded_into_a_graph_of_launches() -> None:
    fn, made = CASES["softmax_long"]
    args = tuple(arg.cuda() for arg in made())
    module = to_cuda(fxkit.capture(fn, args).graph_module, args, policy=Policy(min_members=1))
    with torch.no_grad():
        module(*args)
        recorded = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recorded):
            found = module(*args)
        args[0].mul_(2)
        recorded.replay()
        torch.testing.assert_close(found, fn(*args))


@pytest.mark.gpu
def test_a_whole_graph_is_one_call() -> None:
    x, y = randn(2, 40_000).cuda(), randn(40_000, 3).cuda()
    compiled = fxkit.compile(two_kernels)
    with torch.no_grad():
        exact = two_kernels(x.double(), y.double())
        for _ in range(4):
            for found, right in zip(compiled(x, y), exact, strict=True):
                torch.testing.assert_close(found.double(), right, rtol=1e-4, atol=1e-4)
    (module,) = compiled.compiled_modules
    assert module.native_program.calls >= 3
    assert module.native_program.stand_ins == 0


@pytest.mark.gpu
def test_views_from_odd_places_go_element_by_element() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x * 2, -1)

    memory = torch.randn(4 * 64 + 3, device="cuda")
    views = [memory[shift : 4 * 64 + shift].view(4, 64) for shift in range(4)]
    module = to_cuda(fxkit.capture(fn, (views[0],)).graph_module, (views[0],))
    with torch.no_grad():
        for view in views:
            torch.testing.assert_close(module(view), fn(view))
    assert module.report().calls == len(views)
    assert module.report().kernel_misses == 0


@pytest.mark.gpu
def test_more_elements_than_an_int_counts() -> None:
    free, _ = torch.cuda.mem_get_info()
    count = 2**31 + 19
    if free < 3 * count:
        pytest.skip(f"needs {3 * count >> 30} GiB of free memory on the GPU")
    x = torch.zeros(count, dtype=torch.int8, device="cuda")
    x[-19:] = torch.arange(19, dtype=torch.int8)
    module = to_cuda(fxkit.capture(lambda x: x * 2 + 1, (x,)).graph_module, (x,))
    with torch.no_grad():
        found = module(x)
    assert torch.equal(found[-19:].cpu(), torch.arange(19, dtype=torch.int8) * 2 + 1)
    assert bool((found[:-19] == 1).all())
    assert module.report().kernel_misses == 0


@pytest.mark.gpu
def test_kernels_run_on_the_device_of_their_inputs() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    fn, made = CASES["softmax_long"]
    args = tuple(arg.to("cuda:1") for arg in made())
    module = to_cuda(fxkit.capture(fn, args).graph_module, args, policy=Policy(min_members=1))
    with torch.no_grad():
        torch.testing.assert_close(module(*args), fn(*args))
    assert torch.cuda.current_device() == 0
    assert module.report().kernel_misses == 0


@pytest.mark.gpu
def test_compile_picks_the_gpu_by_its_inputs() -> None:
    compiled = fxkit.compile(lambda x: torch.softmax(x * 0.5, -1) + x)
    x = randn(33, 257)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(compiled(x.cuda()).cpu(), compiled(x))
    assert [("__global__" in m.source) for m in compiled.compiled_modules] == [True, False]


def _as_tuple(value: Any) -> tuple[torch.Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)
