"""Programs of many kinds: a captured one never differs from the program itself."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import functools
import math
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxkit.errors import CaptureError, UnsupportedError
from fxkit.ir.provenance import module_path, module_stack, source_of
from fxkit.ir.types import type_of
from fxkit.tracing.live import capture
from tests.tracing.faithful import assert_faithful

_PROGRAMS: dict[str, Callable[[], tuple[Any, list[tuple[Any, ...]]]]] = {}
_GRAPHS: dict[str, int] = {}


def program(*, graphs: int) -> Callable[..., Any]:
    """Register a function that returns a program and its calls; one graph a set of facts."""

    def register(make: Any) -> Any:
        _PROGRAMS[make.__name__] = make
        _GRAPHS[make.__name__] = graphs
        return make

    return register


def x(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (3, 4)))


@program(graphs=1)
def operators():
    def fn(a, b):
        c = a + b * 2 - 1 / (abs(b) + 1) + 2**a + 3 // (b + 9) + (a @ b.T).sum()
        return -c, ~(a > b), 2 - a, a % 2, (a == b) | (a != b), a[1:, ::2], a[..., None]

    return fn, [(x(), x()), (x(), x())]


@program(graphs=1)
def spellings():
    def fn(a):
        return a.relu(), torch.relu(a), F.relu(a), nn.ReLU()(a), a.size(0), a.shape, len(a), a.T

    return fn, [(x(),), (x(),)]


@program(graphs=2)
def branch_on_value():
    def fn(a):
        return a * 2 if a.sum() > 0 else a - 1

    return fn, [(torch.ones(3),), (torch.ones(3),), (-torch.ones(3),), (torch.ones(3),)]


@program(graphs=3)
def loop_to_a_value():
    def fn(a, n):
        for _ in range(int(n)):
            a = a * 2
        return a

    return fn, [(x(), torch.tensor(n)) for n in (2, 3, 2, 0, 3)]


@program(graphs=2)
def while_loop():
    def fn(a):
        steps = 0
        while a.norm() > 1:
            a, steps = a / 2, steps + 1
        return a, steps

    return fn, [(torch.full((4,), 3.0),), (torch.full((4,), 0.1),), (torch.full((4,), 3.1),)]


@program(graphs=2)
def item_in_arithmetic():
    def fn(a):
        return a * a.max().item() + math.floor(float(a[0]))

    return fn, [(torch.tensor([1.5, 2.0]),), (torch.tensor([1.5, 2.5]),)]


@program(graphs=2)
def nan_is_one_value():
    def fn(a):
        return a + (0 if math.isnan(a.mean().item()) else 1)

    nan = torch.tensor([float("nan")])
    return fn, [(nan,), (nan.clone(),), (torch.tensor([2.0]),)]


@program(graphs=2)
def signed_zero():
    def fn(a):
        return a + math.copysign(1, a.item())

    return fn, [(torch.tensor(0.0),), (torch.tensor(-0.0),)]


@program(graphs=2)
def membership_and_index():
    def fn(a, i):
        return a * [1, 2, 3][i], i in [1, 2]

    return fn, [(x(), torch.tensor(1)), (x(), torch.tensor(0)), (x(), torch.tensor(1))]


@program(graphs=2)
def text_of_a_tensor():
    def fn(a):
        return f"{a.sum().item():.2f} {a}", a + 1

    return fn, [(torch.ones(2),), (torch.zeros(2),)]


@program(graphs=2)
def numpy_in_the_middle():
    def fn(a):
        return a * float(a.detach().numpy().sum())

    return fn, [(torch.ones(2),), (torch.zeros(2),), (torch.ones(2),)]


@program(graphs=1)
def mask_without_a_look_at_its_size():
    def fn(a):
        return a[a > 0].sum(), torch.nonzero(a > 0), a.masked_select(a > 1)

    return fn, [(x(),), (x(),), (x(),)]


@program(graphs=2)
def mask_with_a_look_at_its_size():
    def fn(a):
        kept = a[a > 0]
        return kept.view(kept.shape[0], 1) / len(kept)

    return fn, [(torch.tensor(v),) for v in ([1.0, -1.0], [1.0, 1.0], [-1.0, 2.0])]


@program(graphs=2)
def unbind_of_a_masked_tensor():
    def fn(a):
        total = 0
        for number, row in enumerate(a[a[:, 0] > 0]):
            total = total + row * number
        return total

    return fn, [
        (torch.tensor([[1.0, 2.0], [1.0, 3.0]]),),
        (torch.tensor([[-1.0, 2.0], [1.0, 3.0]]),),
    ]


@program(graphs=2)
def tensor_as_a_size():
    def fn(a, n):
        b = a[:n]
        return b.sum() / b.shape[0], torch.zeros(n, 2), torch.arange(n).shape

    return fn, [(x(5), torch.tensor(2)), (x(5), torch.tensor(3)), (x(5), torch.tensor(2))]


@program(graphs=1)
def in_place():
    def fn(a, b):
        a.add_(b)
        a[0] = 7
        a[1].mul_(2)
        F.relu(b, inplace=True)
        torch.add(a, b, out=b)
        c = a.clone()
        c += 1
        return a, b, c

    return fn, [(x(), x()), (x(), x())]


@program(graphs=1)
def views_written_later():
    def fn(a):
        v = a.view(-1)
        w = a.T
        v.mul_(2)
        w[0].add_(1)
        return v.sum(), w, a

    return fn, [(x(),), (x(),)]


@program(graphs=1)
def several_results():
    def fn(a):
        values, indices = a.max(0)
        first, *others = a.split(1)
        low, high = a.aminmax(dim=1)
        return values, indices, first, others, low, high, a.unbind(0)[2], a.topk(2)

    return fn, [(x(),), (x(),)]


@program(graphs=1)
def nested_results():
    def fn(a):
        return {"a": [a + 1, None, 3, "text"], "b": (a, {"c": a * 2}), "d": a.shape[0]}

    return fn, [(x(),), (x(),)]


@dataclasses.dataclass
class Pair:
    first: torch.Tensor
    second: Any = None


@program(graphs=1)
def dataclass_in_and_out():
    def fn(pair):
        return Pair(pair.first + 1, {"inner": Pair(pair.second)})

    return fn, [(Pair(x(), x()),), (Pair(x(), x()),)]


Point = collections.namedtuple("Point", "left right")


@program(graphs=1)
def named_tuples():
    def fn(point):
        return Point(point.right, point.left + 1)

    return fn, [(Point(x(), x()),), (Point(x(), x()),)]


@program(graphs=1)
def inputs_and_parameters_as_results():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, a):
            return a, self.weight, a

    return Net(), [(x(),), (x(),)]


@program(graphs=1)
def list_that_grows():
    def fn(a, cache):
        cache.append(a + 1)
        return torch.cat(cache)

    return fn, [(x(), [x()]), (x(), [x()])]


@program(graphs=1)
def dict_and_object_that_change():
    def fn(a, state, pair):
        state["sum"] = state["sum"] + a
        state["new"] = [a, pair]
        pair.second = pair.first * a
        return state

    return fn, [(x(), {"sum": x()}, Pair(x())) for _ in range(2)]


@program(graphs=1)
def same_object_twice():
    def fn(a):
        shared = [a + 1]
        return shared, shared

    return fn, [(x(),), (x(),)]


@program(graphs=2)
def one_tensor_given_twice():
    def fn(a, b):
        a.add_(1)
        return a * b, a is b

    shared, other = x(), x()
    return fn, [(x(), x()), (shared, shared), (other, other)]


@program(graphs=1)
def random_numbers():
    def fn(a):
        return F.dropout(a, 0.5) + torch.rand(3, 4) + torch.randn_like(a), torch.randperm(5)

    return fn, [(x(),), (x(),), (x(),)]


@program(graphs=1)
def factories():
    def fn(a):
        mask = torch.full((a.shape[0],) * 2, float("-inf"), dtype=a.dtype).triu(1)
        return mask + torch.arange(3), torch.tensor([1, 2.5]), a.new_zeros(2), torch.eye(2)

    return fn, [(x(),), (x(),)]


@program(graphs=1)
def gradient_regions():
    def fn(a):
        b = a * 2
        with torch.no_grad():
            c = b + 1
            with torch.enable_grad():
                d = b * 3
        return b, c, d

    return fn, [(x().requires_grad_(),), (x().requires_grad_(),)]


@program(graphs=1)
def autocast_regions():
    layer = nn.Linear(4, 4)

    def fn(a):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            b = layer(a)
            with torch.autocast("cpu", enabled=False):
                c = layer(a)
            d = layer(b)
        return b, c, d, layer(a)

    return fn, [(x(),), (x(),)]


@program(graphs=1)
def inference_region():
    @torch.inference_mode()
    def fn(a):
        with torch.inference_mode(False):
            c = torch.ones(3, requires_grad=True) * 2
        return a * 2, c

    return fn, [(x(),), (x(),)]


@program(graphs=1)
def mode_that_stays_changed():
    def fn(a):
        previous = torch.is_grad_enabled()
        torch.set_grad_enabled(False)
        b = a * 2
        torch.set_grad_enabled(previous)
        return b

    return fn, [(x().requires_grad_(),), (x().requires_grad_(),)]


@program(graphs=1)
def recurrent_and_attention():
    lstm, attention = nn.LSTM(4, 5, 2, batch_first=True), nn.MultiheadAttention(4, 2)

    def fn(a):
        out, (h, c) = lstm(a)
        return out, h, c, attention(a, a, a)

    return fn, [(x(2, 3, 4),), (x(2, 3, 4),)]


@program(graphs=1)
def running_statistics():
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3))
    return net.train(), [(x(8, 4),), (x(8, 4),), (x(8, 4),)]


@program(graphs=1)
def weights_tied():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(10, 4)
            self.head = nn.Linear(4, 10, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids):
            return self.head(self.embed(ids))

    return Tied(), [(torch.tensor([1, 2]),), (torch.tensor([3, 4]),)]


@program(graphs=1)
def module_lists_and_plain_attributes():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
            self.scale = torch.full((4,), 3.0)
            self.tables = {"odd name!": [torch.ones(4)]}

        def forward(self, a):
            for layer in self.layers:
                a = layer(a) * self.scale + self.tables["odd name!"][0]
            return a

    return Net(), [(x(),), (x(),)]


@program(graphs=1)
def bound_method_and_partial():
    class Encoder:
        def __init__(self):
            self.net = nn.Linear(4, 4)

        def encode(self, a, scale):
            return self.net(a) * scale

    return functools.partial(Encoder().encode, scale=torch.tensor(2.0)), [(x(),), (x(),)]


@program(graphs=1)
def data_and_detach():
    def fn(a):
        a.data.mul_(2)
        return a.detach() + 1, a.mT.real

    return fn, [(x().requires_grad_(),), (x().requires_grad_(),)]


@program(graphs=1)
def gradient_inside():
    def fn(a):
        with torch.enable_grad():
            b = a.detach().requires_grad_()
            (grad,) = torch.autograd.grad((b**3).sum(), b)
        return grad

    return fn, [(x(),), (x(),)]


@program(graphs=1)
def custom_function_with_a_gradient():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a):
            return a * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 17

    return lambda a: Double.apply(a) + 1, [(x().requires_grad_(),), (x().requires_grad_(),)]


@program(graphs=1)
def vmap_and_grad():
    def fn(a):
        return torch.vmap(torch.sin)(a), torch.func.grad(lambda t: t.sin().sum())(a)

    return fn, [(x(),), (x(),)]


@program(graphs=0)
def tensor_from_nowhere():
    def fn(a):
        import numpy as np

        return a + torch.from_numpy(np.arange(4, dtype=np.float32))

    return fn, [(x(),), (x(),)]


@program(graphs=1)
def seeded_inside():
    def fn(a):
        torch.manual_seed(3)
        return a + torch.rand(4)

    return fn, [(x(),), (x(),)]


@program(graphs=1)
def caught_exception():
    def fn(a):
        try:
            return torch.linalg.cholesky(a)
        except RuntimeError:
            return a * 0

    return fn, [(-torch.eye(2),), (torch.eye(2),), (-torch.eye(2),)]


@program(graphs=3)
def attribute_that_counts():
    class Net(nn.Module):
        calls = 0

        def forward(self, a):
            self.calls += 1
            return a * self.calls

    return Net(), [(x(),), (x(),), (x(),)]


@program(graphs=2)
def lazily_made_table():
    class Net(nn.Module):
        table = None

        def forward(self, a):
            if self.table is None:
                self.table = torch.arange(4.0)
            return a + self.table

    return Net(), [(x(),), (x(),), (x(),)]


@program(graphs=0)
def array_written_through():
    def fn(a):
        a.numpy()[0] = 5
        return a * 2

    return fn, [(torch.ones(3),), (torch.zeros(3),)]


@program(graphs=0)
def subclass_among_the_arguments():
    class Marked(torch.Tensor):
        pass

    return lambda a: a + 1, [(x().as_subclass(Marked),), (x().as_subclass(Marked),)]


@program(graphs=0)
def program_that_raises():
    def fn(a):
        return a.view(5, 5)

    return fn, [(x(),), (x(),)]


@program(graphs=2)
def optional_argument_and_flags():
    def fn(a, mask=None, double=False):
        a = a if mask is None else a.masked_fill(mask, 0)
        return a * 2 if double else a

    return fn, [(x(),), (x(), x() > 0), (x(),), (x(), x() > 0)]


@program(graphs=1)
def packed_sequence():
    def fn(a, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(a, lengths, batch_first=True)
        return nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)[0] * 2

    return fn, [(x(2, 3, 4), torch.tensor([3, 2])), (x(2, 3, 4), torch.tensor([3, 2]))]


@program(graphs=1)
def hooks_on_modules():
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    net[0].register_forward_hook(lambda module, args, result: result * 2)
    net.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    return net, [(x(),), (x(),)]


@program(graphs=3)
def list_in_a_closure_that_grows():
    history: list[torch.Tensor] = []

    def fn(a):
        history.append(a)
        return a * len(history)

    return fn, [(x(),), (x(),), (x(),)]


@program(graphs=3)
def nonlocal_counter():
    count = 0

    def fn(a):
        nonlocal count
        count += 1
        return a * count

    return fn, [(x(),), (x(),), (x(),)]


@program(graphs=3)
def object_that_counts():
    state = Pair(0)

    def fn(a):
        state.first += 1
        return a * state.first

    return fn, [(x(),), (x(),), (x(),)]


@dataclasses.dataclass(slots=True)
class Slotted:
    first: torch.Tensor
    count: int = 0


@program(graphs=1)
def objects_with_slots():
    def fn(pair):
        pair.count += 1
        pair.first = pair.first * 2
        return Slotted(pair.first + 1)

    return fn, [(Slotted(x()),), (Slotted(x()),)]


@program(graphs=1)
def defaultdict_that_grows():
    def make():
        groups = collections.defaultdict(list)
        groups["a"].append(x())
        return groups

    def fn(groups):
        groups["new"].append(groups["a"][0] + 1)
        return groups

    return fn, [(make(),), (make(),)]


@program(graphs=0)
def deque_that_grows():
    def fn(queue):
        queue.append(queue[0] + 1)

    return fn, [(collections.deque([x()]),), (collections.deque([x()]),)]


@program(graphs=1)
def set_that_grows():
    def fn(a, seen):
        seen.add(3)
        return a * len(seen)

    return fn, [(x(), {1}), (x(), {1})]


class Switch(enum.Enum):
    ON = 1
    OFF = 2


@program(graphs=2)
def enumerations():
    def fn(a, switch):
        return a * 2 if switch is Switch.ON else a

    return fn, [(x(), Switch.ON), (x(), Switch.OFF), (x(), Switch.ON)]


@program(graphs=2)
def numpy_argument_read_as_a_number():
    def fn(a, array):
        return a * float(array.sum())

    return fn, [(x(), np.ones(2)), (x(), np.zeros(2)), (x(), np.ones(2))]


@program(graphs=0)
def numpy_argument_written_to():
    def fn(a, array):
        array += 1
        return a

    return fn, [(x(), np.ones(2)), (x(), np.ones(2))]


@program(graphs=1)
def numpy_scalars():
    def fn(a):
        return a * np.float32(2) + np.int64(3) + np.float64(1.5)

    return fn, [(x(),), (x(),)]


@program(graphs=2)
def generator_of_random_numbers():
    def fn(a, generator):
        return a + torch.rand(4, generator=generator)

    return fn, [(x(), torch.Generator().manual_seed(1)) for _ in range(3)]


@program(graphs=0)
def scripted_module():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.trace(nn.Linear(4, 4).eval(), x(2, 4))
    return lambda a: scripted(a) + 1, [(x(2, 4),), (x(2, 4),)]


@program(graphs=1)
def control_flow_operator():
    def fn(a):
        return torch.cond(a.sum() > 0, lambda t: t * 2, lambda t: t - 1, (a,))

    return fn, [(torch.ones(2),), (-torch.ones(2),)]


@program(graphs=1)
def suppressed_error_after_a_write():
    def fn(a, matrix):
        with contextlib.suppress(RuntimeError):
            a.add_(1)
            a.add_(torch.linalg.cholesky(matrix).sum())
        return a

    return fn, [(x(), torch.eye(2) * sign) for sign in (1, -1, 1)]


@program(graphs=2)
def geometry_changed_before_the_branch():
    def fn(a):
        a.unsqueeze_(0)
        return a * 2 if a.sum() > 0 else a - 1

    return fn, [(torch.ones(3),), (-torch.ones(3),), (torch.ones(3),)]


@program(graphs=2)
def custom_operator_that_writes():
    def fn(a):
        torch.ops.fxkit_tests.increment(a)
        return a * 2 if a.sum() > 0 else a - 1

    if not hasattr(torch.ops.fxkit_tests, "increment"):

        @torch.library.custom_op("fxkit_tests::increment", mutates_args=("a",))
        def increment(a: torch.Tensor) -> None:
            a.add_(1)

    return fn, [(torch.ones(3),), (torch.full((3,), -5.0),), (torch.ones(3),)]


@program(graphs=2)
def row_chosen_by_a_tensor():
    def fn(a, i):
        return a[i], a[i:], a[i:].shape

    return fn, [(x(), torch.tensor(1)), (x(), torch.tensor(2)), (x(), torch.tensor(1))]


@program(graphs=1)
def parametrised_weight():
    net = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    return net, [(x(),), (x(),)]


@program(graphs=0)
def gradient_written_inside():
    net = nn.Linear(4, 4)

    def fn(a):
        net.zero_grad()
        net(a).sum().backward()
        return net.weight.grad.clone()

    return fn, [(x(),), (x(),)]


@pytest.mark.parametrize("name", list(_PROGRAMS))
def test_captured_is_the_program(name: str) -> None:
    assert_faithful(_PROGRAMS[name], graphs=_GRAPHS[name])


def test_random_numbers_of_python_are_not_baked_in():
    with pytest.raises(CaptureError, match="random numbers from"):
        capture(lambda a: a * random.random(), (x(),), mode="live")


def test_unknown_mode():
    with pytest.raises(UnsupportedError, match="expected mode to be one of whole, live, symbolic"):
        capture(torch.relu, (x(),), mode="other")


def test_bare_tensor_for_arguments():
    with pytest.raises(UnsupportedError, match="expected args to be a tuple, got Tensor") as error:
        capture(torch.relu, x())  # type: ignore[arg-type]
    assert "(x,)" in str(error.value)


def test_keywords_that_are_no_dict():
    with pytest.raises(UnsupportedError, match="expected kwargs to be a dict or None, got list"):
        capture(torch.relu, (x(),), [1])  # type: ignore[arg-type]


def test_something_that_can_not_be_called():
    with pytest.raises(UnsupportedError, match="expected something callable, got int"):
        capture(3, (x(),))  # type: ignore[arg-type]


def test_nodes_carry_types_lines_and_modules():
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU())

    def fn(a):
        return net(a) + 1

    nodes = {node.name: node for node in capture(fn, (x(2, 4),)).graph_module.graph.nodes}
    assert list(nodes) == ["a", "net_0_weight", "net_0_bias", "linear", "relu", "add", "output"]
    assert str(type_of(nodes["linear"])) == "f32[2,3]"
    assert module_path(nodes["relu"]) == "net.1"
    assert [path for path, _ in module_stack(nodes["linear"])] == ["net", "net.0"]
    source = source_of(nodes["linear"])
    assert source is not None and source.line == fn.__code__.co_firstlineno + 1
    assert source.function == "fn"


def test_values_that_depend_on_data_are_marked():
    graph = capture(lambda a: (a[a > 0] + 1, a * 2), (x(),)).graph_module.graph
    marked = [node.name for node in graph.nodes if node.meta.get("fxkit_data_dependent")]
    assert marked == ["getitem", "add"]


def test_weights_that_are_tied_are_one_attribute():
    fn, (args, _) = weights_tied()
    graph = capture(fn, args).graph_module.graph
    assert [node.target for node in graph.nodes if node.op == "get_attr"] == ["embed.weight"]


def test_names_are_the_same_each_time():
    fn, (args, _) = recurrent_and_attention()
    assert capture(fn, args).graph_module.code == capture(fn, args).graph_module.code


def test_custom_function_without_a_gradient_is_seen_through():
    fn, _ = custom_function_with_a_gradient()
    with torch.no_grad():
        captured = capture(fn, (x(),))
    assert [node.name for node in captured.nodes] == ["a", "mul", "add", "output"]


@pytest.mark.parametrize(
    ("name", "reason", "hint"),
    [
        ("tensor_from_nowhere", r"tensor f32\[4\] of unknown origin", "pass it as an argument"),
        ("seeded_inside", "random state changes between", "seed the generators before"),
        ("attribute_that_counts", "changes calls", "call the program once before"),
        ("custom_function_with_a_gradient", "Double has a backward of its own", "no_grad"),
        ("subclass_among_the_arguments", r"args\[0\] is a .*Marked, a tensor subclass", ""),
    ],
)
def test_refusals_say_why_and_what_to_do(name: str, reason: str, hint: str):
    fn, calls = _PROGRAMS[name]()
    with pytest.raises(CaptureError, match=reason) as error:
        capture(fn, calls[0], mode="live")
    assert hint in str(error.value)
