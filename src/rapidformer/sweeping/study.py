"""The trials of a sweep, kept by Optuna in a file, and what the next one tries.

What trial *n* tries depends on nothing but the seed, *n* and the results of the trials up to
*n - parallel*: a sweep that was killed, however often, tries the same as one that was not. For this
every decision is made by a study of its own that knows these results only, with a sampler that is
seeded for *n*; Optuna's usual study goes on with the random state that it happens to be in.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rapidformer.errors import ConfigurationError, MissingPackageError
from rapidformer.sweeping.space import Parameters, Range, Space, count_choices, list_choices

STUDY_FILE = "study.db"
_FIRST_PRUNED = 2
"""The first evaluation after which a trial may be stopped."""


def load_optuna(what: str) -> Any:
    """The package, which is optional."""
    try:
        import optuna
    except ImportError:
        raise MissingPackageError("optuna", what, "search") from None
    return optuna


def locate_storage(folder: Path) -> str | None:
    """The address of Optuna's file; None would be memory."""
    return f"sqlite:///{folder / STUDY_FILE}"


@dataclass(frozen=True)
class Outcome:
    """How a trial ended."""

    state: Literal["complete", "pruned", "failed"]
    evaluations: list[float] = field(default_factory=list)
    """The metric at each evaluation that counts."""
    error: str = ""


@dataclass(frozen=True)
class Trial:
    number: int
    state: str
    value: float | None
    parameters: Parameters
    error: str


class Study:
    """The trials that have ended, in the order of their numbers."""

    def __init__(
        self,
        folder: Path,
        space: Space,
        *,
        is_greater_better: bool,
        seed: int,
        parallel: int = 1,
        description: dict[str, Any] | None = None,
        prunes: bool = True,
    ) -> None:
        """``description``: what must not change as long as the sweep goes on."""
        self._optuna = optuna = load_optuna("rapidformer sweep")
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        self.space, self._seed, self._parallel, self._prunes = space, seed, parallel, prunes
        self.is_greater_better = is_greater_better
        self._direction = "maximize" if is_greater_better else "minimize"
        count = count_choices(space)
        self._listed = None if count is None else list_choices(space, seed)
        self._distributions = {name: self._describe(name) for name in space}
        self._study: Any = optuna.create_study(
            storage=locate_storage(folder), study_name="sweep", load_if_exists=True,
            direction=self._direction, sampler=optuna.samplers.RandomSampler(seed),
        )  # fmt: skip
        self._keep_description(folder, description or {})
        self._kept: list[Any] = self._study.get_trials()
        self._chosen: dict[str, Any] = self._study.user_attrs

    def _describe(self, name: str) -> Any:
        values, distributions = self.space[name], self._optuna.distributions
        if not isinstance(values, Range):
            return distributions.CategoricalDistribution(values.values)
        if values.is_whole:
            low, high = int(values.low), int(values.high)
            return distributions.IntDistribution(low, high, log=values.is_log)
        return distributions.FloatDistribution(values.low, values.high, log=values.is_log)

    def _keep_description(self, folder: Path, description: dict[str, Any]) -> None:
        known = self._study.user_attrs.get("sweep")
        if known is None:
            self._study.set_user_attr("sweep", description)
        elif known != json.loads(json.dumps(description)):
            names = [n for n in {**known, **description} if known.get(n) != description.get(n)]
            told = "; ".join(f"{n}: {known.get(n)}, now {description.get(n)}" for n in names)
            raise ConfigurationError(
                f"{folder} has another sweep ({told}): give the same command to go on with it, or "
                "another folder with --save."
            )

    @property
    def trials(self) -> list[Trial]:
        return [Trial(number=one.number, **one.user_attrs) for one in self._kept]

    @property
    def ended(self) -> int:
        """Trials 0 up to this one have ended."""
        return len(self._kept)

    def can_draw(self, number: int) -> bool:
        """Whether everything has ended that trial ``number`` depends on."""
        return self.ended > number - self._parallel

    def choose(self, number: int) -> Parameters:
        """What a trial tries; written down before it starts, for a later version of Optuna."""
        name = f"trial {number}"
        if name not in self._chosen:
            self._chosen[name] = self._draw(number)
            self._study.set_user_attr(name, self._chosen[name])
        return dict(self._chosen[name])

    def _draw(self, number: int) -> Parameters:
        if self._listed is not None:
            return self._listed[number]
        digest = hashlib.sha256(f"{self._seed} {number}".encode()).digest()
        sampler = self._optuna.samplers.TPESampler(seed=int.from_bytes(digest[:4], "big"))
        drawn = self._recreate(number, sampler=sampler).ask(self._distributions).params
        return {
            name: values.shorten(drawn[name]) if isinstance(values, Range) else drawn[name]
            for name, values in self.space.items()
        }

    def is_hopeless(self, number: int, evaluations: Sequence[float]) -> bool:
        """Whether the trial is worse than half of the earlier ones after as many evaluations."""
        if not self._prunes or len(evaluations) < _FIRST_PRUNED:
            return False
        pruner = self._optuna.pruners.MedianPruner(n_startup_trials=4)
        study = self._recreate(number, pruner=pruner)
        running = self._optuna.trial.create_trial(
            state=self._optuna.trial.TrialState.RUNNING, params={},
            distributions={}, intermediate_values=dict(enumerate(evaluations, 1)),
        )  # fmt: skip
        return bool(pruner.prune(study, running))

    def _recreate(self, number: int, **options: Any) -> Any:
        """A study in memory that knows what trial ``number`` may depend on."""
        study: Any = self._optuna.create_study(direction=self._direction, **options)
        study.add_trials(self._kept[: max(0, number - self._parallel + 1)])
        return study

    def add(self, number: int, outcome: Outcome) -> Trial:
        """Keep the next trial, in one transaction."""
        assert number == self.ended
        states = self._optuna.trial.TrialState
        parameters, state = self.choose(number), outcome.state
        finite = [value for value in outcome.evaluations if math.isfinite(value)]
        value, error = (max if self.is_greater_better else min)(finite, default=None), outcome.error
        if state != "failed" and value is None:
            state, error = "failed", "no evaluation has a finite value"
        states_by_name = {
            "complete": states.COMPLETE, "pruned": states.PRUNED, "failed": states.FAIL,
        }  # fmt: skip
        trial = self._optuna.trial.create_trial(
            state=states_by_name[state], value=None if state == "failed" else value,
            params=parameters, distributions=self._distributions,
            intermediate_values=dict(enumerate(outcome.evaluations, 1)),
            user_attrs={"state": state, "value": value, "parameters": parameters, "error": error},
        )  # fmt: skip
        self._study.add_trial(trial)
        trial.number = number
        self._kept.append(trial)
        return self.trials[-1]

    @property
    def best(self) -> Trial | None:
        """The best trial that ran to its end."""
        complete = [one for one in self.trials if one.state == "complete"]
        sign = 1 if self.is_greater_better else -1
        return max(complete, key=lambda one: sign * (one.value or 0.0), default=None)


RunTrial = Callable[[int, Parameters, threading.Event], Outcome]
"""Runs a trial by its number, in a thread, until the event is set; resumes an interrupted one."""


def run_trials(
    study: Study, count: int, parallel: int, run: RunTrial, tell: Callable[[Trial], None]
) -> None:
    """Run what is left of ``count`` trials; ``tell`` hears of each one when it is kept."""
    running: dict[Future[Outcome], int] = {}
    outcomes: dict[int, Outcome] = {}
    number, stop = study.ended, threading.Event()
    with ThreadPoolExecutor(parallel) as pool:
        try:
            while running or number < count:
                while number < count and len(running) < parallel and study.can_draw(number):
                    running[pool.submit(run, number, study.choose(number), stop)] = number
                    number += 1
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    outcomes[running.pop(future)] = future.result()
                while study.ended in outcomes:
                    tell(study.add(study.ended, outcomes.pop(study.ended)))
        finally:
            stop.set()  # the pool waits for its threads
