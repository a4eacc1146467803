"""AdamW whose moments are kept in bf16: half the memory of the optimizer's state.

A step computes in fp32 and rounds only what it keeps. The mean of squares moves by a thousandth
per step (``--adam-beta2 0.999``), less than bf16 can resolve: rounded to the nearest value it could
never fall. So moments are rounded up or down at random, so that they are right on average. The
random bits are a hash of value and step: there is no generator to save, every replica rounds
alike, and shards round like whole tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

_MOMENTS = ("exp_avg", "exp_avg_sq")
_CUT = 0xFFFF
"""The bits of fp32 that bf16 does not have."""
_GOLDEN = 0x9E3779B9 - 2**32
"""Sends consecutive steps far apart."""


class Bf16AdamW(Optimizer):
    """torch's ``AdamW``, except for the precision of its state."""

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            numbers: dict[tuple[int, torch.device], Tensor] = {}
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self._get_state(parameter)
                state["step"] += 1
                key = int(state["step"]), parameter.device
                if key not in numbers:
                    numbers[key] = _compute_numbers(*key, group)
                update = _compile_update() if parameter.is_cuda else _update
                update(
                    _get_local(parameter),
                    _get_local(parameter.grad),
                    _get_local(state["exp_avg"]),
                    _get_local(state["exp_avg_sq"]),
                    numbers[key],
                )
        return loss

    def _get_state(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            for name in _MOMENTS:
                state[name] = torch.zeros_like(parameter, dtype=torch.bfloat16)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for state in self.state.values():
            # torch has cast them to the parameter's dtype, which loses nothing.
            state.update({name: state[name].bfloat16() for name in _MOMENTS})
            state["step"] = state["step"].cpu()


def _get_local(tensor: Any) -> Tensor:
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local


def _compute_numbers(step: int, device: torch.device, group: dict[str, Any]) -> Tensor:
    """The inputs of ``_update``; as a tensor, since new floats would cause recompilation."""
    lr, (beta1, beta2) = float(group["lr"]), group["betas"]
    shrink = 1 - lr * group["weight_decay"]
    rate, correction = lr / (1 - beta1**step), (1 - beta2**step) ** 0.5
    numbers = torch.tensor(
        [shrink, 1 - beta1, beta2, 1 - beta2, rate, correction, group["eps"], step]
    )
    if device.type != "cuda":
        return numbers
    # Pinned, so that the host does not wait for the device.
    return numbers.pin_memory().to(device, non_blocking=True)


def _update(
    parameter: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, numbers: Tensor
) -> None:
    shrink, new1, beta2, new2, rate, correction, epsilon, step = numbers.unbind()
    gradient = gradient.float()
    exact_mean = mean.float().lerp(gradient, new1)
    exact_square = square.float() * beta2 + gradient * gradient * new2
    change = rate * exact_mean / (exact_square.sqrt() / correction + epsilon)
    parameter.copy_(parameter.float() * shrink - change)
    salt = step.to(torch.int32) * _GOLDEN
    mean.copy_(round_randomly(exact_mean, salt))
    square.copy_(round_randomly(exact_square, salt + 1))


@functools.cache
def _compile_update() -> Callable[..., None]:
    """One kernel per parameter: without it, a step would read and write everything many times."""
    return torch.compile(_update, dynamic=True)


def round_randomly(value: Tensor, salt: Tensor) -> Tensor:
    """fp32 values that bf16 holds exactly: the one below or the one above, right on average."""
    bits = value.view(torch.int32)
    rounded = (bits + (_hash(bits + salt) & _CUT)) & ~_CUT
    return torch.where(value.isfinite(), rounded.view(torch.float32), value)


def _hash(bits: Tensor) -> Tensor:
    """Chris Wellons' lowbias32, on signed integers that wrap around."""
    bits = (bits ^ ((bits >> 16) & _CUT)) * 0x7FEB352D
    bits = (bits ^ ((bits >> 15) & 0x1FFFF)) * (0x846CA68B - 2**32)
    return bits ^ ((bits >> 16) & _CUT)
