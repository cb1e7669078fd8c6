"""Families of models, and of training steps."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.fusion.case import Case, Family, Work
from fxkit.demo.model import load
from fxkit.demo.sentences import ALL


def _encoder(count: int) -> Work:
    demo = load()
    return Work(demo.encoder, demo.inputs(ALL[:count]))


class _LlamaBlock(nn.Module):
    """A layer of Llama: rotary attention with a mask, and a gated feed-forward block."""

    def __init__(self) -> None:
        super().__init__()
        import transformers

        config = transformers.LlamaConfig(
            vocab_size=32, hidden_size=1024, num_attention_heads=16, num_key_value_heads=4,
            intermediate_size=2816, num_hidden_layers=1,
        )  # fmt: skip
        self.model = transformers.LlamaModel(config)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.model(inputs_embeds=hidden, use_cache=False).last_hidden_state


def _llama_block() -> Work:
    torch.manual_seed(0)
    return Work(_LlamaBlock().eval().requires_grad_(False), (torch.randn(1, 256, 1024),))


class _DecodeStep(nn.Module):
    """One token more of GPT-2, after those whose keys and values are cached."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        import transformers

        self.model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=layers))

    def forward(self, token: Tensor, cache: Tensor) -> Tensor:
        from transformers import DynamicCache

        past = DynamicCache()
        for layer, (key, value) in enumerate(cache):
            past.update(key, value, layer)
        return self.model(token, past_key_values=past, use_cache=True).logits


def _decode_step() -> Work:
    torch.manual_seed(0)
    layers = 4
    cache = torch.randn(layers, 2, 1, 12, 128, 64)
    model = _DecodeStep(layers).eval().requires_grad_(False)
    return Work(model, (torch.randint(50257, (1, 1)), cache))


def _network(name: str, batch: int = 1) -> Case:
    def make() -> Work:
        from pytorchcv.model_provider import get_model

        torch.manual_seed(0)
        module = get_model(name).eval().requires_grad_(False)
        return Work(module, (torch.randn(batch, 3, 224, 224),))

    return Case(f"{name} {batch}×3×224×224", make)


class _NormGelu(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.gelu(self.norm(x + y))


class FeedForward(nn.Module):
    """The feed-forward block of a transformer, with its norm and residual."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Classifier(nn.Module):
    """A network with its loss."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x), target)


class _Gate(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(x * y) * torch.sigmoid(x) + y


class _Weights(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.softmax(x * 0.125 + y, -1)


def _step_of(module: nn.Module, *shapes: tuple[int, ...]) -> Work:
    torch.manual_seed(0)
    args = tuple(torch.randn(*shape, requires_grad=True) for shape in shapes)
    return Work(module, args, (*args, *module.parameters()))


def _resnet_step() -> Work:
    from pytorchcv.model_provider import get_model

    torch.manual_seed(0)
    module = Classifier(get_model("resnet18").train())
    args = (torch.randn(4, 3, 224, 224), torch.randint(1000, (4,)))
    return Work(module, args, tuple(module.parameters()))


_NARROW = (4096, 1024)
FAMILIES = {
    "training": Family(
        (
            Case("norm_gelu 4096×1024", lambda: _step_of(_NormGelu(1024), _NARROW, _NARROW)),
            Case("gate 2048×1024", lambda: _step_of(_Gate(), (2048, 1024), (2048, 1024))),
            Case("weights 4096×512", lambda: _step_of(_Weights(), (4096, 512), (4096, 512))),
        ),
        goal=2.3,
    ),
    "training_mlp": Family(
        (
            Case("block 512×512×2048", lambda: _step_of(FeedForward(512, 2048), (512, 512))),
            Case("block_small 64×256×1024", lambda: _step_of(FeedForward(256, 1024), (64, 256))),
        ),
        goal=1.15,
    ),
    "text": Family(
        (
            Case("minilm 48 sentences", lambda: _encoder(48)),
            Case("minilm_one 1 sentence", lambda: _encoder(1)),
            Case("llama_block 256×1024", _llama_block),
            Case("gpt2_decode 4 layers, 128 cached", _decode_step),
        )
    ),
    "images": Family(
        (
            _network("resnet18"),
            Case("resnet18_training 4×3×224×224", _resnet_step),
        )
    ),
    "mobile_images": Family((_network("mobilenetv2_w1"), _network("efficientnet_b0"))),
}
