"""``self.accelerator`` of a trainer: what subclasses' methods ask of Accelerate's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from rapidformer.data.loader import DistributedLoader
from rapidformer.dialects.accelerate.processes import ProcessVerbs
from rapidformer.dialects.huggingface.interface import TrainerInterface
from rapidformer.dialects.huggingface.label_count import LabelCount, count_processes
from rapidformer.engine import RapidformerEngine
from rapidformer.errors import RapidformerError


class TrainerAccelerator(ProcessVerbs):
    """``self.accelerator`` of a trainer; what only asks about processes needs no engine."""

    def __init__(self, trainer: TrainerInterface) -> None:
        self._trainer = trainer
        self._losses: list[torch.Tensor] = []
        self._divides = True
        """Whether ``prepare`` divides loaders."""

    @property
    def engine(self) -> RapidformerEngine:  # type: ignore[override]
        return self._trainer.engine

    @property
    def num_processes(self) -> int:
        return count_processes(self._trainer.args.world_size)

    @property
    def process_index(self) -> int:
        return self._trainer.args.process_index

    @property
    def device(self) -> torch.device:
        return self._trainer.args.device

    def wait_for_everyone(self) -> None:
        _ = self.device  # joins the other processes, also before there is an engine
        super().wait_for_everyone()

    def backward(self, loss: torch.Tensor, **settings: Any) -> None:
        """Back-propagate now, or when a pipeline's schedule does; several losses add up."""
        loss = loss.mean() if loss.dim() else loss
        if not self._trainer.is_in_train:
            if self.num_processes > 1:
                raise RapidformerError(
                    "backward() outside train() works in one process: only the loop sums the "
                    "gradients of several."
                )
            loss.backward()
            return
        self._losses.append(loss.detach())
        if self.engine.model.parallelized.pipeline is None:
            self.engine.updates.backward_within(loss)
        else:
            self._losses[-1] = loss

    def take(self, returned: torch.Tensor) -> torch.Tensor:
        """The loss of a step: its value if ``backward`` has run, otherwise with its graph."""
        losses, self._losses = self._losses, []
        is_loss = isinstance(returned, torch.Tensor)
        if losses and self.engine.model.parallelized.pipeline is None and is_loss:
            return returned.detach().mean()
        if losses:
            return torch.stack(losses).sum()
        if not is_loss or not returned.requires_grad:
            raise RapidformerError(
                "training_step must return the loss with its graph, or call "
                "self.accelerator.backward(loss): loss.backward() would bypass accumulation and "
                "the other processes."
            )
        return returned.mean() if returned.dim() else returned

    @contextmanager
    def leaving_loaders(self) -> Iterator[None]:
        """Inside, ``prepare`` leaves loaders as they are: the loop divides what it is given."""
        self._divides = False
        try:
            yield
        finally:
            self._divides = True

    def prepare(self, *objects: Any, **options: Any) -> Any:
        """Loaders divided over the processes, models on the device; the trainer's own as they are.

        What else is trained needs an ``Accelerator`` of its own, outside of the trainer.
        """
        prepared = [self._prepare_one(part) for part in objects]
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    prepare_model = prepare_data_loader = prepare_optimizer = prepare_scheduler = prepare

    def _prepare_one(self, part: Any) -> Any:
        trainer = self._trainer
        if isinstance(part, DataLoader):
            divides = self._divides and not isinstance(part, DistributedLoader)
            return self.engine.data.adopt_loader(part, is_training=False) if divides else part
        if isinstance(part, nn.Module):
            return part if part is trainer.model else part.to(self.device)
        if isinstance(part, Optimizer) and part is not trainer.optimizer:
            raise RapidformerError(
                "self.accelerator.prepare(): the trainer trains its own model, with the optimizer "
                "of create_optimizer() or optimizers=. Return yours there."
            )
        return part

    def gather(self, values: Any) -> Any:
        """Every process's rows; a loss that sums the count of labels gets its own (one process)."""
        return values if isinstance(values, LabelCount) else super().gather(values)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The sum, mean or maximum over the processes; the count of labels is its own."""
        if isinstance(tensor, LabelCount):
            return tensor
        return super().reduce(tensor, reduction, scale)

    def unwrap_model(self, model: nn.Module, **options: Any) -> nn.Module:
        """The model: nothing is ever wrapped."""
        return model

    @property
    def sync_gradients(self) -> bool:
        """Whether the micro-batch at hand completes an update's gradient."""
        clock = self.engine.updates.clock
        return not clock.is_accumulating if clock.forced is None else clock.forced

    gradient_accumulation_steps = 1
    """As in transformers, where the trainer accumulates by itself: no loss is divided by it."""

    @property
    def deepspeed_plugin(self) -> Any:
        """What the arguments say; None without DeepSpeed."""
        return self._trainer.args.deepspeed or None

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether fp16 overflowed in the last update."""
        return self.engine.updates.clock.was_skipped

    def no_sync(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Nothing to do: the loop decides when processes exchange gradients."""
        return nullcontext()

    accumulate = no_sync

    def clip_grad_norm_(self, parameters: Any, max_norm: float) -> torch.Tensor | None:
        """Clip an update's gradient; None while it is not complete."""
        return self.engine.clip_grad_norm(max_norm)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The model's weights whole; if sharded, on the first process, and all must call this."""
        return self.engine.checkpoints.gather_weights(everywhere=True)

    def __getattr__(self, name: str) -> Any:
        if name == "_trainer" or name.startswith("__"):  # a copy is made: it needs no engine
            raise AttributeError(name)
        if not hasattr(self.engine, name):
            raise AttributeError(f"self.accelerator of a Trainer has no {name!r} here")
        return getattr(self.engine, name)
