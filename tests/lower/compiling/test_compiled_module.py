"""A compiled module: when its kernels run, and when they do not."""

from __future__ import annotations

import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import fxkit
from fxkit.errors import UnsupportedError
from fxkit.lower import CompiledModule, to_cpp, to_cuda
from fxkit.lower.compiling import kernel_builds, pipeline
from fxkit.lower.runtime import binding

X, Y = torch.randn(40, 64), torch.randn(40, 64)


def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.gelu(x * 2 + y) - torch.sigmoid(y)


@pytest.fixture
def module() -> CompiledModule:
    return to_cpp(fx.symbolic_trace(program), (X, Y))


def eager_calls(module: CompiledModule) -> list[str]:
    return list(module.report().eager_calls)


def test_it_is_called_like_the_graph(module: CompiledModule) -> None:
    expected = program(X, Y)
    torch.testing.assert_close(module(X, Y), expected)
    torch.testing.assert_close(module(X, y=Y), expected)
    torch.testing.assert_close(module(y=Y, x=X), expected)
    assert module.report().calls == 3
    assert 'extern "C" void kernel_0' in module.source
    assert "#include" not in module.source


@pytest.mark.parametrize(
    "args",
    [
        (X.double(), Y.double()),
        (X.double(), Y),
        (X[:7], Y[:7]),
        (X.t().contiguous().t(), Y),
        (X, Y[:1]),
        (X.bfloat16(), Y.bfloat16()),
    ],
    ids=["dtype", "mixed", "shape", "stride", "broadcast", "bf16"],
)
def test_other_types_run_the_original_graph(module: CompiledModule, args: Any) -> None:
    torch.testing.assert_close(module(*args), program(*args))
    assert module.report().calls == 0
    assert "the type of input" in eager_calls(module)[0]


def test_wrong_arguments_raise_as_the_graph_does(module: CompiledModule) -> None:
    with pytest.raises(TypeError):
        module(X)


def test_gradients_run_the_original_graph(module: CompiledModule) -> None:
    x = X.clone().requires_grad_()
    module(x, Y).sum().backward()
    expected = X.clone().requires_grad_()
    program(expected, Y).sum().backward()
    torch.testing.assert_close(x.grad, expected.grad, rtol=0, atol=0)
    assert "gradients" in eager_calls(module)[0]
    with torch.no_grad():
        module(x, Y)
    with torch.inference_mode():
        assert module(X, Y).is_inference()
    assert module.report().calls == 2


def test_parameters_are_read_at_each_call() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.randn(64))
            self.shift: torch.Tensor
            self.register_buffer("shift", torch.randn(64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x * self.scale + self.shift)

    net = Net()
    with torch.no_grad():
        gm = fx.symbolic_trace(net)
        module = to_cpp(gm, (X,))
        torch.testing.assert_close(module(X), net(X))
        gm.get_parameter("scale").mul_(2)
        gm.shift = torch.randn(64)
        torch.testing.assert_close(module(X), gm(X))
        gm.double()
        torch.testing.assert_close(module(X), gm(X))
        assert module.report().kernel_misses == 1
    optimizer = torch.optim.SGD(gm.float().parameters(), lr=0.5)
    module(X).sum().backward()
    optimizer.step()
    with torch.no_grad():
        torch.testing.assert_close(module(X), gm(X))


def test_a_mode_sees_every_call(module: CompiledModule) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False):
        torch.testing.assert_close(module(X, Y), program(X, Y))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(module(X, Y), program(X, Y))
    batched = torch.func.vmap(module)(X[None].repeat(3, 1, 1), Y[None].repeat(3, 1, 1))
    torch.testing.assert_close(batched[1], program(X, Y))
    assert module.report().calls == 0
    assert len(eager_calls(module)) == 3


def test_results_have_eagers_strides() -> None:
    x = torch.randn(2, 3, 5, 7).to(memory_format=torch.channels_last)
    y = torch.randn(3, 1, 1)

    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.relu(x * y) + 1

    module = to_cpp(fx.symbolic_trace(fn), (x, y))
    found, expected = module(x, y), fn(x, y)
    assert found.stride() == expected.stride()
    torch.testing.assert_close(found, expected)
    assert module.report().calls == 1


def test_results_are_fresh_each_call(module: CompiledModule) -> None:
    first = module(X, Y)
    kept = first.clone()
    second = module(X + 1, Y)
    assert first.data_ptr() != second.data_ptr()
    assert torch.equal(first, kept)


def test_threads_follow_torch() -> None:
    x, y = torch.randn(300, 1024), torch.randn(300, 1024)
    module = to_cpp(fx.symbolic_trace(program), (x, y))
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(module(x, y))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_one_openmp_runtime_is_loaded(module: CompiledModule) -> None:
    module(X, Y)
    with open("/proc/self/maps") as maps:
        runtimes = {line.split()[-1] for line in maps if "libgomp" in line or "libiomp" in line}
    assert len(runtimes) == 1


def test_aten_graphs_give_the_same_kernels() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    torch_level = to_cpp(fx.symbolic_trace(program), (X, Y))
    aten_level = to_cpp(make_fx(program)(X, Y), (X, Y))
    assert aten_level.source == torch_level.source
    assert aten_level.cache_hit
    torch.testing.assert_close(aten_level(X, Y), program(X, Y))


def test_backend_eager_leaves_everything_to_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXKIT_BACKEND", "eager")
    module = to_cpp(fx.symbolic_trace(program), (X, Y))
    assert torch.equal(module(X, Y), program(X, Y))
    assert {region.kernel for region in module.regions} == {None}
    assert "FXKIT_BACKEND=eager" in str(module.report())


def test_without_a_compiler_everything_runs_in_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXKIT_CXX", "no-such-compiler")
    pipeline._warn_once.cache_clear()
    with pytest.warns(UserWarning, match="expected a C\\+\\+ compiler, got none"):
        module = to_cpp(fx.symbolic_trace(program), (X, Y))
    assert torch.equal(module(X, Y), program(X, Y))
    assert "C++ compiler" in str(module.report())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        to_cpp(fx.symbolic_trace(program), (X, Y))


def test_a_failing_compiler_costs_only_that_graph(
    monkeypatch: pytest.MonkeyPatch, module: CompiledModule
) -> None:
    monkeypatch.setattr(kernel_builds, "print_unit", lambda *args: "this is no C++;")
    with pytest.warns(UserWarning, match="error:") as caught:
        broken = to_cpp(fx.symbolic_trace(lambda x: x.exp() + 2), (X,))
    text = str(caught[0].message)
    assert "command:" in text and "log:" in text
    torch.testing.assert_close(broken(X), X.exp() + 2)
    torch.testing.assert_close(module(X, Y), program(X, Y))


def test_a_new_process_needs_no_compiler(module: CompiledModule) -> None:
    """A warm start neither runs a compiler nor imports torch's machinery for building."""
    binding.load()  # which another thread may still be building
    code = """
import sys, torch, torch.nn.functional as F
from torch import fx
from fxkit.lower import to_cpp
import subprocess
def refuse(*args, **kwargs): raise AssertionError("a process was started")
subprocess.Popen.__init__ = refuse
def program(x, y): return F.gelu(x * 2 + y) - torch.sigmoid(y)
x, y = torch.randn(40, 64), torch.randn(40, 64)
module = to_cpp(fx.symbolic_trace(program), (x, y))
assert module.cache_hit
assert "torch.utils.cpp_extension" not in sys.modules
torch.testing.assert_close(module(x, y), program(x, y))
assert module.report().calls == 1
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_report_names_what_was_fused(module: CompiledModule) -> None:
    module(X, Y)
    text = str(module.report())
    assert "5 of 5 pointwise and normalising nodes fused (100.0%)" in text
    assert "mul, add, gelu, sigmoid, sub" in text
    assert "calls: 1 fused, 0 in eager" in text
    (region,) = module.regions
    # eager: 2 reads and 1 write for add and sub, 1 and 1 for the others; the kernel: 2 and 1
    assert region.bytes_saved == (2 * 3 + 3 * 2 - 3) * X.nbytes


def test_values_that_torch_negates_when_read_are_computed_in_eager() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return x.conj().imag * 2 + 1

    x = torch.randn(4096, dtype=torch.complex64)
    compiled = to_cpp(fxkit.capture(program, (x,)).graph_module, (x,))
    assert compiled.report().fused == 2
    assert torch.equal(compiled(x), program(x))
    assert compiled.report().kernel_misses == 1


@pytest.mark.parametrize("lower", [to_cpp, to_cuda])
@pytest.mark.parametrize(
    ("program", "args", "message"),
    [
        (lambda: torch.relu, (X,), r"expected a torch\.fx\.GraphModule, got builtin.*\n.*capture"),
        (lambda: fxkit.capture(torch.relu, (X,)), (X,), r"got Captured\n.*its \.graph_module"),
        (lambda: fx.symbolic_trace(nn.ReLU()), 3, "expected a tuple of inputs, got int"),
        (lambda: fx.symbolic_trace(nn.ReLU()), X, "expected a tuple of inputs, got Tensor"),
    ],
)
def test_what_can_not_be_lowered_is_told(lower: Any, program: Any, args: Any, message: str):
    with pytest.raises(UnsupportedError, match=message):
        lower(program(), args)
