"""What the demo's steps hand to each other, and in the end to the report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, fx

from fxkit.demo.building import DemoModel
from fxkit.demo.judge import Neighbour
from fxkit.demo.model import SentenceEncoder
from fxkit.passes.manager.manager import PassResult
from fxkit.view.profiling.profile_result import Profile


@dataclass(frozen=True)
class DemoSubject:
    """What goes through the steps.

    Attributes:
        texts: The sentences.
        encoder: The model.
        inputs: Token ids and mask of the sentences, i64[B, T] each.
    """

    texts: tuple[str, ...]
    encoder: SentenceEncoder
    inputs: tuple[Tensor, Tensor]


@dataclass(frozen=True)
class DemoVerdict:
    """How good the embeddings are.

    Attributes:
        eager_error: Error of eager against float64, relative, by norm.
        error: The same of fxkit.
        eager: Neighbours by eager's embeddings.
        ours: Neighbours by fxkit's.
    """

    eager_error: float
    error: float
    eager: list[list[Neighbour]]
    ours: list[list[Neighbour]]


@dataclass(frozen=True)
class Journey:
    """All that the steps found out.

    Attributes:
        subject: The model and its inputs.
        before: The graph as it was captured.
        result: What the passes did.
        built: The compiled module.
        verdict: Errors and neighbours.
        times: Median seconds of a call, measured in turn, by name.
        profile: Where eager spends its time in the rewritten graph.
        fused_profile: Where the compiled module does, measured right after that.
    """

    subject: DemoSubject
    before: fx.GraphModule
    result: PassResult
    built: DemoModel
    verdict: DemoVerdict
    times: Mapping[str, float]
    profile: Profile
    fused_profile: Profile
