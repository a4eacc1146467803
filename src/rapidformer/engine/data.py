"""The data of a run: loaders, the order of samples, and how far the run is in them.

The first loader that is built is the training data's, unless the caller says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch.utils.data import DataLoader

from rapidformer.accel.unpad.on_demand import settle
from rapidformer.config import Settings
from rapidformer.config.derive import get_batch_schedule
from rapidformer.data.adopting import adopt_loader, get_rows_per_batch
from rapidformer.data.collate import PadCollator
from rapidformer.data.data_source import find_length
from rapidformer.data.fetching import Collate
from rapidformer.data.loader import DistributedLoader
from rapidformer.data.mixture import Sets
from rapidformer.data.nested import map_tensors
from rapidformer.data.rounds import GroupedOrder, MixedOrder, RepeatedOrder, measure_lengths
from rapidformer.data.update import Update
from rapidformer.dist.collectives import gather_from_all, gather_objects, gather_rows, is_alone
from rapidformer.engine.current_batch import CurrentBatch
from rapidformer.engine.in_batch import INSTEAD
from rapidformer.engine.runtime import Runtime
from rapidformer.errors import ConfigurationError, RapidformerError
from rapidformer.log import get_logger, warn_once
from rapidformer.optim.observer import get_observer
from rapidformer.optim.update import UpdateClock


class RunData:
    """Loaders, and the run's position in the training data.

    ``clock`` learns how many micro-batches an update has, ``current`` what the loaders yield.
    """

    def __init__(
        self, args: Settings, runtime: Runtime, clock: UpdateClock, current: CurrentBatch
    ) -> None:
        self.args = args
        self.batches = get_batch_schedule(args)
        self.train_loader: DistributedLoader | None = None
        """The loader of the training data, once there is one."""
        self.topology, self._device = runtime.topology, runtime.device
        self._clock, self.current = clock, current
        self._watched: WeakKeyDictionary[DistributedLoader, Any] = WeakKeyDictionary()
        """The loaders, each with a reference to what follows it."""
        self._extra_updates = 0
        """By how much a run is longer or shorter because it began with another batch size."""

    def build_loader(
        self,
        dataset: Any,
        collate_fn: Collate | None = None,
        *,
        shuffle: bool | None = None,
        batch_size: int | None = None,
        is_training: bool | None = None,
        order: Sequence[int] | None = None,
        keeps_rounds: bool = False,
    ) -> DistributedLoader:
        """A loader for this rank's part of the data, with batches on the device.

        The first one built is the training data's, unless ``is_training`` says otherwise.
        ``shuffle`` follows the data set's own name for its split (``train`` is), unless said.
        ``order`` lists the samples to hand out, by their index. Without ``--keep-last``, an update
        that lacks micro-batches is dropped; with ``keeps_rounds``, only a smaller micro-batch.
        """
        if is_training is None:
            is_training = self.train_loader is None
        if shuffle is None:
            shuffle = is_training and str(getattr(dataset, "split", "")).startswith("train")
        workers, collate = self.args.num_workers, collate_fn or PadCollator()
        is_growing = is_training and not self.batches.is_constant
        budget = self.args.tokens_per_micro_batch if is_training else None
        lengths = None
        if budget is not None and find_length(dataset) is not None:
            lengths = measure_lengths(dataset, self.args.length_column, "--tokens-per-micro-batch")
        if is_training:
            get_observer().see_training_data(dataset, collate)
        chosen = self._choose_order(dataset, order, shuffles=shuffle, is_training=is_training)
        counted = chosen if isinstance(chosen, (RepeatedOrder, MixedOrder)) else order
        loader = DistributedLoader(
            dataset, collate=collate, shuffle=shuffle, **self._describe_share(is_training),
            micro_batch_size=batch_size or self.args.micro_batch_size or 1,
            drop_last=is_training and not self.args.keep_last, keeps_rounds=keeps_rounds,
            num_workers=workers if workers is not None else 2 * (self._device.type == "cuda"),
            get_batch_size=self.batches.get_size if is_growing else None,
            token_budget=budget, lengths=lengths, order=chosen, tells_sets=is_training,
            num_samples=None if counted is None else len(counted),
        )  # fmt: skip
        return self._watch(loader, is_training=is_training)

    def _describe_share(self, is_training: bool) -> dict[str, Any]:
        """What any loader must know of this rank's part of the data."""
        return {
            "num_replicas": self.args.data_parallel_size, "replica": self.topology.get_rank("data"),
            "rounds_per_update": self._clock.rounds_per_update if is_training else 1,
            "seed": self.args.seed if self.args.data_seed is None else self.args.data_seed,
            "device": self._device, "gather_digests": None if is_alone() else gather_from_all,
        }  # fmt: skip

    def _choose_order(
        self, dataset: Any, listed: Sequence[int] | None, *, shuffles: bool, is_training: bool
    ) -> Callable[[], Sequence[int]] | MixedOrder | None:
        if listed is not None:
            return lambda: listed
        sets = getattr(dataset, "sets", None)
        if is_training and isinstance(sets, Sets) and sets.weights is not None:
            return MixedOrder(sets, shuffles)
        repeats = self.args.updates_per_generation
        if is_training and repeats > 1:
            total = self.args.global_batch_size or 1
            return RepeatedOrder(len(dataset), total, repeats, shuffles)
        if not (shuffles and is_training and self.args.group_by_length):
            return None
        size = (self.args.micro_batch_size or 1) * self.args.data_parallel_size
        return GroupedOrder(measure_lengths(dataset, self.args.length_column), size)

    def adopt_loader(
        self,
        loader: Any,
        *,
        is_training: bool,
        batch_size: int | None = None,
        tells_epoch: bool = True,
    ) -> DistributedLoader:
        """The user's DataLoader, split over the ranks, with ``batch_size`` rows each or its own.

        A data set with ``set_epoch`` is told when a pass begins, which torch's DataLoader does not.
        """
        if isinstance(loader, DistributedLoader):
            return self._watch(loader, is_training=is_training)
        if not isinstance(loader, DataLoader):
            raise RapidformerError(
                f"compose() takes torch DataLoaders, got {type(loader).__name__}: "
                "use engine.data.build_loader(dataset, collate_fn)."
            )
        size = batch_size or get_rows_per_batch(loader)
        if is_training and size is not None:
            self._adopt_batch_size(size)
        share = self._describe_share(is_training)
        adopted = adopt_loader(loader, batch_size=batch_size, **share)
        adopted.tells_epoch = tells_epoch
        return self._watch(adopted, is_training=is_training)

    def _adopt_batch_size(self, batch_size: int) -> None:
        """Accumulate to ``--global-batch-size`` in micro-batches of the user's own size."""
        if not self.batches.is_constant:
            raise ConfigurationError(
                "--rampup-batch-size needs a loader whose batches the engine sizes: use "
                "engine.data.build_loader(dataset, collate_fn)."
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
        self._clock.rounds_per_update = total // unit

    def _watch(self, loader: DistributedLoader, *, is_training: bool) -> DistributedLoader:
        self.current.watch(loader, is_training=is_training)
        self._watched[loader] = ref(loader.follow) if loader.follow is not None else None
        if is_training:
            self.train_loader = loader
            self._clock.follows_loader = loader.has_token_budget
            if self.current.has_model:
                self.say_batch()
        return loader

    def allow_no_model(self, tell: Callable[[], None]) -> None:
        """Call this instead of refusing a pass with gradients before a model is composed."""
        self.current.refuse_no_model = tell

    def say_batch(self) -> None:
        """Log the global batch of a script's own loop, once its loader is known."""
        if self.train_loader is not None:
            get_logger().info("batch     %s", self.describe_batch(self.train_loader))

    def describe_batch(self, loader: DistributedLoader) -> str:
        """What the global batch is made of; on several ranks also what it is in one process."""
        args, replicas, micro = self.args, self.args.data_parallel_size, loader.batch_size
        if loader.has_token_budget:
            return (
                f"{args.global_batch_size} samples over {replicas} replica{'s' * (replicas > 1)}, "
                f"in micro-batches of up to {args.tokens_per_micro_batch} tokens"
            )
        rounds = self._clock.rounds_per_update
        total = micro * replicas * rounds if self.batches.is_constant else args.global_batch_size
        text = f"{total} = {micro} micro x {replicas} data parallel x {rounds} accumulation"
        if replicas == 1 or args.is_given("global_batch_size"):
            return text
        way = f"; batches of {micro // replicas} keep it" if micro % replicas == 0 else ""
        return f"{text} (in one process {micro * rounds}{way})"

    def iterate_updates(
        self, loader: DistributedLoader, *, stays_on_host: Callable[[], bool] | None = None
    ) -> Iterator[Update]:
        """The updates of an epoch; while batches stay on the host, ``run_update`` moves them."""
        if self.train_loader is None:
            self.train_loader = loader
        return _observe_wait(loader.iterate_updates(stays_on_host))

    def get_prediction_batch_size(self, asked: int | None = None) -> int:
        """Rows per batch and rank of a prediction, as asked for or by the settings."""
        return asked or self.args.eval_micro_batch_size or self.args.micro_batch_size or 1

    def get_train_iters(self) -> int | None:
        """Updates of the whole run, from the flags and the training data's length."""
        args, loader = self.args, self.train_loader
        if args.train_iters is not None:
            return args.train_iters
        if args.train_samples is not None:
            return self.batches.count_updates(args.train_samples) + self._extra_updates
        if args.epochs is None or loader is None:
            return None
        if loader.updates_per_epoch or not loader.is_stream:  # a stream may know them, too
            return math.ceil(args.epochs * loader.updates_per_epoch) + self._extra_updates
        return None

    def count_updates_done(self) -> int | None:
        """Updates done, by the run's samples and current size; None if the run counts updates."""
        args, loader = self.args, self.train_loader
        if loader is None or args.train_iters is not None or not self.batches.is_constant:
            return None
        if args.train_samples is not None:
            consumed = loader.epoch * loader.num_samples + loader.consumed_samples
            return self.batches.count_updates(consumed)
        return None if args.epochs is None or loader.is_stream else loader.count_updates_done()

    def follow_samples(self, global_batch: int | None, attempts: int) -> int | None:
        """After a resume with another batch size, let samples tell how far the run is.

        ``global_batch`` is the checkpoint's. Returns the updates done in those of the current size;
        None if the checkpoint's count stands.
        """
        done, loader = self.count_updates_done(), self.train_loader
        if done is None or loader is None or global_batch in (None, loader.samples_per_update):
            return None
        self._extra_updates = attempts - done
        return done

    def list_samples(self) -> list[int]:
        """The samples of the update that the training loader handed out last."""
        loader = self.train_loader
        return loader.list_samples(loader.epoch, loader.positions) if loader is not None else []

    def gather(self, tensor: torch.Tensor, pad_value: float | None = None) -> torch.Tensor:
        """Every process's rows, each example once: fillers of the last batch are left out."""
        tensor = settle(tensor)
        rows = tensor.reshape(1) if tensor.dim() == 0 else tensor
        is_for_loss = rows.requires_grad and torch.is_grad_enabled() and rows.dim() > 1
        if is_for_loss and self._clock.rounds_per_update > 1:
            warn_once(
                "engine.gather() in a loss joins the rows of one micro-batch per rank, not of all "
                f"{self._clock.rounds_per_update} micro-batches of an update. {INSTEAD}."
            )
        if self.current.ends_with_filler(rows):
            rows = rows[:-1]
        return gather_rows(rows, self.topology, pad_value)

    def drop_surplus_rows(self, values: Any) -> Any:
        """Results without the rows that the current batch lacks, if it is smaller than the others.

        For what is not computed row by row: a loss repeated ``batch_size`` times.
        """
        return map_tensors(values, lambda _, t: self.drop_surplus_items(t) if t.dim() else t)

    def drop_surplus_items(self, values: Any) -> Any:
        """The same for a single tensor, or a list with an item per row."""
        surplus = self.current.count_surplus_rows(values)
        return values[: len(values) - surplus] if surplus else values

    def gather_objects(self, values: list[Any]) -> list[Any]:
        """Every process's list, joined in rank order, without fillers of the last batch."""
        if self.current.ends_with_filler(values):
            values = values[:-1]
        return [value for part in gather_objects(values, self.topology) for value in part]

    def close(self) -> None:
        """Let go of the training data; loaders stay usable, but are no longer followed."""
        for loader, follow in self._watched.items():
            # Another engine may follow it by now.
            if follow is not None and loader.follow is follow():
                loader.follow = None
        self.train_loader = None


def _observe_wait(updates: Iterator[Update]) -> Iterator[Update]:
    """Report when the wait for data begins and ends."""
    while True:
        get_observer().see_phase("loop")
        update = next(updates, None)
        if update is None:
            return
        get_observer().see_phase("data")
        yield update
