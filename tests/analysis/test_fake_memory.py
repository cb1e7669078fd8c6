"""Code that looks for a tensor's memory by its address is told that there is none, and survives."""

from __future__ import annotations

import subprocess

PROGRAM = """
import ctypes

import numpy as np
import torch

import fxkit
from fxkit.analysis.tensor_types import infer_type

X = torch.randn(4, 3)


def numbers(x, address):
    return torch.tensor((ctypes.c_float * x.numel()).from_address(address)[:]).reshape(x.shape)


def address(x):
    return numbers(x, x.data_ptr())


def storage(x):
    return numbers(x, x.untyped_storage().data_ptr())


def alias(x):
    return address(x.detach().view(3, 4)).view(4, 3)


def fresh(x):
    return address(torch.ones(4, 3))


def written(x):
    ctypes.memset(x.data_ptr(), 0, 4 * x.numel())
    return x


def shared(x):
    return torch.from_numpy(np.from_dlpack(x).copy())


def array(x):
    return torch.from_numpy(np.asarray(x) * 2)


def graph_of(function):
    graph = torch.fx.Graph()
    relu = graph.call_function(torch.relu, (graph.placeholder("x"),))
    graph.output(graph.call_function(torch.neg, (graph.call_function(function, (relu,)),)))
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def untold(function):
    gm = graph_of(function)
    try:
        fxkit.propagate_types(gm, (X,))
    except fxkit.errors.InvalidGraphError as error:
        assert error.hint == f"declare what it returns with fxkit.declare_type({function.__name__})"
        assert f"%{function.__name__} = " in error.node, error.node
    else:
        raise AssertionError(function)
    fxkit.propagate_types(sub := graph_of(torch.abs), (X,))
    call = next(node for node in sub.graph.nodes if node.target is torch.abs)
    call.target = function
    del call.meta["fxkit_type"]
    assert infer_type(call) is None
    fxkit.declare_type(function)(lambda x: x)
    assert str(fxkit.propagate_types(gm, (X,))) == "f32[4,3]"


class Kernels:
    name = "kernels"

    def supports(self, node):
        return None

    def compile(self, region, types):
        assert str(types[0]) == "f32[4,3]", types
        return lambda x: -address(x.contiguous()).clamp(0)


def partitioned():
    gm = fxkit.symbolic_trace(lambda x: torch.neg(torch.relu(x)))
    assert fxkit.PassManager([fxkit.passes.Partition(Kernels())], args=(X,)).run(gm).modified
    assert torch.equal(gm(X), -X.clamp(0))
    assert str(fxkit.propagate_types(gm, (X,))) == "f32[4,3]"


for function in (address, storage, alias, fresh, written, shared, array):
    untold(function)
partitioned()
print("through")
"""


def test_no_code_that_reads_at_an_address_ends_the_process(python: list[str]) -> None:
    done = subprocess.run([*python, "-c", PROGRAM], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "through\n"), done.stderr[-2000:]
