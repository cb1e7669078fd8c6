"""Norms whose result is turned, rolled or put together anew: one kernel, right at every width."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

import fxkit
from fxkit.lower import to_cpp
from fxkit.lower.loop_ir.interpreter import interpret
from tests.lower.codegen.cuda.cases import case
from tests.lower.kernels import kernel_of

Program = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def half_turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def rotary(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    n, half = rms_norm(x, weight), x.shape[-1] // 2
    (a, b), c, s = n.chunk(2, -1), cos[..., :half], sin[..., :half]
    return torch.cat((a * c - b * s, b * c + a * s), -1)


def turned(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    n = rms_norm(x, weight)
    return n * cos + half_turned(n) * sin


def transposed(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return turned(x.transpose(1, 2), weight, cos, sin)


def partly_turned(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    n, quarter = rms_norm(x, weight), max(x.shape[-1] // 4 * 2, 2)
    part, rest = n[..., :quarter], n[..., quarter:]
    part = part * cos[..., :quarter] + half_turned(part) * sin[..., :quarter]
    return torch.cat((part, rest), -1)


def rolled(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, weight).roll(3, -1) * cos


def flipped(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.softmax(x * weight, -1).flip(-1) + sin


def exchanged(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    n = F.normalize(x, dim=-1)
    return torch.cat((n[..., 1:] * 2, n[..., :1]), -1) - cos


def padded(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return F.pad(torch.log_softmax(x, -1), (1, 0))[..., :-1] + x


EVEN: list[Program] = [rotary, turned, transposed, partly_turned]
ANY: list[Program] = [rolled, flipped, exchanged, padded]


def inputs_of(program: Program, width: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(width)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    shape = (2, 5, 3, width) if program is transposed else (2, 3, 5, width)
    x = rand(*shape)
    x[0, 0, 1, width // 2], x[1, 2, 0, 0], x[1, 0, 2, -1] = torch.nan, torch.inf, -torch.inf
    return x, rand(width), rand(5, width), rand(5, width)


def errors(found: Tensor, eager: Tensor, exact: Tensor) -> tuple[float, float]:
    """Return both root mean squares; NaNs and infinities must be in the same places."""
    finite = eager.isfinite() & exact.isfinite()
    assert torch.equal(found.isnan(), eager.isnan())
    assert torch.equal(found[eager.isinf()], eager[eager.isinf()])
    ours, eagers = (
        (y.double() - exact)[finite].square().mean().sqrt().item() for y in (found, eager)
    )
    return ours, eagers


def check(program: Program, args: tuple[Tensor, ...], found: Tensor) -> None:
    eager, exact = program(*args), program(*(a.double() for a in args))
    assert (found.dtype, found.shape, found.stride()) == (eager.dtype, eager.shape, eager.stride())
    ours, eagers = errors(found, eager, exact)
    assert ours <= 2 * eagers + torch.finfo(eager.dtype).eps


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [2, 6, 127, 129])
def test_the_one_kernel_means_what_eager_computes(width: int, dtype: torch.dtype) -> None:
    for program in ANY if width % 2 else EVEN + ANY:
        args = inputs_of(program, width, dtype)
        one = case(program, args)
        assert any(i.is_reduction for i in one.kernel.body)
        assert interpret(one.kernel, one.inputs, one.outputs)
        check(program, args, one.outputs[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_printed_kernels_compute_it_too(dtype: torch.dtype) -> None:
    """Rows of whole vectors, of some more elements, and of few; those of bfloat16 in words too."""
    widths = {128: EVEN + ANY, 96: EVEN, 66: EVEN, 127: ANY}
    calls = [
        (program, inputs_of(program, width, dtype), {})
        for width, programs in widths.items()
        for program in programs
    ]
    with torch.no_grad():
        for (program, args, _), found in zip(calls, _compiled(calls), strict=True):
            check(program, args, found)


def _compiled(calls: list[tuple[Program, tuple[Tensor, ...], dict[str, Tensor]]]) -> list[Tensor]:
    """Return the results of calls, each of which is to be one kernel."""

    def all_of(*args: Tensor) -> tuple[Tensor, ...]:
        return tuple(
            program(*args[4 * place : 4 * place + 4]) for place, (program, _, _) in enumerate(calls)
        )

    fast = fxkit.compile(all_of)
    args = [tensor for _, args, _ in calls for tensor in args]
    fast(*args)
    found = fast(*args)
    (module,) = fast.compiled_modules
    assert len([region for region in module.regions if region.kernel]) == len(calls)
    assert not module.reasons
    return list(found)


def test_words_that_rows_of_bfloat16_share_may_lie_anywhere() -> None:
    """Rows that begin between words are copied, without a look at what lies around them."""
    whole = inputs_of(rotary, 128, torch.bfloat16)
    memory = [torch.full((a.numel() + 2,), torch.nan, dtype=a.dtype) for a in whole]
    args = tuple(m[1:-1].view(a.shape).copy_(a) for m, a in zip(memory, whole, strict=True))
    for given in (args, whole):
        module = to_cpp(fx.symbolic_trace(rotary), given)
        check(rotary, whole, module(*given))
        assert "fx_pairs(" in module.source
        assert module.report().calls == 1


def test_what_is_reduced_is_reduced_once() -> None:
    kernel = kernel_of(rotary, *inputs_of(rotary, 64, torch.float32))
    assert sum(i.is_reduction for i in kernel.body) == 1
    loads = [
        i for i in kernel.body if i.op == "load" and kernel.buffers[i.detail.buffer].name == "in0"
    ]
    assert len({(i.detail.offset, i.guard is None) for i in loads}) == len(loads) == 3


def test_gradients_are_those_of_eager() -> None:
    args = inputs_of(turned, 64, torch.float32)
    given = [torch.randn_like(a).requires_grad_() for a in args]
    fast = fxkit.compile(turned)
    torch.autograd.grad(fast(*given).sum(), given)
    found = torch.autograd.grad(fast(*given).square().sum(), given)
    expected = torch.autograd.grad(turned(*given).square().sum(), given)
    for ours, eagers in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, eagers, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    "program",
    [
        lambda x: torch.softmax(x, -1).roll(1, 0) * 2,
        lambda x: torch.softmax(x, -1).cumsum(-1).flip(-1),
        lambda x: torch.softmax(x, -1)[:, torch.tensor([3, 1, 2, 0] * 4)] * x,
    ],
    ids=["another row", "a scan", "places that are computed"],
)
def test_what_can_not_be_made_again_is_right(program: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(6, 16)
    fast = fxkit.compile(program)
    for _ in range(2):
        torch.testing.assert_close(fast(x), program(x))


VIEWS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x[..., 1:],
    lambda x: x[..., ::2],
    lambda x: x[:, 1],
    lambda x: x.transpose(0, 1)[..., :2],
    lambda x: x.narrow(0, 1, 1).squeeze(0),
    lambda x: x.unflatten(-1, (3, 2)).select(-1, 1),
    lambda x: x[:, :1].expand(-1, 5, -1),
    lambda x: x.diagonal(0, 0, 1),
    lambda x: x[1:, 2:, 3:4].permute(2, 0, 1),
]


def test_views_of_what_a_kernel_computes() -> None:
    """Views by dimension, and those that join or divide dimensions, under guards too."""

    def all_of(*args: Tensor) -> tuple[Tensor, ...]:
        shown = [view(x.exp()) for x, view in zip(args, VIEWS, strict=True)]
        return tuple(torch.cat((y * 2, y.flip(-1)), -1) * 3 for y in shown)

    args = [torch.randn(2, 4, 6) for _ in VIEWS]
    fast = fxkit.compile(all_of)
    for _ in range(2):
        torch.testing.assert_close(fast(*args), all_of(*args))
    (module,) = fast.compiled_modules
    assert len([region for region in module.regions if region.kernel]) == len(VIEWS)
