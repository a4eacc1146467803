"""Run the trials of a sweep, several at a time, and keep their results in order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from rapidformer.sweeping.space import Parameters
from rapidformer.sweeping.study import Outcome, Study, Trial

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
