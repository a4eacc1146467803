"""A small model of every family, a batch for it, its loss and its gradients."""

from __future__ import annotations

import torch
from torch import nn

from tests.parity.models import build_model

IDS = torch.arange(12).reshape(2, 6) % 20 + 1
FAMILIES = {
    "bert": "small-bert", "gpt2": "small-gpt2", "t5": "small-t5", "vit": "vit",
    "llama": "small-llama", "custom": "small-plain",
}  # fmt: skip
"""Family -> the name of its smallest model."""


def make(family: str, dropout: float = 0.0) -> nn.Module:
    return build_model(FAMILIES[family], dropout, layers=3).train()


GENERATING = {"gpt2", "t5", "llama"}
"""Those that keep keys and values for generation, in training too unless they are told not to."""


def make_batch(family: str) -> dict[str, torch.Tensor]:
    if family == "vit":
        pixels = torch.linspace(-1, 1, 2 * 3 * 256).reshape(2, 3, 16, 16)
        return {"pixel_values": pixels, "labels": torch.tensor([0, 1])}
    if family == "bert":
        return {"input_ids": IDS, "labels": torch.tensor([0, 1])}
    return {"input_ids": IDS, "labels": IDS}


def get_loss(
    model: nn.Module, family: str, seed: int = 1, *, has_cache: bool = True
) -> torch.Tensor:
    torch.manual_seed(seed)
    options = {} if has_cache or family not in GENERATING else {"use_cache": False}
    loss: torch.Tensor = model(**make_batch(family), **options)["loss"]
    return loss


def get_gradients(
    model: nn.Module, family: str, *, has_cache: bool = True
) -> dict[str, torch.Tensor]:
    model.zero_grad()
    get_loss(model, family, has_cache=has_cache).backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
