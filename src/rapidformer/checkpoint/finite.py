"""A checkpoint never holds weights that are NaN or infinite: nobody can train on from them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from rapidformer.dist.collectives import gather_from_all
from rapidformer.errors import TrainingError


def check_finite(model: nn.Module, tensors: Mapping[str, torch.Tensor], step: int) -> None:
    """Stop all ranks if a trained weight is not finite on any of them; each passes its own.

    Weights that are not trained are what the user loaded; some hold an infinity on purpose.
    """
    trained = {f"model.{name}" for name, p in model.named_parameters() if p.requires_grad}
    own = {name: tensor for name, tensor in tensors.items() if name in trained}
    found = [name for names in gather_from_all(_find_not_finite(own)) for name in names]
    if found:
        names = list(dict.fromkeys(name.removeprefix("model.") for name in found))
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise TrainingError(
            f"the weights are not finite at step {step} ({names[0]}{more}): this state is not "
            "saved, and earlier checkpoints stay as they are. Resume from one of them with a lower "
            "--lr or --clip-grad 1.0."
        )


def _find_not_finite(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Needs no memory, unlike ``isfinite`` of whole tensors."""
    names: list[str] = []
    verdicts: list[torch.Tensor] = []
    for name, tensor in tensors.items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.numel() and local.is_floating_point():
            smallest, largest = torch.aminmax(local.detach())  # both are NaN if one element is
            names.append(name)
            verdicts.append(smallest.isfinite() & largest.isfinite())
    if not names:
        return []
    # One transfer: reading each verdict by itself would wait for the device every time.
    is_finite = torch.stack([verdict.to(verdicts[0].device) for verdict in verdicts]).tolist()
    return [name for name, is_fine in zip(names, is_finite, strict=True) if not is_fine]
