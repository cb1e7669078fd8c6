"""A graph of symbolic sizes gives what eager gives, at every size."""

from __future__ import annotations

import contextlib
import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fxkit
from fxkit.errors import UnsupportedError
from fxkit.passes.pipelines import SIMPLIFY
from fxkit.tracing.captured import Captured
from fxkit.tracing.recaptures import RecaptureWarning
from tests.sampling import one_in
from tests.tracing import size_programs as programs
from tests.tracing.faithful import assert_same

SHAPES = [(3, 5), (4, 6), (5, 3), (2, 7), (3, 4), (1, 6), (4, 6), (3, 5)]


def _outcome(run: Callable[..., Any], shape: tuple[int, int], seed: int) -> tuple[Any, ...]:
    torch.manual_seed(seed)
    x = torch.randn(shape)
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        try:
            result: Any = run(x)
        except Exception as error:  # compared like any other outcome
            result = (type(error), str(error))
    return result, x, text.getvalue(), torch.get_rng_state()


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if hasattr(value, "__dict__") and not isinstance(value, (torch.Tensor, type)):
        return {key: _plain(item) for key, item in vars(value).items()}
    stand_ins = "fxkit.tracing.values.symbolic_scalars"
    assert isinstance(value, torch.Tensor) or type(value).__module__ != stand_ins
    return value


def _compare(captured: Any, eager: Any) -> None:
    for number, shape in enumerate(SHAPES):
        ours, theirs = _outcome(captured, shape, number), _outcome(eager, shape, number)
        assert_same(_plain(ours), _plain(theirs), f"call {number} of {shape}")


@pytest.mark.filterwarnings("ignore::fxkit.tracing.recaptures.RecaptureWarning")
@pytest.mark.parametrize(("dynamic", "program"), one_in(2, [None, True], programs.FUNCTIONS))
def test_program_equals_eager_at_every_size(program: Any, dynamic: Any):
    _compare(Captured(program, dynamic=dynamic), program)


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore::fxkit.tracing.recaptures.RecaptureWarning")
@pytest.mark.parametrize("dynamic", [{"x": 0}, {"x": 1}, {"x": (0, 1)}, False])
@pytest.mark.parametrize("program", programs.FUNCTIONS, ids=lambda f: f.__name__)
def test_program_equals_eager_however_sizes_are_freed(program: Any, dynamic: Any):
    _compare(Captured(program, dynamic=dynamic), program)


@pytest.mark.one_in(2)
@pytest.mark.filterwarnings("ignore::fxkit.tracing.recaptures.RecaptureWarning")
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("kind", programs.MODULES)
def test_module_equals_eager_at_every_size(kind: Any, dynamic: Any):
    module = kind()
    twin = copy.deepcopy(module)
    _compare(Captured(module, dynamic=dynamic), twin)
    assert_same(_plain(vars(module)), _plain(vars(twin)), "attributes")
    assert_same(dict(module.state_dict()), dict(twin.state_dict()), "state")


ONE_GRAPH = [programs.reshapes, programs.makes_masks, programs.broadcasts, *programs.SERVED]


@pytest.mark.parametrize("program", ONE_GRAPH, ids=lambda f: f.__name__)
def test_one_graph_serves_every_size(program: Any):
    captured = fxkit.capture(program, (torch.randn(3, 5),), dynamic=True)
    for shape in [(2, 2), (7, 3), (64, 9)]:
        x = torch.randn(shape)
        assert_same(_plain(captured(x)), _plain(program(x)), str(shape))
    assert captured.recaptures == 0 and len(captured.graphs) == 1


def test_a_second_size_frees_that_size_only():
    captured = fxkit.capture(programs.reshapes, (torch.randn(3, 5),))
    assert "f32[3,5]" in str(fxkit.graph(captured.graph_module))
    captured(torch.randn(3, 6))
    assert "%x: f32[3,s0]" in str(fxkit.graph(captured.graph_module))
    captured(torch.randn(3, 9))
    assert captured.recaptures == 1 and len(captured.graphs) == 1
    captured(torch.randn(4, 9))
    captured(torch.randn(5, 2))
    assert captured.recaptures == 2 and len(captured.graphs) == 1
    assert "%x: f32[s0,s1]" in str(fxkit.graph(captured.graph_module))


def test_guards_are_expressions_with_the_line():
    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if x.shape[0] * 2 > y.shape[0]:
            x = x + 1
        return x + y.view(2, -1)[:, 0].sum()

    captured = fxkit.capture(program, (torch.randn(4), torch.randn(6)), dynamic=True)
    texts = [guard.describe() for guard in captured.guards]
    assert "x.shape[0] >= 2" in texts
    (comparison,) = [text for text in texts if "x.shape[0] * 2" in text]
    assert comparison.startswith("(x.shape[0] * 2) > y.shape[0]  (test_size_recording.py:")
    (even,) = [text for text in texts if "% 2" in text]
    assert even.startswith("(y.shape[0] % 2) == 0  (test_size_recording.py:")
    told = captured.explain(torch.randn(4), torch.randn(10))
    assert "(x.shape[0] * 2) > y.shape[0] to be true" in told
    assert "got false for x.shape[0] = 4, y.shape[0] = 10" in told
    assert "test_size_recording.py" in told


def test_numbers_that_a_graph_returns_are_ints():
    captured = fxkit.capture(
        lambda x: (x.shape[0] * 2, x.shape), (torch.randn(3, 5),), dynamic=True
    )
    number, shape = captured(torch.randn(7, 2))
    assert type(number) is int and type(shape) is torch.Size
    assert [type(size) for size in shape] == [int, int] and (number, shape) == (14, (7, 2))
    assert captured.recaptures == 0


def test_a_size_used_as_a_number_keeps_graphs_apart():
    captured = Captured(programs.counts_up)
    for length in (3, 4, 5):
        x = torch.randn(2, length)
        assert_same(captured(x), programs.counts_up(x), str(length))
    assert len(captured.graphs) == 3
    assert "sizes are not free: the program uses each size" in captured.explain(torch.randn(2, 9))


def test_a_program_that_keeps_changing_warns_once():
    captured = Captured(programs.counts_up)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for length in range(2, 24):
            captured(torch.randn(2, length))
    found = [it for it in caught if it.category is RecaptureWarning]
    assert len(found) == 1 and "args[0] keeps changing" in str(found[0].message)


def test_the_second_run_leaves_nothing_behind(capsys: pytest.CaptureFixture[str]):
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros(()))
            self.lengths: list[int] = []

        def forward(self, x: torch.Tensor, into: list[torch.Tensor]) -> torch.Tensor:
            print("called")
            self.steps.add_(1)
            self.lengths.append(x.shape[0])
            into.append(x)
            return x + torch.rand(x.shape)

    model, into = Model(), []
    torch.manual_seed(0)
    captured = fxkit.capture(model, (torch.zeros(3), into), dynamic=True)
    state = torch.get_rng_state()
    torch.manual_seed(0)
    torch.rand(3)
    assert torch.equal(state, torch.get_rng_state())
    assert capsys.readouterr().out == "called\n"
    assert model.steps == 1 and model.lengths == [3] and len(into) == 1
    assert type(model.lengths[0]) is int
    assert "s0" in str(fxkit.graph(captured.graph_module))


def test_opaque_calls_happen_once():
    calls = []

    @fxkit.opaque
    def note(x: torch.Tensor) -> None:
        calls.append(tuple(x.shape))

    def program(x: torch.Tensor) -> torch.Tensor:
        note(x)
        return x * x.shape[0]

    captured = fxkit.capture(program, (torch.ones(3),), dynamic=True)
    for length in (4, 5):
        assert_same(captured(torch.ones(length)), torch.ones(length) * length, str(length))
    assert calls == [(3,), (4,), (5,)]
    assert "an opaque call may happen only once" in captured.explain(torch.ones(7))


def test_gradients_flow_through_a_graph_of_symbolic_sizes():
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    captured = fxkit.capture(model, (torch.randn(3, 4),), dynamic=True)
    for batch in (5, 7):
        x = torch.randn(batch, 4, requires_grad=True)
        found = []
        for run in (model, captured):
            model.zero_grad()
            x.grad = None
            run(x).square().mean().backward()
            found.append([x.grad, *(parameter.grad for parameter in model.parameters())])
        assert all(map(torch.equal, *found))
    assert captured.recaptures == 1  # x asks for gradients now


def test_strides_are_part_of_what_is_guarded():
    captured = fxkit.capture(lambda x: x * x.stride(0), (torch.randn(3, 5),), dynamic=True)
    x = torch.randn(6, 4)
    assert torch.equal(captured(x), x * 4) and captured.recaptures == 0
    assert torch.equal(captured(x.T), x.T) and captured.recaptures == 1
    assert torch.equal(captured(x[:, :2]), x[:, :2] * 4)


@pytest.mark.parametrize("dynamic", [1, {"z": 0}, {"x": 2}, {"x": "batch"}])
def test_a_request_that_does_not_fit_is_an_error(dynamic: Any):
    with pytest.raises(UnsupportedError, match=r"expected .*dynamic|expected axes of x"):
        fxkit.capture(lambda x: x + 1, (torch.randn(3, 5),), dynamic=dynamic)


def test_passes_keep_a_graph_right_at_other_sizes():
    captured = fxkit.capture(programs.slices, (torch.randn(3, 6),), dynamic=True)
    module = copy.deepcopy(captured.graph_module)
    fxkit.PassManager(SIMPLIFY, verify="structure").run(module)
    x = torch.randn(5, 9)
    assert_same(list(module(x)), list(programs.slices(x)), "after SIMPLIFY")


def test_compiled_programs_take_any_size():
    program = fxkit.compile(programs.makes_masks, dynamic=True)
    with torch.no_grad():
        for shape in [(3, 5), (4, 6), (3, 5), (1, 4)]:
            x = torch.randn(shape)
            torch.testing.assert_close(program(x), programs.makes_masks(x))
    assert program.captured.recaptures == 1 and len(program.compiled_modules) == 3


def test_two_threads_with_different_sizes():
    import threading

    captured = Captured(programs.makes_masks)
    wrong: list[Any] = []

    def call(length: int) -> None:
        for _ in range(5):
            x = torch.randn(2, length)
            if not torch.equal(captured(x), programs.makes_masks(x)):
                wrong.append(length)

    threads = [threading.Thread(target=call, args=(length,)) for length in (3, 5, 8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_symbolic_mode_knows_no_sizes():
    with pytest.raises(UnsupportedError, match="expected no dynamic"):
        fxkit.capture(torch.relu, (torch.randn(2),), mode="symbolic", dynamic=True)


def test_a_write_that_autograd_follows_is_made_once():
    def program(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x.mul_(weight)
        return x * x.shape[0]

    captured = Captured(program, dynamic=True)
    for length in (3, 4):
        found = []
        for run in (captured, program):
            weight = torch.full((), 3.0, requires_grad=True)
            x = torch.ones(length)
            run(x, weight).sum().backward()
            found.append((x.detach(), weight.grad))
        assert_same(found[0], found[1], str(length))


def _moments() -> list[torch.Tensor]:
    return [torch.zeros(4), torch.ones(4)]


def _observed() -> list[torch.Tensor]:
    flags = [torch.tensor([1]), torch.tensor([1])]
    limits = [torch.zeros(1), torch.zeros(1), torch.ones(1), torch.zeros(1, dtype=torch.int32)]
    return flags + limits


# Calls that write to their operands and count up no versions, and how those are made.
_UNSEEN: dict[str, tuple[Callable[..., Any], Callable[[], list[torch.Tensor]]]] = {
    "batch_norm": (lambda x, m, v: F.batch_norm(x, m, v, training=True), _moments),
    "legit": (
        lambda x, *s: torch.ops.aten._native_batch_norm_legit(x, None, None, *s, True, 0.5, 0.1)[0],
        _moments,
    ),
    "with_update": (
        lambda x, m, v: torch.ops.aten._batch_norm_with_update(x, m, v, m, v, 0.5, 1e-5)[0],
        _moments,
    ),
    "observer": (
        lambda x, *s: torch.fused_moving_avg_obs_fake_quant(x, *s, 0.1, 0, 255, 0),
        _observed,
    ),
}


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", _UNSEEN)
def test_writes_that_count_up_no_versions_are_made_once(name: str, dynamic: Any):
    program, make = _UNSEEN[name]
    captured, ours, theirs = Captured(program, dynamic=dynamic), make(), make()
    with torch.no_grad():
        for length in (3, 5, 3, 7):
            x = torch.randn(length, 4)
            assert_same(captured(x, *ours), program(x, *theirs), f"result of length {length}")
            assert_same(ours, theirs, f"operands of length {length}")


@pytest.mark.parametrize(
    "program",
    [
        lambda x, y: torch.slice_scatter(x, y, 0, 0, 4),
        lambda x, y: torch.select_scatter(x, y[0], 1, 0),
        lambda x, y: torch.diagonal_scatter(x, y[0]),
    ],
)
def test_parts_that_do_not_fit_are_refused_as_by_eager(program: Any):
    compiled = fxkit.compile(program, dynamic=True)
    compiled(torch.randn(4, 4), torch.randn(4, 4))
    with pytest.raises(RuntimeError, match="expected src to have a size equal"):
        compiled(torch.randn(6, 5), torch.randn(6, 3))


@pytest.mark.filterwarnings("ignore:expected operands that tensor_split can take")
def test_what_no_type_tells_runs_in_eager():
    compiled = fxkit.compile(torch.tensor_split, dynamic=True)
    for length, places in ((5, [1, 2]), (7, [2, 3, 6]), (6, [1, 4])):
        x, at = torch.randn(length, 3), torch.tensor(places)
        assert_same(compiled(x, at), torch.tensor_split(x, at), f"length {length}")


def test_stand_ins_that_outlive_their_run_are_numbers():
    kept: list[Any] = []

    def program(x: torch.Tensor) -> torch.Tensor:
        kept.append(x.shape[0])
        return x.view(1, -1)[:, : kept[0]] * kept[0]

    captured = Captured(program, dynamic=True)
    for length in (3, 5, 4):
        x = torch.randn(length)
        assert torch.equal(captured(x), x.view(1, -1)[:, :3] * 3)
    assert kept == [3, 5, 4] and {type(size) for size in kept} == {int}
