"""Small random models of many architectures, each with inputs of two sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Inputs = dict[str, torch.Tensor]
Architecture = Callable[[], tuple[torch.nn.Module, Callable[[int], Inputs]]]

_SMALL = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}


def _ids(batch: int, length: int = 7) -> torch.Tensor:
    return torch.randint(3, 99, (batch, length))


def _text(batch: int) -> Inputs:
    ids = _ids(batch)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _sequence_pair(batch: int) -> Inputs:
    return {**_text(batch), "decoder_input_ids": _ids(batch, 5)}


def _pixels(size: int) -> Callable[[int], Inputs]:
    return lambda batch: {"pixel_values": torch.randn(batch, 3, size, size)}


def _of(
    config: str, model: str, inputs: Callable[[int], Inputs] = _text, **options: Any
) -> Architecture:
    def make() -> tuple[torch.nn.Module, Callable[[int], Inputs]]:
        import transformers

        built = getattr(transformers, model)(getattr(transformers, config)(**options))
        return built.eval(), inputs

    return make


def _like_bert(name: str, **options: Any) -> Architecture:
    return _of(f"{name}Config", f"{name}Model", **(_SMALL | options))


def _clip() -> tuple[torch.nn.Module, Callable[[int], Inputs]]:
    import transformers

    text = {**_SMALL, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    vision = {**_SMALL, "image_size": 30, "patch_size": 15}
    vision.pop("vocab_size")
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    return (
        transformers.CLIPModel(config).eval(),
        lambda batch: {**_text(batch), **_pixels(30)(batch)},
    )


_GPT = {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
_LLAMA = {**_SMALL, "num_key_value_heads": 2}
_VISION = {key: value for key, value in _SMALL.items() if key != "vocab_size"} | {
    "image_size": 30,
    "patch_size": 15,
}
_TWO_STACKS = {
    "vocab_size": 99,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 37,
    "decoder_ffn_dim": 37,
}

HUGGING_FACE: dict[str, Architecture] = {
    "bert": _like_bert("Bert"),
    "roberta": _like_bert("Roberta", max_position_embeddings=70),
    "albert": _like_bert("Albert", embedding_size=16),
    "electra": _like_bert("Electra", embedding_size=16),
    "distilbert": _of(
        "DistilBertConfig",
        "DistilBertModel",
        vocab_size=99,
        dim=32,
        n_layers=2,
        n_heads=4,
        hidden_dim=37,
        max_position_embeddings=64,
    ),
    "deberta_v2": _like_bert("DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"]),
    "gpt2": _of("GPT2Config", "GPT2LMHeadModel", **_GPT),
    "gpt_neox": _like_bert("GPTNeoX"),
    "opt": _of(
        "OPTConfig",
        "OPTModel",
        vocab_size=99,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_dim=37,
        max_position_embeddings=64,
        word_embed_proj_dim=32,
    ),
    "llama": _of("LlamaConfig", "LlamaForCausalLM", **_LLAMA),
    "qwen3": _of("Qwen3Config", "Qwen3ForCausalLM", **_LLAMA, head_dim=8),
    "mixtral": _of("MixtralConfig", "MixtralForCausalLM", **_LLAMA, num_local_experts=4),
    "mamba": _of(
        "MambaConfig",
        "MambaModel",
        vocab_size=99,
        hidden_size=32,
        num_hidden_layers=2,
        state_size=4,
    ),
    "t5": _of(
        "T5Config",
        "T5ForConditionalGeneration",
        _sequence_pair,
        vocab_size=99,
        d_model=32,
        d_kv=8,
        d_ff=37,
        num_layers=2,
        num_heads=4,
    ),
    "bart": _of(
        "BartConfig",
        "BartModel",
        _sequence_pair,
        **_TWO_STACKS,
        max_position_embeddings=64,
    ),
    "vit": _of("ViTConfig", "ViTModel", _pixels(30), **_VISION),
    "swin": _of(
        "SwinConfig",
        "SwinModel",
        _pixels(32),
        image_size=32,
        patch_size=2,
        embed_dim=16,
        depths=[1, 2],
        num_heads=[2, 2],
        window_size=2,
    ),
    "convnext": _of(
        "ConvNextConfig",
        "ConvNextModel",
        _pixels(32),
        hidden_sizes=[8, 16],
        depths=[1, 2],
        num_stages=2,
    ),
    "clip": _clip,
    "whisper": _of(
        "WhisperConfig",
        "WhisperModel",
        lambda batch: {
            "input_features": torch.randn(batch, 80, 60),
            "decoder_input_ids": _ids(batch, 5),
        },
        **_TWO_STACKS,
        max_source_positions=30,
        max_target_positions=20,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=2,
    ),
}

CONVOLUTIONAL = (
    *("resnet18", "mobilenetv2_w1", "densenet121", "squeezenet_v1_1", "shufflenetv2_w1"),
    *("efficientnet_b0", "vgg11", "seresnet18", "mobilenet_w1", "ghostnet"),
)


def convolutional(name: str, size: int = 224) -> tuple[torch.nn.Module, Callable[[int], Inputs]]:
    """Return a pytorchcv model with random weights, and its inputs of this height and width."""
    from pytorchcv.model_provider import get_model

    return get_model(name).eval(), lambda batch: {"x": torch.randn(batch, 3, size, size)}
