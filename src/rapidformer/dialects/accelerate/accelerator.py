"""``Accelerator``: the engine in Accelerate's words, for a loop that stays the user's own.

Inside ``accumulate(model)``, the engine counts micro-batches and decides when an update is due.
Outside it, ``optimizer.step()`` ends an update: the gradients of several ``backward`` calls add up,
as in a plain loop, and the script divides the loss by their number itself.

A prepared scheduler moves ``num_processes`` steps per update, as in Accelerate: scripts count its
length before ``prepare`` divides the loader among the processes. A scheduler that is not prepared
moves one step per call, and so does any with ``step_scheduler_with_optimizer=False``.
"""

from __future__ import annotations

import gc
import itertools
import os
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NoReturn, cast
from weakref import WeakValueDictionary

import torch
from torch import nn

from rapidformer.checkpoint.state import get_random_states, set_random_states
from rapidformer.config import Settings
from rapidformer.dialects.accelerate.preparing import PreparingVerbs
from rapidformer.dialects.accelerate.processes import tell_accelerate
from rapidformer.dialects.accelerate.settings import (
    ProjectConfiguration,
    build_accelerator_settings,
    find_folders,
    list_trackers,
    splits_batches,
)
from rapidformer.dialects.accelerate.tracking import TrackingVerbs
from rapidformer.dist.seeding import is_seeded, seed_everything
from rapidformer.engine.engine import RapidformerEngine
from rapidformer.errors import RapidformerError
from rapidformer.log import warn_once
from rapidformer.optim.gradients import add_gradients, clip_norm


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed Python, NumPy and torch; ``device_specific`` gives every process another seed."""
    rank = int(os.environ.get("RANK") or 0) if device_specific else 0
    seed_everything(seed + rank, deterministic=deterministic)


_numbers = itertools.count()
_accelerators: WeakValueDictionary[int, Accelerator] = WeakValueDictionary()


class _Elsewhere:
    """Stands for the engine of an Accelerator that came in a pickle from another process."""

    def __init__(self, args: Settings) -> None:
        self.args = args

    def __getattr__(self, name: str) -> NoReturn:
        raise RapidformerError(
            f"this Accelerator came in a pickle from another process ({name!r} was asked for): it "
            "only knows the processes of the run."
        )


def _find_accelerator(number: int, args: Settings) -> Accelerator:
    found = _accelerators.get(number)
    if found is None:
        found = Accelerator.__new__(Accelerator)
        found.engine, found._number = cast(RapidformerEngine, _Elsewhere(args)), number
    return found


class Accelerator(PreparingVerbs, TrackingVerbs):
    """A ``RapidformerEngine`` that answers Accelerate's verbs."""

    set_seed = staticmethod(set_seed)

    def __init__(self, **arguments: Any) -> None:
        settings = build_accelerator_settings(arguments)
        if is_seeded():
            settings = settings.replace("set_seed()", seed=torch.initial_seed())
        self._settings = settings
        self._models, self._optimizers, self._schedulers, self._guards = [], [], [], []
        self._start_engine()
        self.deepspeed_plugin = arguments.get("deepspeed_plugin")
        # With DeepSpeed's plugin nobody says `accumulate`: its engine counts by itself.
        accumulates = self.gradient_accumulation_steps > 1
        self._is_counting = self.deepspeed_plugin is not None and accumulates
        self._lacks_optimizer = self._has_train_loader = False
        self._registered = []
        self.split_batches = splits_batches(arguments)
        self.step_scheduler_with_optimizer = arguments.get("step_scheduler_with_optimizer", True)
        self.dataloader_config = arguments.get("dataloader_config")
        self._save_hooks: OrderedDict[int, Any] = OrderedDict()
        self._load_hooks: OrderedDict[int, Any] = OrderedDict()
        self._tracker_names, self._user_trackers = list_trackers(arguments)
        self.project_configuration = arguments.get("project_config") or ProjectConfiguration()
        self.project_dir, self.logging_dir = find_folders(arguments)
        self._trackers: dict[str, Any] = {}
        handlers = arguments.get("kwargs_handlers") or []
        self._profile = next((each for each in handlers if hasattr(each, "output_trace_dir")), None)
        tell_accelerate(self.mixed_precision, self.device, self.num_processes)
        self._number = next(_numbers)
        _accelerators[self._number] = self

    def __reduce__(self) -> Any:
        """In a pickle, this very object; elsewhere one that only knows its process's number."""
        return _find_accelerator, (self._number, self.engine.args)

    def _start_engine(self) -> None:
        """Make the engine; a script that has seeded its random numbers keeps them."""
        keeps_states, device = is_seeded(), torch.device("cpu")
        states = get_random_states(device)
        self.engine = RapidformerEngine(args=self._settings)
        self.engine.updates.has_own_parts = False
        self.engine.data.allow_no_model(self._warn_without_model)
        self._engines, self._reached = [self.engine], [self.engine.updates]
        if keeps_states:
            set_random_states(states, device)

    def _warn_without_model(self) -> None:
        if not self._models:
            warn_once(
                "a prepared DataLoader gives each process other rows, and no model was prepared: "
                "if this loop trains one, each process trains its own. Call "
                "accelerator.prepare(model, optimizer, loader), or evaluate in torch.no_grad()."
            )

    @property
    def gradient_accumulation_steps(self) -> int:
        return self.engine.updates.clock.rounds_per_update

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        if self._has_train_loader:
            raise RapidformerError(
                "set gradient_accumulation_steps before prepare(): the prepared DataLoader is cut "
                "into optimizer steps."
            )
        self.engine.updates.clock.rounds_per_update = steps

    @property
    def sync_gradients(self) -> bool:
        """Whether the last ``backward`` completed an update's gradient."""
        return not any(each.clock.is_accumulating for each in self._reached)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last update was skipped because fp16 overflowed."""
        return any(engine.updates.clock.was_skipped for engine in self._engines)

    def backward(
        self,
        loss: torch.Tensor,
        *,
        weight: float | torch.Tensor | None = None,
        retain_graph: bool = False,
    ) -> None:
        """Back-propagate. Outside ``accumulate``, add to what no ``optimizer.step()`` has used.

        ``weight`` is what the loss is a mean over, if not the labels of its batch; 1 if the script
        has divided by those of all processes and multiplied by ``num_processes`` itself.
        """
        self.compose_without_optimizer("backward()")
        steps = self.gradient_accumulation_steps
        counts = self._is_counting and steps > 1 and not self._lacks_optimizer
        divided = loss if counts or steps == 1 else loss / steps
        if len(self._optimizers) > len(self._engines):
            raise RapidformerError(
                "backward(): an optimizer was prepared without the model that it trains: call "
                "accelerator.prepare(model, optimizer)."
            )
        if len(self._engines) > 1:
            first, *others = (engine.updates for engine in self._engines)
            self._reached = first.backward_with(
                others, divided, weight, counts=counts, retain_graph=retain_graph
            )
            return
        if counts:
            self.engine.backward(loss, weight, retain_graph=retain_graph)
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
        with self.engine.accumulate(is_last=True):
            self.engine.backward(divided, weight, retain_graph=retain_graph)
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
        """Clip an update's gradient; returns its norm before, None while it is not complete."""
        if norm_type != 2:
            raise RapidformerError(f"clip_grad_norm_(norm_type={norm_type}): only 2 is supported.")
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        chosen = {id(each) for each in given}
        touched = [e for e in self._engines if any(id(p) in chosen for p in e.model.parameters)]
        trained = [p for e in touched for p in e.model.parameters if p.grad is not None]
        # Between forward and backward, sharded weights are not the ones that the engine knows.
        if len(touched) < 2 and all(id(p) in chosen for p in trained):
            return (touched or [self.engine])[0].clip_grad_norm(max_norm)
        if not all(each.updates.clock.is_unused for each in touched):
            return None
        return clip_norm([each.grad for each in given if each.grad is not None], max_norm)

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
        self._models, self._optimizers, self._has_train_loader = [], [], False
        self._schedulers, self._lacks_optimizer = [], False
        self._drop_guards()
        self._start_engine()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return [None for _ in objects]

    clear = free_memory

    def end_training(self) -> None:
        """Close the logs and what speeds training up; the models can still be saved."""
        for tracker in self._trackers.values():
            tracker.finish()
        self.engine.closed_hint = (
            "end_training() has ended what this Accelerator prepares and trains: call it after the "
            "last prepare(), backward() and gather(), or make a new Accelerator."
        )
        while self._engines:  # from here on, they are models like any others
            self._engines.pop().close()

    def __repr__(self) -> str:
        return (
            f"Accelerator(distributed_type={self.distributed_type}, "
            f"num_processes={self.num_processes}, process_index={self.process_index}, "
            f"device={self.device}, mixed_precision={self.mixed_precision})"
        )
