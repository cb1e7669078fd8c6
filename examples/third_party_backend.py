"""A backend of your own: give the parts of a model that it can run to NumPy.

A backend says which nodes it can run, and makes something callable of a region of them. Where
regions lie, what may move around them and what happens to the rest is `Partition`'s to know.

Run it: python examples/third_party_backend.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.fx.node import map_arg

import fxkit
from fxkit.errors import UnsupportedError
from fxkit.ir.op import Attribute, resolve
from fxkit.passes import Partition

# What NumPy computes: the operator → a function of its arguments, by the names of its schema.
TABLE: dict[str, Callable[..., Any]] = {
    "aten.add": lambda self, other, alpha: self + alpha * other,
    "aten.mul": lambda self, other: self * other,
    "aten.tanh": lambda self: np.tanh(self),
    "aten.relu": lambda self: np.maximum(self, 0),
    "aten.linear": lambda input, weight, bias: input @ weight.T + (0 if bias is None else bias),
}


class NumpyBackend:
    """Runs float32 regions with NumPy."""

    name = "numpy"

    def supports(self, node: fx.Node) -> str | None:
        """Tell why a node stays with torch; None when NumPy takes it."""
        call = resolve(node)
        if call is None or call.name not in TABLE:
            return "NumPy has no such function"
        return None

    def compile(self, region: fx.GraphModule, types: tuple[Any, ...]) -> Callable[..., Any]:
        """Return a function that runs a region node by node."""
        if any(known is None or known.dtype != torch.float32 for known in types):
            raise UnsupportedError("expected float32 inputs, got others or unknown ones")
        return lambda *args: run(region, args)


def run(region: fx.GraphModule, args: tuple[torch.Tensor, ...]) -> Any:
    """Run a region; parameters are read at each call, and so never out of date."""
    inputs = iter(args)
    values: dict[fx.Node, Any] = {}

    def value(operand: Any) -> Any:
        if isinstance(operand, fx.Node):
            return values[operand]
        return read(operand.path) if isinstance(operand, Attribute) else operand

    def read(path: str) -> Any:
        owner, _, name = path.rpartition(".")
        return getattr(region.get_submodule(owner), name).detach().numpy()

    for node in region.graph.nodes:
        call = resolve(node)
        if node.op == "placeholder":
            values[node] = next(inputs).detach().numpy()
        elif node.op == "get_attr":
            values[node] = read(str(node.target))
        elif call is not None:
            arguments = {name: value(operand) for name, operand in call.arguments.items()}
            values[node] = TABLE[call.name](**arguments)
    (returned,) = region.graph.output_node().args
    return map_arg(returned, lambda node: torch.from_numpy(np.asarray(values[node])))


def main() -> None:
    """Partition a small model, and compare."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 4), nn.Tanh(), nn.Softmax(-1)
    ).eval()
    x = torch.randn(2, 8)
    gm = fxkit.symbolic_trace(model)
    result = fxkit.PassManager([Partition(NumpyBackend())], args=(x,)).run(gm)
    print(fxkit.graph(gm))
    print("\n".join(result.records[0].notes))
    with torch.no_grad():
        torch.testing.assert_close(gm(x), model(x))
        print(
            "NumPy ran:", [name for name, part in gm.named_children() if hasattr(part, "compiled")]
        )


if __name__ == "__main__":
    main()
