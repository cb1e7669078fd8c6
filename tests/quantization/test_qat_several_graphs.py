"""Training with fake quantisation of programs with several graphs: each place has its own scale."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxkit
from fxkit import quantization as q
from fxkit.errors import FxkitError

LARGE, SMALL = 30.0, 0.03


class Branches(nn.Module):
    """Two branches whose nodes have the same names, one with values a thousand times as large."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 16)
        self.large = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.small = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return self.head(self.large(self.stem(x) * LARGE))
        return self.head(self.small(self.stem(x) * SMALL))


def batches() -> list[tuple[Tensor]]:
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    x = x * x.sum().sign()
    return [(x,), (-x,)]


def model() -> Branches:
    torch.manual_seed(0)
    made = Branches()
    with torch.no_grad():
        for _ in range(50):  # so that the norms know their input
            for batch in batches():
                made(*batch)
    return made


def train(trained: q.QatProgram, seen: list[tuple[Tensor]], steps: int = 3) -> None:
    steps_to_learn = {"params": trained.quantizers.parameters(), "lr": 1e-6}
    optimizer = torch.optim.SGD([{"params": trained.model.parameters()}, steps_to_learn], lr=0.001)
    for _ in range(steps):
        for batch in seen:
            optimizer.zero_grad()
            F.cross_entropy(trained(*batch), torch.arange(64) % 4).backward()
            optimizer.step()


def check(trained: q.QatProgram) -> None:
    """See that results are near the float model's, and that what is converted computes them."""
    trained.eval()
    floats = trained.model
    with torch.no_grad():
        quantized = q.convert(trained)
        for batch in batches():
            wanted = floats(*batch)
            assert (trained(*batch) - wanted).abs().max() < 0.1 * wanted.abs().max()
            # An element between two steps may round to either.
            difference = (quantized(*batch) - trained(*batch)).abs()
            assert difference.max() < 0.01 * wanted.abs().max()
            assert difference.median() < 1e-4 * wanted.abs().max()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("learn_steps", [False, True])
@pytest.mark.parametrize("spec", [q.int8_static(), q.int8_dynamic()], ids=["static", "dynamic"])
@pytest.mark.parametrize("first", [0, 1])
def test_each_branch_has_its_own_scales(
    first: int, spec: q.QuantizationSpec, learn_steps: bool
) -> None:
    trained = q.prepare_qat(
        model(), batches()[first], spec, batches=batches(), learn_steps=learn_steps
    )
    train(trained, batches())
    check(trained)


def test_ranges_of_a_branch_that_was_not_shown_begin_with_its_first_batch() -> None:
    trained = q.prepare_qat(model(), batches()[0], q.int8_static())
    train(trained, batches())
    check(trained)


def test_training_of_branches_runs_compiled() -> None:
    plain, fast = (q.prepare_qat(model(), batches()[0], q.int8_static()) for _ in range(2))
    train(plain, batches())
    compiled = fxkit.compile(fast.program)
    optimizer = torch.optim.SGD(fast.parameters(), lr=0.001)
    for _ in range(3):
        for batch in batches():
            optimizer.zero_grad()
            F.cross_entropy(compiled(*batch), torch.arange(64) % 4).backward()
            optimizer.step()
    for ours, theirs in zip(fast.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_a_branch_that_never_ran_stays_in_float() -> None:
    trained = q.prepare_qat(model(), batches()[0], q.int8_static())
    train(trained, batches()[:1])
    trained.eval()
    x = batches()[1]
    with torch.no_grad():
        wanted = trained.model(*x)
        assert (trained(*x) - wanted).abs().max() < 0.1 * wanted.abs().max()
        with pytest.warns(UserWarning, match="calibration has met, got new ones"):
            found = q.convert(trained)(*x)
        assert (found - wanted).abs().max() < 0.1 * wanted.abs().max()


def test_steps_are_learnt_only_where_batches_say_where_to_begin() -> None:
    trained = q.prepare_qat(model(), batches()[0], q.int8_static(), learn_steps=True)
    with pytest.raises(FxkitError, match="expected batches for each branch of the model"):
        train(trained, batches())


def test_users_that_only_training_has_share_the_scale() -> None:
    class Auxiliary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            y = x.tanh()
            return self.a(y) + self.b(y) if self.training else self.a(y)

    x = batches()[0]
    trained = q.prepare_qat(Auxiliary(), x, q.int8_static(), momentum=1.0)
    trained(3 * x[0])
    trained.eval()
    with torch.no_grad():
        torch.testing.assert_close(q.convert(trained)(*x), trained(*x), rtol=1e-5, atol=1e-5)
    assert len([name for name in trained.quantizers if name.startswith("activation/")]) == 1
