"""What fxkit computes for itself is not seen by modes that are on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import fxkit
from fxkit.ir.modes import without_modes
from fxkit.passes.manager.manager import PassManager
from fxkit.passes.pipelines import INFERENCE
from fxkit.passes.pipelines import QUANTIZATION_READY as READY


class _Log(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def _network() -> fx.GraphModule:
    network = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.ReLU())
    return fxkit.symbolic_trace(network.eval())


def _rewrite(gm: fx.GraphModule, x: torch.Tensor) -> None:
    rule = fxkit.rule(lambda x: torch.relu(x), lambda x: x.clamp(min=0), name="relu_as_clamp")
    assert fxkit.rewrite(gm, rule).count == 1


_WORK: dict[str, Callable[[fx.GraphModule, torch.Tensor], Any]] = {
    "symbolic_trace": lambda gm, x: fxkit.symbolic_trace(gm),
    "rewrite": _rewrite,
    "types": lambda gm, x: fxkit.propagate_types(gm, (x,)),
    "inference": lambda gm, x: PassManager(INFERENCE, args=(x,)).run(gm),
    "numerics": lambda gm, x: PassManager(READY, args=(x,), verify="numerics").run(gm),
}


@pytest.mark.parametrize("work", sorted(_WORK))
def test_a_mode_for_fake_tensors_is_no_hindrance(work: str) -> None:
    x, gm = torch.randn(2, 3), _network()
    with FakeTensorMode():
        assert isinstance(torch.ones(2), FakeTensor)
        _WORK[work](gm, x)
    assert not any(isinstance(value, FakeTensor) for value in gm.state_dict().values())
    assert gm(x).shape == (2, 3)


@pytest.mark.parametrize("work", sorted(_WORK.keys() - {"rewrite"}))
def test_a_log_of_operators_has_those_of_the_program_alone(work: str) -> None:
    x, gm = torch.randn(2, 3), _network()
    with _Log() as log:
        _WORK[work](gm, x)
        assert log.seen == []
        torch.neg(x)
    assert log.seen == ["aten.neg.default"]


def test_modes_come_back_after_an_error() -> None:
    with _Log() as log:
        with pytest.raises(ZeroDivisionError), without_modes():
            torch.ones(2)
            raise ZeroDivisionError
        torch.zeros(2)
    assert log.seen == ["aten.zeros.default"]


def test_passes_run_in_a_backend_of_aot_autograd() -> None:
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch._aot_autograd.utils import make_boxed_func

    counts = []

    def backend(gm: Any, args: Any) -> Any:
        for given in (None, tuple(args)):
            passes = [fxkit.passes.Canonicalise(), fxkit.passes.CommonSubexpressionElimination()]
            counts.append(len(PassManager(passes, args=given).run(gm).records))
        return make_boxed_func(gm.forward)

    torch._dynamo.reset()
    network = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU())
    compiled = torch.compile(network, backend=aot_autograd(fw_compiler=backend))
    x = torch.randn(3, 4)
    torch.testing.assert_close(compiled(x), network(x))
    compiled(x).sum().backward()
    assert counts == [2, 2, 2, 2]
