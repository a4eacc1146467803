"""``RapidformerEngine``: few verbs, for a loop that stays the user's own.

    model, optimizer, lr_scheduler = engine.compose(model, optimizer, lr_scheduler_fn)
    engine.backward(loss)

``compose`` hands back the very objects it was given: the model, optimizer and scheduler get a
subclass of their own class, nothing is wrapped. The one thing a reader would get wrong: *when* an
update happens is decided in ``backward``, by counting micro-batches. ``optimizer.step()``,
``lr_scheduler.step()`` and ``zero_grad()`` do nothing while gradients are still being accumulated,
so the same loop serves any global batch size, and either order of the two ``step`` calls gives the
same learning rates.
"""

from __future__ import annotations

import atexit
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from rapidformer.accel.deepspeed.strategy import DeepSpeedStrategy
from rapidformer.accel.double_backward import check_double_backward, watch_double_backward
from rapidformer.accel.dropout import seed_dropout
from rapidformer.accel.parallelize import Parallelized, parallelize
from rapidformer.accel.pipeline.pipeline import Pipeline
from rapidformer.accel.tensor.check import check_whole_gradients
from rapidformer.accel.tensor.joined_loss import join_loss
from rapidformer.checkpoint.export import export_model, gather_weights
from rapidformer.checkpoint.restart import claim_folder
from rapidformer.checkpoint.store import CheckpointStore, TrainingState, bypass_clock
from rapidformer.config.parse import ExtraArgumentsProvider
from rapidformer.data.loader import DistributedLoader
from rapidformer.data.update import MicroBatch, MicroBatchResult, Update
from rapidformer.dist.heartbeat import beat, in_phase
from rapidformer.dist.processes import stop_processes
from rapidformer.engine.reuse import switch_on_once
from rapidformer.engine.run import Arguments, Run
from rapidformer.engine.unused_settings import describe_unused, list_own_parts
from rapidformer.errors import ModelError, RapidformerError
from rapidformer.log import get_logger, warn_once
from rapidformer.models.deferred import build_for_split
from rapidformer.models.plan import GivenPlan, shifts_labels
from rapidformer.optim.observer import get_observer
from rapidformer.optim.optimizers import build_optimizer, group_parameters
from rapidformer.optim.schedule import build_scheduler, fill_training_steps
from rapidformer.optim.shard_probe import check_given_optimizer
from rapidformer.optim.takeover import (
    repoint_optimizer,
    split_groups_by_mesh,
    take_over_optimizer,
    take_over_scheduler,
)
from rapidformer.optim.update import MeasureNorm, scale_loss

UNKNOWN_WEIGHT = (
    "nobody has said what this loss is a mean over, and the batch does not show it. All "
    "micro-batches get the same weight, which is exact only if they have equally many labels. Say "
    "it with engine.backward(loss, weight=n), or pass the DataLoader to engine.compose()."
)


class RapidformerEngine(Run):
    """A run and the verbs of training.

    ``args`` is for notebooks and tests; without it the command line is read.
    """

    def __init__(
        self,
        extra_args_provider: ExtraArgumentsProvider | None = None,
        *,
        args: Arguments = None,
    ) -> None:
        super().__init__(extra_args_provider, args=args)
        self.model: nn.Module | None = None
        self.optimizer: Optimizer | None = None
        self.lr_scheduler: LRScheduler | None = None
        self.resumed_from: Path | None = None
        self.is_own_loop = True
        """Whether the script drives the training itself; a template says that it does not."""
        self.warns_of_unused_settings = True
        """False for a caller that makes optimizer and schedule from the settings itself."""
        self.shifts_labels = False
        """Whether the model compares each position with the next label; decides what counts."""
        self._first_update = 0
        self._parameters: list[nn.Parameter] = []
        self._num_trainable = 0
        self._is_by_row = False
        self._parallelized: Parallelized | None = None
        atexit.register(self.close)

    @property
    def has_pipeline(self) -> bool:
        """Whether the model is cut into stages: then ``run_update`` replaces ``backward``."""
        return self.topology.pipeline > 1

    # ---- composing -----------------------------------------------------------------------------

    def build_model(self, build: Callable[[], nn.Module]) -> nn.Module:
        """``build()``; where the run splits weights, no process ever holds all of them.

        The model then has no values until ``compose`` has split it and each process has made (read
        or drawn) its share, equal to what one process would have.
        """
        return build_for_split(self.args, build)

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
        """Switch everything on. Returns model, optimizer, lr_scheduler, then the loaders given.

        Without an optimizer, the one that the flags describe is made; likewise the schedule.
        ``plan`` says where the model's blocks are and how they may be split, for a model that
        does not say so itself: the same mapping as its ``rapidformer_plan()`` would return.
        """
        model = model if model is not None else model_obj
        if model is None:
            raise RapidformerError("compose() needs the model: engine.compose(model=model, ...).")
        if self.model is not None:
            raise RapidformerError("this engine has composed a model already: make another engine.")
        loaders = [
            self.adopt_loader(loader, is_training=is_training)
            for loader, is_training in ((train_dataloader, True), (eval_dataloader, False))
            if loader is not None
        ]
        has_optimizer = optimizer is not None
        get_observer().before_compose(model)
        self.shifts_labels = shifts_labels(model)
        names = {id(p): name for name, p in model.named_parameters()}
        self._parallelized = self._switch_on(model, plan, for_training=True)
        self.model = model
        self._own_loop.is_composed = True
        # Found once: to walk a model's modules takes longer than many of its kernels.
        self._parameters = list(model.parameters())
        self._num_trainable = self._count_trainable()
        watch_double_backward(model, self._check_double_backward)
        deepspeed = self._parallelized.deepspeed
        if deepspeed is not None:
            deepspeed.check_given(optimizer, has_schedule=bool(lr_scheduler_fn or lr_scheduler))
        if optimizer is not None:
            repoint_optimizer(optimizer, model, names)
            check_given_optimizer(optimizer)
        elif deepspeed is None or not deepspeed.has_own_optimizer:
            optimizer = build_optimizer(model, self.args)
        if deepspeed is not None:
            optimizer = self._start_deepspeed(deepspeed, optimizer)
        assert optimizer is not None
        if self.topology.expert > 1:
            split_groups_by_mesh(optimizer, lr_scheduler)
        self._parallelized.watch_updates(optimizer)
        # Taken over only now: making a scheduler patches `optimizer.step`, and must come before.
        self.lr_scheduler = self._make_scheduler(optimizer, lr_scheduler_fn, lr_scheduler)
        self.optimizer = take_over_optimizer(
            optimizer, self.clock, clip_grad=self.args.clip_grad, scaler=self.scaler
        )
        take_over_scheduler(self.lr_scheduler, self.clock)
        seed_dropout(model, self.args.seed, self.topology)
        get_observer().after_compose(self)
        self._warn_about_unused_settings(
            has_optimizer=has_optimizer,
            schedule=lr_scheduler_fn or lr_scheduler,
            has_loader=isinstance(train_dataloader, DataLoader),
        )
        return (self.model, self.optimizer, self.lr_scheduler, *loaders)

    def _warn_about_unused_settings(self, **own_parts: Any) -> None:
        if not self.warns_of_unused_settings:
            return
        own = list_own_parts(has_loop=self.is_own_loop, **own_parts)
        message = describe_unused(self.args, own)
        if message is not None and self.is_main:
            get_logger().warning(message)

    def _start_deepspeed(
        self, strategy: DeepSpeedStrategy, optimizer: Optimizer | None
    ) -> Optimizer:
        """Hand model and optimizer over: gradients and updates are DeepSpeed's from now on."""
        groups = group_parameters(strategy.model, self.args.weight_decay)
        bypass = functools.partial(bypass_clock, self.clock)
        optimizer = strategy.start(optimizer, groups, bypass)
        self.clock.keeper = strategy
        return optimizer

    def compose_for_evaluation(
        self, model: nn.Module, *, plan: GivenPlan | None = None
    ) -> nn.Module:
        """Switch on what a model needs without training: no optimizer, no schedule."""
        self.shifts_labels = shifts_labels(model)
        self._parallelized = self._switch_on(model, plan, for_training=False)
        self.model = model.eval()
        self._own_loop.is_composed = True
        return model

    def _switch_on(
        self, model: nn.Module, plan: GivenPlan | None, *, for_training: bool
    ) -> Parallelized:
        switch_on = functools.partial(
            parallelize,
            model,
            self.args,
            device=self.device,
            topology=self.topology,
            precision=self.precision,
            given_plan=plan,
            for_training=for_training,
        )
        return switch_on_once(model, self.args, switch_on)

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """The model's parameters as they are between updates: sharded ones are shards."""
        return self._parameters

    @property
    def parallelized(self) -> Parallelized:
        """The model with its plan and switches, once composed."""
        if self._parallelized is None:
            raise RapidformerError("call engine.compose(model=...) first.")
        return self._parallelized

    # ---- the loop's verbs ----------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, weight: float | torch.Tensor | None = None) -> None:
        """Back-propagate a micro-batch's mean loss.

        ``weight`` is what the mean was taken over (label tokens or samples); without it, the labels
        of the batch that the training loader handed out last are counted. After the last
        micro-batch of an update, gradients are those of the mean over the whole global batch.
        """
        if self.parallelized.pipeline is not None:
            raise RapidformerError(
                "a model that is cut into stages (--pipeline-model-parallel-size) runs forward "
                "and backward passes of several micro-batches at once: use engine.run_update(), "
                "Finetuner or PreTrainer instead of engine.backward()."
            )
        in_hand = self._own_loop.in_training
        if in_hand is not None and in_hand.is_filler:
            weight = 0.0
        elif weight is None:
            weight = self._count_labels(in_hand)
        self._back_propagate(loss, weight, in_hand, ends_update=bool(in_hand and in_hand.is_last))

    def _back_propagate(
        self,
        loss: torch.Tensor,
        weight: float | torch.Tensor,
        micro_batch: MicroBatch | None,
        *,
        ends_update: bool,
    ) -> None:
        loss = join_loss(loss)
        if isinstance(loss, DTensor):
            raise ModelError(
                "the loss contains weights that are split over ranks (a penalty over "
                "model.parameters(), say). Gather each of them in the loss: "
                "sum(engine.gather_weight(p).pow(2).sum() for p in model.parameters())."
            )
        info = micro_batch.info if micro_batch is not None else None
        get_observer().see_loss(loss, weight, info)
        is_last = self.clock.start_micro_batch(ends_update=ends_update)
        share = self.clock.add_weight(weight, shared_unit=self._get_shared_unit(weight))
        scale = self.scaler.scale if self.scaler else 1.0
        synchronizer = self.parallelized.synchronizer
        beat("backward", self.clock.updates + 1)
        synchronizer.before_backward(is_last)
        self.parallelized.backward(scale_loss(loss, share, scale))
        synchronizer.after_backward()
        if is_last:
            beat("update")
            self._finish_gradients()

    def iterate_updates(self, loader: DistributedLoader) -> Iterator[Update]:
        """The updates of an epoch, for ``run_update``."""
        if self._train_loader is None:
            self._train_loader = loader
        return loader.iterate_updates()

    def run_update(self, forward: Callable[[Any], Any], update: Update) -> list[MicroBatchResult]:
        """Forward and backward of all micro-batches of one update; ``step`` comes next.

        ``forward(batch)`` returns the mean loss, or ``(loss, weight)``. This is how every loop of
        the library trains, and the only way to train a model that is cut into stages
        (``--pipeline-model-parallel-size``).
        """
        pipeline = self.parallelized.pipeline
        if pipeline is None:
            return self._run_in_turn(forward, update)
        return self._run_pipelined(pipeline, forward, update)

    def _run_in_turn(self, forward: Callable[[Any], Any], update: Update) -> list[MicroBatchResult]:
        results = []
        for micro_batch in update:
            beat("forward", self.clock.updates + 1)
            result = self.run_forward(forward, micro_batch)
            with self.accumulate(is_last=micro_batch is update[-1]):
                self._back_propagate(result.loss, result.weight, micro_batch, ends_update=False)
            results.append(replace(result, loss=result.loss.detach()))
        return results

    def _run_pipelined(
        self, pipeline: Pipeline, forward: Callable[[Any], Any], update: Update
    ) -> list[MicroBatchResult]:
        count = len(update)
        for _ in update:
            self.clock.start_micro_batch(ends_update=False)
        if self.scaler is not None and self.scaler.weight_unit is None:
            self.scaler.agree_on_unit(float(update[0].info.labels))
        unit = (self.scaler.weight_unit if self.scaler else None) or 1.0
        scale = self.scaler.scale if self.scaler else 1.0

        def compute(number: int) -> tuple[torch.Tensor, MicroBatchResult]:
            result = self.run_forward(forward, update[number])
            return scale_loss(result.loss, result.weight / unit, scale), result

        beat("pipeline", self.clock.updates + 1)
        pipeline.run(
            compute,
            count,
            step=self.clock.updates,
            synchronizer=self.parallelized.synchronizer,
        )
        beat("update")
        results = pipeline.share_results(count)
        for each, result in zip(update, results, strict=True):
            get_observer().see_loss(result.loss, result.weight, each.info)
        self.clock.set_weight(torch.stack([torch.as_tensor(r.weight) for r in results]).sum(), unit)
        self._finish_gradients(pipeline.measure_norm)
        return results

    def _finish_gradients(
        self, measure: Callable[[MeasureNorm], torch.Tensor] | None = None
    ) -> None:
        self.clock.finish_gradients(self._parameters, self.scaler, measure)
        has_changed = self._notice_unfrozen()
        group = self.topology.get_group("tensor")
        if group is not None and (has_changed or self.clock.updates == self._first_update):
            check_whole_gradients(self.parallelized.model, group)

    def _count_trainable(self) -> int:
        return sum(p.requires_grad for p in self._parameters)

    def _notice_unfrozen(self) -> bool:
        """Whether parameters were frozen or unfrozen since the last update; warn of idle ones."""
        count = self._count_trainable()
        if count == self._num_trainable:
            return False
        self._num_trainable = count
        assert self.optimizer is not None
        if self.parallelized.deepspeed is not None:
            raise RapidformerError(
                "parameters were frozen or unfrozen after compose(), but DeepSpeed divides the "
                "trainable ones among the ranks when it starts: choose them before compose(), or "
                "use --zero-1-memory-optimization, -2- or -3- instead of a DeepSpeed file."
            )
        held = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        idle = [p for p in self._parameters if p.requires_grad and id(p) not in held]
        if idle:
            warn_once(
                f"{len(idle)} parameters were unfrozen after compose(), but the optimizer does not "
                "hold them, so they are not updated. Add them once they are unfrozen: "
                'optimizer.add_param_group({"params": [...]}).'
            )
        return True

    def run_forward(
        self, forward: Callable[[Any], Any], micro_batch: MicroBatch
    ) -> MicroBatchResult:
        """The forward step on one micro-batch; what it leaves open is counted from the batch."""
        with self._own_loop.holding(micro_batch):
            returned = forward(micro_batch.batch)
        loss, weight, parts = (
            (*returned, {})[:3] if isinstance(returned, tuple) else (returned, None, {})
        )
        if micro_batch.is_filler:
            weight = 0.0
        elif weight is None:
            weight = self._count_labels(micro_batch)
        means = {
            name: (mean, weight if own is None or micro_batch.is_filler else own)
            for name, (mean, own) in parts.items()
        }
        return MicroBatchResult(loss=loss, weight=weight, parts=means)

    def _count_labels(self, micro_batch: MicroBatch | None) -> float:
        """What the mean loss of a micro-batch was taken over, as far as its batch shows."""
        if micro_batch is not None:
            count = micro_batch.info.count_labels(shifts_labels=self.shifts_labels)
            if count is not None:
                return float(count)
        clock = self.clock
        if self.topology.num_replicas > 1 or clock.rounds_per_update > 1 or clock.is_accumulating:
            warn_once(UNKNOWN_WEIGHT)
        return 1.0

    def _get_shared_unit(self, weight: float | torch.Tensor) -> float | None:
        if self.topology.num_replicas == 1:
            return None
        if self.scaler is None:
            return 1.0
        if self.scaler.weight_unit is None:
            self.scaler.agree_on_unit(float(weight))
        return self.scaler.weight_unit

    def step(self) -> None:
        """Update, advance the learning rate and clear the gradients, if an update is due."""
        if self.optimizer is None or self.lr_scheduler is None:
            raise RapidformerError("call engine.compose(model=...) first.")
        self.optimizer.step()
        self.lr_scheduler.step()
        self.optimizer.zero_grad()

    def clip_grad_norm(self, max_norm: float | None = None) -> torch.Tensor | None:
        """Clip now, and return the norm before it; None while gradients are still accumulated.

        ``optimizer.step()`` clips by ``--clip-grad`` on its own where this was not called.
        """
        return self.clock.clip(self.args.clip_grad if max_norm is None else max_norm)

    @contextmanager
    def gradients_by_row(self) -> Iterator[None]:
        """Allow a gradient penalty on several data-parallel ranks.

        For ``torch.autograd.grad(outputs.sum(), inputs, create_graph=True)`` and the like, where
        each row's gradient depends on that row alone.
        """
        before, self._is_by_row = self._is_by_row, True
        try:
            yield
        finally:
            self._is_by_row = before

    def _check_double_backward(self) -> None:
        check_double_backward(self.args, self.topology, is_by_row=self._is_by_row)

    def gather_weight(self, parameter: torch.Tensor) -> torch.Tensor:
        """The whole of a parameter that ZeRO or tensor parallelism has split, for use in a loss.

        Every rank must call it, for the same parameters in the same order. The gradient is that of
        one process. A parameter that is whole is returned as it is.
        """
        return self.parallelized.gather_weight(parameter)

    @contextmanager
    def accumulate(self, is_last: bool = False) -> Iterator[None]:
        """Decide by hand whether the ``backward`` inside ends an update."""
        before = self.clock.forced
        self.clock.forced = is_last
        try:
            yield
        finally:
            self.clock.forced = before

    def no_sync(self) -> Any:
        """Accumulate: the ``backward`` inside does not end an update."""
        return self.accumulate(is_last=False)

    # ---- state ---------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        folder: str | Path | None = None,
        extra: dict[str, Any] | None = None,
        *,
        protected: Path | None = None,
    ) -> Path:
        """Save the whole state of training; returns the checkpoint's folder.

        ``--save-total-limit`` never removes the checkpoint that is ``protected``.
        """
        target = folder or self.args.save
        if target is None:
            raise RapidformerError("where to? Give --save, or engine.save_checkpoint(folder).")
        if self.clock.is_accumulating:
            raise RapidformerError(
                "save after optimizer.step(): the gradients of this update are only partly there."
            )
        with in_phase("save"):
            self.parallelized.settle()
            saved = CheckpointStore(Path(target)).save(
                self._get_state(),
                extra or {},
                keep=self.args.save_total_limit,
                protected=protected,
                with_optimizer=self.args.save_optim,
                with_random_states=self.args.save_rng,
            )
            if self.is_main:
                claim_folder(Path(target))
            return saved

    def load_checkpoint(self, folder: str | Path | None = None) -> dict[str, Any]:
        """Go on from a checkpoint (or from a run's newest); returns what was saved as extra."""
        source = folder or self.args.load
        if source is None:
            raise RapidformerError("where from? Give --load, or engine.load_checkpoint(folder).")
        state = self._get_state()
        only_weights = self.args.finetune
        extra = CheckpointStore.load(
            Path(source),
            state,
            with_optimizer=self.args.load_optim and not only_weights,
            with_random_states=self.args.load_rng and not only_weights,
            with_position=not only_weights,
        )
        self.clock.updates = self._first_update = state.step
        self.resumed_from = state.loaded_from
        return extra

    def load_weights(self, folder: str | Path) -> None:
        """Take the weights of a checkpoint, and nothing else of it."""
        CheckpointStore.load(
            Path(folder),
            self._get_state(),
            with_optimizer=False,
            with_random_states=False,
            with_position=False,
        )

    def gather_weights(self) -> dict[str, Any]:
        """All weights by name, whole, on rank 0; empty elsewhere. Every rank must call this."""
        self.parallelized.settle()
        deepspeed = self.parallelized.deepspeed
        if deepspeed is not None and deepspeed.state is not None:
            return deepspeed.state.gather_weights()
        return gather_weights(self.parallelized.model)

    def export(self, folder: str | Path, processor: Any = None) -> Path:
        """Save the model alone, as a folder that ``transformers`` loads."""
        with in_phase("save"):
            self.parallelized.settle()
            deepspeed = self.parallelized.deepspeed
            weights = deepspeed.state.gather_weights() if deepspeed and deepspeed.state else None
            return export_model(
                self.parallelized.model,
                Path(folder),
                self.topology,
                processor=processor,
                weights=weights,
            )

    def close(self) -> None:
        """Leave the other processes; the last call of a script."""
        beat("end")
        if self._parallelized is not None and self._parallelized.deepspeed is not None:
            self._parallelized.deepspeed.close()
        stop_processes()

    # ---- inside --------------------------------------------------------------------------------

    def _make_scheduler(
        self, optimizer: Optimizer, function: Callable[..., Any] | None, ready_made: Any
    ) -> LRScheduler:
        if ready_made is not None:
            return ready_made  # type: ignore[no-any-return]
        train_iters = self.get_train_iters()
        if function is not None:
            if isinstance(function, functools.partial):
                function = fill_training_steps(function, train_iters)
            return function(optimizer)  # type: ignore[no-any-return]
        deepspeed = self.parallelized.deepspeed
        of_file: Any = deepspeed and deepspeed.build_scheduler(optimizer, train_iters)
        if of_file is not None:
            return of_file  # type: ignore[no-any-return]
        return build_scheduler(
            optimizer,
            self.args,
            train_iters=train_iters,
            count_samples=self.batches.count_samples,
        )

    def get_learning_rate(self) -> float:
        """The learning rate of the coming update."""
        if self.optimizer is None:
            raise RapidformerError("call engine.compose(model=...) first.")
        return float(self.optimizer.param_groups[0]["lr"])

    def _get_state(self) -> TrainingState:
        parallelized = self.parallelized
        assert self.optimizer is not None and self.lr_scheduler is not None
        return TrainingState(
            model=parallelized.model,
            optimizer=self.optimizer,
            scheduler=self.lr_scheduler,
            scaler=self.scaler,
            loader=self._train_loader,
            step=self.clock.updates,
            device=self.device,
            topology=self.topology,
            bypass=functools.partial(bypass_clock, self.clock),
            gathered=parallelized.deepspeed.state if parallelized.deepspeed else None,
        )
