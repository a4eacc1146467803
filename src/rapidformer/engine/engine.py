"""``RapidformerEngine``: a few verbs for your own training loop.

    model, optimizer, lr_scheduler = engine.compose(model, optimizer, lr_scheduler_fn)
    engine.backward(loss)

The engine is built in steps, one file each: ``run`` (settings, processes, data), ``composing`` (the
model and its switches), ``weighing`` (forward steps), ``updates`` (the verbs of training),
``predicting``, ``saving`` (checkpoints), and here loading and exporting.
"""

from __future__ import annotations

import atexit
import weakref
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import LambdaLR

from rapidformer.checkpoint.export import export_model, gather_weights, merge_export
from rapidformer.checkpoint.finding import find_checkpoints
from rapidformer.checkpoint.finite import check_finite
from rapidformer.checkpoint.loading import load_checkpoint, move_schedule
from rapidformer.checkpoint.run_file import blaming
from rapidformer.checkpoint.writing import writing
from rapidformer.config.explain import render
from rapidformer.config.parse import ExtraArgumentsProvider
from rapidformer.dist.collectives import broadcast_object, wait_for_all
from rapidformer.dist.heartbeat import beat, in_phase
from rapidformer.dist.processes import stop_processes
from rapidformer.engine.facts import find_differences
from rapidformer.engine.run import Arguments
from rapidformer.engine.saving import SavingRun
from rapidformer.errors import RapidformerError, TrainingError
from rapidformer.log import get_logger


class RapidformerEngine(SavingRun):
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
        atexit.register(_close, weakref.ref(self))

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

    def explain(self) -> str:
        """Every change that could be made to the model: on, off or not applicable, and why."""
        return "\n".join(render(self.parallelized.explain(self.args)))

    def close(self, *, gives_back: bool = True) -> None:
        """Give the plain model back, with its trained weights, and leave the process group.

        Every rank must call this. ``gives_back=False`` leaves the model as it is.
        """
        if gives_back and self._parallelized is not None and self._parallelized.deepspeed is None:
            self._parallelized.applied.undo()
        beat("end")
        self.release_folder()
        if self._parallelized is not None and self._parallelized.deepspeed is not None:
            self._parallelized.deepspeed.close()
        stop_processes()


def _close(reference: weakref.ref[RapidformerEngine]) -> None:
    """Close an engine at exit. Until then, it and its model may be freed: notebooks build many."""
    engine = reference()
    if engine is not None:
        engine.close(gives_back=False)
    else:
        beat("end")
        stop_processes()
