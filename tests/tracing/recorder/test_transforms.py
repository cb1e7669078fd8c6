"""Programs that use `torch.func`: one graph of ATen, right at each call, or the program itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, grad_and_value, hessian, jacfwd, jacrev, jvp, vmap
from torch.utils import _pytree as pytree

import fxkit
from fxkit.errors import CaptureError
from fxkit.tracing.captured import Captured

# torch compiles decompositions for forward mode by torch.jit, which it calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")

torch.manual_seed(0)
NET = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4))
WEIGHT = torch.randn(4, 4)


def _loss(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return functional_call(NET, parameters, (x,)).square().sum()


def _branch(t: torch.Tensor) -> torch.Tensor:
    return t.sum() * 2 if t.sum() > 0 else t.prod()


PROGRAMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "grad": lambda x: grad(lambda t: t.sin().sum())(x),
    "grad_and_value": lambda x: grad_and_value(lambda t: t.sin().sum())(x),
    "vmap": lambda x: vmap(lambda row: row.softmax(0) * row.sum())(x),
    "vmap_of_nothing": lambda x: vmap(lambda row: row)(x) + 1,
    "vmap_over_other_axes": lambda x: vmap(lambda a, b: a * b, (0, 1), 1)(x, x.t()),
    "jvp": lambda x: jvp(torch.sin, (x,), (x,)),
    "jacrev": lambda x: jacrev(lambda t: t.sin() * 2)(x),
    "jacfwd": lambda x: jacfwd(lambda t: t.sin() * 2)(x),
    "hessian": lambda x: hessian(lambda t: t.sin().prod())(x),
    "jacfwd_of_jacrev": lambda x: jacfwd(jacrev(lambda t: (t @ WEIGHT).tanh().sum()))(x),
    "vmap_of_grad": lambda x: vmap(grad(lambda row: (row @ WEIGHT).tanh().sum()))(x),
    "between_other_calls": lambda x: (x * 2) @ vmap(grad(lambda r: r.exp().sum()))(x * 3).t(),
    "module": lambda x: vmap(NET)(x),
    "gradients_for_each_sample": lambda x: vmap(grad(_loss), (None, 0))(
        dict(NET.named_parameters()), x
    ),
    "constant": lambda x: grad(lambda t: (t * torch.tensor([1.0, 2, 3, 4])).sum())(x),
    "branch": lambda x: grad(_branch)(x),
    "random": lambda x: vmap(lambda r: r + torch.randn(4), randomness="different")(x),
    "dropout": lambda x: vmap(lambda r: F.dropout(r), randomness="different")(x),
    "in_place": lambda x: vmap(lambda r: r.clone().add_(1))(x),
    "no_grad": lambda x: torch.no_grad()(grad(lambda t: (t * t.detach()).sum()))(x),
    "layer_norm": lambda x: vmap(grad(lambda r: F.layer_norm(r, (4,)).exp().sum()))(x),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_one_graph_is_the_program(name: str, requires_grad: bool):
    fn = PROGRAMS[name]
    captured = fxkit.capture(fn, (torch.rand(3, 4).requires_grad_(requires_grad),))
    before = captured.recaptures
    for seed, scale in enumerate((1.0, 1.0, -1.0, -1.0, 1.0)):
        ours = (torch.rand(3, 4) * scale).requires_grad_(requires_grad)
        theirs = ours.detach().clone().requires_grad_(requires_grad)
        torch.manual_seed(seed)
        found = captured(ours)
        after = torch.get_rng_state()
        torch.manual_seed(seed)
        expected = fn(theirs)
        assert torch.equal(after, torch.get_rng_state())
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(_gradients(found, ours), _gradients(expected, theirs))
        assert captured.whole
    assert captured.recaptures - before == (1 if name == "branch" else 0)


def _gradients(result: Any, x: torch.Tensor) -> Any:
    followed = [t for t in pytree.tree_leaves(result) if t.requires_grad]
    inputs = [t for t in (x, *NET.parameters()) if t.requires_grad]
    if not followed:
        return None
    total = torch.stack([t.square().sum() for t in followed]).sum()
    return torch.autograd.grad(total, inputs, allow_unused=True)


def test_graph_holds_plain_operators():
    captured = fxkit.capture(lambda x: vmap(grad(lambda r: r.sin().sum()))(x), (torch.rand(2, 3),))
    targets = {str(node.target) for node in captured.graph_module.graph.nodes}
    assert "aten.cos.default" in targets
    assert not any("vmap" in target or "functorch" in target for target in targets)


def test_state_that_a_transformed_function_reads_is_guarded():
    scale = {"by": 2.0}
    captured = Captured(lambda x: grad(lambda t: (t.sin() * scale["by"]).sum())(x))
    x = torch.rand(3)
    first = captured(x)
    scale["by"] = 5.0
    torch.testing.assert_close(captured(x), first * 2.5)
    assert captured.recaptures == 1


def _masked(x: torch.Tensor) -> torch.Tensor:
    return grad(lambda t: t[t > 0].sum())(x)


def _under_autocast(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return vmap(lambda row: row @ WEIGHT)(x)


@pytest.mark.parametrize(
    ("fn", "reason"),
    [(_masked, "whose shape depends on its numbers"), (_under_autocast, "under autocast")],
)
def test_what_cannot_be_seen_below_runs_in_python(fn: Callable[..., Any], reason: str):
    x = torch.randn(3, 4)
    with pytest.raises(CaptureError, match=reason):
        fxkit.capture(fn, (x,))
    captured = Captured(fn)
    for _ in range(2):
        torch.testing.assert_close(captured(x), fn(x))
    assert not captured.whole
    assert torch._C._len_torch_dispatch_stack() == 0


def test_an_error_inside_leaves_no_mode_behind():
    def fn(x: torch.Tensor) -> torch.Tensor:
        return vmap(lambda row: row.sin() @ torch.ones(7))(x)

    with pytest.raises(RuntimeError):
        fxkit.capture(fn, (torch.rand(3, 4),))
    assert torch._C._len_torch_dispatch_stack() == 0
    assert torch._C._functorch.maybe_current_level() is None


TRANSFORMS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "grad": lambda fn: grad(lambda x: fn(x).sum()),
    "vmap": vmap,
    "jacrev": jacrev,
    "hessian": lambda fn: hessian(lambda x: fn(x).sum()),
    "jvp": lambda fn: lambda x: jvp(fn, (x,), (x,)),
    "vmap_of_grad": lambda fn: vmap(grad(lambda x: fn(x).sum())),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("make", [Captured, fxkit.compile])
def test_transforms_of_captured_programs(make: Callable[..., Any], name: str):
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x * 2) * x

    x = torch.rand(3, 4)
    captured = make(fn)
    captured(x)
    torch.testing.assert_close(TRANSFORMS[name](captured)(x), TRANSFORMS[name](fn)(x))
    torch.testing.assert_close(captured(x), fn(x))
