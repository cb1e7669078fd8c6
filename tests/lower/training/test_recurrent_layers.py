"""A recurrent layer that is trained is torch's own, a stage between compiled ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxkit
from fxkit.lower.training import training_module
from fxkit.lower.training.training_module import TrainingModule
from tests.sampling import one_in

_REASON = "torch computes recurrent layers as a whole"


@pytest.fixture(autouse=True)
def _every_kernel_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_module, "CALL_SECONDS", -1.0)


class Tagger(nn.Module):
    """Embeds tokens, runs over them, and looks at all states and at the last ones."""

    def __init__(self, kind: str, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.first = getattr(nn, kind)(16, 8, 2, batch_first=True, dropout=dropout)
        self.second = getattr(nn, kind)(8, 8, bidirectional=True, batch_first=True)
        self.head = nn.Linear(16, 5)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        states, last = self.first(self.embedding(tokens).tanh() * 1.5)
        features, _ = self.second(torch.relu(states) + 0.1)
        last = last[0] if isinstance(last, tuple) else last
        return torch.softmax(self.head(features), -1), last[-1].sigmoid()


@pytest.mark.parametrize(("dropout", "kind"), one_in(2, [0.0, 0.5], ["LSTM", "GRU", "RNN"]))
def test_it_is_trained_as_in_eager(kind: str, dropout: float) -> None:
    eager, twin = Tagger(kind, dropout), Tagger(kind, dropout)
    twin.load_state_dict(eager.state_dict())
    fast = fxkit.compile(twin)
    for length in (6, 6, 6, 9, 9):
        tokens = torch.randint(20, (3, length))
        found = []
        for net in (eager, fast):
            torch.manual_seed(length)
            net.zero_grad()
            scores, last = net(tokens)
            (scores.square().sum() + last.sum()).backward()
            found.append([scores, last, *(p.grad for p in net.parameters())])
        torch.testing.assert_close(found[1], found[0])
    reasons = [module.reason for module in fast.compiled_modules]
    assert reasons.count(_REASON) == 2 * len(reasons) / 6 and reasons.count(None) > 0


def test_a_layer_alone_is_left_to_eager() -> None:
    layer = nn.GRU(4, 3)
    fast = fxkit.compile(layer)
    x = torch.randn(5, 2, 4, requires_grad=True)
    for _ in range(3):
        torch.testing.assert_close(fast(x), layer(x))
    (module,) = fast.compiled_modules
    assert isinstance(module, TrainingModule) and module.reason == _REASON
    with pytest.warns(UserWarning, match=f"trained in eager: {_REASON}"):
        fxkit.compile(layer, train=True)(x)


def test_without_gradients_it_is_one_call_of_the_graph() -> None:
    net = Tagger("LSTM").eval()
    fast = fxkit.compile(net)
    tokens = torch.randint(20, (3, 6))
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(fast(tokens), net(tokens))
    assert fast.compiled_modules[0].has_kernels
