"""The pass against eager autocast: equal bit for bit, forwards and backwards."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.utils import _pytree as pytree

import fxkit
from fxkit.errors import PassError
from fxkit.ir.op import resolve
from fxkit.ir.provenance import provenance_of, source_of
from fxkit.ir.types import set_type, type_of, type_of_value
from fxkit.passes import Autocast
from fxkit.passes.manager.manager import PassManager
from tests.architectures import CONVOLUTIONAL, HUGGING_FACE, convolutional
from tests.operator_samples import Sample, is_same, samples

DTYPES = [torch.bfloat16, torch.float16]


def autocast(gm, args, dtype=torch.bfloat16, **options):
    manager = PassManager(
        [Autocast(dtype=dtype, keep_output_types=False, **options)], verify="structure", args=args
    )
    return manager.run(gm).records[0]


def assert_equals_eager(function, args, dtype=torch.bfloat16):
    gm = fxkit.symbolic_trace(function)
    with torch.autocast("cpu", dtype):
        expected = function(*args)
    autocast(gm, args, dtype)
    assert is_same(expected, gm(*args))
    return gm


def casts(gm):
    taken = [n.args[0] for n in gm.graph.nodes if n.target == "to"]
    return [str(n.target) if n.op == "get_attr" else n.name for n in taken]


X = torch.linspace(-2.0, 2.0, 24).reshape(4, 6)
W = torch.linspace(-1.0, 1.5, 36).reshape(6, 6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_run_low_and_losses_in_float32(dtype):
    def f(x, w):
        y = F.linear(torch.relu(x @ w), w)
        return y, F.mse_loss(y, x), torch.stack([y, x]), torch.cat([y, y]), torch.exp(y) + x

    gm = assert_equals_eager(f, (X, W), dtype)
    types = {n.name: type_of(n).dtype for n in gm.graph.nodes if n.name in ("stack", "mse_loss")}
    assert types == {"stack": torch.float32, "mse_loss": torch.float32}


def test_activations_are_cast_at_each_use_and_parameters_once():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(6, 6)

        def forward(self, x):
            return self.fc(x) + self.fc(x.sin()) + F.linear(x, self.fc.weight)

    gm = fxkit.symbolic_trace(Twice())
    autocast(gm, (X,))
    assert sorted(casts(gm)) == ["fc.bias", "fc.weight", "sin", "x", "x"]
    assert all(source_of(n) for n in gm.graph.nodes if n.target == "to")
    linear = next(n for n in gm.graph.nodes if n.target is torch.ops.aten.linear.default)
    assert "autocast" in provenance_of(linear).by


def test_what_autocast_does_not_look_at_stays():
    def f(x, i, d):
        return d @ d.t(), i @ i.t(), x.sum(), torch.cat([d, x]), d @ d.t() + x.sum()

    args = (X, torch.arange(24).reshape(4, 6), X.double())
    gm = assert_equals_eager(f, args)
    assert casts(gm) == []


def test_parts_that_switch_it_off_or_to_another_dtype_are_left_alone():
    def f(x, w):
        y = x @ w
        with torch.autocast("cpu", enabled=False):
            z = y.float() @ w
        with torch.autocast("cpu", dtype=torch.float16):
            u = z @ w
            with torch.autocast("cpu", enabled=False):
                v = z @ w
        return y, z, u, v, z @ w

    with torch.autocast("cpu", torch.bfloat16):
        expected = f(X, W)
        gm = fxkit.capture(f, (X, W)).graph_module
        autocast(gm, (X, W))
    assert [e.dtype for e in expected] == [
        torch.bfloat16, torch.float32, torch.float16, torch.float32, torch.bfloat16
    ]  # fmt: skip
    assert is_same(expected, gm(X, W))


@fx.wrap
def unknown_product(x, w):
    return x @ w


def test_calls_that_cast_somewhere_inside_keep_an_autocast_of_their_own():
    def f(x, w):
        a = torch.einsum("ij,jk->ik", x, w)
        b = unknown_product(x, w)
        return a, b, F.interpolate(x[None], 12), torch.tensordot(x, w, dims=1)

    gm = assert_equals_eager(f, (X, W))
    entered = [n.next for n in gm.graph.nodes if "_enter_autocast" in n.name]
    names = {(resolve(n).name.rpartition(".")[2]) for n in entered}
    assert {"einsum", "unknown_product", "tensordot"} <= names
    assert "relu" not in names


def test_a_module_that_nothing_is_known_of():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.LSTM(6, 5)).eval()
    with torch.no_grad():
        assert_equals_eager(model, (X,))


def test_written_and_random_values_keep_their_order():
    def f(x, w):
        y = x.clone()
        a = y @ w
        y.add_(1)
        b = y @ w
        return a, b, F.dropout(a, 0.5, True), y

    gm = fxkit.symbolic_trace(f)
    with torch.autocast("cpu", torch.bfloat16):
        torch.manual_seed(3)
        expected = f(X, W)
    autocast(gm, (X, W))
    torch.manual_seed(3)
    assert is_same(expected, gm(X, W))


def test_results_keep_their_dtypes_on_request_which_is_the_default():
    gm = fxkit.symbolic_trace(lambda x, w: (x @ w, x))
    PassManager([Autocast()], args=(X, W)).run(gm)
    product, same = gm(X, W)
    assert (product.dtype, same.dtype) == (torch.float32, torch.float32)
    assert torch.equal(product, (X.bfloat16() @ W.bfloat16()).float())


def test_a_device_without_lists_is_refused():
    gm = fxkit.symbolic_trace(lambda x: x @ x.t())
    with pytest.raises(PassError, match="device type of cpu, cuda, got 'abacus'"):
        autocast(gm, (X,), device_type="abacus")


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.tied = nn.Linear(8, 8)
        self.out = nn.Linear(8, 8)
        self.out.weight = self.tied.weight
        self.attention = nn.Linear(8, 24, bias=False)

    def forward(self, x):
        y = F.relu(self.norm(self.conv(x))).flatten(2).transpose(1, 2)
        q, k, v = self.attention(y).chunk(3, -1)
        y = y + F.scaled_dot_product_attention(q, k, v)
        return F.layer_norm(self.out(F.gelu(self.tied(y))), [8]).softmax(-1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_and_running_statistics_of_training(dtype):
    torch.manual_seed(0)
    model = Small()
    gm = fxkit.symbolic_trace(copy.deepcopy(model))
    x = torch.randn(2, 3, 5, 5)
    autocast(gm, (x,), dtype)
    with torch.autocast("cpu", dtype):
        expected = model(x)
    got = gm(x)
    assert is_same(expected, got)
    for result in (expected, got):
        (result.float() * torch.linspace(0.5, 1.5, result.numel()).reshape(result.shape)).sum(
        ).backward()  # fmt: skip
    own = dict(gm.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, own[name].grad), name
    assert torch.equal(model.norm.running_var, gm.get_buffer("norm.running_var"))


QUICK = ("bert", "gpt2", "llama", "t5", "resnet18")
OTHERS = [name for name in (*HUGGING_FACE, *CONVOLUTIONAL) if name not in QUICK]


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.sweep) for name in OTHERS)]
)
def test_an_architecture_equals_eager_autocast(name):
    torch.manual_seed(0)
    make = HUGGING_FACE.get(name) or (lambda: convolutional(name))
    model, inputs_of = make()
    inputs = inputs_of(2)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        expected = _tensors(model(**inputs))
        gm = fxkit.capture(lambda **k: _tensors(model(**k)), (), inputs).graph_module
        args = tuple(pytree.tree_leaves(inputs))
        autocast(gm, args)
    with torch.no_grad():
        assert is_same(expected, gm(*args))


def _tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if hasattr(value, "values") else value
    return [t for part in parts for t in _tensors(part)] if isinstance(
        parts, (list, tuple)) or hasattr(value, "values") else []  # fmt: skip


PARTS = 40
UNSTEADY = ("linalg.lstsq", "torch._scaled_mm", "empty")  # twice the same call, two results


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.sweep) for part in range(1, PARTS))]
)
def test_single_operators_equal_eager_autocast(part):
    compared = sum(_compared(sample) for sample in samples(part, PARTS))
    assert compared > 20


def _compared(sample: Sample) -> bool:
    """Compare a call with eager autocast; False when it raises there."""
    call = resolve(sample.node)
    if call is None or call.operator.is_opaque or not _is_repeatable(sample):
        return False
    graph = copy.deepcopy(sample.node.graph)
    graph.output(list(graph.nodes)[-1])
    gm = fx.GraphModule({}, graph)
    with torch.autocast("cpu", torch.bfloat16):
        expected, _ = sample.run()
    args = tuple(sample.copies().values())
    for node in graph.nodes:
        if node.op not in ("placeholder", "output"):
            set_type(node, type_of_value(sample.run()[0]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        manager = PassManager([Autocast(keep_output_types=False)], verify="structure")
        manager.run(gm)
        assert is_same(expected, gm(*args)), (sample.name, gm.code)
    return True


def _is_repeatable(sample: Sample) -> bool:
    """Tell whether a call runs under autocast, without it, and draws nothing at random."""
    if any(name in sample.name for name in UNSTEADY):
        return False
    try:
        sample.run()
        with torch.autocast("cpu", torch.bfloat16):
            return is_same(sample.run()[0], sample.run()[0])
    except (RuntimeError, ValueError, TypeError, NotImplementedError):
        return False


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Linear(16, 16)
        self.bias = nn.Parameter(torch.zeros(1, 2, 7, 7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.queries(x).view(2, 7, 2, 8).transpose(1, 2)
        attended = F.scaled_dot_product_attention(q, q, q, attn_mask=self.bias)
        return attended.transpose(1, 2).contiguous().view(2, 7, 16).relu_()


@pytest.mark.parametrize(
    "chosen", [fxkit.passes.Autocast(), fxkit.passes.MixedPrecision()], ids=str
)
@pytest.mark.parametrize("verify", ["each", "structure"])
def test_recorded_types_are_those_of_a_run(chosen: fxkit.passes.Pass, verify: str) -> None:
    x = torch.randn(2, 7, 16)
    gm = fxkit.symbolic_trace(_Attention())
    PassManager([chosen], args=(x,), verify=verify).run(gm)
    recorded = {node: type_of(node) for node in gm.graph.nodes if node.op != "output"}
    fxkit.propagate_types(gm, (x,))
    assert {node: type_of(node) for node in recorded} == recorded
    PassManager([fxkit.passes.Canonicalise()], args=(x,)).run(gm)
    assert gm(x).shape == x.shape
