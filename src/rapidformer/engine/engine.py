"""``RapidformerEngine``: a few verbs for your own training loop.

    model, optimizer, lr_scheduler = engine.compose(model, optimizer, lr_scheduler_fn)
    engine.backward(loss)

The engine is built in five steps, one file each: ``run`` (settings, processes, data), ``composing``
(the model and its switches), ``updates`` (the verbs of training), ``predicting``, and here its
state on disk.
"""

from __future__ import annotations

import atexit
import functools
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from rapidformer.accel.unpad.padding_observer import PaddingObserver
from rapidformer.checkpoint.abandoned import abandon_later, drop_abandoned
from rapidformer.checkpoint.background import SMALLEST_BYTES, BackgroundSave
from rapidformer.checkpoint.export import export_model, gather_weights, merge_export
from rapidformer.checkpoint.finding import find_checkpoints
from rapidformer.checkpoint.finite import check_finite
from rapidformer.checkpoint.first_rank import run_on_first
from rapidformer.checkpoint.loading import load_checkpoint, move_schedule
from rapidformer.checkpoint.lock import FolderLock
from rapidformer.checkpoint.pieces import Piece
from rapidformer.checkpoint.publish import remove_leftovers
from rapidformer.checkpoint.restart import claim_folder
from rapidformer.checkpoint.run_file import blaming
from rapidformer.checkpoint.save import Save
from rapidformer.checkpoint.saving import plan_save, prepare_save
from rapidformer.checkpoint.state import TrainingState, bypass_clock
from rapidformer.checkpoint.writing import writing
from rapidformer.config.parse import ExtraArgumentsProvider
from rapidformer.dist.collectives import broadcast_object, gather_from_all, wait_for_all
from rapidformer.dist.heartbeat import beat, in_phase
from rapidformer.dist.processes import stop_processes
from rapidformer.engine.facts import describe_facts, find_differences
from rapidformer.engine.predicting import PredictingRun
from rapidformer.engine.run import Arguments
from rapidformer.errors import CheckpointError, RapidformerError, TrainingError, WriteError
from rapidformer.log import get_logger, warn_once
from rapidformer.overlay import find_fact


class RapidformerEngine(PredictingRun):
    """A run and the verbs of training.

    ``args`` is for notebooks and tests; without it, the command line is read. ``peft_config`` is a
    configuration object of peft: its adapters are trained instead of the model's own weights.
    """

    def __init__(
        self,
        extra_args_provider: ExtraArgumentsProvider | None = None,
        *,
        args: Arguments = None,
        peft_config: Any = None,
    ) -> None:
        super().__init__(extra_args_provider, args=args, peft_config=peft_config)
        self.resumed_from: Path | None = None
        self._held: tuple[Path, FolderLock | None] | None = None
        """The folder that this run writes to; rank 0 has its lock."""
        self._has_gone_back = True
        """Whether later checkpoints than the loaded one are out of the way."""
        self._background = BackgroundSave()
        self._last_save: Save | None = None
        """Written, but not yet taken by ``take_save``."""
        atexit.register(_close, weakref.ref(self))

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

    def load_checkpoint(self, folder: str | Path | None = None) -> dict[str, Any]:
        """Resume from a checkpoint, or from a run's newest; returns what was saved as extra."""
        source = folder or self.args.load
        if source is None:
            raise RapidformerError(
                "nothing to load: give --load, or engine.load_checkpoint(folder)."
            )
        self.wait_for_save()
        state, current = self._get_state(), self._describe_facts()
        only_weights = self.args.finetune
        extra = load_checkpoint(
            Path(source),
            state,
            with_optimizer=self.args.load_optim and not only_weights,
            with_random_states=self.args.load_rng and not only_weights,
            with_position=not only_weights,
            allows_partial=self.args.allow_partial_load,
        )
        self.clock.updates = self._first_update = state.step
        if self.clock.guard is not None:
            self.clock.guard.forget()
        self.resumed_from = state.loaded_from
        self._has_gone_back = only_weights
        if not only_weights:
            assert state.loaded_from is not None
            with blaming(state.loaded_from):
                self._follow_samples(state.saved_facts, int(extra.get("attempts", state.step)))
            self._report_differences(state.saved_facts, current)
        return extra

    def roll_back(self) -> dict[str, Any]:
        """Restore this run's newest checkpoint, but not its place in the data.

        Returns what was saved as extra.
        """
        self.wait_for_save()
        state = self._get_state()
        state.loader = None
        source = self._find_rollback()
        if source is None:
            raise TrainingError(
                "there is no checkpoint to return to yet (--on-bad-loss rollback): save earlier "
                "with --save-interval, or use --on-bad-loss skip."
            )
        extra = load_checkpoint(
            source,
            state,
            with_optimizer=self.args.save_optim,
            with_random_states=self.args.save_rng,
        )
        self.clock.start_over(self._parameters, state.step)
        self.resumed_from = state.loaded_from
        return extra

    def _find_rollback(self) -> Path | None:
        """The run's own folder if it holds a checkpoint, else what the run was resumed from."""
        own = Path(self.args.save) if self.args.save is not None else None
        has_own = self.is_main and own is not None and bool(find_checkpoints(own))
        return own if broadcast_object(has_own) else self.resumed_from

    def _describe_facts(self) -> dict[str, Any]:
        return describe_facts(self.args, self._train_loader, self.parallelized.model)

    def _follow_samples(self, saved: dict[str, Any], attempts: int) -> None:
        """With another batch size, samples tell how far the run is, not updates."""
        done, before = self.count_updates_done(), saved.get("global batch")
        if done is None or before in (None, self._describe_facts()["global batch"]):
            return
        self._extra_updates = attempts - done
        assert self.lr_scheduler is not None and self.optimizer is not None
        if isinstance(self.lr_scheduler, LambdaLR):
            move_schedule(self.lr_scheduler, self.optimizer, done)

    def _report_differences(self, saved: dict[str, Any], current: dict[str, Any]) -> None:
        differences = find_differences(saved, current)
        if differences and self.is_main:
            lines = "".join(f"\n  - {sentence}" for sentence in differences)
            get_logger().warning(
                f"resumed with other settings than {self.resumed_from} was saved with:{lines}"
            )

    def abandon_later(self, folder: Path, results: Sequence[str] = ()) -> None:
        """Move checkpoints after the loaded one aside, if it is one of this folder's."""
        source, has_gone_back = self.resumed_from, self._has_gone_back
        self._has_gone_back = True
        if source is None or has_gone_back or source.resolve().parent != folder.resolve():
            return
        step = self._first_update
        run_on_first(lambda: abandon_later(folder, step, results), folder, is_main=self.is_main)

    def load_weights(self, folder: str | Path) -> None:
        """Load only the weights of a checkpoint, of whatever layout; no optimizer is needed."""
        self.wait_for_save()
        load_checkpoint(
            Path(folder),
            self._get_state(needs_optimizer=False),
            with_optimizer=False,
            with_random_states=False,
            with_position=False,
            allows_partial=self.args.allow_partial_load,
        )

    def check_weights(self) -> None:
        """Stop all ranks if a trained weight is NaN or infinite; every rank must call this."""
        model = self.parallelized.model
        weights = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
        check_finite(model, weights, self.clock.updates)

    def gather_weights(self) -> dict[str, Any]:
        """All weights by name, whole, on rank 0; empty elsewhere. Every rank must call this."""
        self.parallelized.settle()
        deepspeed = self.parallelized.deepspeed
        if deepspeed is not None and deepspeed.state is not None:
            return deepspeed.state.gather_weights()
        return gather_weights(self.parallelized.model)

    def export(
        self, folder: str | Path, processor: Any = None, *, merge: bool | None = None
    ) -> Path:
        """Save the model alone, as a folder that ``transformers`` loads.

        Of a model with adapters, these are saved, as a folder that ``peft`` loads. With ``merge``
        they are added to the weights under them and the whole model is saved; also by default if
        those weights are in no file. A model that has no ``config`` cannot be built a second time
        to merge it: all of its weights are saved under the names that they have.
        """
        adapter = self.adapter
        if merge is None:
            merge = adapter is not None and adapter.base is None and not adapter.is_prompt
            if merge and not hasattr(self.parallelized.model, "config"):
                adapter, merge = None, False
        with in_phase("save"), writing(Path(folder)):
            self.parallelized.settle()
            deepspeed = self.parallelized.deepspeed
            weights = deepspeed.state.gather_weights() if deepspeed and deepspeed.state else None
            return export_model(
                self.parallelized.model,
                Path(folder),
                self.topology,
                processor=processor,
                weights=weights,
                adapter=adapter,
                merges=merge,
            )

    def export_into(self, folder: str | Path, processor: Any = None) -> None:
        """Save the model into a folder that may hold other files, which stay."""
        target = Path(folder)
        exported = self.export(target / ".exported", processor)
        if self.is_main:
            merge_export(exported, target)
        wait_for_all()

    def close(self) -> None:
        """Leave the process group; the last call of a script."""
        beat("end")
        self.release_folder()
        if self._parallelized is not None and self._parallelized.deepspeed is not None:
            self._parallelized.deepspeed.close()
        stop_processes()

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
            padding=find_fact(parallelized.model, PaddingObserver),
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


def _close(reference: weakref.ref[RapidformerEngine]) -> None:
    """Close an engine at exit. Until then, it and its model may be freed: notebooks build many."""
    engine = reference()
    if engine is not None:
        engine.close()
    else:
        beat("end")
        stop_processes()
