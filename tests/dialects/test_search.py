"""``Trainer.hyperparameter_search``: Optuna's trials on the one loop."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest

from rapidformer.errors import ConfigurationError, MissingPackageError
from tests.dialects.small import make_classifier
from tests.dialects.test_trainer import make_trainer
from tests.processes import run_in_kept_processes

optuna = pytest.importorskip("optuna", reason="the extra rapidformer[search] is not installed")
optuna.logging.set_verbosity(optuna.logging.ERROR)


def choose_rate(trial: Any) -> dict[str, Any]:
    return {"learning_rate": trial.suggest_categorical("learning_rate", [1e-12, 1e-3])}


def run_search(folder: Path | str) -> tuple[Any, list[Any]]:
    """The best trial, and the rate and the loss of each."""
    seen: list[Any] = []

    def compute(metrics: dict[str, float]) -> float:
        seen.append((trainer.args.learning_rate, metrics["eval_loss"]))
        return metrics["eval_loss"]

    def build(trial: Any) -> Any:
        assert trial is None or trial.params["learning_rate"] in (1e-12, 1e-3)
        return make_classifier()

    trainer = make_trainer(folder, model_init=build, max_steps=3)
    best = trainer.hyperparameter_search(
        choose_rate,
        compute,
        sampler=optuna.samplers.GridSampler({"learning_rate": [1e-12, 1e-3]}, seed=0),
        n_trials=2,
    )
    assert trainer.args.learning_rate == 5e-5 and trainer.args.output_dir == str(folder)
    return best, seen


def check_best(best: Any, seen: list[Any]) -> None:
    assert sorted(rate for rate, _ in seen) == [1e-12, 1e-3]
    rate, loss = min(seen, key=lambda each: each[1])
    assert best.hyperparameters == {"learning_rate": rate} and best.objective == loss


def test_the_best_trial_is_found(tmp_path: Path) -> None:
    best, seen = run_search(tmp_path)
    check_best(best, seen)
    assert (tmp_path / f"run-{best.run_id}" / "metrics.jsonl").is_file()


def test_every_process_trains_the_same_trials(tmp_path: Path) -> None:
    for best, seen in run_in_kept_processes(run_search, 2, str(tmp_path)):
        check_best(best, seen)


def test_optuna_may_stop_a_trial(tmp_path: Path) -> None:
    class PrunesAll(optuna.pruners.BasePruner):
        def prune(self, study: Any, trial: Any) -> bool:
            return trial.number == 1

    trainer = make_trainer(
        tmp_path, model_init=make_classifier, max_steps=4, eval_strategy="steps", eval_steps=2
    )
    study_trials: list[int] = []
    best = trainer.hyperparameter_search(
        lambda trial: {"seed": trial.suggest_int("seed", 1, 9)},
        compute_objective=lambda metrics: study_trials.append(trainer.state.global_step) or 1.0,
        n_trials=2,
        pruner=PrunesAll(),
    )
    assert best.run_id == "0"
    assert study_trials[:2] == [2, 4] and 4 not in study_trials[2:]


def test_what_a_search_needs_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="needs model_init="):
        make_trainer(tmp_path).hyperparameter_search()
    trainer = make_trainer(tmp_path, model_init=make_classifier)
    with pytest.raises(ConfigurationError, match=r"backend='ray'\) must be 'optuna'"):
        trainer.hyperparameter_search(backend="ray")
    real = builtins.__import__

    def refuse(name: str, *rest: Any, **named: Any) -> Any:
        if name == "optuna":
            raise ImportError(name=name)
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(MissingPackageError, match=r"pip install 'rapidformer\[search\]'"):
        trainer.hyperparameter_search()
