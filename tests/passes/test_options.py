"""Options that make no sense are refused, by name, before anything is done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fxkit
from fxkit import passes as p
from fxkit.errors import PassError, UnsupportedError

BAD_OPTIONS: dict[str, Callable[[], Any]] = {
    "fewest": lambda: p.BatchOperators(fewest=1),
    "max_bytes": lambda: p.ConstantFolding(max_bytes=-1),
    "max_bytes ": lambda: p.ConstantFolding(max_bytes="1"),
    "only": lambda: p.Recompose(only=("atention",)),
    "only ": lambda: p.Recompose(only="attention"),
    "dtype": lambda: p.MixedPrecision(dtype=torch.int8),
    "dtype ": lambda: p.MixedPrecision(dtype="bfloat16"),
    "dtype  ": lambda: p.Autocast(dtype=torch.float32),
    "budget": lambda: p.ActivationCheckpointing(budget=-1),
    "by_halves": lambda: p.FoldBatchNorm(by_halves="x"),
    "callback": lambda: p.ObserveValues(callback=3),
    "write": lambda: p.PrintValues(write=3),
    "timings": lambda: p.TimeNodes(timings=None),
    "backend": lambda: p.Partition(backend="inductor"),
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_an_option_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"expected the option {name.strip()} of "):
        BAD_OPTIONS[name]()


def test_a_name_that_is_nearly_right_is_suggested() -> None:
    with pytest.raises(UnsupportedError, match="attention"):
        p.Recompose(only=("atention",))


@pytest.mark.parametrize(
    "options",
    [
        {"print_after": ["nothing_like_it"]},
        {"reproduce": 3},
        {"dump_on_change": 3},
        {"kwargs": 3},
        {"instruments": 3},
    ],
    ids=lambda options: next(iter(options)),
)
def test_the_manager_refuses(options: dict[str, Any]) -> None:
    with pytest.raises(PassError):
        fxkit.PassManager([p.Canonicalise()], **options)


@pytest.mark.parametrize("limits", [{"stop_after": -1}, {"stop_after": "a"}, {"max_rewrites": -1}])
def test_a_run_refuses(limits: dict[str, Any]) -> None:
    gm = fxkit.symbolic_trace(lambda x: torch.relu(x))
    with pytest.raises(PassError, match=next(iter(limits))):
        fxkit.PassManager([p.Canonicalise()]).run(gm, **limits)


def test_a_choice_of_nothing_is_noted() -> None:
    gm = fxkit.symbolic_trace(lambda x: torch.relu(x))
    (record,) = fxkit.PassManager([p.CheckNumbers(operator="aten.gelu")]).run(gm).records
    assert any("no node" in note for note in record.notes)


def test_memory_that_nothing_was_written_to_is_not_checked() -> None:
    def fill(x: torch.Tensor) -> torch.Tensor:
        made = torch.full((8, 8), float("nan"))
        other = torch.empty(8, 8)
        half = other[:4]
        other.copy_(x)
        return other * 2 + half.sum() + made.new_zeros(())

    x = torch.ones(8, 8)
    gm = fxkit.capture(fill, (x,)).graph_module
    fxkit.PassManager([p.CheckNumbers(where=lambda node: "full" not in node.name)]).run(gm)
    for _ in range(50):
        freed = torch.full((8, 8), float("nan"))
        del freed  # memory that may be taken again
        gm(x)
    checked = [str(node) for node in gm.graph.nodes if node.op == "call_module"]
    assert not any("empty" in name or "getitem" in name for name in checked)
    assert any("copy_" in name for name in checked)
