"""A run's checkpoints; where the state is split over ranks, all of them must call these methods."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import LambdaLR

from rapidformer.checkpoint.background import SMALLEST_BYTES, BackgroundSave
from rapidformer.checkpoint.finding import (
    abandon_later,
    blaming,
    claim_folder,
    drop_abandoned,
    find_checkpoints,
    name_checkpoint,
    set_checkpoints_aside,
)
from rapidformer.checkpoint.loading import load_checkpoint, move_schedule
from rapidformer.checkpoint.lock import FolderLock
from rapidformer.checkpoint.pieces import Piece
from rapidformer.checkpoint.publish import get_staging, remove_leftovers
from rapidformer.checkpoint.saving import Save, check_finite, plan_save, prepare_save
from rapidformer.checkpoint.state import TrainingState
from rapidformer.checkpoint.writing import run_on_first, writing
from rapidformer.config.sections import CheckpointArguments
from rapidformer.dist.collectives import broadcast_object, gather_from_all, is_apart
from rapidformer.dist.heartbeat import in_phase
from rapidformer.engine.facts import report_differences
from rapidformer.engine.model import RunModel
from rapidformer.engine.model_files import ModelFiles
from rapidformer.engine.runtime import Runtime
from rapidformer.errors import CheckpointError, RapidformerError, TrainingError, WriteError
from rapidformer.log import get_logger, warn_once
from rapidformer.optim.update import UpdateClock

EXPORTED = "exported"
"""The folder of a checkpoint's adapter, if each checkpoint holds what ``from_pretrained`` reads."""


class Checkpoints(ModelFiles):
    """Saves and restores the state of training.

    ``model`` is what is saved, ``collect`` the state of all parts of the run. ``follow_samples``
    learns the checkpoint's global batch and attempts, and answers how many updates are done if
    that is another number now.
    """

    def __init__(
        self,
        args: CheckpointArguments,
        runtime: Runtime,
        clock: UpdateClock,
        model: RunModel,
        collect: Callable[[], TrainingState],
        follow_samples: Callable[[int | None, int], int | None] = lambda batch, attempts: None,
    ) -> None:
        self.args = args
        self.resumed_from: Path | None = None
        self.holds_model = False
        """Whether each checkpoint holds what ``from_pretrained`` reads."""
        self._folder: Path | None = None
        """The folder that this run writes to; rank 0 has its lock."""
        self._lock: FolderLock | None = None
        super().__init__(runtime, model, collect)
        self._clock, self._follow_samples = clock, follow_samples
        self.background = BackgroundSave()
        self._has_gone_back = True
        """Whether later checkpoints than the loaded one are out of the way."""
        self._saved_in: set[Path] = set()
        """The folders that hold checkpoints of this run."""
        self._last_save: Save | None = None
        """Written, but not yet taken by ``take_save``."""

    def save(
        self,
        folder: str | Path | None = None,
        extra: dict[str, Any] | None = None,
        *,
        protected: Path | None = None,
        processor: Any = None,
        wait: bool = True,
    ) -> Path:
        """Save the whole state of training; see ``engine.save_checkpoint``."""
        if (folder := folder or self.args.save) is None:
            raise RapidformerError(
                "nowhere to save: give --save, or engine.save_checkpoint(folder)."
            )
        target = Path(folder)
        if self._clock.is_accumulating:
            raise RapidformerError(
                "save after optimizer.step(): the gradients of this update are incomplete."
            )

        with self.attending(f"save_checkpoint({str(target)!r})") as takes_part:
            if takes_part:
                self._save(target, extra or {}, protected, processor, wait=wait)
        return target / name_checkpoint(self._clock.updates)

    def _save(
        self, target: Path, extra: dict[str, Any], protected: Path | None, processor: Any, *,
        wait: bool,
    ) -> None:  # fmt: skip
        def claim() -> None:
            """What rank 0 does once the checkpoint is published."""
            drop_abandoned(target)
            claim_folder(target)

        self._finish_last()
        with in_phase("save"), writing(target):
            self.hold_folder(target)
            self._set_earlier_aside(target.absolute())
            self.abandon_later(target)
            self._model.parallelized.settle()
            try:
                is_adapter = self._model.adapter is not None
                save = prepare_save(
                    target, self._collect(), extra,
                    keep=self.args.save_total_limit, protected=protected, processor=processor,
                    with_optimizer=self.args.save_optim, with_random_states=self.args.save_rng,
                    with_model=self.holds_model and not is_adapter,
                )  # fmt: skip
                if self.holds_model and is_adapter:  # small, and under other names in its file
                    self.export(get_staging(save.target) / EXPORTED, merge=False)
                if self._lock is not None:
                    save.before_publishing = self._lock.check
                save.after_publishing = claim
                if is_apart():  # the results of the others are taken by every rank
                    save.write()
                elif not wait and self._writes_behind(save.pieces, save.total_bytes):
                    self.background.start(save)
                else:
                    save.write()
                    self._last_save = save
            except WriteError as error:  # the same on every rank
                if wait:
                    raise
                self._report_failed_save(self._clock.updates, error)

    def wait_for_save(self) -> None:
        """Wait until the last checkpoint is complete; if it could not be written, say so."""
        save = self.background.save
        if save is None:
            return
        try:
            with in_phase("save"):
                self._last_save = self.background.finish()
        except WriteError as error:
            if not save.is_cancelled.is_set():
                self._report_failed_save(save.step, error)

    def _finish_last(self) -> None:
        """One save at a time; every rank takes the result of one that all have begun."""
        if is_apart():
            self.background.join()
            return
        self.wait_for_save()
        self._last_save = None

    def take_save(self) -> Save | None:
        """The last complete checkpoint, once; None if it failed or was taken before."""
        save, self._last_save = self._last_save, None
        return save

    def _report_failed_save(self, step: int, error: WriteError) -> None:
        if self._runtime.is_main:
            get_logger().warning(
                f"the checkpoint of step {step} was not saved: {error.reason}. Training continues; "
                "earlier checkpoints are as they were."
            )

    def prepare_saves(self) -> None:
        """Reserve host memory for saves in the background, which takes long: after an update."""
        parallelized = self._model.parallelized
        if self._runtime.device.type != "cuda" or parallelized.deepspeed is not None:
            return
        parallelized.settle()
        pieces = plan_save(self._collect(), with_optimizer=self.args.save_optim)
        total = sum(gather_from_all(sum(piece.data.nbytes for piece in pieces)))
        if self._writes_behind(pieces, total):
            self.background.reserve(pieces)

    def _writes_behind(self, pieces: list[Piece], total_bytes: int) -> bool:
        asked = self.args.async_save
        if asked == "off":
            return False
        if self._model.parallelized.deepspeed is not None:
            if asked == "on":
                warn_once("--async-save on has no effect under --deepspeed: it saves at once.")
            return False
        if asked == "on":
            return True
        if total_bytes < SMALLEST_BYTES:
            return False
        has_room = self.background.has_room(pieces)
        if not has_room:
            warn_once(
                "training waits while checkpoints are written: host memory has no room for a copy "
                "of the state (--async-save on makes one anyway)."
            )
        return has_room

    def hold_folder(self, folder: Path) -> None:
        """Lock a folder to write to, and no other; one that a live run holds stops all ranks."""
        folder = folder.absolute()
        is_new = folder != self._folder
        if is_new:
            self.release_folder()
            self._folder, self._lock = folder, FolderLock(folder) if self._runtime.is_main else None

        def take_or_check() -> None:
            assert self._lock is not None  # only rank 0 runs this
            if not is_new:
                self._lock.check()
                return
            self._lock.acquire()
            remove_leftovers(folder)

        try:
            run_on_first(take_or_check, folder)
        except CheckpointError:
            self._let_go()
            raise

    def check_folder(self) -> None:
        """Refuse to write to the folder if it is another run's by now; only rank 0 looks."""
        if self._lock is not None:
            self._lock.check()

    @property
    def holds_folder(self) -> bool:
        """Whether the folder that was held still belongs to this run."""
        return self._folder is not None

    def release_folder(self) -> None:
        """Finish what is being written, and let other runs write to the folder."""
        try:
            if is_apart():
                self.background.join()
            else:
                self.wait_for_save()
        finally:
            self._let_go()

    def _let_go(self) -> None:
        if self._lock is not None:
            self._lock.release()
        self._folder = self._lock = None

    def abandon_later(self, folder: Path, results: Sequence[str] = ()) -> None:
        """Move checkpoints after the loaded one aside, if it is one of this folder's."""
        source, has_gone_back = self.resumed_from, self._has_gone_back
        self._has_gone_back = True
        continues = source is not None and source.resolve().parent == folder.resolve()
        step = self._clock.first_update

        def abandon() -> None:
            """Rank 0 knows: it may have saved alone since."""
            if continues and not has_gone_back:
                abandon_later(folder, step, results)

        run_on_first(abandon, folder)

    def _set_earlier_aside(self, folder: Path) -> None:
        """Keep the checkpoints of an earlier run, which this one does not continue, apart."""
        source = None if self.args.finetune else self.resumed_from
        continues = source is not None and source.resolve().parent == folder.resolve()

        def set_aside() -> None:
            if folder not in self._saved_in and not continues:
                set_checkpoints_aside(folder)

        run_on_first(set_aside, folder)
        self._saved_in.add(folder)

    def load(self, folder: str | Path | None = None) -> dict[str, Any]:
        """Resume from a checkpoint, or from a run's newest; returns what was saved as extra."""
        source = folder or self.args.load
        if source is None:
            raise RapidformerError(
                "nothing to load: give --load, or engine.load_checkpoint(folder)."
            )
        self.wait_for_save()
        state, only_weights = self._collect(), self.args.finetune
        current = dict(state.facts)
        extra = load_checkpoint(
            Path(source), state,
            with_optimizer=self.args.load_optim and not only_weights,
            with_random_states=self.args.load_rng and not only_weights,
            with_position=not only_weights, allows_partial=self.args.allow_partial_load,
        )  # fmt: skip
        self._clock.resume(state.step)
        self.resumed_from = state.loaded_from
        self._has_gone_back = only_weights
        if not only_weights:
            assert state.loaded_from is not None
            with blaming(state.loaded_from):
                attempts = int(extra.get("attempts", state.step))
                done = self._follow_samples(state.saved_facts.get("global batch"), attempts)
            if done is not None and isinstance(state.scheduler, LambdaLR):
                move_schedule(state.scheduler, state.optimizer, done)
            if self._runtime.is_main:
                report_differences(state.saved_facts, current, state.loaded_from)
        return extra

    def roll_back(self) -> dict[str, Any]:
        """Restore the newest checkpoint, but not its place in the data; returns its extra."""
        self.wait_for_save()
        state = self._collect()
        state.loader = None
        # The run's own folder if it holds a checkpoint, else what the run was resumed from.
        folder = Path(self.args.save) if self.args.save is not None else None
        has_one = self._runtime.is_main and folder is not None and bool(find_checkpoints(folder))
        source = folder if broadcast_object(has_one) else self.resumed_from
        if source is None:
            raise TrainingError(
                "there is no checkpoint to return to yet (--on-bad-loss rollback): save earlier "
                "with --save-interval, or use --on-bad-loss skip."
            )
        has_optimizer, has_rng = self.args.save_optim, self.args.save_rng
        extra = load_checkpoint(
            source, state, with_optimizer=has_optimizer, with_random_states=has_rng
        )
        self._clock.start_over(list(state.model.parameters()), state.step)
        self.resumed_from = state.loaded_from
        return extra

    def load_weights(self, folder: str | Path) -> None:
        """Load only the weights of a checkpoint, of whatever layout; no optimizer is needed."""
        self.wait_for_save()
        load_checkpoint(
            Path(folder), self._collect(),
            with_optimizer=False, with_random_states=False, with_position=False,
            allows_partial=self.args.allow_partial_load,
        )  # fmt: skip

    def check_weights(self) -> None:
        """Stop all ranks if a trained weight is NaN or infinite."""
        model = self._model.parallelized.model
        weights = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
        check_finite(model, weights, self._clock.updates)
