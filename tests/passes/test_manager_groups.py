"""Groups, conditions, functions as passes, instruments, analyses, and what can be run on."""

from __future__ import annotations

import io
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import fxkit
from fxkit.analysis.dependencies import EffectOrder
from fxkit.errors import PassError, UnsupportedError
from fxkit.ir.printer import format_graph
from fxkit.passes import FixedPoint, Group, Instrument, Pass, PassContext, When, pass_function
from fxkit.passes.manager.instruments import PrintAfter
from fxkit.passes.manager.manager import PassManager

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def gm():
    return fxkit.symbolic_trace(lambda x: torch.relu(torch.relu(torch.relu(x))) + 1)


def relus(edit):
    return [found.fx_node for found in fxkit.graph(edit.gm).find(torch.relu)]


@pass_function(is_idempotent=False, numerics="changed")
def drop_one(edit, context):
    for relu in relus(edit)[:1]:
        edit.replace(relu, relu.args[0])


@pass_function
def nothing(edit, context):
    pass


@pass_function(numerics="changed", is_idempotent=False)
def swap(edit, context, *, function=torch.tanh, limit=100):
    for relu in relus(edit)[:limit]:
        edit.replace(relu, edit.call(function, *relu.args, before=relu))


def test_a_fixed_point_runs_until_nothing_changes(gm):
    result = PassManager([nothing, FixedPoint(drop_one, nothing), nothing]).run(gm)
    assert [(r.place, r.modified) for r in result.records] == [
        ("nothing (1/4)", False),
        ("drop_one (2/4, round 1)", True),
        ("nothing (3/4, round 1)", False),
        ("drop_one (2/4, round 2)", True),
        ("nothing (3/4, round 2)", False),
        ("drop_one (2/4, round 3)", True),
        ("nothing (3/4, round 3)", False),
        ("drop_one (2/4, round 4)", False),
        ("nothing (3/4, round 4)", False),
        ("nothing (4/4)", False),
    ]
    assert "relu" not in format_graph(gm)


def test_groups_nest(gm):
    inner = PassManager([nothing])
    manager = PassManager([Group(nothing, [drop_one, inner], name="outer"), FixedPoint([drop_one])])
    assert [p.name for p in manager.passes] == [
        "nothing", "drop_one", "nothing", "drop_one",
    ]  # fmt: skip
    assert str(manager.items[0]) == "outer(nothing, group(drop_one, group(nothing)))"
    result = manager.run(gm)
    assert [r.place for r in result.records][:3] == [
        "nothing (1/4)", "drop_one (2/4)", "nothing (3/4)",
    ]  # fmt: skip
    assert "relu" not in format_graph(gm)


def test_a_condition_chooses(gm):
    def has_relu(module):
        return any(n.target is torch.relu for n in module.graph.nodes)

    manager = PassManager(
        [When(has_relu, swap, otherwise=[nothing]), When(has_relu, swap, otherwise=[nothing])]
    )
    assert [r.place for r in manager.run(gm).records] == ["swap (1/4)", "nothing (4/4)"]


def test_a_property_is_a_condition(gm):
    manager = PassManager([When("deterministic", swap), When("aten", nothing)])
    assert [r.name for r in manager.run(gm).records] == ["swap"]
    with pytest.raises(PassError, match="name of a property"):
        When("sunny", swap)


def test_options_of_a_decorated_function(gm):
    limited = swap(limit=1, function=torch.sin)
    assert str(limited).startswith("swap(limit=1, function=<built-in")
    assert str(swap) == "swap" and swap.options == {}
    PassManager([limited]).run(gm)
    assert format_graph(gm).count("aten.relu") == 2
    with pytest.raises(PassError, match="expected an option of swap, got 'limt'") as caught:
        swap(limt=3)
    assert caught.value.hint == "it has function, limit"


def test_the_bare_decorator():
    @pass_function
    def plain(edit, context):
        """Do nothing."""

    assert isinstance(plain, Pass)
    assert (plain.name, plain.numerics, plain.is_idempotent) == ("plain", "exact", True)


def test_a_torch_fx_pass_that_puts_other_modules_in_place():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

        def forward(self, x):
            return self.body(x)

    def doubled(module):
        body = module.get_submodule("body")
        new = nn.Linear(4, 4)
        new.load_state_dict({k: 2 * v for k, v in body.get_submodule("0").state_dict().items()})
        setattr(body, "0", new)
        module.recompile()

    torch.manual_seed(0)
    model = Model()
    gm = fxkit.symbolic_trace(model)
    expected = torch.relu(2 * model.body[0](X))
    result = PassManager([doubled], args=(X,)).run(gm)
    assert result.modified
    torch.testing.assert_close(gm(X), expected)
    assert torch.equal(model(X), torch.relu(model.body[0](X))), "the user's module is as it was"


def test_what_a_torch_fx_pass_leaves_on_nodes_is_kept(gm):
    def mark(module):
        for node in module.graph.nodes:
            node.meta["mark"] = node.name

    assert not PassManager([mark]).run(gm).modified
    assert [n.meta["mark"] for n in gm.graph.nodes] == [n.name for n in gm.graph.nodes]


def test_torch_fx_passes_and_their_results_are_taken():
    from torch.fx.passes.infra.pass_base import PassBase, PassResult

    class Swap(PassBase):
        def call(self, graph_module):
            for node in graph_module.graph.nodes:
                if node.target is torch.relu:
                    node.target = torch.tanh
            return PassResult(graph_module, True)

    gm = fxkit.symbolic_trace(lambda x: torch.relu(x))
    result = PassManager([Swap()]).run(gm)
    assert result.records[0].name == "Swap"
    assert torch.equal(gm(X), torch.tanh(X))


class Log(Instrument):
    def __init__(self):
        self.lines = []

    def before(self, current, gm):
        self.lines.append(f"before {current.name}")

    def changed(self, current, record, gm):
        self.lines.append(f"changed {record.name} {torch.equal(gm(X), torch.tanh(X))}")

    def after(self, current, record, gm):
        self.lines.append(f"after {record.name}")

    def failed(self, current, error, gm):
        self.lines.append(f"failed {current.name}: {type(error).__name__}")


def test_instruments_are_told_of_all():
    @pass_function
    def fails(edit, context):
        raise ValueError

    gm, log = fxkit.symbolic_trace(lambda x: torch.relu(x)), Log()
    with pytest.raises(PassError):
        PassManager([nothing, swap, fails], instruments=[log]).run(gm)
    assert log.lines == [
        "before nothing", "after nothing", "before swap", "changed swap True", "after swap",
        "before fails", "failed fails: PassError",
    ]  # fmt: skip


def test_graphs_are_printed_and_dumped(gm, capsys, tmp_path):
    passes = [nothing, drop_one, swap]
    PassManager(passes, print_after=True, dump_on_change=tmp_path / "dump").run(gm)
    assert capsys.readouterr().out.count("graph(%x):") == 2
    files = sorted(path.name for path in (tmp_path / "dump").iterdir())
    assert files == ["01_drop_one.txt", "02_swap.txt"]
    dumped = (tmp_path / "dump" / "02_swap.txt").read_text()
    assert "aten.tanh" in dumped and "insert    %tanh" in dumped
    file = io.StringIO()
    PassManager([nothing, swap], instruments=[PrintAfter({"nothing"}, file)]).run(gm)
    assert file.getvalue().startswith("after nothing (1/2):\ngraph(%x):")
    PassManager([nothing, swap], print_after=["swap"]).run(gm)
    assert capsys.readouterr().out.startswith("after swap (2/2):")


def test_a_folder_that_can_not_be_written_is_refused_before_any_pass(gm, tmp_path):
    (tmp_path / "file").touch()
    before = format_graph(gm)
    with pytest.raises(UnsupportedError, match="expected a folder that can be written, got"):
        PassManager([drop_one, swap], dump_on_change=tmp_path / "file" / "dump").run(gm)
    assert format_graph(gm) == before


def test_analyses_are_kept_until_the_journal_says_otherwise(gm):
    seen = []

    @pass_function
    def looks(edit, context):
        seen.append(context.analysis(EffectOrder))

    passes = [looks, nothing, looks, drop_one, looks, looks]
    result = PassManager(passes, verify="structure").run(gm)
    assert seen[0] is seen[1] and seen[2] is seen[3] and seen[1] is not seen[2]
    tally = result.analyses["EffectOrder"]
    assert (tally.made, tally.reused, tally.updated) == (2, 2, 0)
    assert "analysis EffectOrder" in result.timings()


class CountedRelus:
    """An analysis that can be brought up to date."""

    def __init__(self, graph):
        self.count = len(graph.find_nodes(op="call_function", target=torch.relu))
        self.visited = 0

    def update(self, changes):
        for change in changes:
            self.visited += 1
            if change.node is not None and change.node.target is torch.relu:
                self.count += {"erase": -1, "insert": 1}.get(change.kind, 0)


def test_an_analysis_may_be_brought_up_to_date(gm):
    counts = []

    @pass_function
    def looks(edit, context):
        found = context.analysis(CountedRelus)
        counts.append((found.count, found.visited))

    result = PassManager([looks, drop_one, looks, looks], verify="structure").run(gm)
    changes = len(result.records[1].changes)
    assert counts == [(3, 0), (2, changes), (2, changes)]
    assert result.analyses["CountedRelus"].updated == 1


def test_an_analysis_is_made_anew_after_an_undo(gm):
    counts = []

    @pass_function(is_idempotent=False)
    def tries(edit, context):
        counts.append(context.analysis(CountedRelus).count)
        mark = edit.mark()
        drop_one.apply(edit, context)
        counts.append(context.analysis(CountedRelus).count)
        edit.undo(mark)
        counts.append(context.analysis(CountedRelus).count)

    PassManager([tries], verify="structure").run(gm)
    assert counts == [3, 2, 3]


def test_a_context_alone_has_no_analyses():
    with pytest.raises(PassError, match="a pass that a PassManager runs"):
        PassContext().analysis(EffectOrder)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return torch.relu(self.fc(x) * 1)


def test_an_exported_program_keeps_no_parameter_that_nothing_reads():
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8)).eval()
    x = torch.randn(1, 3, 6, 6)
    result = PassManager([fxkit.passes.FoldBatchNorm()]).run(torch.export.export(model, (x,)))
    again = result.exported_program()
    assert sum(tensor.numel() for tensor in again.state_dict.values()) == 8 * 3 * 9 + 8
    torch.testing.assert_close(again.module()(x), model(x))


def test_runs_on_an_exported_program():
    model = Model().eval()
    batch = torch.export.Dim.AUTO
    program = torch.export.export(model, (X,), dynamic_shapes=({0: batch},))
    result = PassManager([fxkit.passes.Canonicalise()], verify="numerics").run(program)
    assert result.modified and "aten.mul" not in format_graph(result.graph_module)
    assert torch.equal(result.graph_module(X), model(X))
    again = result.exported_program()
    wide = torch.randn(7, 4)
    torch.testing.assert_close(again.module()(wide), model(wide))
    assert "aten.mul" not in str(again.graph)


def test_runs_on_a_captured_program():
    model = Model().eval()
    program = fxkit.capture(model, (X,))
    with torch.no_grad():
        program(X)
        expected = model(X)
        result = PassManager([swap], args=(X,)).run(program)
        assert result.graph_module is program.graph_module
        assert torch.equal(program(X), torch.tanh(model.fc(X))) and expected.min() == 0


def test_other_things_are_refused():
    with pytest.raises(
        PassError, match="GraphModule, a captured or an exported program, got Model"
    ):
        PassManager([]).run(Model())
    gm = fx.symbolic_trace(Model())
    with pytest.raises(PassError, match="ran on an ExportedProgram, got Model"):
        PassManager([nothing]).run(gm).exported_program()


def test_inputs_for_numbers_are_made_from_the_types():
    @pass_function(numerics="exact")
    def wrong(edit, context):
        for relu in relus(edit):
            edit.replace(relu, edit.call(F.relu6, *relu.args, before=relu))

    gm = fxkit.symbolic_trace(lambda x: torch.relu(x * 9))
    fxkit.propagate_types(gm, (X,))
    with pytest.raises(PassError, match=r"outputs\[0\] to equal"):
        PassManager([wrong], verify="numerics").run(gm)


@dataclass(frozen=True)
class WithRules(Pass):
    def apply(self, edit, context):
        fxkit.passes.Canonicalise().apply(edit, context)


def test_rules_are_timed(gm):
    result = PassManager([WithRules()]).run(gm)
    tally = result.records[0].rules["relu_of_relu"]
    assert tally.hits == 2 and tally.seconds > 0
    assert "  rule relu_of_relu" in result.timings()
