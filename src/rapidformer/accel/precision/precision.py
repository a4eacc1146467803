"""The arithmetic of a run: fp32, or 16 bits through autocast; fp16 also needs loss scaling."""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch

from rapidformer.accel.precision import processor
from rapidformer.errors import ConfigurationError
from rapidformer.log import warn_once


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The arithmetic of a run and why it was chosen."""

    dtype: torch.dtype | None
    reason: str

    @property
    def name(self) -> Literal["fp32", "fp16", "bf16"]:
        return "fp32" if self.dtype is None else "fp16" if self.needs_loss_scaling else "bf16"

    @property
    def needs_loss_scaling(self) -> bool:
        return self.dtype is torch.float16

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        if self.dtype is None:
            return nullcontext()
        return torch.autocast(device.type, dtype=self.dtype)


def choose_precision(asked: str | None, device: torch.device) -> Precision:
    """bf16 if the device supports it, else fp16, or what the user asked for."""
    if asked is None:
        return Precision(dtype=None, reason="fp32")
    is_fp16 = asked == "fp16"
    if device.type == "cpu":
        # What the CPU would have to emulate stays in fp32.
        wanted = "fp16" if is_fp16 else "bf16"
        if not (processor.has_fp16() if is_fp16 else processor.has_bf16()):
            warn_once(
                f"this processor has no {wanted}: the run stays in fp32, which is many times "
                f"faster than emulating {wanted}.",
                is_local=True,
            )
            return Precision(dtype=None, reason=f"fp32 (this processor has no {wanted})")
    elif not torch.cuda.is_bf16_supported(including_emulation=False):
        if asked == "bf16":
            name = torch.cuda.get_device_name(device)
            raise ConfigurationError(f"--mixed-precision bf16: {name} has no bf16; use fp16.")
        is_fp16 = True
    if is_fp16:
        why = "asked for" if asked == "fp16" else "this device has no bf16"
        return Precision(dtype=torch.float16, reason=f"fp16 with loss scaling ({why})")
    why = "asked for" if asked == "bf16" else "this device supports it"
    return Precision(dtype=torch.bfloat16, reason=f"bf16 ({why})")


def to_fp32(output: Any) -> Any:
    """A loss that the user computes from the output must not be computed in 16 bits."""
    if isinstance(output, torch.Tensor):
        return output.float() if output.dtype in (torch.float16, torch.bfloat16) else output
    if dataclasses.is_dataclass(output) and isinstance(output, dict):
        # Hugging Face's output objects: assignment keeps key and attribute in sync.
        for key, value in list(output.items()):
            output[key] = to_fp32(value)
        return output
    if isinstance(output, dict):
        return type(output)({key: to_fp32(value) for key, value in output.items()})
    if isinstance(output, tuple) and hasattr(output, "_fields"):
        return type(output)(*(to_fp32(value) for value in output))
    if isinstance(output, (list, tuple)):
        return type(output)(to_fp32(value) for value in output)
    return output
