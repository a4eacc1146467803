"""The micro-batch that a user's own loop works on.

``for batch in loader: ... engine.backward(loss)`` names neither the micro-batch nor its facts. So
loaders note here what they yield; ``backward`` and ``gather`` look it up. A script may fetch the
next batch before ``backward``: what counts is the batch whose tensors went through the model, and
the one fetched last only if these are not seen. ``run_update`` needs none of this to train: an
update carries its facts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import ref

import torch

from rapidformer.compat.torch_tensors import get_base
from rapidformer.data.loader import DistributedLoader
from rapidformer.data.nested import iterate_tensors, map_tensors
from rapidformer.data.update import MicroBatch
from rapidformer.dist.attendance import note_progress
from rapidformer.dist.collectives import is_alone
from rapidformer.dist.heartbeat import beat
from rapidformer.errors import RapidformerError
from rapidformer.optim.update import UpdateClock


def _refuse_no_model() -> None:
    raise RapidformerError(
        "this loader gives each rank different rows, but the model was not passed to "
        "engine.compose(): each rank would train its own model. Call engine.compose(model, ...) "
        "before the loop and engine.backward(loss) in it. To evaluate only, build the loader with "
        "is_training=False."
    )


class CurrentBatch:
    """The current micro-batch of a user's loop."""

    def __init__(self, clock: UpdateClock) -> None:
        self._clock = clock
        self.in_training: MicroBatch | None = None
        """The current micro-batch, if it is training data."""
        self.has_model = False
        """Whether a model was composed for what the loaders yield."""
        self.refuse_no_model: Callable[[], None] = _refuse_no_model
        """Called if none was, and batches go by with gradients on."""
        self._in_hand: MicroBatch | None = None
        """The one fetched last."""
        self._in_model: MicroBatch | None = None
        """The one that went through the model last, which counts as long as its tensors live."""
        self._batch_size = 0
        """Of the loader that yielded the current micro-batch."""
        self._rows = 0
        self._ended_with_filler = False
        self._known: dict[int, tuple[ref[torch.Tensor], MicroBatch, bool]] = {}
        """What each tensor that is still alive belongs to, and whether that is training data."""
        self._seen: list[MicroBatch] = []
        """The training data that went through the model since the last ``backward``."""
        self._fetched = 0
        """Training batches since then."""
        self._is_used = False
        """Whether ``backward`` has asked since."""

    def watch(self, loader: DistributedLoader, *, is_training: bool) -> None:
        """Remember what the loader yields from now on."""
        follow = self._follow_training if is_training else self._follow_evaluation
        loader.follow = lambda micro_batches: follow(micro_batches, loader.batch_size)

    def see_call(self, inputs: Any) -> None:
        """The model is called with these inputs."""
        has_gradient = torch.is_grad_enabled()
        if has_gradient and self._is_used:
            self._start_anew()
        for tensor in iterate_tensors(inputs):
            _, known, is_training = self._known.get(id(get_base(tensor)), (None, None, False))
            if known is None:
                continue
            self._in_model = known
            trains = is_training and has_gradient
            if trains and not any(known is seen for seen in self._seen):
                self._seen.append(known)

    def find_trained(self) -> tuple[MicroBatch | None, bool]:
        """The micro-batch that is back-propagated, and whether no other comes into question."""
        self._is_used = True
        if self._seen:
            return self._seen[-1], len(self._seen) == 1
        return self.in_training, self._fetched < 2

    def _start_anew(self) -> None:
        self._seen, self._fetched, self._is_used = [], 0, False

    def _remember(self, micro_batch: MicroBatch, *, is_training: bool) -> None:
        # Not the tensors themselves: the script decides how long they live.
        facts = micro_batch._replace(
            batch=map_tensors(micro_batch.batch, lambda _, tensor: tensor.detach())
        )
        for tensor in iterate_tensors(micro_batch.batch):
            life = ref(tensor, partial(self._forget, id(tensor)))
            self._known[id(tensor)] = life, facts, is_training

    def _forget(self, key: int, _: object) -> None:
        self._known.pop(key, None)

    @contextmanager
    def holding(self, micro_batch: MicroBatch) -> Iterator[None]:
        """A forward step of ``run_update`` runs: ``gather`` inside must know on what."""
        before = self._in_hand, self._in_model
        self._in_hand, self._in_model = micro_batch, None
        try:
            yield
        finally:
            self._in_hand, self._in_model = before

    def is_filler(self) -> bool:
        """Whether the current micro-batch is a filler."""
        current = self._find_current()
        return current is not None and current.is_filler

    def _find_current(self, values: Any = None) -> MicroBatch | None:
        """Where values come from: a batch that they are of, or else what is worked on."""
        is_tensor = isinstance(values, torch.Tensor)
        known = self._known.get(id(get_base(values))) if is_tensor else None
        if known is not None:
            return known[1]
        # A copy: a tensor may be freed meanwhile.
        is_there = any(facts is self._in_model for _, facts, _ in list(self._known.values()))
        return self._in_model if is_there else self._in_hand

    def ends_with_filler(self, values: Any) -> bool:
        """Whether results with a row each, from batches of this pass, end with a filler's.

        True for a filler's own row while it is worked on, and for all rows of the pass joined.
        """
        current = self._find_current(values)
        if len(values) == 1 and current is not None and current.is_filler:
            return True
        return self._ended_with_filler and len(values) == self._rows

    def count_surplus_rows(self, values: Any) -> int:
        """How many of these rows are not in the current batch, which is smaller than others."""
        held, rows = self._find_current(values), len(values)
        if held is None or rows != self._batch_size or not (held.info.rows or held.is_filler):
            return 0
        return max(0, rows - held.info.rows)

    def _follow_training(
        self, micro_batches: Iterator[MicroBatch], batch_size: int
    ) -> Iterator[MicroBatch]:
        for micro_batch in self._follow(micro_batches, batch_size):
            self.in_training = micro_batch
            if self._is_used:
                self._start_anew()
            self._fetched += 1
            self._remember(micro_batch, is_training=True)
            beat("forward", self._clock.updates + 1)
            note_progress()
            yield micro_batch
            # After the first batch, not before: a look at one batch is no training.
            if not self.has_model and not is_alone() and torch.is_grad_enabled():
                self.refuse_no_model()
        # Its update has ended. What comes next, from wherever, starts another.
        self.in_training = None

    def _follow_evaluation(
        self, micro_batches: Iterator[MicroBatch], batch_size: int
    ) -> Iterator[MicroBatch]:
        before = self.in_training
        try:
            for micro_batch in self._follow(micro_batches, batch_size):
                self.in_training = None
                self._remember(micro_batch, is_training=False)
                beat("evaluate", self._clock.updates)
                yield micro_batch
        finally:
            # Unless training has moved on: backward may still come for the batch before.
            if self.in_training is None:
                self.in_training = before

    def _follow(self, micro_batches: Iterator[MicroBatch], batch_size: int) -> Iterator[MicroBatch]:
        self._rows, self._ended_with_filler, self._batch_size = 0, False, batch_size
        self._in_model = None
        for micro_batch in micro_batches:
            self._in_hand = micro_batch
            self._ended_with_filler = micro_batch.is_filler
            self._rows += micro_batch.info.rows or 1
            yield micro_batch
        self._in_hand = None
