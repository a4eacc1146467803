"""``Trainer.hyperparameter_search``: Optuna's trials, proposed on rank 0 and run by all ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_utils import BestRun, default_compute_objective, default_hp_space_optuna

from rapidformer.dialects.huggingface.evaluating import EvaluationMethods
from rapidformer.dist.collectives import broadcast_object
from rapidformer.errors import ConfigurationError
from rapidformer.log import warn_once
from rapidformer.sweeping.study import load_optuna

Space = Callable[[Any], dict[str, Any]]
Objective = Callable[[dict[str, float]], Any]
_OF_OPTIMIZE = ("timeout", "catch", "callbacks", "gc_after_trial", "show_progress_bar")
"""Options of ``Study.optimize``; all others are ``create_study``'s."""


def search(
    trainer: EvaluationMethods,
    *,
    space: Space | None,
    compute_objective: Objective | None,
    trials: int,
    direction: str | list[str],
    name_trial: Callable[[Any], str] | None,
    options: dict[str, Any],
) -> BestRun | list[BestRun]:
    """Run all trials; returns the best one, or the best ones for several objectives."""
    optuna = load_optuna("hyperparameter_search()")
    if options.pop("n_jobs", 1) != 1:
        raise ConfigurationError(
            "hyperparameter_search(n_jobs=...) must be 1: a trial uses all processes of the run."
        )
    arguments, space = trainer.args, space or default_hp_space_optuna
    _ = arguments.device  # joins the other ranks, which must hear the first proposal
    is_first, has_several = arguments.process_index == 0, isinstance(direction, list)

    def run(trial: Any, values: dict[str, Any]) -> Any:
        name = name_trial(trial) if name_trial is not None else f"run-{trial.number}"
        trainer.args = _change_arguments(arguments, values, name)
        compute = compute_objective or default_compute_objective
        reporter = _Reporter(trial, compute, can_prune=is_first and not has_several)
        return _run_trial(trainer, trial, reporter)

    def propose(trial: Any) -> Any:
        """What Optuna calls for each trial, on rank 0."""
        values = space(trial)
        broadcast_object(((trial.number, trial.params), None))
        outcome = run(trial, values)
        if outcome is None:
            raise optuna.TrialPruned
        return outcome

    try:
        if not is_first:
            return _follow(optuna, space, run)
        others = {key: value for key, value in options.items() if key not in _OF_OPTIMIZE}
        directions = {"directions" if has_several else "direction": direction}
        study: Any = optuna.create_study(**{**directions, **others})
        optimize = {name: options[name] for name in _OF_OPTIMIZE if name in options}
        study.optimize(propose, n_trials=trials, **optimize)
    finally:
        trainer.args = arguments
    best: BestRun | list[BestRun]
    if has_several:
        best = [BestRun(str(one.number), one.values, one.params) for one in study.best_trials]
    else:
        best = BestRun(str(study.best_trial.number), study.best_value, study.best_trial.params)
    broadcast_object((None, best))
    return best


def _follow(optuna: Any, space: Space, run: Callable[..., Any]) -> BestRun | list[BestRun]:
    """On the other ranks: run what rank 0 proposes until it has the result."""
    while True:
        heard: Any = broadcast_object(None)
        proposed, best = heard
        if proposed is None:
            return best
        number, parameters = proposed
        trial = optuna.trial.FixedTrial(parameters, number=number)
        run(trial, space(trial))


def _change_arguments(before: Any, values: dict[str, Any], name: str) -> Any:
    arguments = copy.copy(before)
    for key, value in values.items():
        if not hasattr(arguments, key):
            warn_once(
                f"hyperparameter_search: {key} is not one of the TrainingArguments, so only "
                "model_init(trial) can use it."
            )
            continue
        default = getattr(arguments, key)
        setattr(arguments, key, value if default is None else type(default)(value))
    arguments.output_dir = str(Path(before.output_dir or ".") / name)
    return arguments


@dataclass(eq=False)
class _Reporter(TrainerCallback):
    """Reports every evaluation of a trial, which Optuna may then stop early."""

    trial: Any
    compute: Objective
    can_prune: bool
    evaluated_at: int | None = None
    outcome: Any = None
    is_pruned: bool = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **details: Any) -> None:
        state.trial_params = self.trial.params

    def on_evaluate(self, args: Any, state: Any, control: Any, **details: Any) -> None:
        self.outcome = self.compute(dict(details["metrics"]))
        self.evaluated_at = state.global_step
        if self.can_prune:
            self.trial.report(self.outcome, state.global_step)
            if self.trial.should_prune():
                self.is_pruned = control.should_training_stop = True


def _run_trial(trainer: EvaluationMethods, trial: Any, reporter: _Reporter) -> Any:
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
