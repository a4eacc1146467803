"""``Trainer.hyperparameter_search``: Optuna's trials, each of them a run of its own.

Optuna runs on rank 0; the other ranks train with the values that it proposes there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_utils import BestRun, default_compute_objective, default_hp_space_optuna

from rapidformer.dialects.huggingface.interface import SearchableTrainer
from rapidformer.dist.collectives import broadcast_object
from rapidformer.errors import ConfigurationError, MissingPackageError
from rapidformer.log import warn_once

Space = Callable[[Any], dict[str, Any]]
Objective = Callable[[dict[str, float]], Any]


_OF_OPTIMIZE = ("timeout", "catch", "callbacks", "gc_after_trial", "show_progress_bar")
"""Options of ``Study.optimize``; all others are ``create_study``'s."""


def search(
    trainer: SearchableTrainer,
    *,
    space: Space | None,
    compute_objective: Objective | None,
    trials: int,
    direction: str | list[str],
    name_trial: Callable[[Any], str] | None,
    options: dict[str, Any],
) -> BestRun | list[BestRun]:
    """Run all trials; returns the best one, or the best ones for several objectives."""
    optuna = _import_optuna()
    if options.pop("n_jobs", 1) != 1:
        raise ConfigurationError(
            "hyperparameter_search(n_jobs=...) must be 1: a trial uses all processes of the run."
        )
    given = trainer.args
    _ = given.device  # joins the other ranks, which must hear the first proposal

    def run(trial: Any, values: dict[str, Any]) -> Any:
        name = name_trial(trial) if name_trial is not None else f"run-{trial.number}"
        trainer.args = _build_arguments(given, values, name)
        reporter = _Reporter(
            trial, compute_objective or default_compute_objective,
            can_prune=given.process_index == 0 and not isinstance(direction, list),
        )  # fmt: skip
        return _run_trial(trainer, trial, reporter)

    try:
        if given.process_index > 0:
            return _follow(optuna, space or default_hp_space_optuna, run)
        study = _build_study(optuna, direction, options)
        optimize = {name: options[name] for name in _OF_OPTIMIZE if name in options}
        propose = _propose(optuna, space or default_hp_space_optuna, run)
        study.optimize(propose, n_trials=trials, **optimize)
    finally:
        trainer.args = given
    best = _find_best(study, direction)
    broadcast_object((None, best))
    return best


def _import_optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise MissingPackageError("optuna", "hyperparameter_search()", "search") from None
    return optuna


def _build_study(optuna: Any, direction: str | list[str], options: dict[str, Any]) -> Any:
    name = "directions" if isinstance(direction, list) else "direction"
    others = {key: value for key, value in options.items() if key not in _OF_OPTIMIZE}
    return optuna.create_study(**{name: direction, **others})


def _propose(optuna: Any, space: Space, run: Callable[..., Any]) -> Callable[[Any], Any]:
    """On rank 0: what Optuna calls for each trial."""

    def propose(trial: Any) -> Any:
        values = space(trial)
        broadcast_object(((trial.number, trial.params), None))
        outcome = run(trial, values)
        if outcome is None:
            raise optuna.TrialPruned
        return outcome

    return propose


def _follow(optuna: Any, space: Space, run: Callable[..., Any]) -> BestRun | list[BestRun]:
    """On the other ranks: run what rank 0 proposes until it has the result."""
    while True:
        heard: Any = broadcast_object(None)
        proposed, best = heard
        if proposed is None:
            return best  # type: ignore[no-any-return]
        number, parameters = proposed
        trial = optuna.trial.FixedTrial(parameters, number=number)
        run(trial, space(trial))


def _build_arguments(given: Any, values: dict[str, Any], name: str) -> Any:
    arguments = copy.copy(given)
    for key, value in values.items():
        if not hasattr(arguments, key):
            warn_once(
                f"hyperparameter_search: {key} is not one of the TrainingArguments, so only "
                "model_init(trial) can use it."
            )
            continue
        before = getattr(arguments, key)
        setattr(arguments, key, value if before is None else type(before)(value))
    arguments.output_dir = str(Path(given.output_dir or ".") / name)
    return arguments


class _Reporter(TrainerCallback):
    """Reports every evaluation of a trial, which Optuna may then stop early."""

    def __init__(self, trial: Any, compute_objective: Objective, *, can_prune: bool) -> None:
        self._trial = trial
        self._compute = compute_objective
        self._can_prune = can_prune
        self.evaluated_at: int | None = None
        self.outcome: Any = None
        self.is_pruned = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **details: Any) -> None:
        state.trial_params = self._trial.params

    def on_evaluate(self, args: Any, state: Any, control: Any, **details: Any) -> None:
        self.outcome = self._compute(dict(details["metrics"]))
        self.evaluated_at = state.global_step
        if self._can_prune:
            self._trial.report(self.outcome, state.global_step)
            if self._trial.should_prune():
                self.is_pruned = control.should_training_stop = True


def _run_trial(trainer: SearchableTrainer, trial: Any, reporter: _Reporter) -> Any:
    """What the trial has reached; None if Optuna stopped it."""
    trainer.add_callback(reporter)
    try:
        trainer.train(trial=trial)
        if broadcast_object(reporter.is_pruned):
            return None
        if reporter.evaluated_at != trainer.state.global_step:
            trainer.evaluate()
    finally:
        trainer.remove_callback(reporter)
    return reporter.outcome


def _find_best(study: Any, direction: str | list[str]) -> BestRun | list[BestRun]:
    if isinstance(direction, list):
        return [BestRun(str(each.number), each.values, each.params) for each in study.best_trials]
    best = study.best_trial
    return BestRun(str(best.number), best.value, best.params)
