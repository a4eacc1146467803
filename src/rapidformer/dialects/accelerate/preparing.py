"""The part of ``Accelerator`` that switches on what a script trains: one engine for each optimizer
and its model, all on the same batches."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, RandomSampler
from torch.utils.hooks import RemovableHandle

from rapidformer.accel.weights import broadcast_weights
from rapidformer.data.adopting import get_rows_per_batch
from rapidformer.dialects.accelerate.processes import refuse_own_gradient
from rapidformer.dialects.accelerate.saving import SavingVerbs
from rapidformer.dist.collectives import broadcast_object
from rapidformer.engine.engine import RapidformerEngine
from rapidformer.errors import RapidformerError
from rapidformer.optim.takeover import take_over_scheduler
from rapidformer.overlay import get_own_class


class _UnchangedRates(LRScheduler):
    """The engine's schedule, which leaves the rates to the script's: its warm-up may have begun."""

    def get_lr(self) -> list[float | torch.Tensor]:
        return [group["lr"] for group in self.optimizer.param_groups]


def _compose(engine: RapidformerEngine, model: nn.Module, optimizer: Optimizer) -> None:
    engine.compose(model, optimizer, lr_scheduler=_UnchangedRates(optimizer))
    if engine.args.world_size > 1 and not hasattr(model, "no_sync"):
        # As DistributedDataParallel has it, with nothing to do, as in accelerator.no_sync(model).
        vars(model)["no_sync"] = nullcontext
        engine.model.parallelized.applied.on_close(vars(model).pop, "no_sync", None)


class PreparingVerbs(SavingVerbs):
    """``prepare``, in one call or several."""

    split_batches: bool
    step_scheduler_with_optimizer: bool
    deepspeed_plugin: Any
    _optimizers: list[Optimizer]
    _lacks_optimizer: bool
    """Whether the model was switched on without one."""
    _guards: list[RemovableHandle]
    """They refuse gradients that would stay on their process."""
    _has_train_loader: bool

    def prepare(self, *objects: Any, device_placement: list[bool] | None = None) -> Any:
        """Switch everything on; returned in the order given, one object by itself.

        The model and the optimizer stay the objects they are, and may come in separate calls. A
        model without parameters in the optimizer (a teacher) is put on the device as it is.
        """
        # The order of the data and dropout follow the seed that the script has set last.
        seed = broadcast_object(torch.initial_seed() % 2**32)
        self.engine.args = self.engine.args.replace("set_seed()", seed=seed)
        training, known = self._find_training_loader(objects), len(self._models)
        prepared = [self._prepare_one(part, is_training=part is training) for part in objects]
        self._compose()
        for model in self._models[known:]:
            if self._find_trainer(model) is None:
                self._equalize(model)
        for part in objects:
            if isinstance(part, LRScheduler):
                self._schedulers.append(part)
                if self.step_scheduler_with_optimizer:
                    self._follow_updates(part)
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def _follow_updates(self, scheduler: LRScheduler) -> None:
        # A script whose batches are split counts the steps of the split loader.
        moves = 1 if self.split_batches else self.engine.args.data_parallel_size
        clock = self._find_engine(scheduler.optimizer).updates.clock
        # It has counted its steps before prepare() divided the loader, which rounds up.
        take_over_scheduler(scheduler, clock, moves=moves, stays_at_end=True)

    def prepare_model(self, model: nn.Module, **options: Any) -> nn.Module:
        self.prepare(model)
        return model

    def prepare_optimizer(self, optimizer: Optimizer, **options: Any) -> Optimizer:
        self.prepare(optimizer)
        return optimizer

    def prepare_scheduler(self, scheduler: LRScheduler) -> LRScheduler:
        self.prepare(scheduler)
        return scheduler

    def prepare_data_loader(self, data_loader: Any, **options: Any) -> Any:
        return self.prepare(data_loader)

    def _find_training_loader(self, objects: tuple[Any, ...]) -> Any:
        loaders = [part for part in objects if isinstance(part, DataLoader)]
        if self._has_train_loader or not loaders:
            return None
        shuffled = [
            each
            for each in loaders
            if isinstance(getattr(each.batch_sampler, "sampler", None), RandomSampler)
        ]
        # Unshuffled data that comes before any optimizer may be for evaluation: a later loader may
        # still be the one to train on.
        has_optimizer = any(isinstance(part, Optimizer) for part in (*self._optimizers, *objects))
        self._has_train_loader = bool(shuffled) or has_optimizer
        return (shuffled or loaders)[0]

    def _prepare_one(self, part: Any, *, is_training: bool) -> Any:
        if isinstance(part, DataLoader):
            size = self._divide_batch_size(part)
            return self.engine.data.adopt_loader(part, is_training=is_training, batch_size=size)
        if isinstance(part, nn.Module):
            if part not in self._models:
                self._models.append(part.to(self.device))
        elif isinstance(part, Optimizer):
            if self._lacks_optimizer:
                raise RapidformerError(
                    "prepare the optimizer before the first backward(), save_state() or "
                    "load_state(): the model has been switched on without one."
                )
            if part not in self._optimizers:
                self._optimizers.append(part)
        return part

    def _divide_batch_size(self, loader: DataLoader[Any]) -> int | None:
        size, replicas = get_rows_per_batch(loader), self.engine.args.data_parallel_size
        if not self.split_batches or replicas == 1:
            return None
        if size is None:
            raise RapidformerError(
                "split_batches divides batches of one size: give the DataLoader a batch_size, or "
                "leave split_batches out, and each process gets batches of its own."
            )
        if size % replicas:
            raise RapidformerError(
                f"split_batches: the DataLoader's batch_size {size} must be a "
                f"multiple of the {replicas} processes that divide it."
            )
        return size // replicas

    def _equalize(self, model: nn.Module) -> None:
        """Give all processes the first one's weights; refuse gradients until it is composed."""
        weights = list(model.parameters())
        is_split = any(isinstance(each, DTensor) or each.is_meta for each in weights)
        if self.num_processes == 1 or is_split:
            return
        broadcast_weights(model)
        if self.engine.model.module is None:
            trained = (each for each in weights if each.requires_grad)
            self._guards += [each.register_hook(refuse_own_gradient) for each in trained]

    def _drop_guards(self) -> None:
        while self._guards:
            self._guards.pop().remove()

    def _compose(self) -> None:
        """Switch on each optimizer's model, once both are here: one engine for each pair."""
        composed = [engine.updates.optimizer for engine in self._engines]
        for optimizer in [each for each in self._optimizers if each not in composed]:
            held = {id(p) for group in optimizer.param_groups for p in group["params"]}
            trained = [m for m in self._models if any(id(p) in held for p in m.parameters())]
            idle = [model for model in self._models if self._find_trainer(model) is None]
            if not trained and (len(self._models) > 1 or not idle):
                continue  # its model may come in a later call
            if len(trained) > 1:
                raise RapidformerError(
                    f"an optimizer of an Accelerator trains one model, and this one holds "
                    f"parameters of {len(trained)}: put them into one nn.Module, or make an "
                    "optimizer for each."
                )
            model = (trained or idle)[0]
            if self._find_trainer(model) is not None:
                raise RapidformerError(
                    f"two optimizers train {get_own_class(model).__name__}: make one of them, with "
                    "parameter groups where their settings differ."
                )
            self._drop_guards()
            _compose(self._make_engine(), model, optimizer)

    def _make_engine(self) -> RapidformerEngine:
        """The first engine, or one more beside it."""
        if self.engine.model.module is None:
            return self.engine
        args, problem = self.engine.args, ""
        if args.deepspeed or args.mixed_precision == "fp16":
            problem = "a DeepSpeed file" if args.deepspeed else 'mixed_precision="fp16"'
        elif args.pipeline_model_parallel_size > 1:
            problem = "a model that is split into stages (--pipeline-model-parallel-size)"
        if problem:
            raise RapidformerError(
                f"an Accelerator cannot train several models with {problem}: use bf16, and "
                "zero_stage or fsdp_plugin to split them; or put both into one nn.Module with one "
                "optimizer."
            )
        engine = RapidformerEngine(beside=self.engine)
        engine.updates.has_own_parts = False
        # A save that is killed leaves the state that the first engine's checkpoint names.
        engine.args = args.replace("save_state()", save_total_limit=2)
        self._engines.append(engine)
        return engine

    def _find_engine(self, optimizer: Optimizer) -> RapidformerEngine:
        found = (each for each in self._engines if each.updates.optimizer is optimizer)
        return next(found, self.engine)

    def compose_without_optimizer(self, verb: str) -> None:
        """Switch on a model that was prepared alone, for a verb that needs a composed one."""
        if self.engine.model.module is not None:
            return
        if len(self._models) != 1 or self._optimizers:
            raise RapidformerError(f"{verb}: call accelerator.prepare(model, optimizer) first.")
        args = self.engine.args
        if self.deepspeed_plugin or args.zero_stage or args.data_parallel_size != args.world_size:
            raise RapidformerError(
                f"{verb}: this run splits the model over the processes, which takes its optimizer, "
                "too: call accelerator.prepare(model, optimizer) first."
            )
        self._drop_guards()
        self._lacks_optimizer = True
        idle = torch.optim.SGD(self._models[0].parameters(), lr=0.0)
        _compose(self.engine, self._models[0], idle)
