"""Keep the best model of a run, and stop when it no longer improves."""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path
from typing import Any

from rapidformer.checkpoint.writing import run_on_first
from rapidformer.errors import RapidformerError, WriteError
from rapidformer.training.callbacks import Callback, Control, RunningLoop
from rapidformer.training.evaluation import Evaluation
from rapidformer.training.run_folder import BEST, note_best


class BestModel(Callback):
    """Compares each evaluation with the best one so far."""

    def __init__(self, evaluation: Evaluation, *, saves: bool, processor: Any) -> None:
        """``saves``: a better model also gets a checkpoint."""
        self._metric, self._greater_is_better = evaluation.best_metric, evaluation.greater_is_better
        self._saves, self._processor = saves, processor

    def on_evaluate(self, loop: RunningLoop, control: Control, metrics: dict[str, float]) -> None:
        results = {name.removeprefix("eval_"): value for name, value in metrics.items()}
        # By default, the first metric that the metrics hook returns.
        name = self._metric if self._metric is not None else next(iter(results), "")
        _check_metric(loop, name, results)
        if name not in results or not math.isfinite(results[name]):
            return
        gain = self._compute_gain(loop, name, results[name])
        _count_patience(loop, control, gain)
        if gain > 0:
            self._keep(loop, control, name, results[name])

    def _compute_gain(self, loop: RunningLoop, name: str, value: float) -> float:
        """How much better the value is than the best one."""
        greater = loop.args.greater_is_better
        if greater is None:
            has_name = self._metric is not None
            greater = self._greater_is_better if has_name else is_greater_better(name)
        best = loop.progress.best_value
        if best is None:
            return math.inf
        return value - best if greater else best - value

    def _keep(self, loop: RunningLoop, control: Control, name: str, value: float) -> None:
        if loop.args.save is not None:
            loop.engine.checkpoints.check_weights()
            try:
                self._export(loop, Path(loop.args.save))
            except WriteError as error:
                loop.say(
                    f"the best model so far, of step {loop.step}, was not saved: {error.reason}. "
                    "Training continues."
                )
                return
        progress = loop.progress
        progress.best_metric, progress.best_value, progress.best_step = name, value, loop.step
        control.should_save |= self._saves

    def _export(self, loop: RunningLoop, folder: Path) -> None:
        """Replace ``best``; every rank raises if rank 0 cannot write it."""
        before = loop.progress.best_step
        run_on_first(lambda: note_best(folder, loop.step), folder)
        try:
            loop.engine.export(folder / BEST, self._processor)
        except WriteError:
            if loop.engine.is_main and before is not None:
                with suppress(OSError):
                    note_best(folder, before)  # it is still there
            raise


def is_greater_better(metric: str) -> bool:
    """Judged by the metric's name: a loss should fall, anything else should rise."""
    return not any(word in metric for word in ("loss", "perplexity", "error"))


def _count_patience(loop: RunningLoop, control: Control, gain: float) -> None:
    """Stop if the metric has not improved for too many evaluations."""
    progress, patience = loop.progress, loop.args.early_stopping_patience
    is_better = gain > loop.args.early_stopping_threshold
    progress.evaluations_since_best = 0 if is_better else progress.evaluations_since_best + 1
    if patience is not None and progress.evaluations_since_best >= patience:
        loop.say(
            f"stopping early at step {loop.step}: no improvement in {patience} evaluations "
            f"(--early-stopping-patience {patience})."
        )
        control.should_training_stop = True


def _check_metric(loop: RunningLoop, name: str, results: dict[str, float]) -> None:
    """Needed only for a script's own metrics hook; the metrics of tasks are known beforehand."""
    args = loop.args
    if name in results or not results or not args.is_given("metric_for_best_model"):
        return
    kept = "No checkpoint was saved, since there is no --save folder."
    if args.save:
        loop.save(wait=True)
        kept = (
            f"A checkpoint of step {loop.step} was saved: resume from it with --load {args.save}."
        )
    raise RapidformerError(
        f"--metric-for-best-model {args.metric_for_best_model}: the evaluation returns only "
        f"{', '.join(results)}. {kept}"
    )
