"""Programs that compute: branches on values, containers, modes, modules, gradients."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from tests.tracing.programs import Programs, x

program = Programs()


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
