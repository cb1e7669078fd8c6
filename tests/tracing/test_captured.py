"""The captured program as a whole: graphs, limits, warnings, threads, re-entrancy, errors."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import warnings
from typing import Any

import pytest
import torch
from torch import fx, nn

from fxkit.errors import CaptureError
from fxkit.tracing.capture_modes import capture
from fxkit.tracing.captured import MAX_EVICTIONS, Captured
from fxkit.tracing.graph_cache import MAX_GRAPHS
from fxkit.tracing.recaptures import RecaptureWarning
from fxkit.tracing.symbolic import symbolic_trace


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 4)

    def forward(self, a: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(a)))


def test_parameters_are_shared_and_not_copied():
    net = Net()
    graph_module = capture(net, (torch.ones(2, 4),)).graph_module
    shared = dict(graph_module.named_parameters())
    assert shared.keys() == dict(net.named_parameters()).keys()
    assert all(shared[name] is value for name, value in net.named_parameters())


def test_graph_module_takes_the_tensor_leaves_and_equals_eager():
    def fn(batch: dict[str, Any], scale: float, *rest: torch.Tensor) -> list[torch.Tensor]:
        return [batch["a"] * scale, batch["b"][0] + rest[0]]

    args = ({"a": torch.rand(3), "b": [torch.rand(3)]}, 2.5, torch.rand(3))
    graph_module = capture(fn, args).graph_module
    names = [node.name for node in graph_module.graph.nodes if node.op == "placeholder"]
    assert names == ["batch_a", "batch_b_0", "arg_2"]
    outputs = graph_module(args[0]["a"], args[0]["b"][0], args[2])
    assert isinstance(outputs, tuple)
    assert all(map(torch.equal, outputs, fn(*args)))


def test_graph_module_can_be_copied_checked_and_printed():
    net = Net()
    graph_module = capture(net, (torch.ones(2, 4),)).graph_module
    graph_module.graph.lint()
    graph_module.recompile()
    twin = copy.deepcopy(graph_module)
    assert torch.equal(twin(torch.ones(2, 4)), net(torch.ones(2, 4)))
    assert twin.first.weight is not net.first.weight
    assert "torch.relu(linear)" in graph_module.code


def test_gradients_are_those_of_eager():
    net = Net()
    captured = capture(net, (torch.ones(2, 4, requires_grad=True),))
    ours, theirs = torch.rand(2, 4, requires_grad=True), torch.empty(0)
    theirs = ours.detach().clone().requires_grad_()
    captured(ours).square().sum().backward()
    got = [parameter.grad.clone() for parameter in net.parameters()]
    net.zero_grad()
    net(theirs).square().sum().backward()
    assert torch.equal(ours.grad, theirs.grad)
    assert all(map(torch.equal, got, [parameter.grad for parameter in net.parameters()]))


def test_the_program_runs_once_when_it_is_captured(capsys: pytest.CaptureFixture[str]):
    def fn(a: torch.Tensor) -> torch.Tensor:
        print("once")
        return a + 1

    captured = capture(fn, (torch.ones(2),))
    assert capsys.readouterr().out == "once\n"
    assert captured.recaptures == 0 and len(captured.graphs) == 1


def test_whole_capture_prints_again_what_the_program_printed(capsys: pytest.CaptureFixture[str]):
    runs = []

    def fn(a: torch.Tensor) -> torch.Tensor:
        print("rows", a.shape[0], end="!\n")
        b = a + 1
        print(f"{b.sum().item():.1f}")
        return b

    captured = Captured(fn, backend=lambda module, _: runs.append(1) or module.forward)
    for value in (1.0, 1.0, 2.0, 1.0):
        captured(torch.full((2,), value))
    expected = "".join(f"rows 2!\n{2 * value + 2:.1f}\n" for value in (1, 1, 2, 1))
    assert capsys.readouterr().out == expected
    assert len(runs) == 2
    assert captured.explain(torch.ones(2)).startswith("graph")
    assert capsys.readouterr().out == ""


@pytest.mark.usefixtures("few_objects")
def test_nothing_of_the_captured_run_is_kept_alive():
    def fn(a: torch.Tensor) -> dict[str, Any]:
        middle = a * 2
        return {"result": middle + 1, "more": [middle.sum() * 3]}

    def tensors() -> int:
        return sum(issubclass(type(value), torch.Tensor) for value in gc.get_objects())

    argument = torch.ones(2)
    gc.collect()
    gc.disable()
    try:
        before = tensors()
        captured = Captured(fn)
        captured(argument)
        assert len(captured.graphs) == 1
        assert tensors() == before
    finally:
        gc.enable()


def test_graphs_are_limited_and_one_warning_says_what_changes():
    captured = Captured(lambda a, n: a * len(range(n)))
    with pytest.warns(RecaptureWarning, match="captured more than 8 times: n keeps changing|args"):
        for n in range(MAX_GRAPHS + 1):
            captured(torch.ones(2), n)
    assert len(captured.graphs) == MAX_GRAPHS
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for n in range(100, 140):
            assert torch.equal(captured(torch.ones(2), n), torch.full((2,), float(n)))
    assert captured.recaptures == MAX_GRAPHS + MAX_EVICTIONS - 1


def test_a_number_of_arguments_that_changes_is_told():
    captured = Captured(lambda a, *rest: a + len(rest))
    with pytest.warns(RecaptureWarning, match="8 times: the arguments keep changing"):
        for count in range(MAX_GRAPHS + 1):
            captured(torch.ones(2), *["more"] * count)


def test_the_least_recently_used_graph_goes_first():
    captured = Captured(lambda a, n: a * len(range(n)))
    for n in range(MAX_GRAPHS):
        captured(torch.ones(2), n)
    captured(torch.ones(2), 0)
    with pytest.warns(RecaptureWarning):
        captured(torch.ones(2), 99)
    before = captured.recaptures
    captured(torch.ones(2), 0)
    assert captured.recaptures == before
    captured(torch.ones(2), 1)
    assert captured.recaptures == before + 1


def test_the_backend_makes_what_runs():
    calls = []

    def backend(graph_module: fx.GraphModule, tensors: tuple[torch.Tensor, ...]) -> Any:
        def run(*values: torch.Tensor) -> Any:
            calls.append(len(tensors))
            return graph_module(*values)

        return run

    captured = Captured(lambda a, b: (a + b, [b]), backend=backend)
    captured(torch.ones(2), torch.ones(2))
    assert calls == []
    total, (second,) = captured(torch.ones(2), torch.zeros(2))
    assert calls == [2]
    assert torch.equal(total, torch.ones(2)) and torch.equal(second, torch.zeros(2))


def test_errors_of_the_program_are_its_own():
    class Own(Exception):
        pass

    def fn(a: torch.Tensor) -> None:
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            a + 1
            raise Own("mine")

    with pytest.raises(Own, match="mine"):
        capture(fn, (torch.ones(2),))
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
    assert torch._C._len_torch_function_stack() == 0


def test_error_of_a_torch_call_in_a_graph_is_that_of_the_program():
    def fn(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            return table[index] * 2

    captured = capture(fn, (torch.ones(3), torch.tensor([1])))
    with pytest.raises(IndexError) as error:
        captured(torch.ones(3), torch.tensor([7]))
    assert any(entry.name == "fn" for entry in error.traceback)
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")


def test_inference_region_is_left_when_a_call_raises():
    @torch.inference_mode()
    def fn(total: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        total.add_(1)
        return total[index] * 2

    captured = capture(fn, (torch.ones(3), torch.tensor([1])))
    with pytest.raises(IndexError):
        captured(torch.ones(3), torch.tensor([7]))
    assert not torch.is_inference_mode_enabled() and torch.is_grad_enabled()


def test_capture_inside_capture():
    inner = Captured(lambda a: a * 2 if a.sum() > 0 else a - 1)

    def fn(a: torch.Tensor) -> torch.Tensor:
        return inner(a) + inner(-a)

    captured = capture(fn, (torch.ones(3),))
    assert torch.equal(captured(torch.ones(3)), fn(torch.ones(3)))
    assert torch.equal(captured(-torch.ones(3)), fn(-torch.ones(3)))


def test_capture_within_a_program_that_is_captured():
    def fn(a: torch.Tensor) -> torch.Tensor:
        return capture(torch.sin, (a,))(a)

    captured = Captured(fn)
    assert torch.equal(captured(torch.ones(3)), torch.ones(3).sin())
    assert "captures another program" in captured.explain(torch.ones(3))


def test_program_that_calls_itself():
    def fn(a: torch.Tensor, depth: int) -> torch.Tensor:
        return a if depth == 0 else captured(a * 2, depth - 1) + 1

    captured = Captured(fn)
    for _ in range(3):
        assert torch.equal(captured(torch.ones(2), 3), torch.full((2,), 11.0))


def test_threads_with_other_shapes():
    net, failures = Net().eval(), []
    captured = Captured(net)

    def work(batch: int) -> None:
        for _ in range(20):
            a = torch.rand(batch, 4)
            if not torch.equal(captured(a), net(a)):
                failures.append(batch)

    threads = [threading.Thread(target=work, args=(batch,)) for batch in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(captured.graphs) <= 6


def test_refused_program_says_why():
    def fn(a: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(a.numpy() + 1)

    captured = Captured(fn)
    assert torch.equal(captured(torch.ones(3)), torch.full((3,), 2.0))
    text = captured.explain(torch.ones(3))
    assert "ran in Python" in text and "of unknown origin" in text
    assert f"test_captured.py:{fn.__code__.co_firstlineno + 1} in fn" in text
    with pytest.raises(CaptureError, match="expected a captured graph, got none"):
        _ = captured.graph_module


def test_nothing_is_captured_yet():
    assert Captured(torch.relu).explain(torch.ones(1)) == "no call has been captured yet"
    with pytest.raises(CaptureError, match="call the program first"):
        _ = Captured(torch.relu).guards


def test_nested_tensors_run_in_python():
    def padded(a: torch.Tensor) -> torch.Tensor:
        return a.to_padded_tensor(0.0) if a.is_nested else a * 2

    def inside(a: torch.Tensor) -> torch.Tensor:
        return torch.nested.nested_tensor([a, a[:1]]).to_padded_tensor(0.0)

    dense = torch.arange(6.0).reshape(2, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that they are a prototype
        nested = torch.nested.nested_tensor([dense, dense[:1]])
        for fn, given in ((padded, nested), (padded, dense), (inside, dense)):
            captured = Captured(fn)
            for value in (given, dense, given, nested if fn is padded else dense):
                assert torch.equal(captured(value), fn(value))
        assert not captured.whole and "nested tensor" in captured.explain(dense)


def test_quantised_arguments_have_a_graph_for_each_size():
    captured = Captured(lambda a: a.dequantize() * 2, dynamic=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that such tensors will be removed from torch
        for rows in (2, 3, 2):
            a = torch.quantize_per_tensor(torch.randn(rows, 4), 0.1, 0, torch.qint8)
            assert torch.equal(captured(a), a.dequantize() * 2)
    assert captured.whole and len(captured.graphs) == 2


@pytest.mark.parametrize("mode", ["whole", "aten"])
def test_copies_and_pickles_capture_graphs_of_their_own(mode: str):
    net, a = nn.Linear(3, 3), torch.ones(2, 3)
    captured = capture(net, (a,), mode=mode)
    assert repr(captured).endswith("Captured Linear, graphs: 1>")
    for twin in (copy.deepcopy(captured), pickle.loads(pickle.dumps(captured))):
        assert type(twin) is type(captured) and not twin.graphs
        assert twin.fn is not net
        assert torch.equal(twin(a), net(a)) and twin.whole
        with torch.no_grad():
            twin.fn.weight.zero_()
        assert torch.equal(twin(a), twin.fn(a)) and not torch.equal(twin(a), net(a))
    assert copy.copy(captured).fn is net


class _Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"in": nn.Linear(4, 4), "class": nn.Linear(4, 4)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers["class"](self.layers["in"](x))


def test_modules_that_are_called_by_keywords() -> None:
    net, x = _Keywords(), torch.randn(2, 4)
    assert torch.equal(capture(net, (x,))(x), net(x))
    assert torch.equal(capture(net, (x,), mode="aten")(x), net(x))
    with pytest.raises(CaptureError, match="names that code can be made of"):
        symbolic_trace(net)
