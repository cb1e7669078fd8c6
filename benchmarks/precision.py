"""What lower precision is worth on this machine: products, and a transformer's layers."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxkit
from fxkit.passes import Autocast, MixedPrecision
from fxkit.timing import in_turn
from fxkit.view.texts.text_table import duration, table

_GOAL = 3.0


class _Layer(nn.Module):
    """A pre-norm layer of a transformer, as wide as BERT's."""

    def __init__(self, width: int = 768, heads: int = 12) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.attention(self.first(x)).view(batch, length, 3 * self.heads, -1)
        q, k, v = parts.transpose(1, 2).chunk(3, 1)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        x = x + self.out(attended.reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.second(x))))


def run(rounds: int) -> str:
    """Time products and layers in float32 and bfloat16, in turn; return tables."""
    repetitions = max(3, rounds // 3)
    with torch.no_grad():
        return "\n\n".join([_products(repetitions), _layers(repetitions)])


def _products(repetitions: int) -> str:
    rows = []
    for rows_of_a in (1, 16, 512):
        a, w = torch.randn(rows_of_a, 1024), torch.randn(1024, 1024)
        ways = {"f32": _product(a, w), "bf16": _product(a.bfloat16(), w.bfloat16())}
        seconds = in_turn(ways, rounds=repetitions, warmup=1)
        ratio = seconds["f32"] / seconds["bf16"]
        rows.append([f"{rows_of_a} × 1024 by 1024 × 1024", duration(seconds["f32"]),
                     duration(seconds["bf16"]), f"{ratio:.2f} ×"])  # fmt: skip
    return table(["linear", "float32", "bfloat16", "faster"], rows, align="<>>>")


def _product(a: Tensor, w: Tensor) -> Callable[[], object]:
    return lambda: F.linear(a, w)


def _layers(repetitions: int) -> str:
    rows = []
    for batch, length in ((1, 16), (4, 128)):
        torch.manual_seed(0)
        model = nn.Sequential(_Layer(), _Layer()).eval()
        x = torch.randn(batch, length, 768)
        ways: dict[str, Callable[[], object]] = {
            "eager float32": lambda model=model, x=x: model(x),
            "eager torch.autocast": lambda model=model, x=x: _autocast(model, x),
            "Autocast": _graph(model, x, Autocast()),
            "MixedPrecision": _graph(model, x, MixedPrecision()),
        }
        seconds = in_turn(ways, rounds=repetitions, warmup=1)
        plain = seconds["eager float32"]
        for name, taken in seconds.items():
            ratio = plain / taken
            goal = f"≥ {_GOAL:g} ×: {'met' if ratio >= _GOAL else 'not met'}"
            shown = goal if name == "MixedPrecision" and batch > 1 else ""
            rows.append([f"{batch} × {length}", name, duration(taken), f"{ratio:.2f} ×", shown])
    headers = ["two layers, width 768", "how", "a call", "over float32", "goal"]
    return table(headers, rows, align="<<>><")


def _graph(model: nn.Module, x: Tensor, change: Autocast | MixedPrecision) -> Callable[[], object]:
    """Capture a model, run one pass over it, and return a call of what comes out."""
    gm = fxkit.capture(model, (x,)).graph_module.eval()
    fxkit.PassManager([change], args=(x,)).run(gm)
    return lambda: gm(x)


def _autocast(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(x)
