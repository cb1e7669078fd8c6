"""Cross-layer equalisation: the same program, whose weights have even ranges."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxkit
from fxkit import quantization as q
from fxkit.passes.fold_batch_norm import FoldBatchNorm
from fxkit.quantization.affine import signal_to_noise


class Separable(nn.Module):
    """A depthwise convolution between two others, and a classifier, as in MobileNet."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.n = nn.Conv2d(3, 16, 1, bias=False), nn.BatchNorm2d(16)
        self.b, self.m = nn.Conv2d(16, 16, 3, groups=16, padding=1), nn.BatchNorm2d(16)
        self.c, self.last = nn.Conv2d(16, 24, 1), nn.Linear(24 * 4, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.n(self.a(x)))
        x = F.relu(self.m(self.b(x)))
        x = F.leaky_relu(self.c(x))
        return self.last(F.adaptive_avg_pool2d(x, 2).flatten(1))


def uneven(model: Any) -> Any:
    """Give channels sizes that differ by much, and take them back in the layer behind."""
    torch.manual_seed(4)
    with torch.no_grad():
        for norm, behind in ((model.n, model.b.weight), (model.m, model.c.weight)):
            size = (10 ** torch.linspace(-1.3, 1.3, 16))[torch.randperm(16)]
            norm.weight.copy_(size)
            norm.bias.copy_(torch.randn(16) / 4 * size)
            behind /= size.reshape((-1, 1, 1, 1) if behind.shape[1] == 1 else (1, -1, 1, 1))
    return model.eval()


def images(count: int) -> list[tuple[Tensor]]:
    return [(torch.randn(4, 3, 9, 9),) for _ in range(count)]


def error(model: Any, program: Any, spec: Any, data: list[tuple[Tensor]]) -> float:
    quantized: Any = q.quantize(program, spec, data)
    with torch.no_grad():
        pairs = [(model(*batch), quantized(*batch)) for batch in data]
    exact, found = (torch.cat(one) for one in zip(*pairs, strict=True))
    return signal_to_noise(exact, found)


@pytest.mark.parametrize("spec", [q.int8_static(weights="per_tensor"), q.int8_static()], ids=str)
def test_uneven_channels_cost_less(spec: q.QuantizationSpec) -> None:
    model, data = uneven(Separable()), images(3)
    even: Any = q.equalize(model, data[0])
    with torch.no_grad():
        torch.testing.assert_close(even(*data[1]), model(*data[1]), rtol=1e-4, atol=1e-4)
    folded: Any = fxkit.capture(model, data[0])
    fxkit.PassManager([FoldBatchNorm()]).run(folded)
    plain = error(model, folded, spec, data)
    assert error(model, even, spec, data) > plain + 6
    if spec.weights.granularity == "per_tensor":
        assert plain < 16  # visibly off


def weights_of(program: Any) -> dict[str, Tensor]:
    gm = program.graph_module
    reads = gm.graph.find_nodes(op="get_attr")
    return {node.target: gm.get_parameter(node.target) if node.target in dict(
        gm.named_parameters()) else gm.get_buffer(node.target) for node in reads}  # fmt: skip


def test_ranges_become_those_of_the_paper() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5)).eval()
    with torch.no_grad():
        model[0].weight *= 10 ** torch.randn(8, 1)
        r1, r2 = model[0].weight.abs().amax(1), model[2].weight.abs().amax(0)
    found = weights_of(q.equalize(model, (torch.randn(2, 6),)))
    first, second = (found[name] for name in ("equalized_weight", "equalized_weight_1"))
    wanted = (r1 * r2).sqrt()
    torch.testing.assert_close(first.abs().amax(1), wanted, rtol=2e-3, atol=0)
    torch.testing.assert_close(second.abs().amax(0), wanted, rtol=2e-3, atol=0)


class Crossed(nn.Module):
    """Nothing here may be equalised."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        gelu = self.b(F.gelu(self.a(x)))
        shared = torch.relu(self.c(gelu + x))
        return self.a(shared) + shared + self.b(F.hardtanh(self.a(x)))


class Unbatched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv1d(2, 4, 1), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).flatten(1)) if x.ndim == 3 else self.b(self.a(x))


@pytest.mark.parametrize(
    ("model", "shape"), [(Crossed(), (3, 8)), (Unbatched(), (2, 8))], ids=["crossed", "unbatched"]
)
def test_what_must_not_be_scaled_stays(model: Any, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    even: Any = q.equalize(model.eval(), (x,))
    assert not any("equalized" in name for name in weights_of(even))
    assert torch.equal(even(x), model(x))


def test_dead_channels_products_of_one_layer_twice_and_traced_graphs() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(6, 6)
    with torch.no_grad():
        layer.weight[2] = 0
        layer.weight[:, 3] = 0
    model = nn.Sequential(layer, nn.ReLU(), layer, nn.Dropout(), nn.Linear(6, 2)).eval()
    x = torch.randn(4, 6)
    even: Any = q.equalize(model, (x,))
    torch.testing.assert_close(even(x), model(x), rtol=1e-5, atol=1e-5)
    gm: Any = q.equalize(fxkit.symbolic_trace(model))
    torch.testing.assert_close(gm(x), model(x), rtol=1e-5, atol=1e-5)
    assert "equalized_weight" in dict(gm.named_buffers())
