"""What every registered pass keeps: structure, numbers, metadata, idempotence."""

from __future__ import annotations

import dataclasses
import math
import subprocess

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxkit
from fxkit.errors import PassError
from fxkit.ir.printer import format_graph
from fxkit.ir.provenance import source_of
from fxkit.passes import PASSES
from fxkit.passes.manager.listing import passes_page
from fxkit.passes.manager.manager import PassManager
from fxkit.passes.pipelines import INFERENCE, PIPELINES
from tests.generated_text import HoldPage


class Block(nn.Module):
    """A little of everything: spelled-out operators, effects, constants, duplicates, dead code."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("position", torch.arange(6.0))

    def forward(self, x):
        y = self.norm(self.fc(x) * 1)
        y = y * 0.5 * (1.0 + torch.erf(y / math.sqrt(2.0)))
        torch.tanh(y)
        a, b = y.sin(), torch.sin(y)
        a.add_(1)
        scale = torch.cos(self.position) * 2
        z = torch.sigmoid(b) * b + scale.reshape(6)
        return self.drop(a * z), F.dropout(z, 0.3, training=self.training), [a, z.transpose(0, 1)]


X = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))


def traced(training=False):
    torch.manual_seed(0)
    return fxkit.symbolic_trace(Block().train(training))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", list(PASSES))
@pytest.mark.parametrize("training", [False, True])
def test_pass_keeps_numbers_types_and_structure(name, training):
    gm = traced(training)
    x = X.clone().requires_grad_()
    PassManager([PASSES[name]()], verify="numerics", args=(x,)).run(gm)


@pytest.mark.parametrize("name", list(PASSES))
def test_pass_is_idempotent_where_it_says_so(name):
    cls = PASSES[name]
    gm = traced()
    manager = PassManager([cls(), cls()], args=(X,))
    result = manager.run(gm)
    if cls.is_idempotent:
        assert not result.records[-1].modified, result.diff()


@pytest.mark.parametrize("name", list(PASSES))
def test_every_node_keeps_a_source(name):
    gm = traced()
    PassManager([PASSES[name]()], args=(X,)).run(gm)
    computed = [n for n in gm.graph.nodes if n.op.startswith("call")]
    assert [n.name for n in computed if source_of(n) is None] == []


@pytest.mark.parametrize("name", list(PASSES))
def test_pass_is_a_frozen_documented_dataclass_in_a_file_of_its_name(name):
    cls = PASSES[name]
    assert dataclasses.is_dataclass(cls)
    assert cls.__dataclass_params__.frozen
    assert PASSES.file_of(name).endswith(f"/{name}.py")
    assert "Rewrites:" in (cls.__doc__ or "")
    assert getattr(fxkit.passes, cls.__name__) is cls


def test_inference_pipeline_on_the_block():
    gm = traced()
    reference = gm(X)
    result = PassManager(INFERENCE, verify="numerics", args=(X,)).run(gm)
    text = format_graph(gm)
    for gone in ("erf", "dropout", "aten.cos", "aten.tanh", "aten.sigmoid"):
        assert gone not in text
    for kept in ("aten.gelu", "aten.silu", "aten.add_", "aten.layer_norm"):
        assert kept in text
    assert text.count("aten.sin") == 2, "one of the two is written to"
    assert result.records[0].rewrites == {
        "multiply_by_one": 1,
        "reshape_to_same": 1,
        "dropout_in_eval": 2,
    }
    torch.testing.assert_close(gm(X), reference)


def test_unknown_pass_names_the_known_ones():
    with pytest.raises(AttributeError, match="Canonicalise"):
        fxkit.passes.Canonicalize  # noqa: B018


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("inference", "write *fxkit.passes.pipelines.PIPELINES['inference']"),
        ("dead_code_elimination", "write fxkit.passes.DeadCodeElimination()"),
        ("shrink", "derive from fxkit.passes.Pass"),
    ],
)
def test_text_is_no_pass_and_the_hint_says_what_is(name, hint):
    with pytest.raises(PassError, match=f"got the text '{name}'") as caught:
        fxkit.PassManager([name])
    assert caught.value.hint == hint


def test_named_orders_are_there_without_another_import(bare_python: list[str]):
    code = "import fxkit; print(*fxkit.passes.pipelines.DEBUG)"
    run = subprocess.run([*bare_python, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["type_propagation", "canonicalise", "dead_code_elimination"]


def test_passes_are_all_found_whichever_module_is_imported_first(bare_python: list[str]):
    code = "import fxkit.passes.pipelines; from fxkit.passes import PASSES; print(*PASSES)"
    found = subprocess.run([*bare_python, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == list(PASSES)


def test_the_documentation_prints_the_table_of_passes(hold_page: HoldPage):
    text = passes_page(PASSES.items(), PIPELINES.items())
    hold_page("built_in_passes.md", "table of passes", text)
