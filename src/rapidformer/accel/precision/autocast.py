"""``--mixed-precision``: the model's own ``__call__`` enters autocast, on weights kept in fp32."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rapidformer.accel.assembly import Assembly
from rapidformer.accel.precision.precision import Precision, to_fp32
from rapidformer.overlay import extend


def apply(assembly: Assembly) -> None:
    """Run every call of the model in the run's precision, which has its own start-up line."""
    if assembly.needs_autocast:
        apply_mixed_precision(assembly.model, assembly.precision, assembly.device)


def keep_fp32_weights(assembly: Assembly) -> str | None:
    """Row ``fp32 weights``: before weights are split, which copies them."""
    if assembly.precision.dtype is None:
        return None
    half = (torch.float16, torch.bfloat16)
    weights = [p for p in assembly.model.parameters() if p.dtype in half]
    for parameter in weights:
        parameter.data = parameter.data.float()
    return f"{len(weights)} weights that were in 16 bits" if weights else None


def apply_mixed_precision(
    model: nn.Module, precision: Precision, device: torch.device
) -> nn.Module:
    """Run every call of the model under autocast, on fp32 weights."""
    if precision.dtype is not None:
        extend(model, "autocast", lambda cls: _build_autocast(cls, precision, device))
    return model


def _build_autocast(
    cls: type[nn.Module], precision: Precision, device: torch.device
) -> dict[str, Any]:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with precision.autocast(device):
            output = cls.__call__(self, *args, **kwargs)
        has_loss = isinstance(output, dict) and output.get("loss") is not None
        return output if has_loss else to_fp32(output)

    return {"__call__": call}
