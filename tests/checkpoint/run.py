"""A small training run with a state worth saving."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from rapidformer.checkpoint.saving import prepare_save
from rapidformer.checkpoint.state import TrainingState
from rapidformer.data.loader import DistributedLoader
from rapidformer.dist.topology import Topology
from rapidformer.optim.guard import LossScaler
from rapidformer.optim.optimizers import build_optimizer
from tests.optim.rig import describe_optimizer


class Model(nn.Module):
    def __init__(self, width: int = 4, *, has_unused: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(3, width)
        self.norm = nn.LayerNorm(width)
        self.last = nn.Linear(width, 1)
        if has_unused:
            self.unused = nn.Linear(2, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.dropout(self.norm(self.first(inputs)), 0.3, training=self.training)
        return self.last(hidden)


class Run:
    """Model, optimizer, schedule, scaler and loader, with a loop of a few lines."""

    def __init__(
        self,
        *,
        seed: int = 0,
        kind: str = "adam",
        model: nn.Module | None = None,
        optimizer: Optimizer | None = None,
    ) -> None:
        torch.manual_seed(seed)
        self.model = model or Model()
        self.optimizer = optimizer or build_optimizer(self.model, describe_optimizer(kind, lr=0.05))
        self.scheduler = LambdaLR(self.optimizer, lambda update: 1.0 / (1 + update))
        self.scaler = LossScaler(initial=64, window=2)
        rows = torch.randn(10, 3, generator=torch.Generator().manual_seed(7))
        self.loader = DistributedLoader(
            list(rows), collate=torch.stack, micro_batch_size=2, shuffle=True
        )
        self.step = 0
        self._batches = self._endless()

    def train(self, updates: int) -> list[float]:
        """So many updates more, in the epochs as they come."""
        return [self._update(batch) for batch in islice(self._batches, updates)]

    def _endless(self) -> Iterator[torch.Tensor]:
        while True:
            yield from self.loader

    def _update(self, batch: torch.Tensor) -> float:
        loss = (self.model(batch) - batch.sum(-1, keepdim=True)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.scaler.update(overflowed=False)
        self.step += 1
        return loss.item()

    @property
    def state(self) -> TrainingState:
        return TrainingState(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            scaler=self.scaler,
            loader=self.loader,
            step=self.step,
            device=torch.device("cpu"),
            topology=Topology(),
            bypass=nullcontext,
        )

    def weights(self) -> dict[str, Any]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}


def save_checkpoint(
    folder: Path, state: TrainingState, extra: dict[str, Any], **options: Any
) -> Path:
    """Save the current step at once."""
    save = prepare_save(folder, state, extra, **options)
    save.write()
    return save.target
