"""A model being prepared for training: what each switch gets, and what it leaves for the next."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rapidformer.accel.applied import Applied
from rapidformer.accel.precision.precision import Precision
from rapidformer.config import Settings
from rapidformer.config.switches import Situation, get_switch
from rapidformer.dist.topology import Topology
from rapidformer.models.deferred import DeferredWeights
from rapidformer.models.plan import ModelPlan
from rapidformer.models.tensor_plans import TensorPlan


class GradientSynchronizer:
    """What every data-parallel strategy does around a backward pass: leave *sums* in ``.grad``."""

    def before_backward(self, is_last: bool) -> None: ...

    def after_backward(self) -> None: ...


class Alone(GradientSynchronizer):
    """One rank: nothing to synchronize."""


Enter = Callable[[dict[str, Any]], AbstractContextManager[list[Tensor]]]
"""Inside, ``model.forward`` runs a part of the model on a batch, and on these hidden states."""


class Stages(Protocol):
    """A model cut into pipeline stages, as other rows see it."""

    @property
    def stacks(self) -> list[tuple[str, ...]]: ...

    def attach(self, model: nn.Module) -> None: ...

    def list_alone(self, model: nn.Module) -> list[tuple[ModelPlan, Enter]]: ...


@dataclass(kw_only=True)
class Assembly:
    """The model and its run, for ``apply(assembly)`` of every switch; models change in place."""

    model: nn.Module
    whole_plan: ModelPlan
    args: Settings
    device: torch.device
    topology: Topology
    precision: Precision
    deferred: DeferredWeights | None
    """How to create the weights of a model that was built without them."""
    is_training: bool = True
    """False for a model that is only evaluated."""
    is_filler: Callable[[], bool] = lambda: False
    """Whether the batch that runs now only keeps this rank in step with the others."""
    is_by_row: Callable[[], bool] = lambda: False
    """Whether the gradients that the user takes now are each row's own."""

    applied: Applied = field(default_factory=Applied)
    """Every change that a row makes, with its undo."""

    # What switches leave for those that follow.
    plan: ModelPlan
    """The plan of this rank's blocks: those of its own pipeline stages."""
    pipeline: Stages | None = None
    tensor_plan: TensorPlan | None = None
    experts: list[nn.Module] = field(default_factory=list)
    """Modules whose experts are split over ranks."""
    synchronizer: GradientSynchronizer = field(default_factory=Alone)
    needs_autocast: bool = True
    """False if DeepSpeed itself keeps the weights in 16 bits."""

    @property
    def situation(self) -> Situation:
        """What a row asks beside the settings."""
        return Situation(
            device=self.device.type, precision=self.precision.name, is_training=self.is_training
        )

    @property
    def uses_deepspeed(self) -> bool:
        """Whether DeepSpeed trains this model."""
        return self.wants("DeepSpeed")

    def wants(self, name: str) -> bool:
        """Whether a row is on in this run, as far as is known before it meets the model."""
        return get_switch(name).applies(self.args, self.situation)
