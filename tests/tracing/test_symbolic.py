"""Following a program with placeholders: provenance, leaves, modes, and errors that help."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.proxy import TraceError

from fxkit.errors import CaptureError, UnsupportedError
from fxkit.ir.provenance import module_stack, source_of
from fxkit.tracing.capture_modes import capture
from fxkit.tracing.symbolic import symbolic_trace


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, a: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.layer(a))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, a: torch.Tensor) -> torch.Tensor:
        return self.block(a) * self.scale


def test_nodes_carry_lines_and_modules():
    graph = symbolic_trace(Net()).graph
    nodes = {node.name: node for node in graph.nodes}
    assert list(nodes) == ["a", "block_layer", "relu", "scale", "mul", "output"]
    source = source_of(nodes["relu"])
    assert source is not None and source.function == "forward"
    assert source.line == Block.forward.__code__.co_firstlineno + 1
    assert module_stack(nodes["relu"]) == [("block", Block)]
    mul = source_of(nodes["mul"])
    assert mul is not None and mul.line == Net.forward.__code__.co_firstlineno + 1


@pytest.mark.parametrize("leaves", [(Block,), ("block",)])
def test_modules_can_be_kept_as_calls(leaves: tuple[Any, ...]):
    graph = symbolic_trace(Net(), leaf_modules=leaves).graph
    assert [node.target for node in graph.nodes if node.op == "call_module"] == ["block"]


def test_values_can_be_fixed():
    def fn(a: torch.Tensor, double: bool) -> torch.Tensor:
        return a * 2 if double else a

    graph_module = symbolic_trace(fn, concrete_args={"double": True})
    assert torch.equal(graph_module(torch.ones(2), True), torch.full((2,), 2.0))


def test_an_input_in_place_of_fixed_values_is_refused_with_what_takes_it():
    with pytest.raises(UnsupportedError, match=r"got Tensor\n.*fxkit\.capture\(fn, args\) takes"):
        symbolic_trace(Net(), torch.ones(2, 4))


def test_gradient_and_autocast_regions_are_in_the_graph():
    class Regions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, a: torch.Tensor) -> Any:
            with torch.no_grad():
                b = self.layer(a)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                c = self.layer(a)
            return b, c, self.layer(a)

    net = Regions()
    a = torch.ones(2, 4)
    for ours, theirs in zip(symbolic_trace(net)(a), net(a), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.requires_grad == theirs.requires_grad
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")


def branches(a: torch.Tensor) -> torch.Tensor:
    if a.sum() > 0:
        return a
    return -a


def iterates(a: torch.Tensor) -> torch.Tensor:
    return sum(row for row in a)  # type: ignore[return-value]


def measures(a: torch.Tensor) -> int:
    return len(a)


def fails(a: torch.Tensor) -> torch.Tensor:
    return a + [][0]


@pytest.mark.parametrize(
    ("fn", "what", "hint", "offset"),
    [
        (branches, "an `if`, `while`", "use fxkit.capture(fn, args), which runs the program", 1),
        (iterates, "a loop over a traced value", "use fxkit.capture(fn, args)", 1),
        (measures, "len() of a traced value", "value.shape[0]", 1),
        (fails, "IndexError: list index out of range", "use fxkit.capture(fn, args)", 1),
    ],
)
def test_errors_name_the_line_and_a_remedy(fn: Any, what: str, hint: str, offset: int):
    with pytest.raises(CaptureError) as error:
        symbolic_trace(fn)
    text = str(error.value)
    assert what in text and hint in text
    assert f"test_symbolic.py:{fn.__code__.co_firstlineno + offset} in" in text
    assert error.value.__cause__ is not None


def test_the_error_of_torch_is_chained():
    with pytest.raises(CaptureError) as error:
        symbolic_trace(branches)
    assert isinstance(error.value.__cause__, TraceError)


def test_random_constants_are_refused():
    before = torch.get_rng_state()
    with pytest.raises(CaptureError, match="random numbers"):
        symbolic_trace(lambda a: a + torch.rand(3))
    assert torch.equal(before, torch.get_rng_state())


def test_modes_are_restored_when_tracing_fails():
    def fn(a: torch.Tensor) -> torch.Tensor:
        torch.set_grad_enabled(False)
        return branches(a)

    with pytest.raises(CaptureError):
        symbolic_trace(fn)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("root", [3, None, "relu"])
def test_what_cannot_be_called_is_refused(root: Any):
    with pytest.raises(UnsupportedError, match=r"expected something to call, got (int|None|str)"):
        symbolic_trace(root)


class Remembers(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.last, self.seen, self.named, self.calls = None, [], {}, 0

    def forward(self, x):
        self.last, self.new = x * 2, x
        self.seen.append(x)
        self.named["x"] = x
        self.calls += 1
        return self.fc(self.last) + torch.ones(3)


def test_no_placeholder_stays_in_a_module():
    model = Remembers()
    gm = symbolic_trace(model)
    assert (model.last, model.seen, model.named, model.calls) == (None, [], {}, 0)
    assert not hasattr(model, "new")
    x = torch.randn(2, 3)
    torch.testing.assert_close(gm(x), model(x))


@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_program_that_can_not_be_followed_is_as_it_was(make):
    model = make(3, 4)
    with pytest.raises(CaptureError):
        symbolic_trace(model)
    x = torch.randn(5, 2, 3)
    program = capture(model, (x,))
    torch.testing.assert_close(program(x)[0], model(x)[0])


def writes_to_its_own(x):
    own = torch.zeros(3)
    own.add_(x)
    return own


def writes_to_a_part_of_its_own(x):
    own = torch.zeros(2, 3)
    own[0].add_(x)
    return own * 2


def reads_what_a_call_is_to_write(x):
    own = torch.zeros(3)
    torch.add(x, 1, out=own)
    return own * 2


def reads_a_part_of_it(x):
    own = torch.zeros(2, 3)
    torch.add(x, 1, out=own[0])
    return own.sum(0)


def decides_by_it(x):
    own = torch.zeros(3)
    torch.add(x, 1, out=own)
    return x if own.sum() > 3 else -x


def writes_to_it_again(x):
    own, places = torch.zeros(3), torch.zeros(3, dtype=torch.int64)
    torch.max(torch.stack([x, -x]), 0, out=(own, places))
    own += 1
    return x * own


def _is_left_to_capture(program, message):
    x = torch.randn(3)
    with pytest.raises(CaptureError, match=message) as raised:
        symbolic_trace(program)
    assert program.__name__ in str(raised.value.source)
    graph = capture(program, (x,))
    torch.testing.assert_close(graph(x), program(x))


@pytest.mark.parametrize(
    "program",
    [reads_what_a_call_is_to_write, reads_a_part_of_it, decides_by_it, writes_to_it_again],
)
def test_numbers_that_a_call_is_yet_to_write_are_not_read(program):
    _is_left_to_capture(program, "a call is to write")


def test_what_a_call_has_written_is_read_in_the_graph():
    def program(x):
        own = torch.zeros(3)
        made = torch.add(x, 1, out=own)
        part = own[:2]
        return made * 2, x + own, own.dim(), x[:2] * part

    x = torch.randn(3)
    for found, expected in zip(symbolic_trace(program)(x), program(x), strict=True):
        torch.testing.assert_close(found, expected)


STATE = torch.zeros(3)


def writes_to_what_was_there(x):
    STATE[:2].add_(x[:2])
    return x * torch.ones(3)


@pytest.mark.parametrize("program", [writes_to_its_own, writes_to_a_part_of_its_own])
def test_a_tensor_of_its_own_that_a_program_writes_to_is_refused(program):
    _is_left_to_capture(program, "a write to a tensor that it makes")


def test_a_tensor_that_was_there_may_be_written_to():
    x = torch.ones(3)
    gm = symbolic_trace(writes_to_what_was_there)
    STATE.zero_()
    gm(x), gm(x)
    assert torch.equal(STATE, torch.tensor([2.0, 2.0, 0.0]))
