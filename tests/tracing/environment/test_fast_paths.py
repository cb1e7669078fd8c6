"""Layers of torch with fast paths: captured, they give what they give unobserved."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch
from torch import nn

from fxkit.tracing.captured import Captured

# Of nested tensors, of slow masks, and of layers that could be faster.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def _layer() -> nn.TransformerEncoderLayer:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(16, 2, 24, batch_first=True).eval()


def _check(program, *args: torch.Tensor, same: bool = True) -> Captured:
    captured = Captured(program)
    with torch.no_grad():
        right = program(*args)
        for _ in range(2):
            found = captured(*args)
            tolerance = (0.0, 0.0) if same else (1e-5, 1e-6)
            torch.testing.assert_close(
                found, right, rtol=tolerance[0], atol=tolerance[1], equal_nan=True
            )
            assert found.stride() == right.stride()
    return captured


def test_padding_comes_out_of_an_encoder_as_zeros():
    encoder = nn.TransformerEncoder(_layer(), 2).eval()
    mask = torch.arange(5) >= torch.tensor([[5], [3]])
    captured = _check(lambda x: encoder(x, src_key_padding_mask=mask), torch.randn(2, 5, 16))
    with torch.no_grad():
        assert not captured(torch.randn(2, 5, 16))[1, 3:].any()


@pytest.mark.parametrize("kind", ["numbers", "bools", "nothing left", "causal"])
def test_masks_of_a_layer_count_as_in_eager(kind: str):
    layer, x = _layer(), torch.randn(2, 5, 16)
    masks = {
        "numbers": torch.randn(5, 5),
        "bools": torch.eye(5, dtype=torch.bool),
        "nothing left": torch.ones(5, 5, dtype=torch.bool),
        "causal": nn.Transformer.generate_square_subsequent_mask(5),
    }
    assert _check(lambda x: layer(x, src_mask=masks[kind]), x).whole


def test_layers_without_masks_keep_their_operators_apart():
    layer = _layer()
    captured = _check(layer, torch.randn(2, 5, 16), same=False)
    assert any("layer_norm" in str(node.target) for node in captured.nodes)


def test_the_result_of_attention_lies_as_in_eager():
    attention = nn.MultiheadAttention(16, 2, batch_first=True).eval()
    x = torch.randn(2, 5, 16)
    padding = torch.arange(5) >= torch.tensor([[5], [3]])
    assert _check(lambda x: attention(x, x, x)[0].view(2, -1), x, same=False).whole
    assert _check(lambda x: attention(x, x, x, key_padding_mask=padding)[0], x).whole
    others = [lambda x: attention(x, x, x)[0] + attention(x, x * 2, x)[0]]
    others += [lambda x: (attention(x, x, x)[0], attention(x, x * 2, x)[0])[1]]
    assert all(_check(program, x, same=False).whole for program in others)


def test_other_threads_are_asked_as_before():
    seen: list[bool] = []

    def ask() -> None:
        class Mode(torch.overrides.TorchFunctionMode):
            def __torch_function__(self, func, types, args=(), kwargs=None):
                return func(*args, **(kwargs or {}))

        seen.append(torch.overrides.has_torch_function((torch.ones(1),)))
        with Mode():
            seen.append(torch.overrides.has_torch_function((torch.ones(1),)))

    class Layer(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            thread = threading.Thread(target=ask)
            thread.start()
            thread.join()
            seen.append(torch.overrides.has_torch_function((x,)))
            return x + 1

    before = torch.overrides.has_torch_function
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Captured(Layer())(torch.ones(2))
    assert seen == [False, True, False]
    assert torch.overrides.has_torch_function is before
