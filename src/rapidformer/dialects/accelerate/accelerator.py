"""``Accelerator``: the engine in Accelerate's words, for a loop that stays the user's own.

Inside ``accumulate(model)``, the engine counts micro-batches and decides when an update is due.
Outside it, ``optimizer.step()`` ends an update: the gradients of several ``backward`` calls add up,
as in a plain loop, and the script divides the loss by their number itself.

A prepared scheduler moves ``num_processes`` steps per update, as in Accelerate: scripts count its
length before ``prepare`` divides the loader among the processes. A scheduler that is not prepared
moves one step per call.
"""

from __future__ import annotations

import gc
import os
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, RandomSampler
from torch.utils.hooks import RemovableHandle

from rapidformer.accel.weights import broadcast_weights
from rapidformer.checkpoint.state import get_random_states, set_random_states
from rapidformer.data.loader import get_rows_per_batch
from rapidformer.dialects.accelerate.processes import (
    DistributedType,
    refuse_own_gradient,
    tell_accelerate,
)
from rapidformer.dialects.accelerate.saving import SavingVerbs
from rapidformer.dialects.accelerate.settings import (
    ProjectConfiguration,
    build_accelerator_settings,
    find_folders,
    list_trackers,
    splits_batches,
)
from rapidformer.dialects.accelerate.tracking import TrackingVerbs
from rapidformer.dist.collectives import broadcast_object
from rapidformer.dist.seeding import seed_everything
from rapidformer.engine.engine import RapidformerEngine
from rapidformer.errors import RapidformerError
from rapidformer.log import warn_once
from rapidformer.optim.gradients import add_gradients
from rapidformer.optim.takeover import take_over_scheduler

_UNSEEDED = 67280421310721
"""What torch's generator says of its seed in a process that nobody has seeded."""


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed Python, NumPy and torch; ``device_specific`` gives every process another seed."""
    rank = int(os.environ.get("RANK") or 0) if device_specific else 0
    seed_everything(seed + rank, deterministic=deterministic)


class _UnchangedRates(LRScheduler):
    """The engine's schedule, which leaves the rates to the script's: its warm-up may have begun."""

    def get_lr(self) -> list[float | torch.Tensor]:
        return [group["lr"] for group in self.optimizer.param_groups]


class Accelerator(SavingVerbs, TrackingVerbs):
    """A ``RapidformerEngine`` that answers Accelerate's verbs."""

    set_seed = staticmethod(set_seed)

    def __init__(self, **arguments: Any) -> None:
        settings = build_accelerator_settings(arguments)
        seed = torch.initial_seed()
        if seed != _UNSEEDED:
            settings = settings.replace("set_seed()", seed=seed % 2**32)
        self._settings = settings
        self._models: list[nn.Module] = []
        """All that were prepared; the optimizer's is trained, the others (a teacher) only run."""
        self._start_engine()
        self.deepspeed_plugin = arguments.get("deepspeed_plugin")
        # With DeepSpeed's plugin nobody says `accumulate`: its engine counts by itself.
        accumulates = self.gradient_accumulation_steps > 1
        self._is_counting = self.deepspeed_plugin is not None and accumulates
        self._optimizer: Optimizer | None = None
        self._lacks_optimizer = False
        """Whether the model was switched on without one."""
        self._guards: list[RemovableHandle] = []
        """They refuse gradients that would stay on their process."""
        self._has_train_loader = False
        self._schedulers: list[LRScheduler] = []
        self._registered: list[Any] = []
        self.split_batches = splits_batches(arguments)
        self._save_hooks: OrderedDict[int, Any] = OrderedDict()
        self._load_hooks: OrderedDict[int, Any] = OrderedDict()
        self._tracker_names, self._user_trackers = list_trackers(arguments)
        self.project_configuration = arguments.get("project_config") or ProjectConfiguration()
        self.project_dir, self.logging_dir = find_folders(arguments)
        self._trackers: dict[str, Any] = {}
        handlers = arguments.get("kwargs_handlers") or []
        self._profile = next((each for each in handlers if hasattr(each, "output_trace_dir")), None)
        tell_accelerate(self.mixed_precision, self.device, self.num_processes)

    def _start_engine(self) -> None:
        """Make the engine; a script that has seeded its random numbers keeps them."""
        is_seeded, device = torch.initial_seed() != _UNSEEDED, torch.device("cpu")
        states = get_random_states(device)
        self.engine = RapidformerEngine(args=self._settings)
        self.engine.updates.has_own_parts = False
        self.engine.data.allow_no_model(self._warn_without_model)
        if is_seeded:
            set_random_states(states, device)

    def _warn_without_model(self) -> None:
        if not self._models:
            warn_once(
                "a prepared DataLoader gives each process other rows, and no model was prepared: "
                "if this loop trains one, each process trains its own. Call "
                "accelerator.prepare(model, optimizer, loader), or evaluate in torch.no_grad()."
            )

    @property
    def state(self) -> Accelerator:
        """The same facts: ``accelerator.state.num_processes`` and so on."""
        return self

    @property
    def device(self) -> torch.device:
        return self.engine.device

    @property
    def distributed_type(self) -> DistributedType:
        if self.deepspeed_plugin is not None:
            return DistributedType.DEEPSPEED
        if self.num_processes == 1:
            return DistributedType.NO
        if self.engine.args.zero_stage == 3:
            return DistributedType.FSDP
        is_gpu = self.device.type == "cuda"
        return DistributedType.MULTI_GPU if is_gpu else DistributedType.MULTI_CPU

    @property
    def mixed_precision(self) -> str:
        return self.engine.args.mixed_precision or "no"

    @property
    def gradient_accumulation_steps(self) -> int:
        return self.engine.updates.clock.rounds_per_update

    @property
    def sync_gradients(self) -> bool:
        """Whether the last ``backward`` completed an update's gradient."""
        return not self.engine.updates.clock.is_accumulating

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last update was skipped because fp16 overflowed."""
        return self.engine.updates.clock.was_skipped

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
            if not self._is_trained(model):
                self._equalize(model)
        for part in objects:
            if isinstance(part, LRScheduler):
                self._schedulers.append(part)
                # A script whose batches are split counts the steps of the split loader.
                moves = 1 if self.split_batches else self.engine.args.data_parallel_size
                take_over_scheduler(part, self.engine.updates.clock, moves=moves)
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

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
        has_optimizer = any(isinstance(part, Optimizer) for part in (self._optimizer, *objects))
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
            if self._optimizer not in (None, part):
                raise RapidformerError(
                    "an Accelerator has one optimizer: give it all the parameters, in groups of "
                    "their own where their settings differ, or make an Accelerator for each model."
                )
            self._optimizer = part
        return part

    def _divide_batch_size(self, loader: DataLoader[Any]) -> int | None:
        size = get_rows_per_batch(loader)
        if not self.split_batches or size is None:
            return None
        replicas = self.engine.args.data_parallel_size
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
        if self._optimizer is None or not self._models:
            return
        held = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
        composed = self.engine.model.module
        if composed is not None:
            held |= {id(p) for p in self.engine.model.parameters}
        trained = [m for m in self._models if any(id(p) in held for p in m.parameters())]
        if composed is not None and trained == [composed]:
            return
        if not trained and len(self._models) > 1:
            return  # the optimizer's model may come in a later call
        if len(trained) > 1:
            raise RapidformerError(
                f"an Accelerator trains one model, and the optimizer holds parameters of "
                f"{len(trained)}: put several into one nn.Module, or make an Accelerator for each."
            )
        model = trained[0] if trained else self._models[0]
        self._drop_guards()
        self.engine.compose(model, self._optimizer, lr_scheduler=_UnchangedRates(self._optimizer))

    def compose_without_optimizer(self, verb: str) -> None:
        """Switch on a model that was prepared alone, for a verb that needs a composed one."""
        if self.engine.model.module is not None:
            return
        if len(self._models) != 1 or self._optimizer is not None:
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
        self.engine.compose(self._models[0], idle, lr_scheduler=_UnchangedRates(idle))

    def backward(self, loss: torch.Tensor, *, retain_graph: bool = False) -> None:
        """Back-propagate. Outside ``accumulate``, add to what no ``optimizer.step()`` has used."""
        self.compose_without_optimizer("backward()")
        if self._is_counting and not self._lacks_optimizer:
            self.engine.backward(loss, retain_graph=retain_graph)
            return
        # Not the model's own list: between forward and backward, sharded weights are whole there.
        clock, parameters = self.engine.updates.clock, self.engine.model.parameters
        if clock.is_unused and clock.keeper is not None:
            raise RapidformerError(
                "a DeepSpeed file counts the micro-batches of an update itself: say "
                "gradient_accumulation_steps in the file, and call optimizer.step() after every "
                "backward()."
            )
        earlier = clock.set_aside(parameters) if clock.is_unused else []
        steps = self.gradient_accumulation_steps
        with self.engine.accumulate(is_last=True):
            self.engine.backward(loss / steps if steps > 1 else loss, retain_graph=retain_graph)
        is_whole = self.num_processes == 1 or clock.keeper is not None
        if not is_whole and all(each.grad is None for each in parameters):
            warn_once(
                "accelerator.backward(loss): the loss does not depend on the prepared model, and "
                "nothing divides another one's gradients by its rows: call loss.backward() for it."
            )
        if earlier:
            add_gradients(parameters, earlier)

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """Count micro-batches: ``optimizer.step()`` waits until an update is due."""
        before, self._is_counting = self._is_counting, True
        try:
            yield
        finally:
            self._is_counting = before

    def no_sync(self, model: nn.Module | None = None) -> AbstractContextManager[None]:
        """Nothing to do: gradients are the same whenever processes exchange them."""
        return nullcontext()

    trigger_sync_in_backward = no_sync

    def clip_grad_norm_(
        self, parameters: Any, max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor | None:
        """Clip the update's gradient; returns its norm before, None while it is not complete."""
        if norm_type != 2:
            raise RapidformerError(f"clip_grad_norm_(norm_type={norm_type}): only 2 is supported.")
        return self.engine.clip_grad_norm(max_norm)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip every number of the update's gradient; nothing while it is not complete."""
        if self.engine.model.parallelized.deepspeed is not None:
            raise RapidformerError(
                "clip_grad_value_(): DeepSpeed keeps the gradients to itself. Use clip_grad_norm_, "
                "or zero_stage without a DeepSpeed file."
            )
        if self.sync_gradients:
            torch.nn.utils.clip_grad_value_(parameters, clip_value)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Nothing to do: a finished gradient is not scaled."""

    def free_memory(self, *objects: Any) -> list[None]:
        """Forget everything prepared; the script must drop its own references, as in Accelerate."""
        self._models, self._optimizer, self._has_train_loader = [], None, False
        self._schedulers, self._lacks_optimizer = [], False
        self._drop_guards()
        self._start_engine()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return [None for _ in objects]

    clear = free_memory

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision of the run, for what is computed outside the model."""
        return self.engine.runtime.precision.autocast(self.device)

    def end_training(self) -> None:
        """Close the logs and leave the other processes; the last call of a script."""
        for tracker in self._trackers.values():
            tracker.finish()
        self.engine.close()

    def __repr__(self) -> str:
        return (
            f"Accelerator(distributed_type={self.distributed_type}, "
            f"num_processes={self.num_processes}, process_index={self.process_index}, "
            f"device={self.device}, mixed_precision={self.mixed_precision})"
        )
