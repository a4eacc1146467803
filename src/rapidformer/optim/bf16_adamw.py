"""AdamW whose moments are kept in bf16: half the memory of the optimizer's state.

A step computes in fp32 and rounds only what it keeps. The mean of squares moves by a thousandth
per step (``--adam-beta2 0.999``), less than bf16 can resolve: rounded to the nearest value it could
never fall. So moments are rounded up or down at random, so that they are right on average. The
random bits are a hash of value and step: there is no generator to save, every replica rounds
alike, and shards round like whole tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from rapidformer.optim.multi_tensor.adamw import MOMENTS, MultiTensorAdamW
from rapidformer.optim.multi_tensor.launch import get_local

_CUT = 0xFFFF
"""The bits of fp32 that bf16 does not have."""
_GOLDEN = 0x9E3779B9 - 2**32
"""Sends consecutive steps far apart."""


class Bf16AdamW(MultiTensorAdamW):
    """torch's ``AdamW``, except for the precision of its state."""

    rounds_randomly = True
    moment_dtype = torch.bfloat16

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        **others: Any,
    ) -> None:
        # "fused" says that it obeys `grad_scale` and `found_inf`.
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            **{**others, "fused": True},
        )

    def step_on_host(self) -> None:
        """Update the parameters one by one."""
        flag, divisor = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if flag is not None and bool(flag):
            return
        groups = [(p, group) for group in self.param_groups for p in group["params"]]
        found = [(p, self.get_state(p), group) for p, group in groups if p.grad is not None]
        steps = _advance([state["step"] for _, state, _ in found])
        for (parameter, state, group), step in zip(found, steps, strict=True):
            gradient = get_local(parameter.grad).float()
            _update(
                get_local(parameter),
                gradient if divisor is None else gradient / divisor,
                get_local(state["exp_avg"]),
                get_local(state["exp_avg_sq"]),
                _compute_numbers(step, group),
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for state in self.state.values():
            # torch has cast them to the parameter's dtype, which loses nothing.
            state.update({name: state[name].bfloat16() for name in MOMENTS})


def _advance(steps: list[Tensor]) -> list[int]:
    """Count a step of every parameter; the host waits for the device only once."""
    if not steps:
        return []
    device = steps[0].device
    return list(map(int, torch.stack([step.add_(1).to(device) for step in steps]).tolist()))


def _compute_numbers(step: int, group: dict[str, Any]) -> list[float]:
    lr, (beta1, beta2) = float(group["lr"]), group["betas"]
    shrink = 1 - lr * group["weight_decay"]
    rate, correction = lr / (1 - beta1**step), (1 - beta2**step) ** 0.5
    return [shrink, 1 - beta1, beta2, 1 - beta2, rate, correction, group["eps"], step]


def _update(
    parameter: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, numbers: list[float]
) -> None:
    shrink, new1, beta2, new2, rate, correction, epsilon, step = numbers
    exact_mean = mean.float().lerp(gradient, new1)
    exact_square = square.float() * beta2 + gradient * gradient * new2
    change = rate * exact_mean / (exact_square.sqrt() / correction + epsilon)
    parameter.copy_(parameter.float() * shrink - change)
    # Not torch.tensor: a copy from the host would wait for the device.
    salt = torch.full((), step, dtype=torch.int32, device=mean.device) * _GOLDEN
    mean.copy_(round_randomly(exact_mean, salt))
    square.copy_(round_randomly(exact_square, salt + 1))


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
