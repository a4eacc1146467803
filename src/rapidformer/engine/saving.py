"""A run's checkpoints: written at once or in the background, to a folder it has locked."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from torch.optim import Optimizer

from rapidformer.checkpoint.abandoned import abandon_later, drop_abandoned
from rapidformer.checkpoint.background import SMALLEST_BYTES, BackgroundSave
from rapidformer.checkpoint.first_rank import run_on_first
from rapidformer.checkpoint.lock import FolderLock
from rapidformer.checkpoint.pieces import Piece
from rapidformer.checkpoint.publish import remove_leftovers
from rapidformer.checkpoint.restart import claim_folder
from rapidformer.checkpoint.save import Save
from rapidformer.checkpoint.saving import plan_save, prepare_save
from rapidformer.checkpoint.state import TrainingState, bypass_clock
from rapidformer.checkpoint.writing import writing
from rapidformer.dist.collectives import gather_from_all
from rapidformer.dist.heartbeat import in_phase
from rapidformer.engine.facts import describe_facts
from rapidformer.engine.predicting import PredictingRun
from rapidformer.errors import CheckpointError, RapidformerError, WriteError
from rapidformer.log import get_logger, warn_once


class SavingRun(PredictingRun):
    """Saves the state of training."""

    resumed_from: Path | None = None
    _held: tuple[Path, FolderLock | None] | None = None
    """The folder that this run writes to; rank 0 has its lock."""
    _has_gone_back = True
    """Whether later checkpoints than the loaded one are out of the way."""
    _last_save: Save | None = None
    """Written, but not yet taken by ``take_save``."""

    @functools.cached_property
    def _background(self) -> BackgroundSave:
        return BackgroundSave()

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
        ``wait_for_save`` returns, and a failure is only reported.
        """
        target = folder or self.args.save
        if target is None:
            raise RapidformerError(
                "nowhere to save: give --save, or engine.save_checkpoint(folder)."
            )
        if self.clock.is_accumulating:
            raise RapidformerError(
                "save after optimizer.step(): the gradients of this update are incomplete."
            )
        self.wait_for_save()
        self._last_save = None
        with in_phase("save"), writing(Path(target)):
            self.hold_folder(Path(target))
            self.abandon_later(Path(target))
            self.parallelized.settle()
            try:
                self._save(Path(target), extra or {}, protected, processor, wait=wait)
            except WriteError as error:  # the same on every rank
                if wait:
                    raise
                self._report_failed_save(self.clock.updates, error)
        return Path(target) / f"iter_{self.clock.updates:07d}"

    def _save(
        self,
        folder: Path,
        extra: dict[str, Any],
        protected: Path | None,
        processor: Any,
        *,
        wait: bool,
    ) -> None:
        save = prepare_save(
            folder,
            self._get_state(),
            extra,
            keep=self.args.save_total_limit,
            protected=protected,
            with_optimizer=self.args.save_optim,
            with_random_states=self.args.save_rng,
            processor=processor,
        )
        if self._held is not None and self._held[1] is not None:
            save.before_publishing = self._held[1].check
        save.after_publishing = functools.partial(_claim, folder)
        if not wait and self._writes_behind(save.pieces, save.total_bytes):
            self._background.start(save)
        else:
            save.write()
            self._last_save = save

    @property
    def is_saving(self) -> bool:
        """Whether a save in the background was not waited for yet; the same on every rank."""
        return self._background.save is not None

    @property
    def is_save_written(self) -> bool:
        """Whether ``wait_for_save`` would return at once on this rank."""
        return self._background.is_done

    def wait_for_save(self) -> None:
        """Wait until the last checkpoint is complete; if it could not be written, say so."""
        save = self._background.save
        if save is None:
            return
        try:
            with in_phase("save"):
                self._last_save = self._background.finish()
        except WriteError as error:
            if not save.is_cancelled.is_set():
                self._report_failed_save(save.step, error)

    def take_save(self) -> Save | None:
        """The last complete checkpoint, once; None if it failed or was taken before."""
        save, self._last_save = self._last_save, None
        return save

    def cancel_save(self) -> None:
        """Give up the checkpoint that is being written; the earlier ones stay."""
        self._background.cancel()

    def _report_failed_save(self, step: int, error: WriteError) -> None:
        if self.is_main:
            get_logger().warning(
                f"the checkpoint of step {step} was not saved: {error.reason}. Training continues; "
                "earlier checkpoints are as they were."
            )

    def prepare_saves(self) -> None:
        """Reserve host memory for saves in the background, so that the first one is fast, too.

        Allocating it takes longer than the copy. Every rank must call this, after the first update.
        """
        if self.device.type != "cuda" or self.parallelized.deepspeed is not None:
            return
        self.parallelized.settle()
        pieces = plan_save(self._get_state(), with_optimizer=self.args.save_optim)
        total = sum(gather_from_all(sum(piece.data.nbytes for piece in pieces)))
        if self._writes_behind(pieces, total):
            self._background.reserve(pieces)

    def _writes_behind(self, pieces: list[Piece], total_bytes: int) -> bool:
        if self.args.async_save == "off":
            return False
        if self.parallelized.deepspeed is not None:
            if self.args.async_save == "on":
                warn_once("--async-save on has no effect under --deepspeed: it saves at once.")
            return False
        if self.args.async_save == "on":
            return True
        if total_bytes < SMALLEST_BYTES:
            return False
        has_room = self._background.has_room(pieces)
        if not has_room:
            warn_once(
                "training waits while checkpoints are written: host memory has no room for a copy "
                "of the state (--async-save on makes one anyway)."
            )
        return has_room

    def hold_folder(self, folder: Path) -> None:
        """Lock a folder to write to, instead of the one held before; every rank must call this.

        A folder that another live run holds stops all ranks.
        """
        folder = folder.absolute()
        if self._held is None or self._held[0] != folder:
            self.release_folder()
            self._held = folder, FolderLock(folder) if self.is_main else None
            action: Callable[[FolderLock], None] = _take_folder
        else:
            action = FolderLock.check
        try:
            # Only rank 0 has a lock, and runs this.
            lock = cast(FolderLock, self._held[1])
            run_on_first(lambda: action(lock), folder, is_main=self.is_main)
        except CheckpointError:
            self.release_folder()
            raise

    @property
    def holds_folder(self) -> bool:
        """Whether the folder that was held still belongs to this run."""
        return self._held is not None

    def release_folder(self) -> None:
        """Let other runs write to the folder that this one held."""
        self.wait_for_save()
        if self._held is not None and self._held[1] is not None:
            self._held[1].release()
        self._held = None

    def _describe_facts(self) -> dict[str, Any]:
        return describe_facts(self.args, self._train_loader, self.parallelized.model)

    def abandon_later(self, folder: Path, results: Sequence[str] = ()) -> None:
        """Move checkpoints after the loaded one aside, if it is one of this folder's."""
        source, has_gone_back = self.resumed_from, self._has_gone_back
        self._has_gone_back = True
        if source is None or has_gone_back or source.resolve().parent != folder.resolve():
            return
        step = self._first_update
        run_on_first(lambda: abandon_later(folder, step, results), folder, is_main=self.is_main)

    def _get_state(self, *, needs_optimizer: bool = True) -> TrainingState:
        parallelized = self.parallelized
        assert self.optimizer is not None or not needs_optimizer
        return TrainingState(
            model=parallelized.model,
            optimizer=cast(Optimizer, self.optimizer),
            scheduler=self.lr_scheduler,
            scaler=self.scaler,
            loader=self._train_loader,
            step=self.clock.updates,
            device=self.device,
            topology=self.topology,
            bypass=functools.partial(bypass_clock, self.clock),
            gathered=parallelized.deepspeed.state if parallelized.deepspeed else None,
            facts=self._describe_facts(),
            base=self.adapter.base if self.adapter else None,
        )


def _claim(folder: Path) -> None:
    """What rank 0 does once a checkpoint is published."""
    drop_abandoned(folder)
    claim_folder(folder)


def _take_folder(lock: FolderLock) -> None:
    lock.acquire()
    remove_leftovers(lock.folder)
