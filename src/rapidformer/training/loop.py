"""The training loop of every front end: when to update, log, evaluate, save and stop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rapidformer.checkpoint.finding import blaming, name_checkpoint
from rapidformer.data.loader import DistributedLoader
from rapidformer.data.update import MicroBatchResult, Update
from rapidformer.dist.collectives import broadcast_object
from rapidformer.engine import RapidformerEngine
from rapidformer.errors import RapidformerError
from rapidformer.objectives import BoundObjective
from rapidformer.training.bad_batches import BadBatches, check_first_labels
from rapidformer.training.best_model import BestModel
from rapidformer.training.callbacks import Callback, Control
from rapidformer.training.course import Course
from rapidformer.training.evaluation import Evaluation, Metrics, Progress, evaluate_model
from rapidformer.training.garbage import GarbageCollection
from rapidformer.training.meter import LogLines, Meter
from rapidformer.training.predicted import PredictionReport, advise_on_memory
from rapidformer.training.report import Reporter, list_reports
from rapidformer.training.run_folder import LAST, keeps_best
from rapidformer.training.run_record import RunRecord
from rapidformer.training.saves import Saves
from rapidformer.training.stop_signals import StopSignals
from rapidformer.training.summary import describe_results
from rapidformer.training.timetable import Timetable


class TrainingLoop:
    """Runs updates until the run is over."""

    def __init__(
        self,
        engine: RapidformerEngine,
        loader: DistributedLoader,
        forward: BoundObjective,
        *,
        train_iters: int,
        reporter: Reporter,
        record: RunRecord,
        evaluation: Evaluation | None = None,
        processor: Any = None,
        saves_each_epoch: bool = True,
        test: Callable[[], Metrics] | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.engine, self.args = engine, engine.args
        self.loader, self.forward = loader, forward
        self.reporter, self._record = reporter, record
        self.processor, self.test = processor, test
        self.timetable = Timetable(
            engine.args, train_iters=train_iters, saves_each_epoch=saves_each_epoch,
            eval_interval=evaluation.interval if evaluation else None,
        )  # fmt: skip
        self.course = Course(engine, loader, self.timetable, train_iters)
        self.evaluation = evaluation
        self.progress, self.control = Progress(), Control()
        self._callbacks: list[Callback] = [reporter, record]
        if evaluation is not None:
            saves_best = self.timetable.saves_best or self.args.load_best_model_at_end
            self._callbacks.append(BestModel(evaluation, saves=saves_best, processor=processor))
        self._callbacks += list_reports(engine)
        if engine.args.plan:
            plan = PredictionReport(reporter, self.args, engine.device, is_main=engine.is_main)
            self._callbacks.append(plan)
        self._callbacks += callbacks
        self.meter = Meter(
            engine.device, engine.runtime.topology, live=reporter.shows_bar,
            set_losses=forward.set_losses,
        )  # fmt: skip
        self._log_lines = LogLines(engine)
        self._bad_batches = BadBatches(engine, loader, reporter)
        self.saves_at_once = False
        self._saves = Saves(engine, reporter, self._notify)
        saves, is_alone = bool(self.args.save), self.args.world_size == 1
        self._signals = StopSignals(reporter.say, engine.device, saves=saves, is_alone=is_alone)
        self._garbage = GarbageCollection(train_iters)
        self.lr = 0.0
        """The learning rate of the last update."""
        self.parts: dict[str, float] = {}
        """What the objective shows besides the loss, in the last line of the log."""

    @property
    def step(self) -> int:
        """Updates done."""
        return self.course.step

    @property
    def epoch(self) -> float:
        """Epochs done, including the fraction of the current one."""
        return self.course.epoch

    @property
    def train_iters(self) -> int:
        """Updates of the whole run."""
        return self.course.train_iters

    @property
    def slots(self) -> int:
        """Tokens of this process so far, padding included."""
        return self.meter.all_slots

    @property
    def tokens(self) -> int:
        """The same without padding."""
        return self.meter.all_tokens

    @property
    def live_loss(self) -> float | None:
        """The running mean that the progress bar shows; None without a bar."""
        return self.meter.live_loss.value if self.meter.live_loss else None

    def say(self, message: str) -> None:
        self.reporter.say(message)

    def run(self) -> Progress:
        """Train to the end; returns the last evaluation and the best one."""
        self.engine.model.parallelized.model.train()
        self._log_lines.measure_device()
        try:
            self._notify("on_train_begin")
            if self.evaluation and self.timetable.evaluates_first and self.step == 0:
                self._evaluate()
            with self._signals, self._garbage:
                while not self._is_over():
                    self._run_epoch()
            if self._signals.is_agreed:
                where = "nothing was saved"
                if self.args.save and self.step > 0:
                    self.save(wait=True)
                    where = f"resume with the same command and --load {self.args.save}"
                self.say(f"stopped by {self._signals.name} at step {self.step}: {where}.")
                self._signals.leave()
            self._finish()
            self._notify("on_train_end")
        except BaseException as error:
            self._record.see_error(error)
            self._saves.give_up(error)
            advise_on_memory(error, self.args, self.engine.device)
            raise
        finally:
            self.reporter.close()
            self._record.finish(self, is_done=self.course.is_complete)
        return self.progress

    def _notify(self, hook: str, *facts: Any) -> None:
        for callback in self._callbacks:
            getattr(callback, hook)(self, self.control, *facts)

    def _run_epoch(self) -> None:
        attempts, is_cut = self.course.attempts, False
        self.control.should_epoch_stop = False
        self._notify("on_epoch_begin")
        for update in self.engine.data.iterate_updates(
            self.loader, stays_on_host=self.engine.updates.may_replay
        ):
            if self.course.has_passed:  # it was resumed at the end of a stream
                break
            self._run_update(update)
            is_cut = self.control.should_epoch_stop
            if self._is_over() or is_cut:
                break
        else:
            self.course.request_after_epoch(self.control)
        if attempts == self.course.attempts and not self.course.has_passed:
            raise RapidformerError("the training data yielded no batch: is the stream empty?")
        self._notify("on_epoch_end")
        self._act()
        if is_cut and not self._is_over():
            self.loader.set_epoch(self.loader.epoch + 1)

    def _run_passes(self, update: Update) -> list[MicroBatchResult]:
        hooks = ("on_substep_end", "on_pre_optimizer_step", "on_optimizer_step")
        is_watched = any(callback.hears(hook) for callback in self._callbacks for hook in hooks)
        return self.engine.run_update(
            self.forward, update, after_micro_batch=lambda: self._notify(hooks[0]),
            steps_at_once=not is_watched,
        )  # fmt: skip

    def _run_update(self, update: Update) -> None:
        self._notify("on_step_begin")
        with self._garbage.held_back():
            results = self._run_passes(update)
        # Only now, with this work queued, is it read whether the last update was good.
        if self._settle():
            results = self._run_passes(update)  # the first time, it was with other weights
        if self.course.attempts == 0:
            check_first_labels(update, results)
            self._record.see_first(update)
        for result in results:
            self.meter.add_micro_batch(result.means, result.info)
        self.lr = self.engine.updates.get_learning_rate()
        self._notify("on_pre_optimizer_step")
        with self._garbage.held_back():
            self.engine.updates.step(lambda: self._notify("on_optimizer_step"))
        self.course.attempts += 1
        clock = self.engine.updates.clock
        self.meter.add_update(clock.total_weight, clock.grad_norm)
        self._bad_batches.see(update)
        self._signals.look(self.course.attempts, asks_others=self._is_anything_due())
        if not self._bad_batches.is_late or self._is_anything_due():
            self._settle()
        if self.course.request_after_update(self.control):
            if self.timetable.saves:
                self._saves.prepare()
            self.control.should_training_stop |= self._signals.is_agreed
        self._notify("on_step_end")
        self._act()

    def _is_anything_due(self) -> bool:
        return self._is_over() or self._signals.is_agreed or self.course.is_anything_due()

    def _settle(self) -> bool:
        """Deal with the last update if it was bad; returns whether the weights were restored."""
        bad = self.engine.updates.clock.settle()
        if bad is None:
            return False
        self.meter.drop_update()
        line = self._bad_batches.report(bad, self.step + 1)
        self.course.note_step()
        if self.args.on_bad_loss != "rollback":
            self.reporter.record({"step": self.step, **line})
            return False
        attempts = self.course.attempts
        self.restore(self.engine.checkpoints.roll_back())
        self.course.attempts = attempts  # only the weights go back, not the place in the data
        self.meter.reset()
        self._bad_batches.forget()
        self.reporter.go_back(self.step)
        self.reporter.record({"step": self.step, **line})
        self.say(f"went back to step {self.step} ({self.engine.checkpoints.resumed_from})")
        return True

    def _act(self) -> None:
        """Do what the settings and the callbacks have requested."""
        control = self.control
        if control.should_log:
            self._log()
        if control.should_evaluate and self.evaluation is not None:
            self._evaluate()
        if control.should_save and self.args.save:
            self.save()
        # Clear requests that a run without a folder or validation data cannot meet.
        control.should_evaluate = control.should_save = False

    def _finish(self) -> None:
        if self.course.has_passed:
            self.course.train_iters = self.course.attempts
        is_due = self.timetable.evaluates and self.progress.evaluated_at != self.step
        if self.evaluation is not None and is_due:
            self._evaluate()
        if self.test is not None and self.course.is_complete:
            self._log()  # log first, so that the evaluation does not count as training time
            results = broadcast_object(evaluate_model(self.engine, self.test))
            line = {f"test_{key}": value for key, value in results.items()}
            self.progress.evaluations |= line
            self._notify("on_log", self.course.place | line)
        if self.timetable.saves:
            assert self.args.save is not None
            if self.step > 0:
                self.save(wait=True)
            self.engine.export(Path(self.args.save) / LAST, self.processor)
        elif self.meter.has_updates():
            self._log()
        self.reporter.close_bar()  # the lines that follow are the last on the screen
        best, total = self.progress.get_best(), self.train_iters
        told = describe_results(self.args, step=self.step, total=total, best=best)
        for sentence in (*self.loader.describe_sets(), *told):
            self.reporter.say(sentence)
        if self._best_folder is not None and self.progress.best_step != self.step:
            self.engine.checkpoints.load_weights(self._best_folder)
            self.reporter.say(f"loaded    the best weights, from step {self.progress.best_step}")

    @property
    def _best_folder(self) -> Path | None:
        """The checkpoint of the best evaluation, if it is to be kept."""
        step, save = self.progress.best_step, self.args.save
        if step is None or save is None or not self.args.load_best_model_at_end:
            return None
        return Path(save) / name_checkpoint(step)

    def _is_over(self) -> bool:
        return self.control.should_training_stop or self.course.is_over

    def _log(self) -> None:
        self.control.should_log = False
        self._settle()
        if not self.meter.has_updates():
            return
        measured = self.meter.read()
        has_scaler = self.engine.updates.scaler is not None
        self._bad_batches.check(measured, self.course.attempts, tolerates_infinity=has_scaler)
        self.parts = measured.parts
        line = self._log_lines.describe(
            measured, self.course.place, lr=self.lr, updates_left=self.course.attempts_left
        )
        self._notify("on_log", line)
        self._saves.report_if_written()

    def _evaluate(self) -> None:
        assert self.evaluation is not None
        self.control.should_evaluate = False
        self._log()
        with self.meter.paused():
            # Rank 0 decides: if results differed, one rank might save the best model alone.
            results = broadcast_object(evaluate_model(self.engine, self.evaluation.run))
            self.progress.evaluations, self.progress.evaluated_at = results, self.step
            metrics = {f"eval_{key}": value for key, value in results.items()}
            self._notify("on_log", self.course.place | metrics)
            self._notify("on_evaluate", metrics)
        # A checkpoint of this step, if there is one, does not know this evaluation.
        if self.args.save and (self.control.should_save or self._saves.step == self.step):
            self.save()

    def save(self, *, wait: bool = False) -> None:
        """Save a checkpoint, unless this step has one; without ``wait``, maybe behind."""
        self.control.should_save = False
        self._settle()
        if wait:
            self._saves.finish()
        if self._saves.has_state(self.step, self.progress):
            return
        # Logging raises an error if a loss is NaN: such a state is never saved.
        self._log()
        with self.meter.paused():
            extra = {
                "attempts": self.course.attempts, "train_iters": self.train_iters,
                "bad_batches": self._bad_batches.state_dict(),
                "objective": self.forward.state_dict(),
            }  # fmt: skip
            self._saves.start(
                self.step, self.progress, extra, protected=self._best_folder,
                processor=self.processor, wait=wait or self.saves_at_once,
            )  # fmt: skip

    def restore(self, extra: dict[str, Any]) -> None:
        """Restore what a checkpoint holds beyond the engine's state."""
        assert self.engine.checkpoints.resumed_from is not None
        with blaming(self.engine.checkpoints.resumed_from):
            self.progress = Progress(**extra.get("progress", {}))
            self.course.attempts = int(extra.get("attempts", self.step))
            self._bad_batches.load_state_dict(extra.get("bad_batches", {}))
            self.forward.load_state_dict(extra.get("objective", {}))
        if self.args.save is not None:
            folder, best_step = Path(self.args.save), self.progress.best_step
            if not broadcast_object(self.engine.is_main and keeps_best(folder, best_step)):
                # Another run's folder, or its best model is from a step that will be repeated.
                self.progress.best_value = self.progress.best_step = None
        self.course.note_step()
        self._saves.remember(self.step, self.progress)
