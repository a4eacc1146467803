"""``RapidformerEngine``: a few verbs for your own training loop.

    model, optimizer, lr_scheduler = engine.compose(model, optimizer, lr_scheduler_fn)
    engine.backward(loss)

The engine is built in four steps, one file each: ``run`` (settings, processes, data), ``composing``
(the model and its switches), ``updates`` (the verbs of training), and here its state on disk.
"""

from __future__ import annotations

import atexit
import functools
from pathlib import Path
from typing import Any

from rapidformer.checkpoint.export import export_model, gather_weights, merge_export
from rapidformer.checkpoint.restart import claim_folder
from rapidformer.checkpoint.store import CheckpointStore, TrainingState, bypass_clock
from rapidformer.config.parse import ExtraArgumentsProvider
from rapidformer.dist.collectives import wait_for_all
from rapidformer.dist.heartbeat import beat, in_phase
from rapidformer.dist.processes import stop_processes
from rapidformer.engine.run import Arguments
from rapidformer.engine.updates import UpdatingRun
from rapidformer.errors import RapidformerError


class RapidformerEngine(UpdatingRun):
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
        atexit.register(self.close)

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
            raise RapidformerError(
                "nowhere to save: give --save, or engine.save_checkpoint(folder)."
            )
        if self.clock.is_accumulating:
            raise RapidformerError(
                "save after optimizer.step(): the gradients of this update are incomplete."
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
        """Resume from a checkpoint, or from a run's newest; returns what was saved as extra."""
        source = folder or self.args.load
        if source is None:
            raise RapidformerError(
                "nothing to load: give --load, or engine.load_checkpoint(folder)."
            )
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
        """Load only the weights of a checkpoint."""
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

    def export(
        self, folder: str | Path, processor: Any = None, *, merge: bool | None = None
    ) -> Path:
        """Save the model alone, as a folder that ``transformers`` loads.

        Of a model with adapters, these are saved, as a folder that ``peft`` loads. With ``merge``
        they are added to the weights under them and the whole model is saved; also by default if
        those weights are in no file.
        """
        adapter = self.adapter
        if merge is None:
            merge = adapter is not None and adapter.base is None and not adapter.is_prompt
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
        if self._parallelized is not None and self._parallelized.deepspeed is not None:
            self._parallelized.deepspeed.close()
        stop_processes()

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
            base=self.adapter.base if self.adapter else None,
        )
