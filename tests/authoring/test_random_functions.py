"""Random functions of scalars: read, they compute what Python computes, and so do derivatives."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fxkit.authoring.operators.composed import composed
from fxkit.authoring.operators.reading import definition_of

POINTS = 32


class Writer:
    """Writes functions of x and y that use all that control flow has."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)

    def function(self) -> str:
        body = "\n".join(self.block(["x", "y"], 1, is_in_loop=False))
        return f"import math\n\n\ndef f(x, y):\n{body}\n    return x + y\n"

    def value(self, names: list[str], depth: int = 0) -> str:
        draw = self.draw
        if depth > 2 or draw.random() < 0.3:
            return draw.choice([*names, f"{draw.uniform(-2, 2):.2f}", str(draw.randint(-2, 3))])
        a, b = self.value(names, depth + 1), self.value(names, depth + 1)
        forms = ("{a} + {b}", "{a} - {b}", "{a} * {b}", "{a} / (abs({b}) + 1)", "abs({a})",
                 "max({a}, {b})", "min({a}, {b})", "math.tanh({a})", "{a} if {c} else {b}",
                 "-({a})", "({a}) % 3.5", "({a}) // 1.5")  # fmt: skip
        return f"({draw.choice(forms).format(a=a, b=b, c=self.test(names, depth + 1))})"

    def test(self, names: list[str], depth: int = 0) -> str:
        a, b = self.value(names, depth + 1), self.value(names, depth + 1)
        found = f"{a} {self.draw.choice(('<', '<=', '>', '>='))} {b}"
        if depth < 2 and self.draw.random() < 0.3:
            return f"({found} {self.draw.choice(('and', 'or'))} {self.test(names, depth + 1)})"
        return f"not ({found})" if self.draw.random() < 0.1 else f"({found})"

    def block(self, names: list[str], depth: int, *, is_in_loop: bool) -> list[str]:
        lines: list[str] = []
        names, pad = list(names), "    " * depth
        for _ in range(self.draw.randint(1, 3)):
            kind = self.draw.random()
            if depth > 3 or kind < 0.4:
                name = self.draw.choice([*names, "a", "b"])
                lines.append(f"{pad}{name} = {self.value(names)}")
                names += [name] if name not in names else []
            elif kind < 0.65:
                lines.append(f"{pad}if {self.test(names)}:")
                lines += self.block(names, depth + 1, is_in_loop=is_in_loop)
                lines.append(f"{pad}else:")
                lines += self.block(names, depth + 1, is_in_loop=is_in_loop)
            elif kind < 0.78:
                lines.append(f"{pad}for i{depth} in range({self.draw.randint(1, 3)}):")
                lines += self.block([*names, f"i{depth}"], depth + 1, is_in_loop=True)
            elif kind < 0.86:
                lines += [f"{pad}n{depth} = 0", f"{pad}while {self.test(names)} and n{depth} < 3:"]
                lines.append(f"{pad}    n{depth} += 1")
                lines += self.block(names, depth + 1, is_in_loop=True)
            elif kind < 0.93 and is_in_loop:
                return [*lines, f"{pad}{self.draw.choice(('break', 'continue'))}"]
            else:
                lines += [f"{pad}if {self.test(names)}:", f"{pad}    return {self.value(names)}"]
        return lines


def function_of(text: str, path: Path) -> Callable[[float, float], float]:
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.f


@pytest.mark.parametrize("seed", range(60))
def test_reading_keeps_what_a_function_computes(seed: int, tmp_path: Path) -> None:
    text = Writer(seed).function()
    function = function_of(text, tmp_path / f"random_function_{seed}.py")
    definition = definition_of(function, "f")
    x, y = (torch.randn(POINTS, dtype=torch.float64, requires_grad=True) for _ in range(2))
    pairs = zip(x.tolist(), y.tolist(), strict=True)
    expected = torch.tensor([float(function(a, b)) for a, b in pairs], dtype=torch.float64)
    (found,) = composed(definition, [x, y], {})
    torch.testing.assert_close(found.double(), expected, rtol=1e-9, atol=1e-9, msg=text)
    if not found.requires_grad:
        return
    grad = torch.randn(POINTS, dtype=torch.float64)
    slopes = torch.autograd.grad(found, (x, y), grad, materialize_grads=True)
    for name, slope in zip("xy", slopes, strict=True):
        operands = [grad, x.detach(), y.detach()]
        (ours,) = composed(definition.gradient(name), operands, {})
        torch.testing.assert_close(ours.double(), slope, rtol=1e-8, atol=1e-8, msg=text)
