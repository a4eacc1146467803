"""Wide convolutions: the same values and gradients from Fourier transforms."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import Wav2Vec2Config, Wav2Vec2ForSequenceClassification

from rapidformer.accel.wide_convolutions import apply_wide_convolutions, convolve
from rapidformer.overlay import list_layers


@pytest.mark.parametrize(("steps", "width", "padding"), [(49, 128, 64), (64, 64, 0), (1, 65, 40)])
def test_values_and_gradients_of_both_orders(steps: int, width: int, padding: int) -> None:
    torch.manual_seed(0)
    values = torch.randn(2, 6, steps, requires_grad=True)
    weight = (0.1 * torch.randn(9, 2, width)).requires_grad_()
    found = []
    for output in (
        convolve(values, weight, padding, 3),
        functional.conv1d(values, weight, padding=padding, groups=3),
    ):
        slopes = torch.autograd.grad(output.square().sum(), (values, weight), create_graph=True)
        curves = torch.autograd.grad(slopes[1].square().sum(), (values, weight))
        found.append((output, *slopes, *curves))
    for mine, theirs in zip(*found, strict=True):
        assert mine.shape == theirs.shape
        assert (mine - theirs).abs().max() < 1e-5 * theirs.abs().max()


def test_a_model_in_16_bits() -> None:
    """Positions are no further from fp32 than those of torch's convolution; fp32 stays as it is."""
    torch.manual_seed(0)
    config = Wav2Vec2Config(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        conv_dim=(16, 16), conv_stride=(4, 2), conv_kernel=(8, 4), layerdrop=0.0,
    )  # fmt: skip
    plain = Wav2Vec2ForSequenceClassification(config).eval()
    model, values = copy.deepcopy(plain), torch.randn(2, 1200)
    assert apply_wide_convolutions(model) == 1
    extended = [name for name, module in model.named_modules() if list_layers(module)]
    assert extended == ["wav2vec2.encoder.pos_conv_embed.conv"]
    assert torch.equal(model(values).logits, plain(values).logits)

    hidden = torch.randn(2, 50, 32)

    def run(model: nn.Module) -> list[torch.Tensor]:
        encoder = model.get_submodule("wav2vec2.encoder.pos_conv_embed")
        output = encoder(hidden)
        weights = list(encoder.parameters())
        return [output, *torch.autograd.grad(output.float().square().sum(), weights)]

    exact = run(plain)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        theirs, mine = run(plain), run(model)
    assert mine[0].dtype == theirs[0].dtype == torch.bfloat16
    for wanted, other, value in zip(exact, theirs, mine, strict=True):
        distance = (other.float() - wanted).norm()
        assert 0 < (value.float() - wanted).norm() <= 1.1 * distance


@pytest.mark.parametrize(
    "module",
    [
        nn.Conv1d(4, 4, 31, groups=2),
        nn.Conv1d(4, 4, 128, groups=4),
        nn.Conv1d(4, 4, 128),
        nn.Conv1d(4, 4, 128, groups=2, stride=2),
        nn.Conv1d(4, 4, 128, groups=2, padding="same"),
        nn.Conv1d(4, 4, 128, groups=2, padding=4, padding_mode="circular"),
    ],
)
def test_other_convolutions_are_left_alone(module: nn.Module) -> None:
    assert apply_wide_convolutions(nn.Sequential(module)) == 0


def test_a_traced_model_keeps_its_convolution() -> None:
    model = nn.Sequential(nn.Conv1d(4, 4, 64, groups=2, padding=32)).to(torch.bfloat16)
    values = torch.randn(1, 4, 20, dtype=torch.bfloat16)
    expected = model(values)
    assert apply_wide_convolutions(model) == 1
    assert torch.equal(torch.jit.trace(model, (values,))(values), expected)
