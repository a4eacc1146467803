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

from rapidformer.dist.seeding import hash_bits
from rapidformer.dist.whole import get_shard
from rapidformer.optim.multi_tensor.adamw import MOMENTS, MultiTensorAdamW

_CUT = 0xFFFF
"""The bits of fp32 that bf16 does not have."""
_GOLDEN = 0x9E3779B9 - 2**32
"""Sends consecutive steps far apart."""


class Bf16AdamW(MultiTensorAdamW):
    """torch's ``AdamW``, except for the precision of its state."""

    rounds_randomly = True
    moment_dtype = torch.bfloat16

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, **others: Any) -> None:
        # "fused" says that it obeys `grad_scale` and `found_inf`.
        super().__init__(params, lr, **{**others, "fused": True})

    def step_on_host(self) -> None:
        """Update the parameters one by one."""
        flag, divisor = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if flag is not None and bool(flag):
            return
        groups = [(p, group) for group in self.param_groups for p in group["params"]]
        trained = [(p, self.get_state(p), group) for p, group in groups if p.grad is not None]
        steps = _advance([state["step"] for _, state, _ in trained])
        for (parameter, state, group), step in zip(trained, steps, strict=True):
            gradient = get_shard(parameter.grad).float()
            gradient = gradient if divisor is None else gradient / divisor
            moments = [get_shard(state[name]) for name in MOMENTS]
            _update(get_shard(parameter), gradient, moments, step, group)

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


def _update(
    parameter: Tensor, gradient: Tensor, moments: list[Tensor], step: int, group: dict[str, Any]
) -> None:
    mean, square = moments
    lr, (beta1, beta2) = float(group["lr"]), group["betas"]
    rate, correction = lr / (1 - beta1**step), (1 - beta2**step) ** 0.5
    exact_mean = mean.float().lerp(gradient, 1 - beta1)
    exact_square = square.float() * beta2 + gradient * gradient * (1 - beta2)
    change = rate * exact_mean / (exact_square.sqrt() / correction + group["eps"])
    parameter.copy_(parameter.float() * (1 - lr * group["weight_decay"]) - change)
    # Not torch.tensor: a copy from the host would wait for the device.
    salt = torch.full((), step, dtype=torch.int32, device=mean.device) * _GOLDEN
    mean.copy_(round_randomly(exact_mean, salt))
    square.copy_(round_randomly(exact_square, salt + 1))


def round_randomly(value: Tensor, salt: Tensor) -> Tensor:
    """fp32 values that bf16 holds exactly: the one below or the one above, right on average."""
    bits = value.view(torch.int32)
    rounded = (bits + (hash_bits(bits + salt) & _CUT)) & ~_CUT
    return torch.where(value.isfinite(), rounded.view(torch.float32), value)
