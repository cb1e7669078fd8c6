"""Packed convolutions: against float64, and after whatever may change a weight."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxkit
from fxkit.analysis.type_inference.declared_types import declared_type
from fxkit.demo.judge import reference, relative_error
from fxkit.ir.types import type_of, type_of_value
from fxkit.lower.compiling import pack_convolutions, whole_operators
from fxkit.lower.families.convolutions import autotune
from fxkit.lower.library_calls import onednn
from fxkit.lower.library_calls import packed_convolution as packed
from fxkit.lower.runtime import binding


class Net(nn.Module):
    """Convolutions of several kinds, with norms, a residual and a flattened end."""

    def __init__(self, channels: int = 24) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, stride=2, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(channels)
        self.depth = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)
        self.depth_norm = nn.BatchNorm2d(channels, affine=False)
        self.point = nn.Conv2d(channels, channels, 1)
        self.wide = nn.Conv2d(channels, 5, (3, 1), dilation=2, padding=(2, 0))
        self.head = nn.Linear(5, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu6(self.stem_norm(self.stem(x)))
        x = x + F.silu(self.depth_norm(self.depth(x)))
        x = torch.cat((self.point(x).relu_(), x), 1)[:, : x.shape[1]]
        return self.head(self.wide(x).mean((2, 3)).flatten(1))


def net() -> nn.Module:
    torch.manual_seed(0)
    module = Net()
    for norm in (module.stem_norm, module.depth_norm):
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
    nn.init.normal_(module.stem_norm.weight)
    return module.eval()


def is_packed(fast: fxkit.compiling.compiler.Compiled) -> bool:
    (module,) = fast.compiled_modules
    return any(n.target is packed.operator() for n in module.graph_module.graph.nodes)


def check(fast: Callable[..., torch.Tensor], module: nn.Module, x: torch.Tensor) -> None:
    exact, eager, found = reference(module, (x.double(),)), module(x), fast(x)
    assert found.stride() == eager.stride()
    assert relative_error(found, exact) <= 2 * max(relative_error(eager, exact), 2.0**-23)


needs_packing = pytest.mark.skipif(not packed.is_available(), reason="torch without oneDNN")


@pytest.fixture
def _packed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a convolution be packed that is the only one."""
    monkeypatch.setattr(pack_convolutions, "FEWEST_DENSE", 1)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize(
    ("groups", "stride", "padding", "dilation"),
    [(1, (2, 1), (1, 0), (1, 2)), (2, (1, 3), (0, 2), (2, 1)), (4, (3, 2), (2, 1), (1, 1))],
)
def test_the_declared_type_is_that_of_the_result(
    groups: int,
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    has_norm: bool,
    grad: bool,
) -> None:
    image, weight = torch.randn(2, 4, 11, 9), torch.randn(4, 4 // groups, 3, 2).requires_grad_()
    statistics = (torch.rand(4),) * 4 if has_norm else (None,) * 4
    settings = (stride, padding, dilation, groups, packed.new_slot())
    given = (image, weight, None, *statistics, 1e-5, *settings)
    rule = declared_type(packed.operator())
    assert rule is not None
    with torch.set_grad_enabled(grad):
        types = (type_of_value(it) if isinstance(it, torch.Tensor) else it for it in given)
        assert rule(*types) == type_of_value(packed.convolution(*given))


@needs_packing
@torch.no_grad()
@pytest.mark.parametrize("shape", [(2, 3, 65, 63), (1, 3, 128, 128)])
def test_a_network_of_packed_convolutions(shape: tuple[int, ...]) -> None:
    module, x = net(), torch.randn(shape)
    fast = fxkit.compile(module)
    fast(x)
    check(fast, module, x)
    check(fast, module, x)
    assert is_packed(fast)
    calls = [
        n
        for n in fast.compiled_modules[0].graph_module.graph.nodes
        if n.target is packed.operator()
    ]
    assert len(calls) == 4
    assert not any(
        "batch_norm" in n.name for n in fast.compiled_modules[0].graph_module.graph.nodes
    )


def write_one(tensor: torch.Tensor, value: float) -> None:
    """Write one number in the middle through memory that torch does not watch."""
    numbers = tensor.detach().numpy().reshape(-1)
    numbers[numbers.size // 3] = value


def flip_data(tensor: torch.Tensor) -> None:
    """Flip all signs, one bit of each number, without a version."""
    tensor.data.neg_()


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "one number through data": lambda m: m.point.weight.data[7].__setitem__(5, 3.0),
    "one number through numpy": lambda m: write_one(m.stem.weight, 2.0),
    "a row through numpy": lambda m: m.wide.weight.detach().numpy().__setitem__(3, 0),
    "signs through data": lambda m: flip_data(m.depth.weight),
    "set": lambda m: m.wide.weight.set_(torch.randn_like(m.wide.weight)),
    "numbers in another order": lambda m: m.point.weight.data.copy_(m.point.weight.data.flip(0)),
    "a bias by numpy": lambda m: write_one(m.wide.bias, 4.0),
    "a mean by numpy": lambda m: write_one(m.stem_norm.running_mean, 4.0),
    "a variance by numpy": lambda m: write_one(m.depth_norm.running_var, 9.0),
    "a shift by numpy": lambda m: write_one(m.stem_norm.bias, -3.0),
    "a statistic swapped": lambda m: setattr(
        m.depth_norm, "running_mean", torch.randn_like(m.depth_norm.running_mean)
    ),
    "in place": lambda m: m.stem.weight.mul_(2),
    "through data": lambda m: m.stem.weight.data.mul_(2),
    "other data": lambda m: setattr(m.point.weight, "data", torch.randn_like(m.point.weight)),
    "a bias": lambda m: m.depth.bias.add_(1),
    "a statistic": lambda m: m.stem_norm.running_mean.add_(1),
    "a scale through data": lambda m: m.stem_norm.weight.data.mul_(-3),
    "loaded": lambda m: m.load_state_dict({k: v * 1.5 for k, v in m.state_dict().items()}),
    "another parameter": lambda m: setattr(m.wide, "weight", nn.Parameter(m.wide.weight * 3)),
}


@pytest.mark.one_in(3)
@needs_packing
@torch.no_grad()
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_weights_is_seen(name: str) -> None:
    module, x = net(), torch.randn(2, 3, 64, 64)
    fast = fxkit.compile(module)
    for _ in range(2):
        fast(x)
    before = fast(x)
    CHANGES[name](module)
    assert not torch.allclose(module(x), before)
    check(fast, module, x)
    check(fast, module, x)


@needs_packing
@torch.no_grad()
def test_special_numbers_stay() -> None:
    module, x = net(), torch.randn(2, 3, 64, 64)
    x[0, 0, 5, 5], x[1, 2, 60, 3] = torch.nan, torch.inf
    fast = fxkit.compile(module)
    fast(x)
    torch.testing.assert_close(fast(x), module(x), equal_nan=True)


@needs_packing
@torch.no_grad()
def test_weights_that_are_not_finite_are_not_folded() -> None:
    module, x = net(), torch.randn(2, 3, 64, 64)
    assert isinstance(module, Net)
    module.stem_norm.running_var[3] = torch.inf
    module.point.weight[0, 0] = torch.inf
    fast = fxkit.compile(module)
    fast(x)
    torch.testing.assert_close(fast(x), module(x), equal_nan=True)


@needs_packing
def test_gradients_and_other_types_go_another_way() -> None:
    module, x = net(), torch.randn(2, 3, 64, 64)
    fast = fxkit.compile(module, train=False)
    with torch.no_grad():
        fast(x)
    result = fast(x)
    assert result.requires_grad
    result.sum().backward()
    assert module.get_parameter("stem.weight").grad is not None
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert fast(x).dtype == module(x).dtype


@needs_packing
@torch.no_grad()
def test_copies_and_other_sizes() -> None:
    module = net()
    fast = fxkit.compile(module)
    for size in (64, 66, 68, 70, 72, 74, 64):
        check(fast, module, torch.randn(1, 3, size, size))
    check(fxkit.compile(copy.deepcopy(module)), module, torch.randn(1, 3, 64, 64))


@torch.no_grad()
def test_little_work_is_done_in_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = net(), torch.randn(1, 3, 8, 8)
    fast = fxkit.compile(module)
    fast(x)
    check(fast, module, x)
    names = [
        name
        for region in fast.compiled_modules[0].regions
        if region.kernel
        for name in region.nodes
    ]
    assert sum(name.startswith("convolution") for name in names) == 4
    monkeypatch.setenv("FXKIT_BACKEND", "eager")
    left = fxkit.compile(module)
    left(x)
    check(left, module, x)
    assert not is_packed(left)


@torch.no_grad()
def test_little_work_that_no_kernel_does_is_left_as_it_is() -> None:
    module, x = nn.Conv2d(8, 8, 3, groups=2), torch.randn(1, 8, 9, 9)
    fast = fxkit.compile(module)
    fast(x)
    check(fast, module, x)
    assert not is_packed(fast)


def random_weights() -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = ((1,), (5,), (16, 3, 3, 3), (128,), (129,), (64, 32, 3, 3), (256, 256, 1, 1))
    shapes += ((601, 303),)  # which threads share
    return [torch.randn(shape) for shape in shapes]


@needs_packing
@pytest.mark.parametrize("which", range(8))
def test_a_fingerprint_tells_of_every_number(which: int) -> None:
    native, tensor = binding.load(), random_weights()[which]
    assert native is not None
    others = [None, torch.randn(3)]
    before = native.fingerprint(tensor, *others)
    assert before == native.fingerprint(tensor.clone(), *others)
    flat = tensor.view(-1)
    for place in {0, len(flat) // 3, len(flat) // 2, len(flat) - 1}:
        kept = flat[place].item()
        bits = flat[place : place + 1].view(torch.int32)
        for bit in (0, 13, 31):
            bits ^= -(1 << 31) if bit == 31 else 1 << bit
            assert native.fingerprint(tensor, *others) != before
            flat[place] = kept
    assert native.fingerprint(tensor, *others) == before


@needs_packing
def test_a_fingerprint_is_the_same_on_any_number_of_threads() -> None:
    native, threads = binding.load(), torch.get_num_threads()
    assert native is not None
    weight = random_weights()[-1]
    try:
        prints = [torch.set_num_threads(n) or native.fingerprint(weight) for n in (1, 2, 3, 16)]
    finally:
        torch.set_num_threads(threads)
    assert len(set(prints)) == 1
    parts = weight.view(-1).chunk(8)
    swapped = torch.cat([*parts[4:], *parts[:4]]).view_as(weight)
    assert native.fingerprint(swapped) != prints[0]


@needs_packing
@pytest.mark.parametrize("change", ["neg_", "double", "halve", "zero_", "flip", "roll"])
def test_a_fingerprint_tells_of_changes_to_all_numbers(change: str) -> None:
    native = binding.load()
    assert native is not None
    changes: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "neg_": torch.neg,
        "double": lambda t: t * 2,
        "halve": lambda t: t / 2,
        "zero_": torch.zeros_like,
        "flip": lambda t: t.flatten().flip(0).view_as(t),
        "roll": lambda t: t.flatten().roll(128).view_as(t),
    }
    for tensor in random_weights()[2:]:
        for of in (tensor, torch.ones_like(tensor).cumsum(0)):
            changed = changes[change](of).contiguous()
            assert torch.equal(of, changed) == (
                native.fingerprint(of) == native.fingerprint(changed)
            )


@needs_packing
def test_a_fingerprint_tells_tensors_apart_and_refuses_others() -> None:
    native = binding.load()
    assert native is not None
    zero = torch.zeros(4)
    prints = [
        native.fingerprint(*tensors)
        for tensors in ((zero, None), (None, zero), (zero, zero), (zero[:3], None))
    ]
    assert len(set(prints)) == 4
    for refused in (
        torch.zeros(3, 2).t(),
        zero.double(),
        torch.zeros(0),
        3,
        torch.zeros(2).to("meta"),
    ):
        assert native.fingerprint(refused) is None


@torch.no_grad()
def test_nothing_is_packed_without_the_binding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "load", lambda: None)
    module, x = net(), torch.randn(2, 3, 64, 64)
    fast = fxkit.compile(module)
    fast(x)
    check(fast, module, x)
    assert not is_packed(fast)


@pytest.mark.one_in(2)
@pytest.mark.usefixtures("_packed_alone")
@needs_packing
@torch.no_grad()
@pytest.mark.parametrize("objection", [None, "the library shall"])
@pytest.mark.parametrize(
    ("channels", "kernel"), [(512, 3), (64, 3), (100, 5), (1280, 1), (30, 7), (289, 1)]
)
def test_many_terms_are_as_exact_as_in_eager(
    monkeypatch: pytest.MonkeyPatch, channels: int, kernel: int, objection: str | None
) -> None:
    monkeypatch.setattr(whole_operators, "objection", lambda *_: objection)
    monkeypatch.setattr(pack_convolutions, "unpacked_is_faster", lambda *_, **options: False)
    torch.manual_seed(0)
    module = nn.Conv2d(channels, 48, kernel, padding=kernel // 2)
    x = torch.relu(torch.randn(2, channels, 14, 14))
    fast = fxkit.compile(module)
    fast(x)
    assert is_packed(fast)
    exact, eager = reference(module, (x.double(),)), module(x)
    assert relative_error(fast(x), exact) <= 1.5 * max(relative_error(eager, exact), 1.6e-7)


@needs_packing
@torch.no_grad()
@pytest.mark.parametrize("is_faster", [True, False])
def test_thin_parts_are_packed_where_eager_is_no_faster(
    monkeypatch: pytest.MonkeyPatch, is_faster: bool
) -> None:
    asked: list[tuple[tuple[int, ...], bool]] = []

    def answer(image: tuple[int, ...], weight: Tensor, *_: object, has_norm: bool) -> bool:
        asked.append((tuple(weight.shape), has_norm))
        return is_faster

    monkeypatch.setattr(pack_convolutions, "unpacked_is_faster", answer)
    torch.manual_seed(0)
    module = nn.Sequential(
        *(nn.Conv2d(24, 32, (64, 1)), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Conv2d(32, 16, (64, 1)), nn.ReLU()),
    ).eval()
    x = torch.randn(2, 24, 200, 3)
    fast = fxkit.compile(module)
    fast(x)
    check(fast, module, x)
    assert is_packed(fast) != is_faster
    assert asked[:2] == [((32, 24, 64, 1), True), ((16, 32, 64, 1), False)]


@needs_packing
@torch.no_grad()
@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize("window", [(5, 5), (36, 1)])
def test_the_trial_of_thin_parts_runs_all_candidates(
    monkeypatch: pytest.MonkeyPatch, window: tuple[int, int], has_norm: bool
) -> None:
    measured: list[tuple[float, float]] = []

    def kept(key: str, measure: Any, texts: Any) -> tuple[float, float]:
        measured.append(measure())
        return measured[-1]

    monkeypatch.setattr(autotune.times, "kept_times", kept)
    settings = onednn.Settings((1, 1), (0, 0), (1, 1), 1)
    weight = torch.randn(16, 40, *window)
    found = autotune.unpacked_is_faster((3, 40, 50, 40), weight, settings, has_norm=has_norm)
    ((eager, ours),) = measured
    assert eager > 0 and ours > 0
    assert found == (eager < ours)


def test_parts_cover_all_channels() -> None:
    for channels in range(1, 700):
        for size in (1, 2, 3, 5, 7, 11):
            parts = packed.parts_of((8, channels, size, size), 1)
            assert parts is not None
            assert [first for first, _ in parts] == [0, *(end for _, end in parts[:-1])]
            assert parts[-1][1] == channels
            assert all(0 < (end - at) * size**2 <= packed.MOST_TERMS for at, end in parts)
    assert packed.parts_of((8, 1, 20, 20), 1) is None
    assert packed.parts_of((8, 300, 1, 1), 2) is None
    assert packed.parts_of((8, 32, 3, 3), 2) == [(0, 32)]


@needs_packing
@torch.no_grad()
def test_a_slot_that_others_use_and_weights_that_are_gone() -> None:
    torch.manual_seed(0)
    x, slot = torch.randn(1, 16, 8, 8), packed.new_slot()
    weights = [torch.randn(8, 16, 3, 3) for _ in range(3)]
    norm = (None, None, None, None, 0.0)
    for weight in (*weights, *weights):
        for stride in (1, 2):
            how = ((stride, stride), (1, 1), (1, 1), 1)
            found = packed.convolution(x, weight, None, *norm, *how, slot)
            torch.testing.assert_close(found, F.conv2d(x, weight, None, *how))
    assert slot in packed._slots
    del weights, weight
    assert slot not in packed._slots


@needs_packing
@torch.no_grad()
def test_large_weights_that_are_used_once_are_left_as_they_are() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(8, 512, 3), nn.AdaptiveAvgPool2d(1), nn.Conv2d(512, 999, 1), nn.Conv2d(999, 9, 1)
    )
    x = torch.randn(1, 8, 32, 32)
    fast = fxkit.compile(module)
    fast(x)
    check(fast, module, x)
    calls = [
        n
        for n in fast.compiled_modules[0].graph_module.graph.nodes
        if n.target is packed.operator()
    ]
    assert [type_of(call).shape[1] for call in calls] == [512, 9]


@pytest.mark.usefixtures("_packed_alone")
@needs_packing
@torch.no_grad()
def test_strides_of_one_pixel_are_those_of_eager() -> None:
    module = nn.Sequential(nn.Conv2d(8, 64, 3), nn.AdaptiveAvgPool2d(1), nn.ReLU())
    x = torch.randn(2, 8, 32, 32)
    fast = fxkit.compile(module)
    fast(x)
    assert is_packed(fast)
    check(fast, module, x)


class Followed(nn.Module):
    """A convolution and what reads its result."""

    def __init__(self, following: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.convolution, self.following = nn.Conv2d(8, 24, 3), following

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.following(self.convolution(x))


@pytest.mark.one_in(2)
@pytest.mark.usefixtures("_packed_alone")
@needs_packing
@torch.no_grad()
@pytest.mark.parametrize("following", [
    lambda y: F.batch_norm(y, None, None, training=True),
    lambda y: F.channel_shuffle(y, 4).relu(),
    lambda y: torch.roll(y, (1, 2), (1, 3)).sort(1).values,
    lambda y: torch.bucketize(y, torch.tensor([-1.0, 0.0, 1.0])) * 0.5,
])  # fmt: skip
def test_what_follows_is_as_exact_and_laid_out_as_in_eager(
    following: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    torch.manual_seed(0)
    module, x = Followed(following), torch.randn(2, 8, 39, 41)
    fast = fxkit.compile(module)
    fast(x)
    assert is_packed(fast)
    check(fast, module, x)


@needs_packing
@torch.no_grad()
def test_one_dense_convolution_alone_stays_as_it_is() -> None:
    x = torch.randn(2, 16, 39, 41)
    alone = nn.Sequential(nn.Conv2d(16, 16, 3), nn.ReLU()).eval()
    for module, is_left in (
        (alone, True),
        (nn.Sequential(nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16)).eval(), False),
        (nn.Sequential(nn.Conv2d(16, 64, 1), nn.ReLU()).eval(), False),
        (nn.Sequential(nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3)).eval(), False),
    ):
        fast = fxkit.compile(module)
        check(fast, module, x)
        assert is_packed(fast) != is_left
    fast = fxkit.compile(alone)
    check(fast, alone, x.contiguous(memory_format=torch.channels_last))
    assert is_packed(fast)


@needs_packing
@torch.no_grad()
def test_the_operator_alone() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(2, 6, 9, 7), torch.randn(8, 3, 3, 3)
    bias, mean, scale = (torch.randn(8) for _ in range(3))
    variance = torch.rand(8) + 0.5
    settings = ((2, 1), (1, 0), (1, 2), 2)
    for norm in (
        (None, None, None, None),
        (mean, variance, scale, bias),
        (mean, variance, None, None),
    ):
        found = packed.convolution(x, weight, bias, *norm, 1e-5, *settings, packed.new_slot())
        exact = F.conv2d(x.double(), weight.double(), bias.double(), *settings[:3], 2)
        if norm[0] is not None:
            wide = [None if t is None else t.double() for t in norm]
            exact = F.batch_norm(exact, *wide, False, 0.0, 1e-5)
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)
        assert found.is_contiguous(memory_format=torch.channels_last)


@needs_packing
@torch.no_grad()
def test_a_program_calls_the_function_and_not_the_operator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[object, ...]] = []

    def counted(*args: object) -> object:
        calls.append(args)
        return function(*args)

    function = packed.convolution
    monkeypatch.setattr(packed, "convolution", counted)
    monkeypatch.setattr(whole_operators, "objection", lambda *_: "the library shall")
    module, x = net(), torch.randn(1, 3, 96, 96)
    fast = fxkit.compile(module)
    fast(x)
    check(fast, module, x)
    assert fast.compiled_modules[0].native_program is not None
    seen = len(calls)
    fast(x)
    assert len(calls) - seen == 4
