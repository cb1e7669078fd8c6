"""Batch norms: which go into the layers beside them, in which spelling, and which must stay."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import fxkit
from fxkit.ir.op import resolve
from fxkit.ir.provenance import module_path
from fxkit.passes import FoldBatchNorm
from fxkit.passes.manager.manager import PassManager
from tests.architectures import convolutional

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # by torch.export


def shaken(module, lowest=0.4):
    """Give every norm statistics and weights of its own, and go to evaluation.

    Shifts are no larger than what they are added to: libraries may begin their sums with them.
    """
    for norm in module.modules():
        if isinstance(norm, nn.modules.batchnorm._BatchNorm):
            norm.running_mean.normal_(std=0.3)
            norm.running_var.uniform_(0.5, 2)
            if norm.affine:
                nn.init.uniform_(norm.weight, lowest, 1.6)
                nn.init.normal_(norm.bias, std=0.3)
    return module.eval()


def norms(gm):
    calls = [resolve(n) for n in gm.graph.nodes]
    return sum("norm" in call.name for call in calls if call is not None)


def added(gm):
    return sum(1 for n in gm.graph.nodes if n.op == "get_attr" and n.target.endswith("_shift"))


def fold(gm, *args, **options):
    """Run the pass, checking numbers, gradients and types; return its notes."""
    result = PassManager([FoldBatchNorm(**options)], verify="numerics", args=args).run(gm)
    return result.records[0].notes


def assert_folded(module, *args, left=0, shifts=0):
    for make in (_traced, _captured, _exported, _decomposed):
        gm = make(copy.deepcopy(module), args)
        notes = fold(gm, *args)
        assert (norms(gm), added(gm)) == (left, shifts), (make.__name__, notes)


def _traced(module, args):
    return fxkit.symbolic_trace(module)


def _captured(module, args):
    return fxkit.capture(module, args).graph_module


def _exported(module, args):
    return torch.export.export(module, args).module()


def _decomposed(module, args):
    return torch.export.export(module, args).run_decompositions().module()


def _picture(axes, channels=4, batch=2):
    return torch.randn(batch, channels, *(7, 6, 5)[:axes])


@pytest.mark.one_in(2)
@pytest.mark.filterwarnings("ignore:.*node_kwargs:UserWarning")
@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("options", [{}, {"groups": 2}, {"bias": False, "padding": 1, "stride": 2}])
def test_convolution_then_norm(axes, transposed, options):
    kind = f"Conv{'Transpose' if transposed else ''}{axes}d"
    layer = getattr(nn, kind)(4, 6, 3, **options)
    norm = getattr(nn, f"BatchNorm{axes}d")(6)
    gm = fxkit.symbolic_trace(shaken(nn.Sequential(layer, norm)))
    fold(gm, _picture(axes))
    assert norms(gm) == 0


SHORT = (nn.Conv2d(4, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU())


def test_every_way_to_get_a_graph():
    assert_folded(shaken(nn.Sequential(*SHORT)), _picture(2))


def test_linear_then_norm():
    module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3, bias=False))
    assert_folded(shaken(module), torch.randn(5, 4))


def test_linear_after_norm():
    module = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 6, bias=False))
    assert_folded(shaken(module, -1.0), torch.randn(5, 4))


@pytest.mark.parametrize("layer", [
    nn.Conv2d(4, 6, 3), nn.Conv2d(4, 6, 3, groups=2, bias=False, stride=2, dilation=2),
    nn.Conv2d(4, 4, 1, groups=4), nn.ConvTranspose2d(4, 6, 1, groups=2),
])  # fmt: skip
def test_convolution_without_padding_after_norm(layer):
    gm = fxkit.symbolic_trace(shaken(nn.Sequential(nn.BatchNorm2d(4), layer), -1.0))
    fold(gm, _picture(2))
    assert (norms(gm), added(gm)) == (0, 0)


def test_padding_after_norm_leaves_the_shift():
    module = shaken(nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 6, 3, padding=1)))
    gm = fxkit.symbolic_trace(module)
    fold(gm, _picture(2))
    assert (norms(gm), added(gm)) == (0, 1)
    gm = fxkit.symbolic_trace(module)
    assert "pads with" in fold(gm, _picture(2), by_halves=False)[0]
    assert norms(gm) == 1


def test_padding_does_not_matter_without_a_shift():
    norm = shaken(nn.BatchNorm2d(4), -1.0)
    norm.running_mean.zero_()
    nn.init.zeros_(norm.bias)
    gm = fxkit.symbolic_trace(nn.Sequential(norm, nn.Conv2d(4, 6, 3, padding=1)).eval())
    fold(gm, _picture(2))
    assert (norms(gm), added(gm)) == (0, 0)


@pytest.mark.parametrize("relu", [nn.ReLU(), nn.ReLU(inplace=True), nn.LeakyReLU(0.1)])
def test_relu_between_norm_and_convolutions(relu):
    module = nn.Sequential(nn.BatchNorm2d(4), relu, nn.Conv2d(4, 6, 3, padding=1))
    assert_folded(shaken(module), _picture(2), shifts=1)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(4)
        self.side = nn.Conv2d(4, 2, 1)
        self.last = nn.Linear(16, 3)

    def forward(self, x):
        x = torch.relu(self.norm(x))
        return self.last(F.adaptive_avg_pool2d(x, 2).flatten(1)), self.side(F.max_pool2d(x, 2))


def test_several_users_behind_relu_and_pooling():
    assert_folded(shaken(Classifier()), _picture(2), shifts=1)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Conv2d(4, 3, 1), nn.Conv2d(4, 2, 3, padding=1)
        self.norm = nn.BatchNorm2d(5)

    def forward(self, x):
        return self.norm(F.max_pool2d(torch.cat([self.left(x), self.right(x)], 1), 2))


def test_backwards_through_pooling_and_concatenation():
    assert_folded(shaken(Branches()), _picture(2))


class Sequence(nn.Module):
    def __init__(self, turn):
        super().__init__()
        self.fc, self.norm, self.turn = nn.Linear(4, 6), nn.BatchNorm1d(6), turn

    def forward(self, x):
        return self.norm(self.turn(self.fc(x)))


@pytest.mark.parametrize("turn", [
    lambda y: y.transpose(1, 2), lambda y: y.permute(0, 2, 1), lambda y: y.transpose(-1, 1).clone(),
    lambda y: y.transpose(1, 2).contiguous(),
    lambda y: torch.cat([y, y + 0], 1).transpose(1, 2)[:, :, :5],
])  # fmt: skip
def test_linear_then_transpose_then_norm(turn):
    """The result is dense, as the norm's was, so that a copy stands for the norm."""
    x, module = torch.randn(2, 5, 4), shaken(Sequence(turn))
    for gm in (fxkit.symbolic_trace(module), fxkit.capture(module, (x,)).graph_module):
        fold(gm, x)
        assert norms(gm) == ("cat" in gm.code)
        assert gm(x).stride() == module(x).stride() == (30, 5, 1)


@pytest.mark.parametrize("turn", [
    lambda y: y, lambda y: y.transpose(0, 1).transpose(1, 2).transpose(1, 2),
    lambda y: y.transpose(0, 2).transpose(1, 2).transpose(1, 2).transpose(0, 2),
])  # fmt: skip
def test_norm_of_other_axes_than_the_channels_stays(turn):
    gm = fxkit.symbolic_trace(shaken(Sequence(turn)))
    fold(gm, torch.randn(6, 6, 4))
    assert norms(gm) == 1


class Shared(nn.Module):
    def __init__(self, norm_count):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(norm_count))

    def forward(self, x):
        for index in range(4):
            x = self.norms[index % len(self.norms)](self.conv(x))
        return x


@pytest.mark.parametrize("count", [1, 2])
def test_shared_layers_get_one_weight_for_each_norm(count):
    module = shaken(Shared(count))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    gm = fxkit.symbolic_trace(module)
    fold(gm, _picture(2))
    made = {n.target for n in gm.graph.nodes if n.op == "get_attr"}
    assert norms(gm) == 0
    assert len(made) == 2 * count
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in before.items())


def test_new_parameters_are_followed_as_the_old_ones_were():
    for learns in (True, False):
        gm = fxkit.symbolic_trace(
            shaken(nn.Sequential(*copy.deepcopy(SHORT))).requires_grad_(learns)
        )
        fold(gm, _picture(2))
        made = [gm.get_parameter(n.target) for n in gm.graph.nodes if n.op == "get_attr"]
        assert [p.requires_grad for p in made] == [learns, learns]


def test_functional_spelling_and_missing_parts():
    weight, mean, variance = torch.randn(6, 4, 3, 3), torch.randn(6), torch.rand(6) + 0.5

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            for name, value in (("w", weight), ("mean", mean), ("variance", variance)):
                self.register_buffer(name, value)

        def forward(self, x):
            return F.batch_norm(F.conv2d(x, self.w), self.mean, self.variance)

    gm = fxkit.symbolic_trace(Net())
    fold(gm, _picture(2))
    assert norms(gm) == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(dtype):
    gm = fxkit.symbolic_trace(shaken(nn.Sequential(*copy.deepcopy(SHORT))).to(dtype))
    fold(gm, _picture(2).to(dtype))
    assert norms(gm) == 0


def test_channels_last_weights_stay_so():
    module = shaken(nn.Sequential(*copy.deepcopy(SHORT))).to(memory_format=torch.channels_last)
    gm = fxkit.symbolic_trace(module)
    fold(gm, _picture(2).to(memory_format=torch.channels_last))
    weight = next(gm.get_parameter(n.target) for n in gm.graph.nodes if n.op == "get_attr")
    assert weight.is_contiguous(memory_format=torch.channels_last)


# What must stay.


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.after = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)


class Training(Net):
    def forward(self, x):
        return F.batch_norm(self.conv(x), self.norm.running_mean, self.norm.running_var,
                            training=True)  # fmt: skip


class UsedElsewhere(Net):
    def forward(self, x):
        y = self.conv(x)
        return self.norm(y).sigmoid() + y


class WrittenWeight(Net):
    def forward(self, x):
        self.conv.weight.mul_(1.0)
        return self.norm(self.conv(x)).sigmoid()


class WrittenStatistics(Net):
    def forward(self, x):
        self.norm.running_mean.add_(x.mean())
        return self.norm(self.conv(x)).sigmoid()


class GivenWeight(Net):
    def forward(self, x):
        return self.norm(F.conv2d(x, x[:, :, :1, :1] * torch.ones(4, 4, 1, 1)[:2])[:, :1] + x)


class NonlinearBetween(Net):
    def forward(self, x):
        return self.norm(torch.sigmoid(self.conv(x)))


class WrittenBetweenNormAndLayer(Net):
    def forward(self, x):
        x = x * 2
        y = self.norm(x)
        x.add_(1)
        return self.after(y) + x


class NormReturned(Net):
    def forward(self, x):
        y = self.norm(torch.sin(x))
        return self.after(y), y


@pytest.mark.parametrize("cls", [
    Training, UsedElsewhere, WrittenWeight, WrittenStatistics, GivenWeight, NonlinearBetween,
    NormReturned,
])  # fmt: skip
def test_stays(cls):
    module = shaken(cls()).requires_grad_(False)
    gm = fxkit.symbolic_trace(module)
    result = PassManager([FoldBatchNorm()], args=(_picture(2),)).run(gm)
    assert not result.modified
    assert result.records[0].notes, "a miss has a reason"


def test_write_to_the_operand_leaves_the_shift_in_place():
    gm = fxkit.symbolic_trace(shaken(WrittenBetweenNormAndLayer()))
    fold(gm, _picture(2))
    assert (norms(gm), added(gm)) == (0, 1)


def test_no_half_with_a_negative_scale():
    norm = shaken(nn.BatchNorm2d(4))
    nn.init.constant_(norm.weight[:1], -0.5)
    gm = fxkit.symbolic_trace(nn.Sequential(norm, nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1)).eval())
    notes = fold(gm, _picture(2))
    assert norms(gm) == 1
    assert "not positive" in notes[0]


def test_overflow_of_a_narrow_dtype_is_refused():
    module = shaken(nn.Sequential(*copy.deepcopy(SHORT)))
    nn.init.constant_(module[1].weight, 3e4)
    nn.init.constant_(module[0].weight, 100.0)
    gm = fxkit.symbolic_trace(module.half())
    result = PassManager([FoldBatchNorm()], args=(_picture(2).half(),)).run(gm)
    assert not result.modified
    assert "out of range" in result.records[0].notes[0]


def test_mode_between_keeps_them_apart():
    graph = fx.Graph()
    x = graph.placeholder("x")
    conv = graph.call_module("0", (x,))
    graph.call_function(torch._C._set_grad_enabled, (False,))
    norm = graph.call_module("1", (conv,))
    graph.call_function(torch._C._set_grad_enabled, (True,))
    graph.output(norm)
    gm = fx.GraphModule(shaken(nn.Sequential(*copy.deepcopy(SHORT))), graph)
    record = PassManager([FoldBatchNorm()]).run(gm).records[0]
    assert not record.modified
    assert "mode" in record.notes[0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name, size, shifts", [("resnet20_cifar10", 32, 0), ("resnet18", 224, 0)])
def test_all_norms_of_a_network(name, size, shifts):
    model, inputs = convolutional(name, size)
    args = tuple(inputs(1).values())
    with torch.no_grad():
        gm = fxkit.capture(shaken(model), args).graph_module
        assert norms(gm) >= 19
        fold(gm, *args)
    assert (norms(gm), added(gm)) == (0, shifts)


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name, shifts", [("mobilenetv2_w1", 0), ("densenet121", 62)])
def test_all_norms_of_a_larger_network(name, shifts):
    test_all_norms_of_a_network(name, 224, shifts)


def test_the_layer_stays_in_its_own_module():
    model = shaken(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()))
    gm = fxkit.symbolic_trace(model)
    PassManager([FoldBatchNorm()], args=(torch.randn(1, 3, 6, 6),)).run(gm)
    (layer,) = fxkit.graph(gm).find(F.conv2d)
    assert module_path(layer.fx_node) == "0"
