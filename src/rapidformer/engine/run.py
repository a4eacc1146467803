"""A run before it has a model: settings, processes, topology, data.

The first loader that is built is the training data's, unless the caller says otherwise.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader

from rapidformer.accel.cuda_graph.obstacles import find_graph_problem
from rapidformer.accel.fp8.layers import find_fp8_problem
from rapidformer.accel.precision.precision import LossScaler, choose_precision
from rapidformer.accel.unpad.on_demand import settle
from rapidformer.checkpoint.restart import continue_after_restart
from rapidformer.config import (
    Settings,
    arguments_from_mapping,
    parse_arguments,
    resolve,
)
from rapidformer.config.batches import get_batch_schedule
from rapidformer.config.dialects import WITHOUT_EFFECT
from rapidformer.config.idle_settings import find_idle_settings
from rapidformer.config.parse import ExtraArgumentsProvider
from rapidformer.config.user_defined import APPLICATIONS
from rapidformer.context import set_context
from rapidformer.data.adopt import adopt_loader
from rapidformer.data.collate import PadCollator
from rapidformer.data.fetching import Collate
from rapidformer.data.lengths import GroupedOrder, measure_lengths
from rapidformer.data.loader import DistributedLoader
from rapidformer.data.run_tokenizer import load_tokenizer
from rapidformer.dist.collectives import (
    gather_from_all,
    gather_objects,
    gather_rows,
    is_alone,
    sum_over_rows,
    wait_for_all,
)
from rapidformer.dist.processes import start_processes
from rapidformer.dist.seeding import seed_everything
from rapidformer.dist.topology import build_topology
from rapidformer.engine.own_loop import OwnLoop
from rapidformer.errors import ConfigurationError, RapidformerError
from rapidformer.log import configure_logging, warn_once
from rapidformer.models.adapter_config import to_text
from rapidformer.optim.observer import get_observer
from rapidformer.optim.update import UpdateClock
from rapidformer.timers import Timers

Arguments = Settings | Mapping[str, Any] | Sequence[str] | None


class Run:
    """Settings, processes, device and loaders of a run."""

    def __init__(
        self,
        extra_args_provider: ExtraArgumentsProvider | None = None,
        *,
        args: Arguments = None,
        peft_config: Any = None,
    ) -> None:
        asked = _read_arguments(args, extra_args_provider)
        if peft_config is not None:
            asked = asked.replace("peft_config", peft_config=to_text(peft_config))
        given = get_observer().change_settings(asked)
        configure_logging(given.log_level)
        processes = start_processes(
            device=given.device, timeout_minutes=given.distributed_timeout_minutes
        )
        given = continue_after_restart(given)
        self.args = resolve(given, world_size=processes.world_size, rank=processes.rank)
        self.device = processes.device
        self.topology = build_topology(
            self.device.type,
            pipeline=self.args.pipeline_model_parallel_size,
            data=self.args.data_parallel_size,
            context=self.args.context_parallel_size,
            tensor=self.args.tensor_model_parallel_size,
            expert=self.args.expert_model_parallel_size,
            sharding=self.args.hybrid_sharding_size,
        )
        self.is_main = processes.is_main
        self.timers = Timers()
        _check_device(self.args, self.device)
        self.precision = choose_precision(self.args.mixed_precision, self.device)
        self.scaler = _build_scaler(self.args) if self.precision.needs_loss_scaling else None
        self.clock = UpdateClock(self.args.gradient_accumulation_steps or 1, self.topology)
        self.batches = get_batch_schedule(self.args)
        self._own_loop = OwnLoop(self.clock)
        self._train_loader: DistributedLoader | None = None
        self._extra_updates = 0
        """By how much a run is longer or shorter because it began with another batch size."""
        # Not the engine itself: the context outlives it.
        build_tokenizer = functools.partial(load_tokenizer, self.args)
        set_context(args=self.args, timers=self.timers, build_tokenizer=build_tokenizer)
        _warn_about_settings_without_effect(self.args)
        seed_everything(self.args.seed, deterministic=self.args.deterministic)

    @property
    def mesh(self) -> DeviceMesh | None:
        """The mesh of the run; None in a run of one process."""
        return self.topology.mesh

    @property
    def train_loader(self) -> DistributedLoader | None:
        """The loader of the training data, once there is one."""
        return self._train_loader

    # ---- data ----------------------------------------------------------------------------------

    def build_data_loader(
        self,
        dataset: Any,
        collate_fn: Collate | None = None,
        *,
        shuffle: bool | None = None,
        batch_size: int | None = None,
        is_training: bool | None = None,
        counts_ahead: bool = False,
        order: Sequence[int] | None = None,
    ) -> DistributedLoader:
        """A loader for this rank's part of the data, with batches on the device.

        The first one built is the training data's, unless ``is_training`` says otherwise.
        ``shuffle`` follows the data set's own name for its split (``train`` is), unless said.
        ``counts_ahead`` adds ``update_counts`` to every batch: rows and labels of its whole update
        over all processes, for a loss that is made of several means.
        ``order`` lists the samples to hand out, by their index.
        """
        if is_training is None:
            is_training = self._train_loader is None
        if shuffle is None:
            shuffle = is_training and str(getattr(dataset, "split", "")).startswith("train")
        workers, collate = self.args.num_workers, collate_fn or PadCollator()
        if is_training:
            get_observer().see_training_data(dataset, collate)
        loader = DistributedLoader(
            dataset,
            collate=collate,
            micro_batch_size=batch_size or self.args.micro_batch_size or 1,
            num_replicas=self.args.data_parallel_size,
            replica=self.topology.get_rank("data"),
            rounds_per_update=self.clock.rounds_per_update if is_training else 1,
            shuffle=shuffle,
            seed=self.args.seed if self.args.data_seed is None else self.args.data_seed,
            drop_last=is_training and not self.args.keep_last,
            num_workers=workers if workers is not None else 2 * (self.device.type == "cuda"),
            device=self.device,
            get_batch_size=(
                self.batches.get_size if is_training and not self.batches.is_constant else None
            ),
            token_budget=self.args.tokens_per_micro_batch if is_training else None,
            lengths=self._measure_for_budget(dataset) if is_training else None,
            gather_digests=None if is_alone() else gather_from_all,
            sum_counts=partial(sum_over_rows, topology=self.topology) if counts_ahead else None,
            order=self._choose_order(dataset, order, groups=shuffle and is_training),
            num_samples=None if order is None else len(order),
        )
        return self._watch(loader, is_training=is_training)

    def _measure_for_budget(self, dataset: Any) -> list[int] | None:
        if self.args.tokens_per_micro_batch is None or not hasattr(dataset, "__len__"):
            return None
        return measure_lengths(dataset, self.args.length_column, "--tokens-per-micro-batch")

    def _choose_order(
        self, dataset: Any, given: Sequence[int] | None, *, groups: bool
    ) -> Callable[[], Sequence[int]] | None:
        if given is not None:
            return lambda: given
        if not (groups and self.args.group_by_length):
            return None
        size = (self.args.micro_batch_size or 1) * self.args.data_parallel_size
        return GroupedOrder(measure_lengths(dataset, self.args.length_column), size)

    def adopt_loader(
        self, loader: Any, *, is_training: bool, batch_size: int | None = None
    ) -> DistributedLoader:
        """The user's DataLoader, split over the data-parallel ranks.

        ``batch_size`` is that of each rank, if it is not the DataLoader's own.
        """
        if isinstance(loader, DistributedLoader):
            return loader
        if not isinstance(loader, DataLoader):
            raise RapidformerError(
                f"compose() takes torch DataLoaders, got {type(loader).__name__}: "
                "use engine.build_data_loader(dataset, collate_fn)."
            )
        if is_training and loader.batch_size is not None:
            self._adopt_batch_size(batch_size or loader.batch_size)
        adopted = adopt_loader(
            loader,
            batch_size=batch_size,
            num_replicas=self.args.data_parallel_size,
            replica=self.topology.get_rank("data"),
            rounds_per_update=self.clock.rounds_per_update if is_training else 1,
            seed=self.args.seed if self.args.data_seed is None else self.args.data_seed,
            device=self.device,
            gather_digests=None if is_alone() else gather_from_all,
        )
        return self._watch(adopted, is_training=is_training)

    def _adopt_batch_size(self, batch_size: int) -> None:
        """Accumulate to ``--global-batch-size`` in micro-batches of the user's own size."""
        if not self.batches.is_constant:
            raise ConfigurationError(
                "--rampup-batch-size needs a loader whose batches the engine sizes: use "
                "engine.build_data_loader(dataset, collate_fn)."
            )
        total = self.args.global_batch_size
        if not self.args.is_given("global_batch_size") or total is None:
            return
        unit = batch_size * self.args.data_parallel_size
        if total % unit:
            raise ConfigurationError(
                f"--global-batch-size {total} is not a multiple of the DataLoader's batch_size "
                f"{batch_size} x {self.args.data_parallel_size} data-parallel ranks = {unit}."
            )
        self.clock.rounds_per_update = total // unit

    def get_train_iters(self) -> int | None:
        """Updates of the whole run, from the flags and the training data's length."""
        args, loader = self.args, self._train_loader
        if args.train_iters is not None:
            return args.train_iters
        if args.train_samples is not None:
            return self.batches.count_updates(args.train_samples) + self._extra_updates
        if args.epochs is not None and loader is not None and not loader.is_stream:
            return math.ceil(args.epochs * loader.updates_per_epoch) + self._extra_updates
        return None

    def count_updates_done(self) -> int | None:
        """How far the run is by its samples, in updates of the current size.

        None if updates tell it: the user counts the run in them (``--train-iters``).
        """
        args, loader = self.args, self._train_loader
        if loader is None or args.train_iters is not None or not self.batches.is_constant:
            return None
        if args.train_samples is not None:
            consumed = loader.epoch * loader.num_samples + loader.consumed_samples
            return self.batches.count_updates(consumed)
        return None if args.epochs is None or loader.is_stream else loader.count_updates_done()

    def _watch(self, loader: DistributedLoader, *, is_training: bool) -> DistributedLoader:
        self._own_loop.watch(loader, is_training=is_training)
        if is_training:
            self._train_loader = loader
            self.clock.follows_loader = loader.has_token_budget
        return loader

    # ---- between processes ---------------------------------------------------------------------

    def gather(self, tensor: torch.Tensor, pad_value: float | None = None) -> torch.Tensor:
        """Every process's rows, each example once: fillers of the last batch are left out."""
        tensor = settle(tensor)
        rows = tensor.detach().reshape(1) if tensor.dim() == 0 else tensor.detach()
        if self._own_loop.ends_with_filler(len(rows)):
            rows = rows[:-1]
        return gather_rows(rows, self.topology, pad_value)

    def drop_surplus_rows(self, values: Any) -> Any:
        """Results without the rows that the current batch lacks, if it is smaller than the others.

        For what is not computed row by row: a loss repeated ``batch_size`` times.
        """
        if isinstance(values, torch.Tensor) and values.dim():
            return self.drop_surplus_items(values)
        if isinstance(values, Mapping):
            return {name: self.drop_surplus_rows(value) for name, value in values.items()}
        if isinstance(values, (list, tuple)):
            return type(values)(self.drop_surplus_rows(value) for value in values)
        return values

    def drop_surplus_items(self, values: Any) -> Any:
        """The same for a single tensor, or a list with an item per row."""
        surplus = self._own_loop.count_surplus_rows(len(values))
        return values[: len(values) - surplus] if surplus else values

    def gather_objects(self, values: list[Any]) -> list[Any]:
        """Every process's list, joined in rank order, without fillers of the last batch."""
        if self._own_loop.ends_with_filler(len(values)):
            values = values[:-1]
        return [value for part in gather_objects(values, self.topology) for value in part]

    def wait_for_all(self) -> None:
        """Return when every process has come here."""
        wait_for_all()


def _read_arguments(
    args: Arguments, extra_args_provider: ExtraArgumentsProvider | None
) -> Settings:
    if isinstance(args, Settings):
        return args
    if isinstance(args, Mapping):
        return arguments_from_mapping(args)
    return parse_arguments(sys.argv[1:] if args is None else args, extra_args_provider)


def _check_device(args: Settings, device: torch.device) -> None:
    """Refuse switches that need another device."""
    found = [
        find_fp8_problem(device) if args.fp8 else None,
        find_graph_problem(device) if args.cuda_graph == "on" else None,
    ]
    problems = [problem for problem in found if problem is not None]
    if problems:
        raise ConfigurationError(problems)


def _build_scaler(args: Settings) -> LossScaler:
    return LossScaler(
        fixed=args.loss_scale,
        initial=args.initial_loss_scale,
        minimum=args.min_loss_scale,
        window=args.loss_scale_window,
        hysteresis=args.hysteresis,
    )


def _warn_about_settings_without_effect(args: Settings) -> None:
    for name, value in args.extras.items():
        has_chosen_task = name == "app_name" and APPLICATIONS.get(str(value)) == args.task
        if name in WITHOUT_EFFECT and not has_chosen_task:
            warn_once(f"--{name.replace('_', '-')} has no effect: {WITHOUT_EFFECT[name]}.")
    for message in find_idle_settings(args):
        warn_once(message)
