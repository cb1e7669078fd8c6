"""Tests of code that is generated when somebody asks for it."""

import copy
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.fx.graph import CodeGen

import fxkit
from fxkit.errors import RewriteError

_INPUT = torch.randn(3, 4)


class _Calls(nn.Module):
    """A module that calls another one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class _CallsForward(_Calls):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner.forward(x)


def _exchange(gm: fx.GraphModule, old: Any, new: Any) -> None:
    node = next(node for node in gm.graph.nodes if node.target is old)
    with fxkit.edit(gm) as session:
        session.replace(node, session.call(new, *node.args, before=node))


def _sine(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x * 2)


@pytest.fixture
def gm() -> fx.GraphModule:
    """Return a module that has run, and computes cos(2 x) since."""
    gm = fx.symbolic_trace(_sine)
    assert torch.equal(gm(_INPUT), _sine(_INPUT))
    _exchange(gm, torch.sin, torch.cos)
    assert not _has_code(gm)
    return gm


def _has_code(gm: fx.GraphModule) -> bool:
    return "_code" in gm.__dict__


def _saved(gm: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(gm, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _compiled(program: nn.Module) -> Any:
    torch.compiler.reset()
    return torch.compile(program, backend="eager", fullgraph=True)


def _exported(program: nn.Module, strict: bool) -> Any:
    return torch.export.export(program, (_INPUT,), strict=strict).module()


_USES: dict[str, Callable[[fx.GraphModule], Any]] = {
    "call": lambda gm: gm,
    "forward": lambda gm: gm.forward,
    "forward of its class": lambda gm: lambda x: type(gm).forward(gm, x),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "deepcopy of its owner": lambda gm: copy.deepcopy(_Calls(gm)),
    "pickle": lambda gm: pickle.loads(pickle.dumps(gm)),
    "torch.save": _saved,
    "interpreter": lambda gm: fx.Interpreter(gm).run,
    "symbolic_trace": fx.symbolic_trace,
    "symbolic_trace of its owner": lambda gm: fx.symbolic_trace(_Calls(gm)),
    "torch.compile": _compiled,
    "torch.compile of its owner": lambda gm: _compiled(_Calls(gm)),
    "torch.compile of who calls forward": lambda gm: _compiled(_CallsForward(gm)),
    "export": lambda gm: _exported(_Calls(gm), False),
    "strict export": lambda gm: _exported(_Calls(gm), True),
    "capture": lambda gm: fxkit.capture(gm, (_INPUT,)),
    "capture of its owner": lambda gm: fxkit.capture(_Calls(gm), (_INPUT,)),
}


@pytest.mark.parametrize("use", _USES)
def test_whoever_asks_gets_the_code_of_the_graph(use: str, gm: fx.GraphModule) -> None:
    assert torch.equal(_USES[use](gm)(_INPUT), torch.cos(_INPUT * 2))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The TorchScript type")
@pytest.mark.parametrize("wrap", [lambda gm: gm, _Calls])
def test_torchscript_takes_the_code_of_the_graph(wrap: Any, gm: fx.GraphModule) -> None:
    assert torch.equal(torch.jit.script(wrap(gm))(_INPUT), torch.cos(_INPUT * 2))


@pytest.mark.parametrize("text", [lambda gm: gm.code, str, lambda gm: gm.print_readable(False)])
def test_text_is_that_of_the_graph(text: Callable[[Any], str], gm: fx.GraphModule) -> None:
    assert "torch.cos" in text(gm)
    assert "torch.sin" not in text(gm)


def test_sessions_in_a_row_generate_code_once(
    gm: fx.GraphModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    generated: list[object] = []
    recompile = fx.GraphModule.recompile
    monkeypatch.setattr(
        fx.GraphModule, "recompile", lambda self: (generated.append(self), recompile(self))[1]
    )
    _exchange(gm, torch.cos, torch.tan)
    _exchange(gm, torch.tan, torch.neg)
    assert not generated
    assert torch.equal(gm(_INPUT), -_INPUT * 2)
    assert "torch.neg" in gm.code
    assert generated == [gm]


@pytest.mark.parametrize("renew", [lambda gm: gm.recompile(), lambda gm: _renew_graph(gm)])
def test_a_recompile_by_hand_serves(renew: Any, gm: fx.GraphModule) -> None:
    renew(gm)
    assert _has_code(gm)
    assert torch.equal(gm(_INPUT), torch.cos(_INPUT * 2))
    _exchange(gm, torch.cos, torch.tan)
    assert torch.equal(gm(_INPUT), torch.tan(_INPUT * 2))


def _renew_graph(gm: fx.GraphModule) -> None:
    gm.graph = gm.graph


def test_its_class_is_as_before_once_code_is_asked_for(gm: fx.GraphModule) -> None:
    plain = fx.symbolic_trace(_sine)
    assert vars(type(gm)).keys() != vars(type(plain)).keys()
    gm(_INPUT)
    assert vars(type(gm)).keys() == vars(type(plain)).keys()
    assert gm.__dict__.keys() == plain.__dict__.keys()


def test_undo_after_the_session_brings_the_text_back() -> None:
    gm = fx.symbolic_trace(_sine)
    before = gm.code
    node = next(node for node in gm.graph.nodes if node.target is torch.sin)
    with fxkit.edit(gm) as session:
        session.set_target(node, torch.cos)
    session.undo()
    assert gm.code == before


def test_code_that_is_none_is_refused_when_the_session_ends() -> None:
    class Odd:
        def __repr__(self) -> str:
            return "<no code>"

    gm = fx.symbolic_trace(_sine)
    before = gm.code
    with pytest.raises(SyntaxError), fxkit.edit(gm) as session:
        session.call(torch.add, session.gm.graph.find_nodes(op="placeholder")[0], Odd())
    assert gm.code == before


def test_inputs_in_an_order_that_no_function_takes_are_refused() -> None:
    gm = fx.symbolic_trace(lambda x, y=2: x * y)
    with pytest.raises(SyntaxError), fxkit.edit(gm) as session:
        session.insert("placeholder", "z", after="y")
    assert torch.equal(gm(_INPUT), _INPUT * 2)


class _Counted(fx.GraphModule):
    count = 0

    def recompile(self) -> Any:
        self.count += 1
        return super().recompile()


def test_a_module_that_recompiles_in_its_own_way_does_so_at_once() -> None:
    gm = _Counted(nn.Module(), fx.symbolic_trace(_sine).graph)
    before = gm.count
    _exchange(gm, torch.sin, torch.cos)
    assert gm.count == before + 1


class _Marked(CodeGen):
    def generate_output(self, output_args: Any, *args: Any, **kwargs: Any) -> str:
        return super().generate_output(output_args, *args, **kwargs) + "  # marked"


def test_a_code_generator_of_its_own_is_used_at_once() -> None:
    gm = fx.symbolic_trace(_sine)
    gm.graph.set_codegen(_Marked())
    _exchange(gm, torch.sin, torch.cos)
    assert _has_code(gm)
    assert "# marked" in gm.code


def test_a_subclass_and_its_hooks_stay(gm: fx.GraphModule) -> None:
    gm.register_forward_hook(lambda module, inputs, output: output * 3)
    assert torch.equal(gm(_INPUT), torch.cos(_INPUT * 2) * 3)


def test_what_fails_to_generate_says_so_and_can_be_mended(
    gm: fx.GraphModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Any) -> None:
        raise AttributeError("no such thing")

    with monkeypatch.context() as patched:
        patched.setattr(fx.GraphModule, "recompile", fail)
        with pytest.raises(RuntimeError, match="no such thing"):
            gm(_INPUT)
    assert torch.equal(gm(_INPUT), torch.cos(_INPUT * 2))


def _in_threads(count: int, work: Callable[[], Any]) -> Iterator[Any]:
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except RewriteError as error:
            found.append(error)

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return iter(found)


def test_threads_that_ask_at_once_get_the_same(gm: fx.GraphModule) -> None:
    for old, new in ((torch.cos, torch.tan), (torch.tan, torch.sin)) * 5:
        results = list(_in_threads(8, lambda: gm(_INPUT)))
        assert len(results) == 8
        expected = getattr(torch, old.__name__)(_INPUT * 2)
        assert all(torch.equal(result, expected) for result in results)
        _exchange(gm, old, new)
        if new is torch.sin:
            _exchange(gm, torch.sin, torch.cos)


def test_another_thread_gets_no_code_of_half_an_edit(gm: fx.GraphModule) -> None:
    node = next(node for node in gm.graph.nodes if node.target is torch.cos)
    with fxkit.edit(gm) as session:
        session.set_target(node, torch.tan)
        (error,) = _in_threads(1, lambda: gm(_INPUT))
        assert "no other thread" in str(error)
    (result,) = _in_threads(1, lambda: gm(_INPUT))
    assert torch.equal(result, torch.tan(_INPUT * 2))
