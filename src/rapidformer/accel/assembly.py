"""A model being prepared for training: what each switch gets, and what it leaves for the next."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from rapidformer.accel.applied import Applied
from rapidformer.accel.pipeline.pipeline import Pipeline
from rapidformer.accel.precision.precision import Precision
from rapidformer.config import Settings
from rapidformer.dist.topology import Topology
from rapidformer.models.deferred import DeferredWeights
from rapidformer.models.plan import ModelPlan
from rapidformer.models.tensor_plans import TensorPlan


class GradientSynchronizer(Protocol):
    """What every data-parallel strategy does around a backward pass: leave *sums* in ``.grad``."""

    def before_backward(self, is_last: bool) -> None: ...

    def after_backward(self) -> None: ...


class Alone:
    """One rank: nothing to synchronize."""

    def before_backward(self, is_last: bool) -> None: ...

    def after_backward(self) -> None: ...


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
    uses_deepspeed: bool = False
    uses_autotp: bool = False
    """Whether DeepSpeed's AutoTP splits the layers instead of our tensor parallelism."""

    applied: Applied = field(default_factory=Applied)
    """Every change that a switch makes, with its undo."""

    # What switches leave for those that follow.
    plan: ModelPlan
    """The plan of this rank's blocks: those of its own pipeline stages."""
    pipeline: Pipeline | None = None
    tensor_plan: TensorPlan | None = None
    experts: list[nn.Module] = field(default_factory=list)
    """Modules whose experts are split over ranks."""
    synchronizer: GradientSynchronizer = field(default_factory=Alone)
    needs_autocast: bool = True
    """False if DeepSpeed itself keeps the weights in 16 bits."""
