"""Mixed precision: 16-bit arithmetic through autocast, weights and optimizer state in fp32.

The model's ``__call__`` runs under autocast, so a user's own loop needs no context manager. fp16
also needs loss scaling: ``LossScaler`` lowers it with hysteresis, and the engine
removes the scale when it divides the gradients anyway.
"""

from __future__ import annotations

import dataclasses
import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rapidformer.accel.precision import processor
from rapidformer.dist.collectives import broadcast_object
from rapidformer.errors import ConfigurationError, TrainingError
from rapidformer.log import warn_once
from rapidformer.overlay import extend


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The arithmetic of a run and why it was chosen."""

    dtype: torch.dtype | None
    reason: str

    @property
    def needs_loss_scaling(self) -> bool:
        return self.dtype is torch.float16

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        if self.dtype is None:
            return nullcontext()
        return torch.autocast(device.type, dtype=self.dtype)


def choose_precision(asked: str | None, device: torch.device) -> Precision:
    """bf16 if the device supports it, else fp16, or what the user asked for.

    A CPU that would have to emulate 16-bit arithmetic stays in fp32.
    """
    if asked is None:
        return Precision(dtype=None, reason="fp32")
    if device.type == "cpu":
        return _choose_on_cpu(asked)
    has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    if asked == "bf16" and not has_bf16:
        name = torch.cuda.get_device_name(device)
        raise ConfigurationError(f"--mixed-precision bf16: {name} has no bf16; use fp16.")
    if asked == "fp16" or not has_bf16:
        why = "asked for" if asked == "fp16" else "this device has no bf16"
        return Precision(dtype=torch.float16, reason=f"fp16 with loss scaling ({why})")
    return Precision(dtype=torch.bfloat16, reason=f"bf16 ({_explain_bf16(asked)})")


def _choose_on_cpu(asked: str) -> Precision:
    wanted = "fp16" if asked == "fp16" else "bf16"
    if not (processor.has_fp16() if wanted == "fp16" else processor.has_bf16()):
        warn_once(
            f"this processor has no {wanted}: the run stays in fp32, which is many times faster "
            f"than emulating {wanted}.",
            is_local=True,
        )
        return Precision(dtype=None, reason=f"fp32 (this processor has no {wanted})")
    if wanted == "fp16":
        return Precision(dtype=torch.float16, reason="fp16 with loss scaling (asked for)")
    return Precision(dtype=torch.bfloat16, reason=f"bf16 ({_explain_bf16(asked)})")


def _explain_bf16(asked: str) -> str:
    return "asked for" if asked == "bf16" else "this device supports it"


def apply_fp32_weights(model: nn.Module, precision: Precision) -> nn.Module:
    """Keep a mixed-precision run's weights in fp32; before they are split, which copies them."""
    if precision.dtype is not None:
        for parameter in model.parameters():
            if parameter.dtype in (torch.float16, torch.bfloat16):
                parameter.data = parameter.data.float()
    return model


def apply_mixed_precision(
    model: nn.Module, precision: Precision, device: torch.device
) -> nn.Module:
    """Run every call of the model under autocast, on fp32 weights."""
    if precision.dtype is None:
        return model
    extend(model, "autocast", lambda cls: _build_autocast(cls, precision, device))
    return model


def _build_autocast(
    cls: type[nn.Module], precision: Precision, device: torch.device
) -> dict[str, Any]:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with precision.autocast(device):
            output = cls.__call__(self, *args, **kwargs)
        return output if _has_loss(output) else to_fp32(output)

    return {"__call__": call}


def _has_loss(output: Any) -> bool:
    return isinstance(output, dict) and output.get("loss") is not None


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


class LossScaler:
    """Keeps fp16 gradients in range: a fixed factor, or one that adapts."""

    def __init__(
        self,
        *,
        fixed: float | None = None,
        initial: float = 2.0**16,
        minimum: float = 1.0,
        window: int = 1000,
        hysteresis: int = 2,
    ) -> None:
        self.scale = fixed if fixed is not None else initial
        self._is_dynamic = fixed is None
        self._minimum = minimum
        self._window = window
        self._hysteresis = hysteresis
        self._patience = hysteresis
        self._clean_updates = 0
        self.weight_unit: float | None = None
        """The unit for loss weights when several ranks add them: close to a typical weight, so that
        many labels do not use up fp16's range. A power of two, so it changes no bits.
        """

    def agree_on_unit(self, weight: float) -> None:
        """Use the first rank's current weight; every rank must call this."""
        self.weight_unit = broadcast_object(2.0 ** round(math.log2(max(weight, 1.0))))

    def update(self, *, overflowed: bool) -> None:
        """Halve after too many overflows, double after enough steps without one."""
        if not self._is_dynamic:
            return
        if overflowed:
            self._clean_updates = 0
            self._patience -= 1
            if self.scale <= self._minimum:
                raise TrainingError(
                    f"the gradient is not finite although the loss scale is {self.scale:g}: this "
                    "is not an fp16 overflow. Check the data and the loss, or lower --lr."
                )
            if self._patience <= 0:
                self.scale = max(self.scale / 2, self._minimum)
            return
        self._clean_updates += 1
        if self._clean_updates == self._window:
            self._clean_updates = 0
            self._patience = self._hysteresis
            self.scale *= 2

    def state_dict(self) -> dict[str, float]:
        return {
            "scale": self.scale,
            "patience": self._patience,
            "clean_updates": self._clean_updates,
            "weight_unit": self.weight_unit or 0.0,
        }

    def load_state_dict(self, state: dict[str, float]) -> None:
        if not self._is_dynamic:
            return  # a fixed scale given now applies, whatever the checkpoint had
        self.scale = float(state["scale"])
        self._patience = int(state["patience"])
        self._clean_updates = int(state["clean_updates"])
        self.weight_unit = state.get("weight_unit") or None
