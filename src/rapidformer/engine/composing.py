"""A run with a model: ``compose`` applies the switches and takes over optimizer and schedule.

``compose`` returns the objects it was given: model, optimizer and scheduler are extended in place,
nothing is wrapped.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from rapidformer.accel.cache import skip_cache_in_training
from rapidformer.accel.deepspeed.strategy import DeepSpeedStrategy
from rapidformer.accel.double_backward import check_double_backward, watch_double_backward
from rapidformer.accel.dropout_seeds import seed_dropout
from rapidformer.accel.host_masks import make_masks_from_host
from rapidformer.accel.parallelize import Parallelized, parallelize
from rapidformer.accel.split.absent import retire_parameters
from rapidformer.accel.unpad.calls import count_steps
from rapidformer.checkpoint.state import bypass_clock
from rapidformer.config.parse import ExtraArgumentsProvider
from rapidformer.engine.bad_batches import describe_bad_batch
from rapidformer.engine.reuse import switch_on_once
from rapidformer.engine.run import Arguments, Run
from rapidformer.engine.unused_settings import describe_unused, list_own_parts
from rapidformer.errors import ModelError, RapidformerError
from rapidformer.log import get_logger
from rapidformer.models.adapters import (
    Adapter,
    add_adapters,
    call_adapted_layers,
    describe_adapter,
    describe_untrainable,
    find_adapter,
    forget_resized_base,
    get_inner,
)
from rapidformer.models.deferred import build_for_split
from rapidformer.models.own_loss import shifts_labels
from rapidformer.models.plan import GivenPlan
from rapidformer.models.work import ModelWork, count_work
from rapidformer.optim.guard import BadUpdate, LossGuard, RecentValues
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


class ComposedRun(Run):
    """A run whose model, optimizer and schedule are in place."""

    def __init__(
        self,
        extra_args_provider: ExtraArgumentsProvider | None = None,
        *,
        args: Arguments = None,
        peft_config: Any = None,
    ) -> None:
        super().__init__(extra_args_provider, args=args, peft_config=peft_config)
        self.model: nn.Module | None = None
        self.optimizer: Optimizer | None = None
        self.lr_scheduler: LRScheduler | None = None
        self.is_own_loop = True
        """Whether the script drives the training itself; templates set this to False."""
        self.warns_of_unused_settings = True
        """False for a caller that creates optimizer and schedule from the settings itself."""
        self.has_own_optimizer = self.has_own_schedule = False
        """Whether the script creates them itself, so that the settings do not describe them."""
        self.skips_cache = True
        """Whether a model keeps no key/value cache in training."""
        self.shifts_labels = False
        """Whether the model compares each position with the next label; decides what counts."""
        self.work: ModelWork | None = None
        """The arithmetic that training the model takes, once composed."""
        self.adapter: Adapter | None = None
        """What is trained instead of the model's own weights, if anything is."""
        self._parameters: list[nn.Parameter] = []
        self._trainable: list[bool] = []
        self.recent_values = RecentValues(self.args.loss_spike_threshold)
        self._is_by_row = False
        self._parallelized: Parallelized | None = None

    @property
    def has_learned_tokens(self) -> bool:
        """Whether every row begins with tokens of an adapter (prompt tuning)."""
        return self.adapter is not None and self.adapter.prepends_tokens

    def build_model(self, build: Callable[[], nn.Module]) -> nn.Module:
        """``build()``, with the adapters of ``--lora-rank`` or ``--peft-config``, if given.

        If the run splits weights, no rank ever holds all of them.

        The model then has no values until ``compose`` has split it and each rank has read or drawn
        its shard, with exactly the values one process would have.
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
        """Apply all switches. Returns model, optimizer, lr_scheduler, then the loaders given.

        Without an optimizer, the one described by the flags is created; likewise the schedule.
        ``plan`` says where the model's blocks are and how they may be split, for a model that
        does not say so itself: the mapping its ``rapidformer_plan()`` would return.
        """
        model = model if model is not None else model_obj
        if model is None:
            raise RapidformerError("compose() needs the model: engine.compose(model=model, ...).")
        if self.model is not None:
            raise RapidformerError("this engine has already composed a model: create a new one.")
        given = model
        model = self._add_adapters(given, has_optimizer=optimizer is not None)
        loaders = [
            self.adopt_loader(loader, is_training=is_training)
            for loader, is_training in ((train_dataloader, True), (eval_dataloader, False))
            if loader is not None
        ]
        has_optimizer = optimizer is not None
        has_schedule = lr_scheduler_fn is not None or lr_scheduler is not None
        if self.warns_of_unused_settings:
            self.has_own_optimizer, self.has_own_schedule = has_optimizer, has_schedule
        get_observer().before_compose(model)
        self.work = count_work(model)
        self.shifts_labels = shifts_labels(model) and not self.has_learned_tokens
        if self.skips_cache:
            skip_cache_in_training(model)
        make_masks_from_host(model)
        names = {id(p): name for name, p in model.named_parameters()}
        before = {name: weakref.ref(p) for name, p in model.named_parameters()}
        self._parallelized = self._switch_on(model, plan, for_training=True)
        count_steps(model, self.clock)
        self.model = model
        self._own_loop.is_composed = True
        # Listed once: walking a model's modules takes longer than many of its kernels.
        self._parameters = list(model.parameters())
        self._trainable = [p.requires_grad for p in self._parameters]
        watch_double_backward(model, self._check_double_backward)
        deepspeed = self._parallelized.deepspeed
        if deepspeed is not None:
            deepspeed.check_given(optimizer, has_schedule=has_schedule)
        if optimizer is not None:
            repoint_optimizer(optimizer, model, names)
        retire_parameters(before, self._parameters)
        if optimizer is not None:
            check_given_optimizer(optimizer)
        elif deepspeed is None or not deepspeed.has_own_optimizer:
            optimizer = build_optimizer(model, self.args)
        if deepspeed is not None:
            optimizer = self._start_deepspeed(deepspeed, optimizer)
        assert optimizer is not None
        if self.topology.expert > 1:
            split_groups_by_mesh(optimizer, lr_scheduler)
        self._parallelized.watch_updates(optimizer)
        # Only now: creating a scheduler patches `optimizer.step`, and must come first.
        self.lr_scheduler = self._make_scheduler(optimizer, lr_scheduler_fn, lr_scheduler)
        self.optimizer = take_over_optimizer(
            optimizer,
            self.clock,
            clip_grad=self.args.clip_grad,
            scaler=self.scaler,
            # On a CPU it saves little, and a clipped step is a plain loop's to the bit.
            clips_in_step=self.device.type == "cuda" and not self.args.cpu_offload,
        )
        take_over_scheduler(self.lr_scheduler, self.clock)
        self.clock.guard = self._build_guard(model, self.optimizer)
        seed_dropout(model, self.args.seed, self.topology)
        get_observer().after_compose(self)
        self._warn_about_unused_settings(
            has_optimizer=has_optimizer,
            schedule=lr_scheduler_fn or lr_scheduler,
            has_loader=isinstance(train_dataloader, DataLoader),
        )
        returned = given if get_inner(given) is model else model
        return (returned, self.optimizer, self.lr_scheduler, *loaders)

    def _add_adapters(self, model: nn.Module, *, has_optimizer: bool) -> nn.Module:
        """The model that holds the weights, with the adapters that the settings ask for."""
        inner = get_inner(model)
        had_adapter = find_adapter(inner) is not None
        adapted = add_adapters(inner, self.args)
        resized = forget_resized_base(adapted)
        if resized is not None and self.is_main:
            get_logger().warning(resized)
        self.adapter = find_adapter(adapted)
        if self.adapter is not None and not had_adapter and has_optimizer:
            raise RapidformerError(
                "the optimizer given to compose() was built before the adapters, which it would "
                "not train. Build the model with its adapters first, then the optimizer:\n"
                "    model = engine.build_model(lambda: AutoModel.from_pretrained(...))\n"
                "or let compose() build the optimizer from the flags."
            )
        if self.adapter is not None and not any(p.requires_grad for p in adapted.parameters()):
            raise ModelError(describe_untrainable(self.adapter))
        if self.adapter is not None and self.is_own_loop and self.is_main:
            get_logger().info("adapter   %s", describe_adapter(self.adapter, adapted))
        return adapted

    def _warn_about_unused_settings(self, **own_parts: Any) -> None:
        if not self.warns_of_unused_settings:
            return
        own = list_own_parts(has_loop=self.is_own_loop, **own_parts)
        if self.is_own_loop and self.clock.guard is None:
            own["loop"] = (*own["loop"], "on_bad_loss", "loss_spike_threshold", "max_rollbacks")
        message = describe_unused(self.args, own)
        if message is not None and self.is_main:
            get_logger().warning(message)

    def _build_guard(self, model: nn.Module, optimizer: Optimizer) -> LossGuard | None:
        """What judges every update; a run that stops at a bad loss needs none."""
        policy = self.args.on_bad_loss
        if policy == "stop" or (policy == "rollback" and self.is_own_loop):
            return None
        if self.is_own_loop:
            self.clock.on_bad_update = self._report_bad_update
        return LossGuard(
            self.recent_values,
            model,
            optimizer,
            self.topology,
            self.device,
            prevents=policy == "skip",
        )

    def _report_bad_update(self, bad: BadUpdate) -> None:
        loader = self._train_loader
        samples = loader.list_samples(loader.epoch, loader.positions) if loader else []
        what = describe_bad_batch(bad.reason, self.clock.updates + 1, samples)
        if self.is_main:
            get_logger().warning(f"{what}: the batch was skipped.")

    def _start_deepspeed(
        self, strategy: DeepSpeedStrategy, optimizer: Optimizer | None
    ) -> Optimizer:
        """Hand model and optimizer to DeepSpeed, which owns gradients and updates from now on."""
        groups = group_parameters(strategy.model, self.args.weight_decay)
        bypass = functools.partial(bypass_clock, self.clock)
        optimizer = strategy.start(optimizer, groups, bypass)
        self.clock.keeper = strategy
        return optimizer

    def compose_for_evaluation(
        self, model: nn.Module, *, plan: GivenPlan | None = None
    ) -> nn.Module:
        """Apply what a model needs without training: no optimizer, no schedule."""
        inner = get_inner(model)
        self.adapter = find_adapter(inner)
        self.shifts_labels = shifts_labels(inner) and not self.has_learned_tokens
        self._parallelized = self._switch_on(inner, plan, for_training=False)
        self.model = inner
        self._own_loop.is_composed = True
        return model.eval()

    def _switch_on(
        self, model: nn.Module, plan: GivenPlan | None, *, for_training: bool
    ) -> Parallelized:
        if self.adapter is not None:
            call_adapted_layers(model)
        switch_on = functools.partial(
            parallelize,
            model,
            self.args,
            device=self.device,
            topology=self.topology,
            precision=self.precision,
            given_plan=plan,
            for_training=for_training,
            is_filler=self._own_loop.is_on_filler,
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

    def get_learning_rate(self) -> float:
        """The learning rate of the next update."""
        if self.optimizer is None:
            raise RapidformerError("call engine.compose(model=...) first.")
        return float(self.optimizer.param_groups[0]["lr"])

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

    def _check_double_backward(self) -> None:
        check_double_backward(self.args, self.topology, is_by_row=self._is_by_row)
