"""The one training loop. PreTrainer, Finetuner, Trainer and the command all end here.

It owns time: updates, epochs, when to log, evaluate, save and stop. What a forward pass is, and how
a model is evaluated, it is told.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from rapidformer.data.loader import DistributedLoader
from rapidformer.dist.collectives import broadcast_object
from rapidformer.dist.heartbeat import in_phase
from rapidformer.engine import RapidformerEngine
from rapidformer.errors import RapidformerError
from rapidformer.training.closing import describe_results
from rapidformer.training.meter import Measurement, Meter
from rapidformer.training.report import Reporter
from rapidformer.training.run_folder import BEST, LAST
from rapidformer.training.stop_signals import StopSignals
from rapidformer.training.timetable import Timetable

Metrics = dict[str, float]


class ForwardResult(NamedTuple):
    """What a forward step returned, in one form; a weight of None is counted by the engine."""

    loss: torch.Tensor
    weight: float | torch.Tensor | None
    parts: Mapping[str, tuple[torch.Tensor, float | torch.Tensor | None]] = MappingProxyType({})
    """What the loss is made of, by name, each a mean over a weight of its own: only to be shown."""


@dataclass(kw_only=True)
class Evaluation:
    """How a model is evaluated during training, and which result is better."""

    run: Callable[[], dict[str, float]]
    interval: int | None = None
    """Updates between evaluations where the settings do not say; None: after each epoch."""
    best_metric: str | None = None
    greater_is_better: bool = True


@dataclass
class Progress:
    """Where the run stands, beyond what the engine counts; goes into every checkpoint."""

    best_metric: str | None = None
    best_value: float | None = None
    best_step: int | None = None
    evaluations: dict[str, float] = field(default_factory=dict)
    evaluated_at: int | None = None
    evaluations_since_best: int = 0
    """In a row, none better by ``--early-stopping-threshold``."""

    def get_best(self) -> tuple[str, float, int] | None:
        """The metric, its value and the step of the best model so far."""
        if self.best_value is None or self.best_step is None:
            return None
        return self.best_metric or "metric", self.best_value, self.best_step


class TrainingLoop:
    """Runs updates until the run is over."""

    def __init__(
        self,
        engine: RapidformerEngine,
        loader: DistributedLoader,
        forward: Callable[[Any], ForwardResult],
        *,
        train_iters: int,
        reporter: Reporter,
        evaluation: Evaluation | None = None,
        processor: Any = None,
        saves_each_epoch: bool = True,
        test: Callable[[], Metrics] | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.engine = engine
        self.args = engine.args
        self.loader = loader
        self.forward = forward
        self.train_iters = train_iters
        self.reporter = reporter
        self.evaluation = evaluation
        self.processor = processor
        self.timetable = Timetable(
            engine.args,
            train_iters=train_iters,
            eval_interval=evaluation.interval if evaluation else None,
            saves_each_epoch=saves_each_epoch,
        )
        if not self.timetable.evaluates:
            self.evaluation = None
        self.test = test
        self.progress = progress or Progress()
        self.meter = Meter(engine.device, engine.topology, live=reporter.shows_bar)
        self._saved_at: int | None = None
        self._started_at = time.monotonic()
        self._attempts = self.step
        self._step_before = self.step
        self._is_stopping = False
        self._signals = StopSignals(
            reporter.say, saves=bool(self.args.save), is_alone=self.args.world_size == 1
        )
        self._lr = 0.0

    @property
    def step(self) -> int:
        """Updates done."""
        return self.engine.clock.updates

    @property
    def is_finished(self) -> bool:
        """Whether a restored run has done all of its updates already."""
        return self._attempts >= self.train_iters

    def run(self) -> Progress:
        """Train to the end; returns the last evaluation and the best one."""
        self.engine.parallelized.model.train()
        try:
            if self.evaluation is not None and self.timetable.evaluates_first and self.step == 0:
                self._evaluate()
            with self._signals:
                while not self._is_over():
                    self._run_epoch()
            if self._signals.caught is not None:
                self._stop()
            self._finish()
        finally:
            self.reporter.close()
        return self.progress

    def _stop(self) -> None:
        """Save and leave, because a signal asked for it."""
        where = "nothing was saved"
        if self.args.save and self.step > 0:
            self._save()
            where = f"go on with the same command and --load {self.args.save}"
        self.reporter.say(f"stopped by {self._signals.name} at step {self.step}: {where}.")
        self._signals.leave()

    def _run_epoch(self) -> None:
        attempts = self._attempts
        for update in self.engine.iterate_updates(self.loader):
            results = self.engine.run_update(self.forward, update)
            for each, result in zip(update, results, strict=True):
                self.meter.add_micro_batch(result.means, each.info)
            self._lr = self.engine.get_learning_rate()
            self.engine.step()
            self._after_update()
            if self._is_over():
                break
        else:
            self._after_epoch()
        if attempts == self._attempts:
            raise RapidformerError("the training data gave no batch: is the stream empty?")

    def _after_update(self) -> None:
        clock = self.engine.clock
        self._attempts += 1
        self.meter.add_update(clock.total_weight, clock.grad_norm)
        live = self.meter.live_loss
        self.reporter.advance(self.step, live.value if live else None, self._lr)
        if self.timetable.is_log_due(self._attempts, self.step):
            self._log()
        if self.step == self._step_before:
            return  # an update that fp16 has skipped: nothing is due
        self._step_before = self.step
        if self.evaluation is not None and self.timetable.is_evaluation_due(self.step):
            self._evaluate()
        if self.timetable.is_save_due(self.step):
            self._save()
        self._check_exit()

    def _after_epoch(self) -> None:
        if self.timetable.is_log_due_after_epoch():
            self._log()
        is_due = self.timetable.is_evaluation_due_after_epoch(self._get_epoch())
        if self.evaluation is not None and is_due:
            self._evaluate()
        if self.timetable.is_save_due_after_epoch():
            self._save()

    def _finish(self) -> None:
        if self.evaluation is not None and self.progress.evaluated_at != self.step:
            self._evaluate()
        if self.test is not None and self._attempts >= self.train_iters:
            self._log()  # before, so that measuring is not taken for training time
            results = broadcast_object(evaluate_model(self.engine, self.test))
            line = {f"test_{key}": value for key, value in results.items()}
            self.progress.evaluations |= line
            self.reporter.log_evaluation(self._locate() | line)
        if self.timetable.saves:
            assert self.args.save is not None
            if self.step > 0:
                self._save()
            self.engine.export(Path(self.args.save) / LAST, self.processor)
        elif self.meter.has_updates():
            self._log()
        best = self.progress.get_best()
        kept = describe_results(self.args, step=self.step, total=self.train_iters, best=best)
        for sentence in kept:
            self.reporter.say(sentence)
        if self.args.load_best_model_at_end:
            self._load_best()

    def _load_best(self) -> None:
        if self._best_folder is not None and self.progress.best_step != self.step:
            self.engine.load_weights(self._best_folder)
            self.reporter.say(f"loaded   the best weights, of step {self.progress.best_step}")

    @property
    def _best_folder(self) -> Path | None:
        """The checkpoint of the best evaluation, if it is to be kept."""
        step, save = self.progress.best_step, self.args.save
        if step is None or save is None or not self.args.load_best_model_at_end:
            return None
        return Path(save) / f"iter_{step:07d}"

    def _is_over(self) -> bool:
        # Attempts, not updates: fp16 overflows use up data without an update.
        return self._is_stopping or self._attempts >= self.train_iters

    def _check_exit(self) -> None:
        args = self.args
        self._is_stopping |= self._signals.caught is not None
        if args.exit_interval and self.step % args.exit_interval == 0:
            self._is_stopping = True
        if args.exit_duration_in_mins is not None and (
            self._attempts % self.timetable.log_interval == 0
        ):
            minutes = (time.monotonic() - self._started_at) / 60
            self._is_stopping |= broadcast_object(minutes > args.exit_duration_in_mins)

    # ---- logging, evaluating, saving -----------------------------------------------------------

    def _log(self) -> None:
        if not self.meter.has_updates():
            return
        measured = self.meter.read(
            self._attempts, tolerates_infinity=self.engine.scaler is not None
        )
        self.reporter.log_training(self._describe(measured))

    def _describe(self, measured: Measurement) -> dict[str, Any]:
        updates = len(measured.losses)
        step_time = measured.seconds / updates
        line: dict[str, Any] = {
            **measured.parts,
            "step": self.step,
            "epoch": round(self._get_epoch(), 4),
            "loss": measured.loss,
            "lr": self._lr,
            "grad_norm": measured.grad_norm,
            "step_time": step_time,
            "tokens_per_second": measured.tokens / measured.seconds,
            "samples_per_second": measured.samples / measured.seconds,
            "padding_share": 1 - measured.tokens / measured.slots if measured.slots else 0.0,
            "seconds_left": max(self.train_iters - self._attempts, 0) * step_time,
        }
        if self.engine.device.type == "cuda":
            line["memory_gib"] = torch.cuda.max_memory_allocated(self.engine.device) / 2**30
        if self.engine.scaler is not None:
            line["loss_scale"] = self.engine.scaler.scale
            line["skipped_updates"] = self.engine.clock.skipped
        return line

    def _locate(self) -> dict[str, Any]:
        return {"step": self.step, "epoch": round(self._get_epoch(), 4)}

    def _get_epoch(self) -> float:
        state = self.loader.state_dict()
        if self.loader.is_stream:
            return float(state["epoch"])
        return state["epoch"] + state["consumed_samples"] / self.loader.num_samples

    def _evaluate(self) -> None:
        assert self.evaluation is not None
        self._log()
        paused_at = self.meter.pause()
        # The first process's word: were they to differ, one alone would go and save the best.
        results = broadcast_object(evaluate_model(self.engine, self.evaluation.run))
        self.progress.evaluations = results
        self.progress.evaluated_at = self.step
        line = {f"eval_{key}": value for key, value in results.items()}
        self.reporter.log_evaluation(self._locate() | line)
        is_best = self._keep_if_best(results)
        self.meter.resume(paused_at)
        if is_best and (self.timetable.saves_best or self.args.load_best_model_at_end):
            self._save()

    def _keep_if_best(self, results: dict[str, float]) -> bool:
        assert self.evaluation is not None
        name, greater = self.evaluation.best_metric, self.evaluation.greater_is_better
        if name is None:
            # Nobody has said which: the first one that the metrics hook returns.
            name = next(iter(results), "")
            greater = is_greater_better(name)
        self._check_metric(name, results)
        if self.args.greater_is_better is not None:
            greater = self.args.greater_is_better
        if name not in results or not math.isfinite(results[name]):
            return False
        value, best = results[name], self.progress.best_value
        gain = math.inf if best is None else (value - best if greater else best - value)
        self._count_patience(gain)
        if gain <= 0:
            return False
        self.progress.best_metric = name
        self.progress.best_value, self.progress.best_step = value, self.step
        if self.args.save is not None:
            self.engine.export(Path(self.args.save) / BEST, self.processor)
        return True

    def _count_patience(self, gain: float) -> None:
        """Stop where the metric has not been better for too many evaluations."""
        progress, patience = self.progress, self.args.early_stopping_patience
        is_better = gain > self.args.early_stopping_threshold
        progress.evaluations_since_best = 0 if is_better else progress.evaluations_since_best + 1
        if patience is not None and progress.evaluations_since_best >= patience:
            self.reporter.say(
                f"stopping at step {self.step}: {patience} evaluations in a row were not better "
                f"than the best (--early-stopping-patience {patience})."
            )
            self._is_stopping = True

    def _check_metric(self, name: str, results: dict[str, float]) -> None:
        """Only a script's own metrics hook is found out here; tasks know their metrics before."""
        if name in results or not results or not self.args.is_given("metric_for_best_model"):
            return
        if self.args.save:
            self._save()
        raise RapidformerError(
            f"--metric-for-best-model {self.args.metric_for_best_model}: the evaluation gives "
            f"{', '.join(results)}. A checkpoint of step {self.step} "
            + (
                f"is kept: go on from it with --load {self.args.save}."
                if self.args.save
                else "is not kept, since there is no --save folder."
            )
        )

    def _save(self) -> None:
        if self._saved_at == self.step:
            return
        # Reading the meter raises where a loss is not a number: such a state is never saved.
        self._log()
        paused_at = self.meter.pause()
        progress = dataclasses.asdict(self.progress)
        self.engine.save_checkpoint(
            extra={"progress": progress, "attempts": self._attempts}, protected=self._best_folder
        )
        self._saved_at = self.step
        self.meter.resume(paused_at)

    def restore(self, extra: dict[str, Any]) -> None:
        """Take over what an earlier run's checkpoint knows beyond the engine's state."""
        self.progress = Progress(**extra.get("progress", {}))
        save = self.args.save
        if save is not None and not broadcast_object((Path(save) / BEST).is_dir()):
            # Another folder than that run's: its best model is not here.
            self.progress.best_value = self.progress.best_step = None
        self._attempts = extra.get("attempts", self.step)
        self._step_before = self._saved_at = self.step


def is_greater_better(metric: str) -> bool:
    """By the metric's name: less of a loss is better, more of anything else."""
    return not any(word in metric for word in ("loss", "perplexity", "error"))


def evaluate_model(
    engine: RapidformerEngine, run: Callable[[], dict[str, float]]
) -> dict[str, float]:
    """Evaluate without gradients and dropout, and bring the model back to training."""
    model = engine.parallelized.model
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), in_phase("evaluate"), engine.parallelized.keep_gathered():
            return run()
    finally:
        model.train(was_training)
