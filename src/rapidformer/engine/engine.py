"""``RapidformerEngine``: a few verbs for your own training loop.

    model, optimizer, lr_scheduler = engine.compose(model, optimizer, lr_scheduler_fn)
    engine.backward(loss)

The engine is made of four parts, each a class of its own: ``data`` (loaders, order, position),
``model`` (plan, switches, adapters), ``updates`` (loss contract, backward, step, graphs) and
``checkpoints``. They share values, and do not know each other or the engine; what concerns one part
alone is a method of that part (``engine.data.build_loader``).
"""

from __future__ import annotations

import atexit
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from rapidformer.config import Settings, arguments_from_mapping, parse_arguments
from rapidformer.config.explain import explain, render
from rapidformer.config.parse import ExtraArgumentsProvider, read_command_line
from rapidformer.config.row import Situation
from rapidformer.data.update import MicroBatchResult, Update
from rapidformer.dist.heartbeat import beat
from rapidformer.dist.processes import stop_processes
from rapidformer.engine.checkpoints import Checkpoints
from rapidformer.engine.current_batch import CurrentBatch
from rapidformer.engine.data import RunData
from rapidformer.engine.facts import collect_state
from rapidformer.engine.model import RunModel
from rapidformer.engine.optimizing import Wanted
from rapidformer.engine.runtime import start_run
from rapidformer.engine.unused_settings import warn_about_unused_settings
from rapidformer.engine.updates import Updates
from rapidformer.errors import RapidformerError
from rapidformer.log import get_logger
from rapidformer.models.adapter_config import to_text
from rapidformer.models.adapters import get_inner
from rapidformer.models.deferred import build_for_split
from rapidformer.models.plan import GivenPlan
from rapidformer.optim.observer import get_observer
from rapidformer.optim.update import UpdateClock

Arguments = Settings | Mapping[str, Any] | Sequence[str] | None
_open_engines: weakref.WeakSet[RapidformerEngine] = weakref.WeakSet()


class RapidformerEngine:
    """A run and the verbs of training.

    ``args`` are the settings: by name, as flags or ready-made. Without it, the command line is read
    if it is meant for us: in a script that ``rapidformer`` or ``torchrun`` started, or that has
    flags of ours. A notebook gets the defaults. ``peft_config`` is a configuration object of peft:
    its adapters are trained instead of the model's own weights. An engine ``beside`` another one
    trains a second model on the same batches.
    """

    closed_hint = "this engine is closed: create a new RapidformerEngine()."
    """What to say to a call that comes after ``close``."""

    def __init__(
        self,
        extra_args_provider: ExtraArgumentsProvider | None = None,
        *,
        args: Arguments = None,
        peft_config: Any = None,
        beside: RapidformerEngine | None = None,
    ) -> None:
        if beside is None:
            asked = _read_arguments(args, extra_args_provider)
            if peft_config is not None:
                asked = asked.replace("peft_config", peft_config=to_text(peft_config))
            self._args, self.runtime = start_run(asked)
        else:
            self._args, self.runtime = beside.args, beside.runtime
        clock = UpdateClock(self._args.gradient_accumulation_steps or 1, self.runtime.topology)
        current = CurrentBatch(clock) if beside is None else beside.data.current
        self.data: RunData = RunData(self._args, self.runtime, clock, current)
        self.model = RunModel(self._args, self.runtime, current)
        self.updates = Updates(self._args, self.runtime, clock, current)
        collect = functools.partial(
            collect_state, self.runtime, self.data, self.model, self.updates
        )
        self.checkpoints = Checkpoints(
            self._args, self.runtime, clock, self.model, collect, self.data.follow_samples
        )
        _open_engines.add(self)
        _close_at_exit()

    @property
    def args(self) -> Settings:
        """The settings of the run."""
        return self._args

    @args.setter
    def args(self, args: Settings) -> None:
        """Hand other settings to all parts: a run's folder may be chosen after it has started."""
        self._args = self.data.args = self.model.args = args
        self.updates.args = self.checkpoints.args = args

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self.runtime.device

    @property
    def mesh(self) -> DeviceMesh | None:
        """The mesh of the run; None in a run of one process."""
        return self.runtime.topology.mesh

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.runtime.is_main

    def build_model(self, build: Callable[[], nn.Module]) -> nn.Module:
        """``build()``, with the adapters of ``--lora-rank`` or ``--peft-config``, if given.

        If the run splits weights, no rank ever holds all of them: the model has no values until
        ``compose`` has split it and each rank has read or drawn its shard, with exactly the values
        one process would have.
        """
        return build_for_split(self._args, build)

    def compose(
        self,
        model: nn.Module | None = None,
        optimizer: Optimizer | None = None,
        lr_scheduler_fn: Callable[..., Any] | None = None,
        train_dataloader: Any = None,
        eval_dataloader: Any = None,
        *,
        model_obj: nn.Module | None = None,
        lr_scheduler: Any = None,
        plan: GivenPlan | None = None,
    ) -> tuple[Any, ...]:
        """Apply all switches. Returns model, optimizer, lr_scheduler, then the loaders given.

        All are the objects that were passed, extended in place. Without an optimizer, the one
        described by the flags is created; likewise the schedule. ``plan`` says where the model's
        blocks are and how they may be split, for a model that does not say so itself: the mapping
        its ``rapidformer_plan()`` would return.
        """
        passed = model if model is not None else model_obj
        if passed is None:
            raise RapidformerError("compose() needs the model: engine.compose(model=model, ...).")
        has_optimizer, is_own_loop = optimizer is not None, self.updates.is_own_loop
        loaders = [
            self.data.adopt_loader(loader, is_training=is_training, tells_epoch=not is_own_loop)
            for loader, is_training in ((train_dataloader, True), (eval_dataloader, False))
            if loader is not None
        ]
        names = self.model.compose(
            passed, plan, has_optimizer=has_optimizer, is_own_loop=is_own_loop
        )
        wanted = Wanted(
            optimizer=optimizer, lr_scheduler_fn=lr_scheduler_fn, lr_scheduler=lr_scheduler,
            train_iters=self.data.get_train_iters(), count_samples=self.data.batches.count_samples,
        )  # fmt: skip
        self.updates.start(
            wanted, self.model.parallelized, self.model.parameters, names,
            work=self.model.work, shifts_labels=self.model.shifts_labels,
            list_samples=self.data.list_samples,
        )  # fmt: skip
        get_observer().after_compose(self)
        if is_own_loop:
            get_logger().info("switches  %s", "; ".join(self.model.parallelized.switches))
            self.data.say_batch()
        if is_own_loop and self.updates.has_own_parts and self.updates.clip_grad > 0:
            get_logger().info(
                "clip      gradients to norm %s (--clip-grad)", self.updates.clip_grad
            )
        if self.updates.has_own_parts and self.is_main:
            warn_about_unused_settings(
                self._args, has_optimizer=has_optimizer, schedule=wanted.schedule,
                has_loader=isinstance(train_dataloader, DataLoader), has_loop=is_own_loop,
                has_guard=self.updates.clock.guard is not None,
            )  # fmt: skip
        module = self.model.module
        returned = passed if get_inner(passed) is module else module
        return (returned, self.updates.optimizer, self.updates.lr_scheduler, *loaders)

    def backward(
        self,
        loss: torch.Tensor,
        weight: float | torch.Tensor | None = None,
        *,
        retain_graph: bool = False,
    ) -> None:
        """Back-propagate a micro-batch's mean loss.

        ``weight`` is what the mean was taken over (label tokens or samples); without it, the labels
        of the batch that went through the model are counted. After the last micro-batch of an
        update, gradients are those of the mean over the whole global batch. ``retain_graph`` lets a
        second loss go back through the same forward pass.
        """
        self.updates.backward(loss, weight, retain_graph=retain_graph)

    def run_update(
        self,
        forward: Callable[[Any], Any],
        update: Update,
        after_micro_batch: Callable[[], None] | None = None,
        *,
        steps_at_once: bool = False,
    ) -> list[MicroBatchResult]:
        """Forward and backward of all micro-batches of one update; ``step`` comes next.

        ``forward(batch)`` returns the mean loss, or ``(loss, weight)``, or is an objective bound to
        its model (``rapidformer.objectives``). Every loop of the library trains this way, and it is
        the only way to train a model that is split into stages
        (``--pipeline-model-parallel-size``). ``after_micro_batch`` is called after each of them but
        the last; those of a pipeline or a CUDA graph are all under way at once, so there it is
        called after them all. ``steps_at_once`` says that nothing looks at the gradients before
        ``step``: a CUDA graph may then update the weights, too.
        """
        return self.updates.run_update(
            forward, update, after_micro_batch, steps_at_once=steps_at_once
        )

    def step(self) -> None:
        """Update, advance the learning rate and clear the gradients, if an update is due."""
        self.updates.step()

    def clip_grad_norm(self, max_norm: float | None = None) -> torch.Tensor | None:
        """Clip now and return the norm before clipping; None while gradients are accumulated.

        Without a number, to ``--clip-grad``. If this was not called, ``optimizer.step()`` clips to
        that itself; with an optimizer of the script's own, only if ``--clip-grad`` was given.
        """
        return self.updates.clock.clip(self._args.clip_grad if max_norm is None else max_norm)

    def accumulate(self, is_last: bool = False) -> AbstractContextManager[None]:
        """Decide yourself whether the ``backward`` inside ends an update."""
        return self.updates.clock.accumulate(is_last)

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate: the ``backward`` inside does not end an update."""
        return self.updates.clock.accumulate(is_last=False)

    def gather(self, tensor: torch.Tensor, pad_value: float | None = None) -> torch.Tensor:
        """Every process's rows, each example once: fillers of the last batch are left out."""
        return self.data.gather(tensor, pad_value)

    def save_checkpoint(
        self,
        folder: str | Path | None = None,
        extra: dict[str, Any] | None = None,
        *,
        protected: Path | None = None,
        processor: Any = None,
        wait: bool = True,
    ) -> Path:
        """Save the whole state of training; returns the checkpoint's folder.

        ``--save-total-limit`` never removes the checkpoint that is ``protected``. With the
        ``processor`` (the tokenizer), `rapidformer predict` can load the checkpoint by itself.
        Without ``wait``, it may be written in the background: it is complete when
        ``checkpoints.wait_for_save`` returns, and a failure is only reported.
        """
        return self.checkpoints.save(
            folder, extra, protected=protected, processor=processor, wait=wait
        )

    def load_checkpoint(self, folder: str | Path | None = None) -> dict[str, Any]:
        """Resume from a checkpoint, or from a run's newest; returns what was saved as extra."""
        return self.checkpoints.load(folder)

    def export(
        self, folder: str | Path, processor: Any = None, *, merge: bool | None = None
    ) -> Path:
        """Save the model alone, as a folder that ``transformers`` loads.

        Of a model with adapters, these are saved, as a folder that ``peft`` loads. With ``merge``
        they are added to the weights under them and the whole model is saved; also by default if
        those weights are in no file. A model that has no ``config`` cannot be built a second time
        to merge it: all of its weights are saved under the names that they have.
        """
        return self.checkpoints.export(folder, processor, merge=merge)

    def explain(self) -> str:
        """Every switch in this run, a line each: on, off or not applicable, and why."""
        if self.model.module is not None:
            return "\n".join(render(self.model.parallelized.explain(self._args)))
        precision = self.runtime.precision.name
        situation = Situation(device=self.device.type, precision=precision)
        return "\n".join(render(explain(self._args, situation)))

    def close(self, *, gives_back: bool = True) -> None:
        """Finish what is being written and take off all that was applied.

        The model is then the plain model again, with its trained weights. That may gather sharded
        weights; a script that no longer needs the model can skip this with ``gives_back=False``.
        The process group stays until the process ends: another engine may follow.
        """
        if self not in _open_engines:
            return
        _open_engines.discard(self)
        beat("end")
        with ExitStack() as parts:  # the last one first, and all of them if one fails
            parts.callback(self._leave)
            parts.callback(self.data.close)
            parts.callback(self.model.close, gives_back=gives_back)
            parts.callback(self.updates.close)  # before the rows that its graphs build on
            parts.callback(self.checkpoints.release_folder)

    def _leave(self) -> None:
        closed: Any = _Closed(self.closed_hint)
        self.data = self.model = self.updates = self.checkpoints = closed


class _Closed:
    """Stands where the parts of an engine were."""

    def __init__(self, hint: str) -> None:
        self._hint = hint

    def __getattr__(self, name: str) -> NoReturn:
        raise RapidformerError(f"{self._hint} ({name!r} was asked for.)")


@functools.cache
def _close_at_exit() -> None:
    """Registered with the first engine, so that it runs before what was imported earlier ends."""

    @atexit.register
    def close_all() -> None:
        # Nothing is restored: that may take all ranks, and some may be gone.
        with ExitStack() as engines:
            engines.callback(stop_processes)
            engines.callback(beat, "end")
            for engine in list(_open_engines):
                engines.callback(engine.close, gives_back=False)


def _read_arguments(args: Arguments, provider: ExtraArgumentsProvider | None) -> Settings:
    if isinstance(args, Settings):
        return args
    if isinstance(args, Mapping):
        return arguments_from_mapping(args)
    return read_command_line(provider) if args is None else parse_arguments(args, provider)
