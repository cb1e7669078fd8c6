"""What the inference pipeline makes of real architectures: one row a model.

python -m tests.passes.architecture_table [name ...]
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import fx
from torch.utils import _pytree as pytree

import fxkit
from fxkit.analysis.equivalence import Comparison, compare
from fxkit.analysis.float64 import widened
from fxkit.ir.op import resolve
from fxkit.passes.manager.manager import PassManager
from fxkit.passes.pipelines import INFERENCE
from tests.architectures import CONVOLUTIONAL, HUGGING_FACE, convolutional

NAMES = (*HUGGING_FACE, *CONVOLUTIONAL)

_KINDS = ("nodes", "layers", "norms", "attentions")
_LAYERS = frozenset("linear addmm mm conv1d conv2d conv3d conv_transpose2d".split())


@dataclass(frozen=True)
class Row:
    """One model before and after the pipeline.

    Attributes:
        name: Name of the architecture.
        nodes: Nodes that compute something, before and after.
        layers: Linear layers and convolutions, before and after.
        norms: Batch norms, before and after.
        attentions: Calls of attention as one operator, before and after.
        errors: Error of each output against float64, before and after.
    """

    name: str
    nodes: tuple[int, int]
    layers: tuple[int, int]
    norms: tuple[int, int]
    attentions: tuple[int, int]
    errors: tuple[Comparison, ...]

    def __str__(self) -> str:
        pairs = [f"{before:>5} -> {after:<5}" for before, after in
                 (self.nodes, self.layers, self.norms, self.attentions)]  # fmt: skip
        worst = max(self.errors, key=lambda one: one.error)
        return f"{self.name:<18} {'  '.join(pairs)} {worst.error:>9.2e} {worst.eager_error:>9.2e}"


_COLUMNS = [f"{kind:<14}" for kind in ("nodes", "layers", "batch norms", "attentions")]
HEADING = f"{'model':<18} {'  '.join(_COLUMNS)} {'error':>9} eager's"


def row(name: str, attention: str | None = None) -> Row:
    """Run the pipeline on a model with random weights, and compare it with eager and float64.

    Args:
        name: Name of the architecture.
        attention: The implementation of attention of a Hugging Face model; its own when left out.
    """
    torch.manual_seed(0)
    model, inputs = HUGGING_FACE[name]() if name in HUGGING_FACE else convolutional(name)
    if name == "mixtral":  # grouped products have no float64, nor fake tensors of float32
        model.set_experts_implementation("batched_mm")
    if attention is not None:
        model.set_attn_implementation(attention)
    _shake(model)
    batch = inputs(2 if name in HUGGING_FACE else 1)
    with torch.no_grad():
        gm = _captured(model, batch)
        before = copy.deepcopy(gm)
        PassManager(INFERENCE, args=(), kwargs=batch).run(gm)
        errors = _errors(before, gm, batch)
    counts = [_counts(module) for module in (before, gm)]
    pairs = ((counts[0][kind], counts[1][kind]) for kind in _KINDS)
    return Row(name, *pairs, errors=errors)


def _captured(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> fx.GraphModule:
    """Capture at the second call: the first imports and builds what no graph can hold."""
    model(**batch)
    return fxkit.capture(model, (), batch).graph_module


def _shake(model: torch.nn.Module) -> None:
    """Give norms statistics and weights as if they had learnt: some scales are negative."""
    for norm in model.modules():
        if isinstance(norm, torch.nn.modules.batchnorm._BatchNorm) and norm.affine:
            torch.nn.init.normal_(norm.running_mean, std=0.1)
            torch.nn.init.uniform_(norm.running_var, 0.5, 1.5)
            torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
            torch.nn.init.normal_(norm.bias, std=0.1)


def _counts(gm: fx.GraphModule) -> Counter[str]:
    found: Counter[str] = Counter()
    for node in gm.graph.nodes:
        call = resolve(node)
        if call is not None:
            packet = call.name.removeprefix("aten.")
            found["nodes"] += 1
            found["layers"] += packet in _LAYERS
            found["attentions"] += packet == "scaled_dot_product_attention"
            found["norms"] += packet == "batch_norm"
    return found


def _errors(
    before: fx.GraphModule, after: fx.GraphModule, batch: dict[str, torch.Tensor]
) -> tuple[Comparison, ...]:
    wide = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
    truth, eager, ours = (
        [t for t in pytree.tree_leaves(run) if isinstance(t, torch.Tensor)]
        for run in (widened(before)(**wide), before(**batch), after(**batch))
    )
    types = [[(t.shape, t.dtype, t.stride()) for t in run] for run in (eager, ours)]
    assert types[0] == types[1]
    return tuple(compare(o, e, t.double()) for o, e, t in zip(ours, eager, truth, strict=True))


def main(names: Iterable[str]) -> None:
    """Print the table, one row at a time."""
    print(HEADING)
    for name in names:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            print(row(name), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or NAMES)
