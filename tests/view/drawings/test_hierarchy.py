"""Groups of modules: no cycles, whatever the order and the sharing."""

from __future__ import annotations

import random

import pytest
import torch
from torch import fx, nn

from fxkit.view.drawings.grouping import acyclic_groups
from fxkit.view.drawings.hierarchy import Hierarchy, ModuleGroup
from tests.view import models


def is_acyclic(groups: list[list[fx.Node]]) -> bool:
    """Tell whether each group only reads groups that come before it."""
    owner = {node: i for i, group in enumerate(groups) for node in group}
    return all(
        owner.get(operand, -1) <= i
        for i, group in enumerate(groups)
        for node in group
        for operand in node.all_input_nodes
    )


@pytest.mark.parametrize("seed", range(20))
def test_groups_of_random_keys_form_no_cycle(seed: int) -> None:
    nodes = list(models.random_graph(60, seed=seed).graph.nodes)
    generator = random.Random(seed)
    keys = {node: generator.randrange(6) for node in nodes}
    groups = acyclic_groups(nodes, keys, {n: list(n.users) for n in nodes})
    assert sorted(n.name for g in groups for n in g) == sorted(n.name for n in nodes)
    assert all(len({keys[n] for n in group}) == 1 for group in groups)
    assert is_acyclic(groups)


def test_nodes_of_one_module_that_others_come_between_stay_one_group() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    nodes = [graph.call_function(torch.sin, (x,)) for _ in range(4)]
    keys = {node: i % 2 for i, node in enumerate(nodes)}
    users = {node: list(node.users) for node in nodes}
    assert acyclic_groups(nodes, keys, users) == [[nodes[0], nodes[2]], [nodes[1], nodes[3]]]


def test_shared_parameters_are_counted_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4, bias=False)
            self.b = nn.Linear(4, 4, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x))

    assert Hierarchy(fx.symbolic_trace(Tied())).root.parameters == 16


def test_constants_are_parts_of_their_users() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    root = Hierarchy(fx.symbolic_trace(Scaled())).root
    assert [leaf.node.name for leaf in root.leaves()] == ["x", "mul", "output"]
    assert root.parameters == 5


def test_a_constant_that_is_returned_is_shown() -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.value = nn.Parameter(torch.ones(5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.value

    root = Hierarchy(fx.symbolic_trace(Constant())).root
    assert "value" in [leaf.node.name for leaf in root.leaves()]


def test_layers_are_folded_only_next_to_each_other() -> None:
    graph = models.stack(3)
    root = Hierarchy(graph).root
    folds = [item.fold for item in root.items if isinstance(item, ModuleGroup) and item.fold]
    assert [fold.count for fold in folds] == [3]
    assert [member.name for member in folds[0].members] == ["layers.1", "layers.2"]


def test_layers_that_call_one_kernel_are_alike() -> None:
    class KernelCall:
        def __init__(self, name: str, kernel: str) -> None:
            self.__name__ = self.__qualname__ = name
            self.kernel = kernel

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x

    def folded(kernels: list[str]) -> list[int]:
        graph = fx.Graph()
        value = graph.placeholder("x")
        for i, kernel in enumerate(kernels):
            for call in (KernelCall(f"region_{i}", kernel), torch.sin):
                value = graph.call_function(call, (value,))
                value.meta["nn_module_stack"] = {"k": (f"layers.{i}", "Layer")}
        graph.output(value)
        items = Hierarchy(fx.GraphModule(nn.Module(), graph)).root.items
        return [item.fold.count for item in items if isinstance(item, ModuleGroup) and item.fold]

    assert folded(["kernel_0"] * 3) == [3]
    assert folded(["kernel_0", "kernel_1", "kernel_1"]) == [2]
