"""Reproducers: what comes back in a new process is what was written."""

from __future__ import annotations

import copy
import subprocess
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from torch import fx, nn

import fxkit
from fxkit.analysis.reproducing.reproducer import code_of, write_reproducer
from fxkit.errors import InvalidGraphError, UnsupportedError
from fxkit.ir.printer import format_graph
from tests.patterns.random_graphs import GRAPHS, SHAPE, difference, observe
from tests.sampling import examples


def rebuilt(gm: fx.GraphModule, args: tuple[Any, ...], kwargs: Any = None) -> Any:
    """Return the program and the inputs that the script makes."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(code_of(gm, args, kwargs, check="pass"), names)
    return names["program"], names["args"]


def identity_of(*args: Any) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(tuple(graph.placeholder(f"x{index}") for index in range(len(args))))
    return fx.GraphModule(nn.Module(), graph)


def run(script: Path, python: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*python, "-I", str(script)],
        capture_output=True,
        text=True,
        cwd=script.parent,
        check=False,
    )


BASE = torch.arange(24.0)
TENSORS = {
    "plain": torch.randn(2, 3),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 3, dtype=torch.float16),
    "transposed": torch.randn(3, 4).t(),
    "slice of something larger": BASE[3:19:4],
    "expanded": torch.randn(3, 1).expand(3, 5),
    "large": torch.randn(40, 5),
    "one value": torch.full((30, 30), float("nan")),
    "special values": torch.tensor([float("inf"), -0.0, float("nan"), 1e-45]),
    "complex": torch.randn(2, 2, dtype=torch.complex64).t(),
    "conjugated": torch.randn(3, dtype=torch.complex128).conj(),
    "negated": torch.randn(3, dtype=torch.complex64).conj().imag,
    "bool": torch.tensor([[True, False], [False, False]]),
    "bfloat16": torch.randn(3, 3).bfloat16(),
    "float8": torch.randn(6).to(torch.float8_e4m3fn),
    "uint16": torch.tensor([1, 65535], dtype=torch.uint16),
    "int8": torch.arange(-4, 4, dtype=torch.int8),
    "channels last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "with gradient": torch.randn(3, requires_grad=True),
}


@pytest.mark.parametrize("kind", sorted(TENSORS))
@pytest.mark.parametrize("in_file", [False, True])
def test_tensors_come_back_to_the_last_bit(kind: str, in_file: bool, tmp_path: Path) -> None:
    x = TENSORS[kind]
    if in_file:
        script = write_reproducer(tmp_path, identity_of(x), (x,), check="pass")
        names: dict[str, Any] = {"__name__": "__main__", "__file__": str(script)}
        exec(script.read_text(), names)
        (got,) = names["args"]
    else:
        _, (got,) = rebuilt(identity_of(x), (x,))
    assert (got.dtype, got.shape, got.stride()) == (x.dtype, x.shape, x.stride())
    assert (got.requires_grad, got.is_conj(), got.is_neg()) == (
        x.requires_grad,
        x.is_conj(),
        x.is_neg(),
    )
    assert bits(got) == bits(x)


def bits(tensor: torch.Tensor) -> list[int]:
    dense = (
        tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    )
    return dense.reshape(-1).view(torch.uint8).tolist()


def test_shared_memory_is_shared_again() -> None:
    large = torch.zeros(100)
    memory = large[50:74].view(4, 6)
    args = (memory[1:], memory.t()[2:4], memory.view(torch.int32)[2], memory[1:], torch.zeros(3))
    _, got = rebuilt(identity_of(*args), args)
    got[0][1, 2] = 1.0
    assert got[1][0, 2] == 1.0
    assert got[2][2] != 0
    assert got[4].sum() == 0
    assert got[0].untyped_storage().nbytes() < 30 * 4


def test_an_argument_given_twice_is_one_object() -> None:
    x = torch.randn(2)
    _, got = rebuilt(identity_of(x, x), (x, x))
    assert got[0] is got[1]


Point = namedtuple("Point", "x y")

VALUES = [
    None, True, 3, 2.5, float("inf"), -float("inf"), 1 + 2j, "it's", ..., slice(1, None, 2),
    range(3), [1, (2,), {"a": [3]}], (), {4, 5}, torch.float16, torch.device("cpu"),
    torch.channels_last, torch.Size([2, 3]), torch.strided, Point(1, (2, 3)),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_plain_values_come_back(value: Any) -> None:
    _, (got,) = rebuilt(identity_of(value), (value,))
    assert got == value
    assert type(got) is type(value)


def test_nan_comes_back() -> None:
    _, (got,) = rebuilt(identity_of(0), (float("nan"),))
    assert got != got


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.register_buffer("mask", torch.tensor([True, False, True, False]))
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.25))

    def forward(self, x: torch.Tensor, y: torch.Tensor, scale: float = 2.0) -> Any:
        first, second = torch.split(F.linear(x, self.weight, self.frozen), 2, dim=-1)
        h = self.body(x) * scale + self.weight
        h = h.masked_fill(self.mask, float("-inf")).clamp(min=-3)
        z = y[..., 0, :2].float()
        return {"h": h, "parts": [first, second]}, torch.cat([z, z], dim=-1).to(torch.float64)


def traced() -> tuple[fx.GraphModule, tuple[Any, ...], dict[str, Any]]:
    gm = fx.GraphModule(model := Model().eval(), fx.Tracer().trace(model))
    return gm, (torch.randn(4, 4),), {"y": torch.randn(2, 3, 4).double()}


def test_a_graph_comes_back_node_by_node() -> None:
    gm, args, kwargs = traced()
    program, got = rebuilt(gm, args, kwargs)
    assert format_graph(program) == format_graph(gm)
    assert [n.name for n in program.graph.nodes] == [n.name for n in gm.graph.nodes]
    assert [n.op for n in program.graph.nodes] == [n.op for n in gm.graph.nodes]
    assert not program.frozen.requires_grad
    assert not program.training and not program.get_submodule("body.1").training
    torch.testing.assert_close(program(*got), gm(*args, **kwargs), rtol=0, atol=0)


def test_shared_parameters_and_modules_are_shared_again() -> None:
    root = nn.Module()
    root.weight = nn.Parameter(torch.ones(2))
    root.tied = root.weight
    root.first = nn.Linear(2, 2)
    root.first.bias = root.weight
    root.second = root.first
    graph = fx.Graph()
    x = graph.placeholder("x")
    calls = [graph.call_module(name, (x,)) for name in ("first", "second")]
    graph.output((*calls, graph.get_attr("weight"), graph.get_attr("tied")))
    program, _ = rebuilt(fx.GraphModule(root, graph), (torch.ones(2),))
    assert program.first is program.second
    assert program.weight is program.tied
    assert program.weight is program.first.bias


MODULES = [
    nn.Linear(3, 4, bias=False), nn.Conv2d(4, 6, (3, 1), stride=2, padding="valid", groups=2),
    nn.Conv2d(1, 2, 3, padding=1, padding_mode="reflect"), nn.ConvTranspose1d(2, 3, 2, bias=False),
    nn.BatchNorm2d(3, eps=1e-3, affine=False), nn.BatchNorm1d(2, track_running_stats=False),
    nn.LayerNorm((3, 4), elementwise_affine=False), nn.GroupNorm(2, 4), nn.RMSNorm(3),
    nn.Embedding(5, 2, padding_idx=0), nn.LSTM(3, 4, num_layers=2, bidirectional=True),
    nn.GRU(3, 4, bias=False), nn.MultiheadAttention(4, 2, bias=False),
    nn.MultiheadAttention(4, 2, kdim=3, vdim=5), nn.ReLU(inplace=True), nn.LeakyReLU(0.3),
    nn.GELU("tanh"), nn.Softmax(-1), nn.Hardtanh(-2.0, 3.0), nn.MaxPool2d(3, 2, 1, ceil_mode=True),
    nn.AdaptiveAvgPool2d((1, None)), nn.AvgPool1d(2), nn.Upsample(scale_factor=2.0, mode="nearest"),
    nn.Flatten(1, 2), nn.Unflatten(1, (2, 3)), nn.ZeroPad2d(2), nn.PixelShuffle(2), nn.PReLU(3),
    nn.Bilinear(2, 3, 4), nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Tanh())), nn.Identity(),
    nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, norm_first=True), nn.CosineSimilarity(0),
]  # fmt: skip


@pytest.mark.parametrize("module", MODULES, ids=lambda m: type(m).__name__)
def test_modules_of_torch_come_back(module: nn.Module) -> None:
    graph = fx.Graph()
    graph.output(graph.call_module("part", (graph.placeholder("x"),)))
    root = nn.Module()
    root.part = module
    program, _ = rebuilt(fx.GraphModule(root, graph), (None,))
    assert repr(program.part) == repr(module)
    want, got = module.state_dict(), program.part.state_dict()
    assert list(want) == list(got)
    assert all(torch.equal(want[key], got[key]) for key in want)
    assert [m.training for m in program.modules()] == [True] * len(list(program.modules()))


def test_graph_modules_inside_of_graph_modules_come_back() -> None:
    inner = fxkit.symbolic_trace(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    innermost = fxkit.symbolic_trace(lambda x: x * 2)
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_module("b.c", (graph.call_module("a", (x,)),)))
    root = nn.Module()
    root.a, root.b = inner, nn.Module()
    root.b.c = innermost
    gm = fx.GraphModule(root, graph)
    x = torch.randn(2, 3)
    program, _ = rebuilt(gm, (x,))
    assert isinstance(program.a, fx.GraphModule)
    assert torch.equal(program(x), gm(x))


def test_exported_programs_take_the_leaves_of_their_arguments() -> None:
    class Nested(nn.Module):
        def forward(self, pair: Any, *, more: Any) -> Any:
            return {"sum": pair[0] + pair[1]["k"] * more}

    args, kwargs = ((torch.randn(2), {"k": torch.randn(2)}),), {"more": torch.randn(2)}
    gm: Any = torch.export.export(Nested(), args, kwargs).module()
    program, got = rebuilt(gm, args, kwargs)
    assert len(got) == 3
    torch.testing.assert_close(program(*got)[0], gm(*args, **kwargs)["sum"])


def test_starred_parameters_take_what_is_left() -> None:
    graph = fx.Graph()
    nodes = [graph.placeholder(name) for name in ("x", "*rest", "**more")]
    graph.output(tuple(nodes))
    gm = fx.GraphModule(nn.Module(), graph)
    program, got = rebuilt(gm, (1, 2, 3), {"k": 4})
    assert program(*got) == (1, (2, 3), {"k": 4})


@pytest.mark.parametrize(("args", "kwargs"), [((), {}), ((1, 2), {}), ((1,), {"y": 2})])
def test_arguments_that_do_not_fit_are_refused(args: Any, kwargs: Any) -> None:
    with pytest.raises(InvalidGraphError, match="expected"):
        code_of(fxkit.symbolic_trace(lambda x: x + 1), args, kwargs)


def shrink(x: torch.Tensor) -> torch.Tensor:
    return x / SCALE


SCALE = torch.tensor(4.0)


def is_small(gm: fx.GraphModule, args: tuple[Any, ...]) -> bool:
    result = [shrink(value) for value in gm(*args)]
    return any(bool((value < 1).all()) for value in result)


def test_a_check_runs_alone_in_a_new_process(tmp_path: Path, python: list[str]) -> None:
    gm = fxkit.symbolic_trace(lambda x: (x + 1, x))
    script = write_reproducer(tmp_path / "a", gm, (torch.ones(3),), check=is_small, title="small")
    assert script == tmp_path / "a" / "run.py"
    assert sorted(p.name for p in script.parent.iterdir()) == [
        "data.safetensors",
        "graph.txt",
        "run.py",
    ]
    assert "aten.add(%x, 1)" in (script.parent / "graph.txt").read_text()
    found = run(script, python)
    assert (found.returncode, found.stdout, found.stderr) == (1, "the fault is there\n", "")
    gone = code_of(gm, (torch.full((3,), 9.0),), check=is_small)
    with pytest.raises(SystemExit, match="False"):
        exec(gone, {"__name__": "__main__"})
    text = script.read_text()
    assert "fxkit" not in text and "pickle" not in text and "torch.load" not in text


def test_without_a_check_the_program_runs(capsys: pytest.CaptureFixture[str]) -> None:
    code = code_of(fxkit.symbolic_trace(lambda x: x * 2), (torch.ones(2),))
    exec(code, {"__name__": "__main__"})
    assert capsys.readouterr().out == "tensor([2., 2.])\n"


def test_a_lambda_with_what_it_closes_over_is_a_check() -> None:
    limit = torch.tensor([3.0])
    checks = [lambda gm, args: bool(gm(*args) > limit), lambda gm, args: bool(gm(*args) < limit)]
    gm = fxkit.symbolic_trace(lambda x: x * 2)
    outcomes = []
    for check in checks:
        names: dict[str, Any] = {"__name__": "__main__"}
        with pytest.raises(SystemExit) as status:
            exec(code_of(gm, (torch.ones(1),), check=check), names)
        outcomes.append(status.value.code)
    assert outcomes == [False, True]


def test_a_check_is_found_in_a_file_that_is_not_all_python(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    blocks = [
        "def bad(gm, args):\n    return gm(*args) > 1\n",
        "less = lambda gm, args: gm(*args) < 1\n",
    ]
    page.write_text(f"About log₂ of it:\n\n{blocks[0]}\nand that's\n\n{blocks[1]}\nit.\n")
    names: dict[str, Any] = {"__name__": "page"}
    for block, line in zip(blocks, (2, 7), strict=True):
        exec(compile("\n" * line + block, str(page), "exec"), names)
    gm = fxkit.symbolic_trace(lambda x: x * 2)
    for check, status in ((names["bad"], True), (names["less"], False)):
        with pytest.raises(SystemExit) as found:
            exec(code_of(gm, (1,), check=check), {"__name__": "__main__"})
        assert found.value.code == status


class Stateful:
    def __call__(self, gm: Any, args: Any) -> bool:
        return True


def closing_over_a_module() -> Any:
    gm = fxkit.symbolic_trace(lambda x: x)
    return lambda other, args: other is gm


@pytest.mark.parametrize(
    ("check", "reason"),
    [
        (Stateful(), "no plain function"),
        (closing_over_a_module(), "'gm': expected a value"),
        (eval("lambda gm, args: True"), "source is in no file"),
    ],
)
def test_a_check_that_can_not_be_written_is_refused(check: Any, reason: str) -> None:
    gm = fxkit.symbolic_trace(lambda x: x + 1)
    with pytest.raises(UnsupportedError, match=reason):
        code_of(gm, (1,), check=check)


def hooked() -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_forward_hook(lambda *_: None)
    return module


def local() -> nn.Module:
    class Own(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    return Own()


def with_state(state: Any) -> nn.Module:
    module = nn.ReLU()
    module.state = state
    return module


class Subclass(torch.Tensor):
    pass


def calling(module: nn.Module) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.call_module("part", (graph.placeholder("x"),)))
    root = nn.Module()
    root.part = module
    return fx.GraphModule(root, graph)


REFUSED: dict[str, tuple[fx.GraphModule, Any, str]] = {
    "hooks": (calling(hooked()), None, "at 'part', got Linear: it has hooks"),
    "own module": (calling(local()), None, "at 'part', got Own: .*import"),
    "state": (calling(with_state(object())), None, "at 'part', got ReLU: .*got object"),
    "sparse": (identity_of(0), torch.eye(2).to_sparse(), "layout torch.sparse_coo"),
    "meta": (identity_of(0), torch.empty(2, device="meta"), "on the meta device"),
    "subclass": (identity_of(0), torch.ones(2).as_subclass(Subclass), "got a Subclass"),
    "object": (identity_of(0), object(), "got object"),
}


@pytest.mark.parametrize("kind", sorted(REFUSED))
def test_what_can_not_be_written_is_named(kind: str, tmp_path: Path) -> None:
    gm, value, reason = REFUSED[kind]
    with pytest.raises(UnsupportedError, match=reason):
        write_reproducer(tmp_path / "none", gm, (value,))
    assert not (tmp_path / "none").exists()


def test_functions_of_the_user_are_written_by_their_source() -> None:
    graph = fx.Graph()
    graph.output(graph.call_function(shrink, (graph.placeholder("x"),)))
    gm = fx.GraphModule(nn.Module(), graph)
    program, (x,) = rebuilt(gm, (torch.ones(2),))
    assert program(x).tolist() == [0.25, 0.25]


def test_a_function_that_can_not_be_had_is_named_with_its_node() -> None:
    graph = fx.Graph()
    names: dict[str, Any] = {"__name__": "nowhere"}
    exec("def odd(x): return x", names)
    graph.output(graph.call_function(names["odd"], (graph.placeholder("x"),)))
    with pytest.raises(UnsupportedError, match="source is in no file") as caught:
        code_of(fx.GraphModule(nn.Module(), graph), (1,))
    assert "%odd" in (caught.value.node or "")


def test_writing_changes_nothing() -> None:
    gm, args, kwargs = traced()
    text, before = gm.code, copy.deepcopy(gm.state_dict())
    code_of(gm, args, kwargs)
    assert gm.code == text
    assert all(torch.equal(value, before[key]) for key, value in gm.state_dict().items())


@examples(25, of=60, derandomize=True, database=None)
@given(gm=GRAPHS)
def test_random_graphs_come_back(gm: fx.GraphModule) -> None:
    args = (torch.randn(SHAPE), torch.randn(SHAPE).t().contiguous().t())
    program, got = rebuilt(gm, args)
    assert format_graph(program) == format_graph(gm)
    assert [value.stride() for value in got] == [value.stride() for value in args]
    expected = observe(gm, transposed=True, same=False)
    assert difference(expected, observe(program, transposed=True, same=False)) is None
