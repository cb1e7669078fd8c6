"""Real architectures compiled, held to eager and float64; each node in ATen has its reason."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import fxkit
from fxkit.analysis.effects import effects_of
from fxkit.lower import CompiledModule
from tests.architectures import CONVOLUTIONAL, HUGGING_FACE, Inputs, convolutional

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers and pytorchcv warn at import

QUICK = ("bert",)

# What rounding alone may make, relative to the norm of a result.
FLOOR = 2e-7


def check(net: torch.nn.Module, inputs: Inputs) -> CompiledModule:
    """Call a model and the same one compiled, twice; return what was compiled."""
    compiled = fxkit.compile(net)
    hold_to_float64(compiled, net, inputs)
    assert len(compiled.compiled_modules) == 1
    module = compiled.compiled_modules[0]
    assert isinstance(module, CompiledModule) and module.report().eager_calls == {}
    return module


def hold_to_float64(compiled: Callable[..., Any], net: torch.nn.Module, inputs: Inputs) -> None:
    """Call what was compiled of a model twice, and hold it to eager's error against float64."""
    wide = copy.deepcopy(net).double()
    if hasattr(wide, "set_experts_implementation"):
        wide.set_experts_implementation("eager")  # the other kinds do not take float64
    with torch.no_grad():
        eager, exact = _tensors(net(**inputs)), _tensors(wide(**_doubled(inputs)))
        for _ in range(2):
            _hold(_tensors(compiled(**inputs)), eager, exact)


def check_sizes(net: torch.nn.Module, samples: list[Inputs]) -> None:
    """Call a model compiled for symbolic sizes with inputs of several ones."""
    wide = copy.deepcopy(net).double()
    if hasattr(wide, "set_experts_implementation"):
        wide.set_experts_implementation("eager")
    compiled = fxkit.compile(net, dynamic=True)
    with torch.no_grad():
        for inputs in samples:
            eager, exact = _tensors(net(**inputs)), _tensors(wide(**_doubled(inputs)))
            _hold(_tensors(compiled(**inputs)), eager, exact)
    assert compiled.compiled_modules


def _shorter(inputs: Inputs, length: int) -> Inputs:
    """Return sentences cut to a length; images as they are."""
    return {k: v if v.is_floating_point() else v[:, :length] for k, v in inputs.items()}


def _hold(found: list[torch.Tensor], eager: list[torch.Tensor], exact: list[torch.Tensor]) -> None:
    for a, b, right in zip(found, eager, exact, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        if not b.is_floating_point():
            assert torch.equal(a, b)
            continue
        ours, theirs = (float((t.double() - right).norm()) for t in (a, b))
        assert ours <= 2 * theirs + FLOOR * float(right.norm()), (ours, theirs)


def _tensors(result: Any) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves(dict(result) if hasattr(result, "keys") else result)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _doubled(inputs: Inputs) -> Inputs:
    return {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}


def check_reasons(module: CompiledModule) -> None:
    """See that each node that makes a new value is in a kernel, or in ATen for a reason told."""
    reasons = module.reasons
    fused = {name for r in module.regions if r.kernel is not None for name in r.nodes}
    for node in module.graph_module.graph.nodes:
        makes_a_value = node.op.startswith("call_") and not effects_of(node).aliases
        assert not makes_a_value or node.name in fused or reasons[node.name]
    print(f"{len(fused)} nodes in kernels, {len(reasons)} in ATen:")
    for reason, count in Counter(reasons.values()).most_common():
        print(f"{count:5} {reason}")
    assert fused


@pytest.mark.parametrize("name", QUICK)
def test_transformers(name: str):
    torch.manual_seed(0)
    net, make = HUGGING_FACE[name]()
    check_reasons(check(net, make(2)))


@pytest.mark.sweep
@pytest.mark.parametrize("name", [name for name in HUGGING_FACE if name not in QUICK])
def test_every_transformer(name: str):
    test_transformers(name)


@pytest.mark.sweep
@pytest.mark.parametrize("name", HUGGING_FACE)
def test_every_transformer_at_other_sizes(name: str):
    torch.manual_seed(0)
    net, make = HUGGING_FACE[name]()
    sizes = ((2, 7), (3, 7), (3, 4), (6, 5), (5, 6), (2, 4), (7, 3))
    check_sizes(net, [_shorter(make(batch), length) for batch, length in sizes])


@pytest.mark.sweep
@pytest.mark.parametrize("name", CONVOLUTIONAL)
def test_every_convolutional_net(name: str):
    torch.manual_seed(0)
    net, make = convolutional(name)
    check_reasons(check(net, make(2)))
