"""Mode `export`: modules, exported programs, files of both kinds, and refusals in our words."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import fx, nn

import fxkit
from fxkit.errors import CaptureError, UnsupportedError

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 2:
            return self.linear(x).relu()
        return x * 2


class Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x


class ThroughNumpy(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(x.numpy() + 1)


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


X = torch.linspace(-1, 1, 12).reshape(3, 4)


def test_module(net: Net):
    exported = fxkit.capture(net, (X,), mode="export")
    assert isinstance(exported.graph_module, fx.GraphModule)
    torch.testing.assert_close(exported(X), net(X))
    assert "aten.linear.default" in {str(node.target) for node in exported.nodes}


def test_an_exported_program_needs_no_inputs(net: Net):
    program = torch.export.export(net, (X,))
    exported = fxkit.capture(program, mode="export")
    torch.testing.assert_close(exported(X), net(X))


def test_sizes_that_are_free_are_stated(net: Net):
    rows = torch.export.Dim("rows", min=3, max=64)
    exported = fxkit.capture(net, (X,), mode="export", dynamic={"x": {0: rows}})
    torch.testing.assert_close(exported(X.repeat(2, 1)), net(X.repeat(2, 1)))
    assert any("<= 64" in guard for guard in exported.guards)


def test_exported_program_and_file(net: Net, tmp_path: Path):
    program = torch.export.export(net, (X,))
    torch.export.save(program, tmp_path / "net.pt2")
    for source in (program, tmp_path / "net.pt2", str(tmp_path / "net.pt2")):
        exported = fxkit.capture(source, (), mode="export")
        torch.testing.assert_close(exported(X), net(X))
        torch.testing.assert_close(exported.args[0], X)


@pytest.mark.parametrize("kind", ["scripted", "traced", "file"])
def test_torchscript_is_converted(net: Net, tmp_path: Path, kind: str):
    source = torch.jit.trace(net, X) if kind == "traced" else torch.jit.script(net)
    if kind == "file":
        torch.jit.save(source, tmp_path / "net.pt")
        source = tmp_path / "net.pt"
    exported = fxkit.capture(source, (X,), mode="export")
    torch.testing.assert_close(exported(X), net(X))


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Branching(), "a branch or a shape that depends on the numbers in a tensor"),
        (ThroughNumpy(), "numpy"),
    ],
)
def test_refusals_name_the_line_and_what_to_do(module: nn.Module, reason: str):
    line = module.forward.__code__.co_firstlineno + 1
    with pytest.raises(CaptureError, match=reason) as caught:
        fxkit.capture(module, (X,), mode="export")
    assert f"test_exported.py:{line} in forward" in str(caught.value)
    assert "fxkit.capture(fn, args)" in str(caught.value)


def test_what_is_no_program(tmp_path: Path):
    with pytest.raises(UnsupportedError, match="expected a module, an exported program"):
        fxkit.capture(torch.sin, (X,), mode="export")
    with pytest.raises(UnsupportedError, match="no such file"):
        fxkit.capture(tmp_path / "none.pt2", (), mode="export")
    torch.save({"x": X}, tmp_path / "state.pt")
    with pytest.raises(UnsupportedError, match="expected an exported program"):
        fxkit.capture(tmp_path / "state.pt", (), mode="export")


def test_graph_that_is_imported_can_be_compiled(net: Net):
    compiled = fxkit.compile(fxkit.capture(net, (X,), mode="export").graph_module)
    with torch.no_grad():
        torch.testing.assert_close(compiled(X), net(X))
