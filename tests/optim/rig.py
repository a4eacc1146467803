"""A tiny model on the clock, driven by hand as the engine's ``backward`` drives it; optimizers."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from rapidformer.config import Settings
from rapidformer.dist.topology import Topology
from rapidformer.optim.guard import LossScaler
from rapidformer.optim.takeover import take_over_optimizer, take_over_scheduler
from rapidformer.optim.update import UpdateClock


def describe_optimizer(kind: str, lr: float) -> Settings:
    """``bf16`` and ``int8`` are Adam with its moments in that precision."""
    if kind in ("bf16", "int8"):
        return Settings(lr=lr, optimizer_state_dtype=kind)
    return Settings(optimizer=kind, lr=lr)


class Rig:
    def __init__(
        self,
        rounds: int = 1,
        *,
        scaler: LossScaler | None = None,
        clip_grad: float = 0.0,
        optimizer: Callable[..., Optimizer] | None = None,
        clips_in_step: bool = False,
    ) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        self.clock = UpdateClock(rounds, Topology())
        self.scaler = scaler
        make = optimizer or functools.partial(SGD, lr=1.0)
        self.optimizer = make(self.model.parameters())
        scheduler = LambdaLR(self.optimizer, lambda update: 1.0 / (1 + update))
        take_over_optimizer(
            self.optimizer,
            self.clock,
            clip_grad=clip_grad,
            scaler=self.scaler,
            clips_in_step=clips_in_step,
        )
        self.scheduler = take_over_scheduler(scheduler, self.clock)

    def backward(
        self, loss: torch.Tensor, weight: float | torch.Tensor = 1.0, *, ends_update: bool = False
    ) -> bool:
        is_last = self.clock.start_micro_batch(ends_update=ends_update)
        share = self.clock.add_weight(weight, shared_unit=None)
        scale = self.scaler.scale if self.scaler else 1.0
        (loss * (share * scale)).backward()
        if is_last:
            self.clock.finish_gradients(list(self.model.parameters()), self.scaler)
        return is_last

    def loss(self, rows: int = 2, seed: int = 0) -> torch.Tensor:
        """A mean over the rows."""
        inputs = torch.randn(rows, 3, generator=torch.Generator().manual_seed(seed))
        return self.model(inputs).square().mean()

    @property
    def lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def weights(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]

    @property
    def gradients(self) -> list[torch.Tensor | None]:
        return [p.grad for p in self.model.parameters()]
