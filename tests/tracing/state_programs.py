"""Programs with state and with foreign objects: counters, tables, arrays, generators, hooks."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import warnings

import numpy as np
import torch
from torch import nn

from tests.tracing.programs import Programs, x
from tests.tracing.tensor_programs import Pair

program = Programs()


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
