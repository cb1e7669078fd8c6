"""Training with fake quantisation: what it rounds, its gradients, and what it converts to."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxkit
from fxkit import quantization as q
from fxkit.errors import UnsupportedError
from fxkit.quantization.affine import QuantizationParameters
from fxkit.quantization.qat.fake_quantizer import FakeQuantizer, FakeQuantizerOptions
from tests.sampling import one_in

SPECS = {
    "static": q.int8_static(),
    "static symmetric": q.int8_static(scheme="symmetric"),
    "dynamic": q.int8_dynamic(),
    "weight only": q.int8_weight_only(),
    "weights per tensor": q.int8_weight_only("per_tensor"),
    "four bits": q.int4_weight_only(8),
}


class Network(nn.Module):
    """Convolutions with and without groups, biases and activations between, and linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 8, 3, bias=False)
        self.first_norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, groups=2, padding=1)
        self.second_norm = nn.BatchNorm2d(8, affine=False)
        self.hidden = nn.Linear(8, 16)
        self.hidden_norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first_norm(self.first(x)))
        y = self.second_norm(self.second(y))  # which the mean takes, without an activation
        y = F.dropout(y.mean((2, 3)), 0.1, self.training)
        return self.head(torch.relu(self.hidden_norm(self.hidden(y))))


def network() -> Network:
    torch.manual_seed(0)
    return Network()


def images(count: int = 16) -> Tensor:
    return torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(1))


def train(program: nn.Module, run: Any, steps: int = 8) -> None:
    optimizer = torch.optim.SGD(program.parameters(), lr=0.05)
    x, target = images(), torch.arange(16) % 3
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(run(x), target).backward()
        optimizer.step()


@pytest.mark.parametrize(("learn_steps", "name"), one_in(2, [False, True], SPECS))
def test_what_is_trained_is_what_is_converted(name: str, learn_steps: bool) -> None:
    model = network()
    before = copy.deepcopy(model.state_dict())
    trained = q.prepare_qat(model, (images(),), SPECS[name], learn_steps=learn_steps)
    train(trained, trained)
    trained.eval()
    quantized = q.convert(trained)
    with torch.no_grad():
        for count in (16, 5):
            x = images(count)
            torch.testing.assert_close(quantized(x), trained(x), rtol=1e-5, atol=1e-5)
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])
    x, expected = images(), quantized(images())
    train(trained.train(), trained, 2)  # training goes on, and what was converted stays
    assert torch.equal(quantized(x), expected)


def test_the_reference_graph_is_that_of_convert() -> None:
    trained = q.prepare_qat(network(), (images(),), q.int8_static())
    train(trained, trained)
    model = copy.deepcopy(trained.model).eval()
    folded = fxkit.capture(model, (images(),))
    fxkit.PassManager([fxkit.passes.FoldBatchNorm()]).run(folded)
    prepared = q.prepare(folded, (images(),), q.int8_static())
    prepared(images())
    ours, theirs = (q.convert(p).graph_module for p in (trained, prepared))

    def calls(gm: Any) -> list[str]:
        return [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]

    assert calls(ours) == calls(theirs)
    integers = [
        {tuple(b.shape): b for n, b in gm.named_buffers() if n.endswith("_quantized")}
        for gm in (ours, theirs)
    ]
    assert integers[0].keys() == integers[1].keys()
    for shape, values in integers[0].items():
        assert torch.equal(values, integers[1][shape])


@pytest.mark.parametrize(("learn_steps", "name"), one_in(2, [False, True], SPECS))
def test_a_fake_quantiser_is_one_node(name: str, learn_steps: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    x = torch.randn(4, 8)
    plain = len(fxkit.capture(model, (x,)).graph_module.graph.nodes)
    trained = q.prepare_qat(model, (x,), SPECS[name], learn_steps=learn_steps)
    graph = fxkit.graph(trained.program.graph_module)
    made = [node for node in graph if (node.operator or "").startswith("fxkit.fake_quantize_")]
    reads = [node for node in graph if "fake_quantizer" in node.name and node not in made]
    assert len(made) == (2 if SPECS[name].activations is None else 4)
    assert len(list(graph)) == plain + len(made) + len(reads)
    aten = copy.deepcopy(trained.program.graph_module)
    fxkit.PassManager([fxkit.passes.TypePropagation(), fxkit.passes.DecomposeToAten()]).run(aten)
    calls = [node.target for node in aten.graph.nodes if node.op == "call_function"]
    assert not any("fake_quantize" in str(target) for target in calls)


def test_training_runs_compiled() -> None:
    plain, fast = (q.prepare_qat(network(), (images(),), q.int8_static()) for _ in range(2))
    for program, run in ((plain, plain), (fast, fxkit.compile(fast.program))):
        for module in program.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        torch.manual_seed(2)
        train(program, run, 3)
    for ours, theirs in zip(fast.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    for ours, theirs in zip(fast.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


def test_frozen_ranges_and_norms_stay() -> None:
    trained = q.prepare_qat(network(), (images(),), q.int8_static(), momentum=0.5)
    train(trained, trained, 2)
    trained.freeze()
    before = {name: value.clone() for name, value in trained.named_buffers()}
    weights = {name: value.clone() for name, value in trained.named_parameters()}
    train(trained.train(), lambda x: trained(3 * x), 2)
    for name, value in trained.named_buffers():
        assert torch.equal(value, before[name]), name
    assert any(not torch.equal(v, weights[n]) for n, v in trained.named_parameters())
    kept = q.prepare_qat(network(), (images(),), q.int8_static())
    kept.freeze(norms=False)
    train(kept, kept, 1)
    assert int(kept.model.first_norm.num_batches_tracked) == 1


@pytest.mark.parametrize("learn_steps", [False, True])
def test_a_state_dict_holds_what_is_frozen(learn_steps: bool) -> None:
    first = q.prepare_qat(network(), (images(),), q.int8_static(), learn_steps=learn_steps)
    train(first, first, 2)
    first.freeze()
    again = q.prepare_qat(network(), (images(),), q.int8_static(), learn_steps=learn_steps)
    again.load_state_dict(first.state_dict())
    weights = {name for name, _ in first.model.named_parameters()}
    before = {k: v.clone() for k, v in again.state_dict().items() if k[6:] not in weights}
    train(again.train(), lambda x: again(3 * x), 2)
    for name, value in before.items():
        assert torch.equal(again.state_dict()[name], value), name
    assert len(before) > 8


def fake(learns: bool, zero: int = 3) -> FakeQuantizer:
    spec = q.TensorSpec(torch.uint8, 0, 255, "affine")
    first = QuantizationParameters(torch.tensor(0.1), torch.tensor(zero))
    return FakeQuantizer(spec, (), FakeQuantizerOptions(learns), first).eval()


def test_gradients_pass_where_values_are_in_range() -> None:
    x = torch.tensor([-0.5, -0.3, 0.04, 1.27, 25.19, 26.0, torch.inf], requires_grad=True)
    found = fake(learns=False)(x)
    torch.testing.assert_close(found, torch.tensor([-0.3, -0.3, 0.0, 1.3, 25.2, 25.2, 25.2]))
    found.sum().backward()
    assert x.grad.tolist() == [0, 1, 1, 1, 1, 0, 0]


def test_gradients_of_steps_are_those_of_the_paper() -> None:
    quantizer = fake(learns=True, zero=0)
    x = torch.tensor([-0.5, 0.04, 1.27, 26.0], requires_grad=True)
    quantizer(x).sum().backward()
    scaled = x.detach() / 0.1
    inside = (scaled >= 0) & (scaled <= 255)
    wanted = torch.where(inside, scaled.round() - scaled, scaled.clamp(0, 255)).sum()
    torch.testing.assert_close(quantizer.scale.grad, wanted / (4 * 255) ** 0.5)


def test_values_that_are_not_finite_leave_ranges_alone() -> None:
    quantizer = fake(learns=False).train()
    quantizer.momentum.fill_(1.0)
    quantizer(torch.tensor([torch.nan, torch.inf, -2.0, 3.0]))
    assert (float(quantizer.low), float(quantizer.high)) == (-2.0, 3.0)
    quantizer(torch.empty(0))
    assert (float(quantizer.low), float(quantizer.high)) == (-2.0, 3.0)


def test_channels_without_a_scale_keep_their_weights() -> None:
    model = network()
    with torch.no_grad():
        model.first_norm.weight[2] = 0
    trained = q.prepare_qat(model, (images(),), q.int8_static())
    trained(images()).sum().backward()
    for parameter in trained.parameters():
        assert parameter.grad is None or bool(parameter.grad.isfinite().all())
    trained.eval()
    with torch.no_grad():
        torch.testing.assert_close(q.convert(trained)(images()), trained(images()))


def test_reports_are_those_of_calibrated_programs() -> None:
    trained = q.prepare_qat(network(), (images(),), q.int8_static())
    train(trained, trained, 2)
    report = q.report(q.convert(trained), trained.prepared(), [(images(),)])
    assert [row.is_quantized for row in report.rows] == [True] * 4
    assert report.sqnr[0] > 20


def test_only_modules_are_trained() -> None:
    with pytest.raises(UnsupportedError, match="expected a module to train, got function"):
        q.prepare_qat(lambda x: x, (images(),), q.int8_static())
