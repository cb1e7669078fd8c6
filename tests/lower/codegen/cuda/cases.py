"""Programs whose CUDA kernels are tested: one kernel each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

import fxkit
from fxkit.analysis.tensor_types import propagate_types
from fxkit.lower.compiling.plan import make_plan
from fxkit.lower.fusion.partitioner import partition
from fxkit.lower.fusion.policy import Policy
from fxkit.lower.loop_ir.loop_ir import Kernel
from fxkit.lower.runtime.kernel_call import KernelCall

Program = Callable[..., Any]
Made = Callable[[], tuple[torch.Tensor, ...]]


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def special(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return numbers among which are infinities, zeros, subnormals and no numbers."""
    x = randn(*shape, dtype=dtype)
    flat = x.view(-1)
    for place, number in enumerate((float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-40)):
        flat[place * 7 % len(flat)] = number
    return x


def edges(dtype: torch.dtype) -> torch.Tensor:
    """Return integers among which are the ends of their type."""
    limits = torch.iinfo(dtype)
    some = [limits.min, limits.min + 1, limits.max - 1, limits.max, 0, -1, 1]
    return torch.tensor(some * 9, dtype=dtype)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, 1e-6)


def gelu_chain(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.gelu(1.5 * x + y) * torch.sigmoid(y) - torch.sqrt(torch.abs(x))


def softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    return x * cos + turned * sin


def several(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.amax(-1), x.amin(-1), x.sum(-1), (x * x).mean(-1), x * 2


# Name → program and what makes its inputs.
CASES: dict[str, tuple[Program, Made]] = {
    "gelu_chain": (gelu_chain, lambda: (randn(33, 64), randn(33, 64))),
    "gelu_chain_odd": (gelu_chain, lambda: (randn(7, 13), randn(7, 13))),
    "broadcast": (lambda x, b: torch.relu(x + b) * 2, lambda: (randn(9, 40), randn(40))),
    "broadcast_odd": (lambda x, b: torch.relu(x + b) * 2, lambda: (randn(9, 41), randn(41))),
    "outer_product": (lambda x, y: x * y + 1, lambda: (randn(6, 1, 20), randn(5, 1))),
    "transposed": (lambda x, y: x.t() * y, lambda: (randn(20, 12), randn(12, 20))),
    "one_number": (lambda x: x * 2 + 1, lambda: (randn(1)[0],)),
    "one_element": (lambda x: x * 2 + 1, lambda: (randn(1),)),
    "special": (
        lambda x: (torch.exp(x), torch.log(x), torch.tanh(x), x.clamp(-1, 1), x.isnan()),
        lambda: (special(200),),
    ),
    "angles": (
        lambda x: torch.sin(x) + torch.cos(x) + torch.expm1(x) + torch.log1p(x.abs()),
        lambda: (special(203) * 100,),
    ),
    "library": (
        lambda x: torch.atan(x) + torch.erfc(x) + torch.exp2(x) + torch.fmod(x, 0.7),
        lambda: (special(131),),
    ),
    "integers": (
        lambda x, y: (x * y - 3) // 4 + (x % 5),
        lambda: (torch.arange(-50, 53), torch.arange(103) % 11),
    ),
    "wrapped_sum": (lambda x: (x + 1) > x, lambda: (edges(torch.int32),)),
    "wrapped_product": (lambda x: (x * 2) // 2 == x, lambda: (edges(torch.int64),)),
    "wrapped_size": (lambda x: x.abs() >= 0, lambda: (edges(torch.int32),)),
    "wrapped_difference": (lambda x: -x - 2 < -x, lambda: (edges(torch.int64),)),
    "wrapped_sum_of_rows": (
        lambda x: x.sum(-1),
        lambda: (edges(torch.int64).expand(3, -1).contiguous(),),
    ),
    "small_integers": (
        lambda x: (x * 3 + 1, x > 4, x.float() * 0.5),
        lambda: (torch.arange(-60, 61, dtype=torch.int8),),
    ),
    "mixed_types": (
        lambda x, y, z: torch.where(z, x, y.float()) + 1,
        lambda: (randn(5, 48), randn(5, 48, dtype=torch.bfloat16), randn(5, 48) > 0),
    ),
    "doubles": (lambda x: torch.sigmoid(x) * x, lambda: (special(77, dtype=torch.float64),)),
    "rotary": (rotary, lambda: (randn(2, 6, 32), randn(6, 32), randn(6, 32))),
    "rotary_halves": (
        rotary,
        lambda: tuple(randn(*s, dtype=torch.bfloat16) for s in ((2, 6, 32), (6, 32), (6, 32))),
    ),
    "joined": (
        lambda x, y: torch.cat([x * 2, y], -1) + 1,
        lambda: (randn(3, 8), randn(3, 12)),
    ),
    "joined_oddly": (
        lambda x, y: torch.cat([x * 2, y], -1) + 1,
        lambda: (randn(3, 9), randn(3, 11)),
    ),
    "padded_evenly": (lambda x: F.pad(x, (4, 8)) * 2, lambda: (special(5, 12),)),
    "summed_halves": (lambda x: torch.cat([x, -x], -1).softmax(-1), lambda: (randn(6, 64),)),
    "padded": (lambda x: F.pad(x, (1, 2, 3, 0)) * 2, lambda: (randn(5, 9),)),
    "softmax_tiny": (softmax, lambda: (randn(70, 3),)),
    "softmax_part_of_warp": (softmax, lambda: (randn(9, 20),)),
    "softmax_warp": (softmax, lambda: (randn(11, 1000),)),
    "softmax_warp_odd": (softmax, lambda: (randn(9, 333),)),
    "softmax_block": (softmax, lambda: (randn(3, 4096),)),
    "softmax_block_odd": (softmax, lambda: (randn(2, 5001),)),
    "softmax_long": (softmax, lambda: (randn(2, 40_000),)),
    "softmax_long_odd": (softmax, lambda: (randn(1, 33_333),)),
    "softmax_down": (lambda x: torch.softmax(x, 0), lambda: (randn(50, 130),)),
    "softmax_special": (softmax, lambda: (special(12, 24),)),
    "log_softmax": (lambda x: torch.log_softmax(x * 3, -1), lambda: (randn(6, 100),)),
    "softmax_masked": (
        lambda x, m: torch.softmax(x * 0.125 + m, -1),
        lambda: (randn(2, 4, 16, 64), torch.zeros(16, 64).masked_fill(randn(16, 64) > 1, -1e9)),
    ),
    "layer_norm": (layer_norm, lambda: (randn(10, 768), randn(768), randn(768))),
    "layer_norm_odd": (layer_norm, lambda: (randn(3, 1025), randn(1025), randn(1025))),
    "layer_norm_block": (layer_norm, lambda: (randn(2, 8192), randn(8192), randn(8192))),
    "layer_norm_of_sum": (
        lambda x, y, w: F.layer_norm(x + y, (256,), w) * torch.sigmoid(y),
        lambda: (randn(5, 256), randn(5, 256), randn(256)),
    ),
    "rms_norm": (rms_norm, lambda: (randn(9, 512), randn(512))),
    "rms_norm_long": (rms_norm, lambda: (randn(2, 36_864), randn(36_864))),
    "several": (several, lambda: (randn(13, 100) + 2,)),  # of which no sum is near 0
    "several_long": (several, lambda: (special(2, 34_000),)),
    "sum_all": (lambda x: (x * x).sum(), lambda: (randn(100, 1000),)),
    "mean_middle": (lambda x: x.mean(1), lambda: (randn(4, 30, 40),)),
    "sum_of_two_axes": (lambda x: x.sum((0, 2)), lambda: (randn(6, 5, 16),)),
    "var_of_rows": (lambda x: x.var((1, 2)), lambda: (randn(4, 6, 24),)),
    "sum_down": (lambda x: x.sum(0), lambda: (randn(600, 256),)),
    "sum_down_odd": (lambda x: x.sum(0), lambda: (randn(1000, 37),)),
    "mean_and_max_down": (lambda x: (x.mean(0), x.amax(0)), lambda: (special(700, 129),)),
    "normalised_down": (lambda x: (x - x.mean(0)) / (x.std(0) + 1), lambda: (randn(600, 68),)),
    "product": (lambda x: x.prod(-1), lambda: (randn(20, 17),)),
    "any_all": (lambda x: ((x > 2).any(-1), (x > -2).all(-1)), lambda: (randn(9, 50),)),
    "doubles_of_long_rows": (softmax, lambda: (randn(1, 20_000, dtype=torch.float64),)),
    "integer_sum": (lambda x: x.sum(-1), lambda: (torch.arange(7 * 301).view(7, 301),)),
    "embedding": (
        lambda i, w: F.embedding(i, w) * 2,
        lambda: (torch.arange(35).view(7, 5) % 11, randn(11, 24)),
    ),
    "embedding_normed": (
        lambda i, w, p: F.layer_norm(F.embedding(i, w) + p, (48,)),
        lambda: (torch.arange(35).view(7, 5) * 3 % 11, randn(11, 48), randn(5, 48)),
    ),
    "gathered_oddly": (
        lambda x, i: torch.gather(x, 1, i - 3) + 1,
        lambda: (randn(5, 4), torch.arange(33).view(3, 11) % 4 + 3),
    ),
    "picked": (
        lambda x, i: x[i + 2] * 2,
        lambda: (randn(9), torch.arange(13) % 7 - 4),
    ),
    "loss_of_classes": (
        lambda x, i: F.cross_entropy(x, i, reduction="none"),
        lambda: (randn(37, 10), torch.arange(37) % 10),
    ),
    "loss_of_a_class": (
        lambda x, i: F.nll_loss(x, i),
        lambda: (randn(10), torch.tensor(3)),
    ),
    "sum_of_single_numbers": (lambda x: x.sum(-1) * 2, lambda: (randn(5, 1),)),
    "embedded_sum_down": (
        lambda i, w: F.embedding(i, w).sum(0),
        lambda: (torch.arange(70) % 11, randn(11, 37)),
    ),
    "scanned": (lambda x: torch.cumsum(x * 2, -1) + 1, lambda: (randn(6, 80),)),
    "scanned_oddly": (lambda x: torch.cumsum(x * 2, -1) * x, lambda: (randn(5, 77),)),
    "scanned_tiny": (lambda x: torch.cumsum(x * 2, -1) + 1, lambda: (randn(40, 3),)),
    "scanned_block": (lambda x: torch.cumsum(x * 2, -1) + 1, lambda: (randn(3, 5001),)),
    "scanned_twice": (lambda x: torch.cummax(x * 2, -1), lambda: (special(7, 100),)),
    "scanned_down": (lambda x: torch.cumsum(x * 2, 0) + x, lambda: (randn(60, 130),)),
    "scanned_product": (lambda x: torch.cumprod(x + 0.5, -1) * 2, lambda: (randn(9, 33),)),
    "scanned_softmax": (lambda x: x.softmax(-1).cumsum(-1), lambda: (randn(6, 100),)),
    "scanned_softmax_block": (lambda x: x.softmax(-1).cumsum(-1), lambda: (randn(2, 4096),)),
    "scanned_with_its_operand_bf16": (
        lambda x: ((y := x - 0.5), torch.cumsum(y, -1)),
        lambda: (randn(6, 41, dtype=torch.bfloat16),),
    ),
    "scanned_down_with_its_operand_f16": (
        lambda x: ((y := x * 0.5), torch.cumsum(y, -2)),
        lambda: (randn(7, 3, dtype=torch.float16)[:, 1:],),
    ),
    "scanned_and_summed": (
        lambda x: (x.cumsum(-1).sum(-1), x.cumsum(-1) * 2),
        lambda: (randn(9, 75),),
    ),
    "scanned_by_largest": (
        lambda x: x.cumsum(-1) * x.amax(-1, keepdim=True),
        lambda: (randn(9, 72),),
    ),
    "scanned_softmax_down": (lambda x: x.softmax(0).cumsum(0), lambda: (randn(40, 70),)),
    "scanned_integers": (
        lambda x: torch.cumsum(x, -1) * 2,
        lambda: (torch.arange(7 * 301).view(7, 301) % 11,),
    ),
    "rows_of_nothing": (lambda x: x.sum(-1) * 2, lambda: (randn(5, 0),)),
    "columns_of_nothing": (lambda x: x.mean(0) + 1, lambda: (randn(0, 70),)),
    "every_other": (
        lambda x: torch.relu(x[:, ::2]) + x[:, 1::2],
        lambda: (randn(6, 40),),
    ),
    "flipped": (lambda x: (x.flip(-1) * 2).softmax(-1), lambda: (randn(6, 40),)),
    "from_an_odd_place": (
        lambda x, y: F.layer_norm(x + y, (64,)),
        lambda: (randn(5 * 64 + 1)[1:].view(5, 64), randn(5, 64)),
    ),
    "rows_of_gaps": (softmax, lambda: (randn(6, 80)[:, ::2],)),
    "doubles_of_rows": (softmax, lambda: (randn(4, 300, dtype=torch.float64),)),
}

for _dtype, _suffix in ((torch.bfloat16, "bf16"), (torch.float16, "f16")):
    for _name, _program, _shapes in (
        ("gelu_chain", gelu_chain, ((8, 64), (8, 64))),
        ("tail", gelu_chain, ((83,), (83,))),
        ("softmax", softmax, ((10, 512),)),
        ("softmax_odd", softmax, ((10, 77),)),
        ("layer_norm", layer_norm, ((3, 2048), (2048,), (2048,))),
        ("sum_down", lambda x: x.sum(0), ((300, 512),)),
    ):
        CASES[f"{_name}_{_suffix}"] = (
            _program,
            lambda shapes=_shapes, dtype=_dtype: tuple(randn(*s, dtype=dtype) for s in shapes),
        )
    CASES[f"special_{_suffix}"] = (
        lambda x: (torch.exp(x), torch.tanh(x), x.clamp(-1, 1), x * 3.7, x.isnan()),
        lambda dtype=_dtype: (special(203, dtype=dtype),),
    )


@dataclass(frozen=True)
class Case:
    """A program's one kernel.

    Attributes:
        kernel: The kernel.
        inputs: The tensors that it is called with.
        outputs: Tensors of the layouts that it writes.
        program: The program.
        args: Its inputs.
    """

    kernel: Kernel
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    program: Program
    args: tuple[torch.Tensor, ...]


def case(program: Program, args: tuple[torch.Tensor, ...]) -> Case:
    """Return the kernel of a program and what it is called with."""
    gm = fxkit.capture(program, args).graph_module
    propagate_types(gm, args)
    plan = make_plan(gm, partition(gm, Policy(min_members=1)))
    ((name, call),) = plan.calls.items()
    recorder = _Recorder(fx.GraphModule(gm, plan.graph))
    recorder.run(*args)
    outputs = [torch.empty_strided(t.shape, t.stride or (), dtype=t.dtype) for t in call.outputs]
    return Case(plan.kernels[plan.kernel_of[name]], recorder.inputs, outputs, program, args)


class _Recorder(fx.Interpreter):
    """Runs a graph in eager, and notes what its kernel is called with."""

    inputs: list[torch.Tensor]

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(target, KernelCall):
            self.inputs = list(args)
        return super().call_function(target, args, kwargs)


def all_cases() -> dict[str, Case]:
    """Return all cases by the name of their kernel."""
    return {name: case(program, made()) for name, (program, made) in CASES.items()}
