"""Bisection: the pass, the rule and the site that broke a program, and a script that shows it."""

from __future__ import annotations

import contextlib
import io
import runpy
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.utils._pytree import tree_leaves

import fxkit
from fxkit.errors import NumericsError
from fxkit.passes import Pass
from fxkit.passes.manager.groups import FixedPoint
from fxkit.passes.manager.manager import PassManager
from fxkit.patterns.engine import rewrite_in
from fxkit.patterns.match_results import Match
from fxkit.patterns.rewriting import Rule, rule
from fxkit.patterns.rules import RULES
from tests.architectures import HUGGING_FACE
from tests.sampling import one_in


def has_nan(gm: fx.GraphModule, args: tuple[Any, ...]) -> bool:
    leaves = tree_leaves(gm(*args))
    return any(leaf.isnan().any() for leaf in leaves if isinstance(leaf, torch.Tensor))


def run_alone(script: Path | None, python: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a script in a new process."""
    assert script is not None
    return subprocess.run(
        [*python, "-I", str(script)],
        capture_output=True,
        text=True,
        cwd=script.parent,
        check=False,
    )


def status_of(script: Path | None) -> int:
    """Run a script in this process, which has torch already; return its exit status."""
    assert script is not None
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as end:
            return int(end.code or 0)
    return 0


@dataclass(frozen=True)
class ApplyRules(Pass):
    """Apply rules to their fixpoint."""

    rules: tuple[Rule, ...] = ()
    numerics: ClassVar[str] = "close"

    def apply(self, edit: Any, context: Any) -> None:
        context.reports.append(rewrite_in(edit, self.rules))


def planted_at(root: str) -> Rule:
    """Make a wrong rule that acts at one node only, among all the right ones."""

    def only_there(match: Match) -> bool:
        return match.root.name == root

    return rule(
        lambda x, y: torch.add(x, y), lambda x, y: torch.add(x, y, alpha=1.001),
        where=only_there, name="planted", exact=False,
    )  # fmt: skip


def twenty_passes(wrong: Rule, place: int) -> list[Pass]:
    """Return twenty passes with three rules each, the wrong one in one of them."""
    rules = [found for _, found in RULES.items()][:60]
    groups = [tuple(rules[i : i + 3]) for i in range(0, 60, 3)]
    groups[place] = (groups[place][0], wrong, groups[place][2])
    return [ApplyRules(group) for group in groups]


@pytest.mark.parametrize("place", one_in(3, [13, 0, 19]))
def test_a_planted_rule_is_found_in_a_real_model(
    place: int, tmp_path: Path, python: list[str]
) -> None:
    torch.manual_seed(0)
    model, inputs = HUGGING_FACE["gpt2"]()
    given = inputs(2)
    captured = fxkit.capture(model, (), given)
    gm = captured.graph_module
    args = tuple(captured.take_apart((), given).parts.tensors)
    sums = fxkit.graph(gm).find(torch.add)
    root = sums[len(sums) * 2 // 3].name
    passes = twenty_passes(planted_at(root), place)
    assert len(passes) == 20
    assert len({found.name for current in passes for found in current.rules}) == 60
    reference = first_tensor(gm(*args))
    asked = 0

    def is_off(other: fx.GraphModule, inputs: tuple[Any, ...]) -> bool:
        nonlocal asked
        asked += 1
        return not torch.allclose(first_tensor(other(*inputs)), reference, rtol=1e-5, atol=1e-6)

    found = PassManager(passes, args=args).bisect(gm, bad=is_off, folder=tmp_path)
    assert found.in_pass == f"apply_rules ({place + 1}/20)"
    assert found.rule == "planted"
    assert found.site == (root,)
    assert found.calls == asked <= 12
    assert found.minified is not None and found.minified.nodes <= 10
    assert found.reproducer is not None
    assert "fxkit" not in found.reproducer.read_text()
    assert status_of(found.reproducer) == 1
    if place == 13:
        alone = run_alone(found.reproducer, python)
        assert (alone.returncode, alone.stderr) == (1, "")
        assert "Tensor-likes are not close" in alone.stdout


def first_tensor(value: Any) -> torch.Tensor:
    return next(leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.first(x)) * 2 + 1
        for _ in range(5):
            h = torch.tanh(h) + h
        return self.second(h) * 3


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def gm() -> fx.GraphModule:
    torch.manual_seed(0)
    return fxkit.symbolic_trace(Model())


def differs_from(gm: fx.GraphModule) -> Any:
    reference = gm(X)

    def bad(other: fx.GraphModule, args: tuple[Any, ...]) -> bool:
        return not torch.allclose(other(*args), reference)

    return bad


def node(gm: fx.GraphModule, name: str) -> fx.Node:
    return next(n for n in gm.graph.nodes if n.name == name)


@dataclass(frozen=True)
class Nothing(Pass):
    def apply(self, edit: Any, context: Any) -> None:
        pass


@dataclass(frozen=True)
class Respell(Pass):
    """Replace each tanh by an equal one, one of them by another function."""

    wrong: int = -1
    numerics: ClassVar[str] = "close"
    is_idempotent: ClassVar[bool] = False

    def apply(self, edit: Any, context: Any) -> None:
        for index, found in enumerate(fxkit.graph(edit.gm).find(torch.tanh)):
            function = torch.sin if index == self.wrong else F.tanh
            old = found.fx_node
            edit.replace(old, edit.call(function, *old.args, before=old))


@dataclass(frozen=True)
class ChangeConstants(Pass):
    """Change operands one by one, outside of any rewrite."""

    only: str = ""
    numerics: ClassVar[str] = "changed"

    def apply(self, edit: Any, context: Any) -> None:
        for old in list(edit.graph.nodes):
            if old.op == "call_function" and old.args and isinstance(old.args[-1], int):
                value = old.args[-1] + 5 if old.name == self.only else float(old.args[-1])
                edit.set_args(old, (*old.args[:-1], value))


def test_a_pass_written_by_hand_is_found_with_the_node(gm: fx.GraphModule, tmp_path: Path) -> None:
    sites = [found.name for found in fxkit.graph(gm).find(torch.tanh)]
    text = gm.code
    manager = PassManager([Nothing(), Respell(), Nothing(), Respell(wrong=3)], args=(X,))
    found = manager.bisect(gm, bad=differs_from(gm), folder=tmp_path)
    assert found.in_pass == "respell (4/4)"
    assert found.rule == "respell"
    assert len(found.site) == 1 and "tanh" in found.site[0]
    replaced = fxkit.graph(found.before)[found.site[0]]
    assert replaced.fx_node.target is F.tanh
    assert any(n.target is torch.sin for n in found.after.graph.nodes)
    assert len(sites) == 5
    assert gm.code == text
    assert status_of(found.reproducer) == 1


def test_a_change_outside_of_any_rewrite_is_found(gm: fx.GraphModule, tmp_path: Path) -> None:
    manager = PassManager([Respell(), ChangeConstants("mul_1")], args=(X,), verify="structure")
    found = manager.bisect(gm, bad=differs_from(gm), folder=tmp_path)
    assert found.in_pass == "change_constants (2/2)"
    assert found.rewrite is None and found.rule is None
    assert found.site == ("mul_1",)
    assert [change.kind for change in found.changes] == ["rewire"]
    assert found.minified is not None and found.minified.nodes <= 10


def test_the_script_runs_the_pass_again_where_it_can_be_imported(
    gm: fx.GraphModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python: list[str]
) -> None:
    (tmp_path / "broken_passes.py").write_text(_BROKEN)
    monkeypatch.syspath_prepend(str(tmp_path))
    import broken_passes  # pyright: ignore[reportMissingImports]

    manager = PassManager([broken_passes.Halve("tanh")], args=(X,))
    found = manager.bisect(gm, bad=differs_from(gm), folder=tmp_path / "repro")
    assert found.reproducer is not None
    assert "broken_passes.Halve(function='tanh')" in found.reproducer.read_text()
    assert status_of(found.reproducer) == 1
    # Of another length: Python takes a source of the same second and length for the compiled one.
    (tmp_path / "broken_passes.py").write_text(_BROKEN.replace("* 0.5", "* 1.000"))
    mended = run_alone(found.reproducer, python)
    assert (mended.returncode, mended.stdout.splitlines()[-1]) == (0, "the fault is gone")


_BROKEN = '''
import operator
from dataclasses import dataclass

import torch

from fxkit.passes import Pass


@dataclass(frozen=True)
class Halve(Pass):
    """Wrong on purpose."""

    function: str = "relu"
    numerics = "close"
    is_idempotent = False

    def apply(self, edit, context):
        for node in list(edit.graph.find_nodes(op="call_function", target=torch.tanh)):
            made = edit.call(operator.mul, node, 1.0 * 0.5, after=node)
            edit.replace_uses(node, made)
'''


def test_the_script_applies_a_rule_where_it_can_be_imported(
    gm: fx.GraphModule, tmp_path: Path
) -> None:
    manager = PassManager([ApplyRules((TANH_TO_SIN,))], args=(X,))
    found = manager.bisect(gm, bad=differs_from(gm), folder=tmp_path)
    assert found.rule == "tanh_to_sin"
    assert found.reproducer is not None
    assert "TANH_TO_SIN" in found.reproducer.read_text()
    assert status_of(found.reproducer) == 1


TANH_TO_SIN = rule(lambda x: torch.tanh(x), lambda x: torch.sin(x), name="tanh_to_sin", exact=False)


def test_functions_written_for_torch_fx_are_found_whole(gm: fx.GraphModule, tmp_path: Path) -> None:
    def harmless(module: fx.GraphModule) -> None:
        for found in module.graph.nodes:
            if found.target is torch.tanh:
                found.target = F.tanh

    def harmful(module: fx.GraphModule) -> None:
        for found in module.graph.nodes:
            if found.target is F.tanh:
                found.target = torch.sin

    manager = PassManager([harmless, harmful, Nothing()], args=(X,))
    found = manager.bisect(gm, bad=differs_from(gm), folder=tmp_path)
    assert found.in_pass == "harmful (2/3)"
    assert found.rule is None
    assert found.minified is not None and found.minified.nodes <= 4
    assert status_of(found.reproducer) == 1


def test_an_oracle_about_something_else_than_values(gm: fx.GraphModule, tmp_path: Path) -> None:
    def calls_tanh_of_functional(other: fx.GraphModule, args: tuple[Any, ...]) -> bool:
        other(*args)
        return any(n.target is F.tanh for n in other.graph.nodes)

    manager = PassManager([Nothing(), Respell()], args=(X,))
    found = manager.bisect(gm, bad=calls_tanh_of_functional, folder=tmp_path)
    assert found.in_pass == "respell (2/2)"
    assert found.site == (fxkit.graph(gm).find(torch.tanh)[0].name,)
    assert found.minified is not None and found.minified.nodes == 3
    assert status_of(found.reproducer) == 1


def test_passes_in_groups_are_found(gm: fx.GraphModule, tmp_path: Path) -> None:
    group = FixedPoint(Nothing(), ApplyRules((TANH_TO_SIN,)))
    manager = PassManager([Nothing(), group, Nothing()], args=(X,))
    found = manager.bisect(gm, bad=differs_from(gm), folder=tmp_path)
    assert found.in_pass.startswith("apply_rules (3/4")
    assert found.rule == "tanh_to_sin"


def test_keyword_inputs_and_exported_programs(tmp_path: Path) -> None:
    program: Any = torch.export.export(Model(), (), {"x": X})

    def bad(gm: fx.GraphModule, args: tuple[Any, ...]) -> bool:
        return any(n.target is torch.ops.aten.sin.default or n.target is torch.sin
                   for n in gm.graph.nodes)  # fmt: skip

    manager = PassManager([ApplyRules((TANH_TO_SIN,))], args=(), kwargs={"x": X})
    found = manager.bisect(program, bad=bad, folder=tmp_path)
    assert found.rule == "tanh_to_sin"
    assert status_of(found.reproducer) == 1


def test_it_says_all_of_it_as_text(gm: fx.GraphModule, tmp_path: Path) -> None:
    manager = PassManager([ApplyRules((TANH_TO_SIN,))], args=(X,))
    text = str(manager.bisect(gm, bad=differs_from(gm), folder=tmp_path))
    assert text.startswith("apply_rules (1/1): tanh_to_sin at %tanh (")
    assert "insert    %sin" in text
    assert "minified to 3 nodes" in text
    assert text.endswith(f"repro: {tmp_path / 'run.py'}")


def test_without_a_folder_a_new_one_is_made(gm: fx.GraphModule) -> None:
    manager = PassManager([ApplyRules((TANH_TO_SIN,))], args=(X,))
    found = manager.bisect(gm, bad=differs_from(gm))
    assert found.reproducer is not None and found.reproducer.is_file()


def test_a_program_that_is_bad_already_is_refused(gm: fx.GraphModule) -> None:
    with pytest.raises(NumericsError, match="good of the program as it was given, got bad"):
        PassManager([Nothing()], args=(X,)).bisect(gm, bad=lambda gm, args: True)


def test_passes_that_break_nothing_are_refused(gm: fx.GraphModule) -> None:
    with pytest.raises(NumericsError, match="bad of the program after all passes, got good"):
        PassManager([Respell()], args=(X,)).bisect(gm, bad=differs_from(gm))


def test_an_oracle_that_raises_is_named_with_the_state(gm: fx.GraphModule) -> None:
    def broken(other: fx.GraphModule, args: tuple[Any, ...]) -> bool:
        if any(n.target is torch.sin for n in other.graph.nodes):
            raise ZeroDivisionError("no")
        return False

    manager = PassManager([ApplyRules((TANH_TO_SIN,))], args=(X,))
    with pytest.raises(NumericsError, match="the program after all passes, got ZeroDivisionError"):
        manager.bisect(gm, bad=broken)
