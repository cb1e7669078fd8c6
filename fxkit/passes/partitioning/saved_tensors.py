"""What autograd keeps between forward and backward, found by a run on fake tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fxkit.analysis.tensor_types import fake_mode
from fxkit.analysis.type_inference.fake_tensors import as_fake
from fxkit.ir.types import TensorType, type_of
from fxkit.torch_adapters import pytree
from fxkit.torch_adapters.fake_tensors import reading_errors
from fxkit.torch_adapters.tensors import impl_address_of


@dataclass(eq=False)
class SavedMemory:
    """One piece of memory that a forward run makes.

    Attributes:
        producer: The node that made it.
        nbytes: Its size in bytes.
        holders: Nodes whose result lies in it.
        savers: Nodes whose backward needs it.
    """

    producer: fx.Node
    nbytes: int
    holders: list[fx.Node] = field(default_factory=list)
    savers: list[fx.Node] = field(default_factory=list)


def saved_memories(
    gm: fx.GraphModule, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
) -> list[SavedMemory]:
    """Return the memory that the nodes of a graph make, and who needs it in backward.

    Parameters, buffers and inputs are left out: they live anyway.

    Args:
        gm: The module.
        args: Example inputs.
        kwargs: Example keyword inputs.

    Returns:
        One entry for each piece of memory, in the order in which they are made. Cost: one run on
        fake tensors.
    """
    with fake_mode() as mode, torch.enable_grad():
        runner = _Runner(gm, mode)
        given = pytree.tree_map_only(
            torch.Tensor, runner.outside, (tuple(args), dict(kwargs or {}))
        )
        with torch.autograd.graph.saved_tensors_hooks(runner.save, lambda held: held):
            runner.run_on(*given)
    return list(runner.memories.values())


class _Runner(fx.Interpreter):
    def __init__(self, gm: fx.GraphModule, mode: Any) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.extra_traceback = False
        self.memories: dict[int, SavedMemory] = {}
        self._mode = mode
        self._alive: list[torch.Tensor] = []  # else a freed storage's address comes again
        self._outside: set[int] = set()
        self._fakes: dict[int, torch.Tensor] = {}
        self._node = next(iter(gm.graph.nodes))

    def run_on(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        names = [n.target for n in self.module.graph.nodes if n.op == "placeholder"]  # type: ignore[union-attr]
        self.run(*args, *(kwargs[n] for n in names[len(args) :] if n in kwargs),
                 enable_io_processing=False)  # fmt: skip

    def outside(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the fake tensor of one that lives outside of the graph."""
        if id(tensor) not in self._fakes:
            fake = as_fake(self._mode, tensor)
            self._fakes[id(tensor)] = fake
            self._outside.add(_key(fake))
        return self._fakes[id(tensor)]

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        """Note that the backward of the present node needs a tensor."""
        memory = self._memory(tensor)
        if memory is not None and self._node not in memory.savers[-1:]:
            memory.savers.append(self._node)
        return tensor

    def run_node(self, n: fx.Node) -> Any:
        self._node = n
        result = self._run_recorded(n)
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and n.op != "output":
                memory = self._memory(leaf)
                if memory is not None:
                    memory.holders.append(n)
        return result

    def _run_recorded(self, node: fx.Node) -> Any:
        """Run a node; of one that reads numbers out of a tensor, take those of the capture."""
        try:
            return super().run_node(node)
        except reading_errors()[0]:
            known = type_of(node)
            if not isinstance(known, (bool, int, float, complex)):
                raise
            return known

    def fetch_attr(self, target: str) -> Any:
        found = super().fetch_attr(target)
        return self.outside(found) if isinstance(found, torch.Tensor) else found

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        module = super().fetch_attr(target)
        held = [*module.named_parameters(), *module.named_buffers()]
        fakes = {name: self.outside(tensor) for name, tensor in held}
        return torch.func.functional_call(module, fakes, args, kwargs)

    def _memory(self, tensor: torch.Tensor) -> SavedMemory | None:
        if tensor.layout != torch.strided or _key(tensor) in self._outside:
            return None
        key = _key(tensor)
        if key not in self.memories:
            self._alive.append(tensor)
            nbytes = int(tensor.untyped_storage().nbytes())
            self.memories[key] = SavedMemory(self._node, nbytes or TensorType.of(tensor).nbytes)
        return self.memories[key]


def _key(tensor: torch.Tensor) -> int:
    return impl_address_of(tensor.untyped_storage())
