"""Any subset of the rules, on any graph, changes nothing that a caller can see."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, reject, settings
from hypothesis import strategies as st
from torch import fx

from fxkit.analysis.tensor_types import propagate_types
from fxkit.ir.printer import format_graph
from fxkit.ir.verifier import verify
from fxkit.patterns import operand
from fxkit.patterns.engine import rewrite
from fxkit.patterns.rewriting import Rule, rule
from fxkit.patterns.rules import RULES
from fxkit.patterns.safety import Safety
from tests.patterns.random_graphs import GRAPHS, SHAPE, difference, observe
from tests.sampling import runs_every_case

# Rules that make, merge and return values in ways the shipped ones do not.
_OTHERS = (
    rule(lambda x: -torch.relu(x), lambda x: torch.clamp(-x, max=0.0), name="pushed_negation"),
    rule(lambda x, y: (x * y, x + y), lambda x, y: (y * x, x - (-y)), name="two_results"),
    rule(lambda x: (torch.relu(x), -x), lambda x: (x.clamp(min=0), 0 - x), name="two_of_one"),
    rule(
        lambda x: (torch.relu(x), torch.relu(x)),
        lambda x: (lambda r: (r, r))(torch.relu(x)),
        name="two_as_one",
    ),
    rule(
        lambda x, y: (torch.abs(-x), x + y, torch.sigmoid(y)),
        lambda x, y: (x.abs(), y - (-x), 1 / (1 + torch.exp(-y))),
        exact=False,
        name="three_results",
    ),
    rule(
        lambda x, y: (torch.rand_like(x), x * y),
        lambda x, y: (torch.rand_like(x), y / (1 / x)),
        exact=False,
        name="noise_and_product",
        where={"x": operand(constant=False)},
    ),
    rule(lambda x, y: (x + y) * y, lambda x, y: x * y + y * y, exact=False, name="distributed"),
    rule(lambda x: torch.abs(-x), lambda x: torch.abs(x), name="abs_of_neg"),
    rule(
        lambda x, y: torch.rand_like(x) + y,
        lambda x, y: torch.addcmul(y, torch.rand_like(x), torch.ones_like(y)),
        name="noise",
        where={"y": operand(constant=False)},
    ),
    rule(lambda x: x.clone(), lambda x: x.mul(1.0), name="clone_as_product", benefit=-1),
)
# Rules that make a copy of a view, or a view of a copy: right only where nobody can tell.
_ALIASING = (
    rule(lambda x: x.transpose(0, 1).transpose(0, 1), lambda x: x.clone(), name="turned_copied"),
    rule(lambda x: x.unsqueeze(0).squeeze(), lambda x: x.clone(), name="axis_copied"),
    rule(lambda x: x.view(3, 4), lambda x: x.clone(), name="view_copied"),
    rule(lambda x: x[:], lambda x: x.clone(), name="slice_copied"),
    rule(lambda x: x.expand(3, 4), lambda x: x.clone(), name="expanded_copied"),
    rule(lambda x: x.reshape(3, 4), lambda x: x.clone(), name="reshape_copied"),
    rule(lambda x: x.to(torch.float32), lambda x: x.clone(), name="cast_copied"),
    rule(
        lambda x: x.contiguous(),
        lambda x: x.clone(memory_format=torch.contiguous_format),
        name="contiguous_copied",
    ),
    rule(
        lambda x: (x.transpose(0, 1).transpose(0, 1), -x),
        lambda x: (lambda y: (y, -y))(x.clone()),
        name="two_copied",
    ),
    rule(
        lambda x: (x.unsqueeze(0).squeeze(), x[:]),
        lambda x: (lambda y: (y[:], y))(x.clone()),
        name="two_views_of_a_copy",
    ),
    rule(
        lambda x: (x.unsqueeze(0).squeeze(), x[:]),
        lambda x: (x.clone(), x.clone()),
        name="two_views_as_copies",
    ),
    rule(lambda x: x.clone(), lambda x: x, name="copy_dropped"),
    rule(lambda x: x.clone(), lambda x: x[:], name="copy_viewed"),
    rule(lambda x: -x, lambda x: (0 - x).transpose(0, 1).transpose(0, 1), name="turned_new"),
    rule(lambda x: (x * x, x * x), lambda x: (lambda y: (y, y[:]))(x * x), name="squares_as_one"),
)
_SEVERAL = sorted(found.name for found in _OTHERS if len(found.pattern.outputs) > 1)
_RULES: dict[str, Rule] = {**dict(RULES.items()), **{found.name: found for found in _OTHERS}}
_BY_NAME: dict[str, Rule] = {**_RULES, **{found.name: found for found in _ALIASING}}

_CASES: dict[str, Any] = {
    "gm": GRAPHS,
    "rules": st.lists(st.sampled_from(sorted(_RULES)), min_size=1, unique=True),
    "fixpoint": st.booleans(),
    "typed": st.sampled_from([True, True, True, False]),
    "transposed": st.sampled_from([False, False, False, True]),
    "same": st.sampled_from([False, False, False, True]),
}
_QUIET = settings(
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def _check(
    gm: fx.GraphModule,
    rules: list[str],
    fixpoint: bool,
    typed: bool,
    transposed: bool,
    same: bool,
) -> int:
    try:
        expected = observe(gm, transposed=transposed, same=same)
    except RuntimeError:  # a view that torch refuses
        reject()
    if same and expected.writes_input:  # inputs are taken for distinct memory
        reject()
    before = copy.deepcopy(gm)
    if typed:
        x = torch.empty(SHAPE[::-1]).t() if transposed else torch.empty(SHAPE)
        propagate_types(gm, (x, x if same else torch.empty(SHAPE)))
    report = rewrite(gm, [_BY_NAME[name] for name in rules], fixpoint=fixpoint)
    verify(gm)
    differs = difference(expected, observe(gm, transposed=transposed, same=same))
    assert differs is None, (
        f"{differs} differ\n{format_graph(before)}\n{[str(s) for s in report.sites]}\n"
        f"{format_graph(gm)}"
    )
    return report.count


@settings(_QUIET, max_examples=70)
@given(**_CASES)
def test_rewriting_random_graphs_shows_nothing(**case: Any) -> None:
    _check(**case)


@pytest.mark.sampled
@settings(_QUIET, max_examples=150 if runs_every_case() else 50)
@given(**{**_CASES, "rules": st.just(_SEVERAL)})
def test_rules_of_several_results_on_random_graphs_show_nothing(**case: Any) -> None:
    _check(**case)


_ALIASING_CASES = {
    **_CASES,
    "rules": st.lists(
        st.sampled_from([found.name for found in _ALIASING]), min_size=1, max_size=4, unique=True
    ),
    "fixpoint": st.just(False),
}


@settings(_QUIET, max_examples=50)
@given(**_ALIASING_CASES)
def test_rules_that_copy_views_and_view_copies_show_nothing(**case: Any) -> None:
    _check(**case)


@pytest.mark.sweep
@settings(_QUIET, max_examples=4000)
@given(**_ALIASING_CASES)
def test_many_rules_that_copy_views_and_view_copies_show_nothing(**case: Any) -> None:
    _check(**case)


@pytest.mark.sweep
@settings(_QUIET, max_examples=2000)
@given(**_CASES)
def test_rewriting_many_random_graphs_shows_nothing(**case: Any) -> None:
    _check(**case)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("check", "rules"),
    [
        ("_written_operand", sorted(_RULES)),
        ("_moved_effect", ["noise"]),
        ("_new_alias", sorted(_RULES)),
        ("_lost_alias", [found.name for found in _ALIASING]),
    ],
)
def test_random_graphs_find_the_absence_of_each_check(
    check: str, rules: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graphs are hard enough: each check that is taken away is missed."""
    monkeypatch.setattr(Safety, check, lambda *_: None)

    @settings(_QUIET, max_examples=2000, report_multiple_bugs=False, phases=[Phase.generate])
    @given(**_CASES)
    def explore(**case: Any) -> None:
        _check(**{**case, "rules": rules})

    with pytest.raises(AssertionError, match="differ"):
        explore()
