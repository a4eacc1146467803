"""torch's elastic agent, with rounds shared by all nodes and a shutdown that leaves nothing behind.

Three things are ours: a failure that the user must fix is not retried; every process group of a
worker is ended, even if the worker itself is dead (its data loader workers may not be); and a
second Ctrl-C does not interrupt the cleanup.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

from rapidformer.compat.torch_elastic import RunResult, WorkerAgent, WorkerGroup, WorkerSpec
from rapidformer.launch.failures import Failure, choose_first, read_report
from rapidformer.launch.logs import RankLogs
from rapidformer.launch.preemption import Preemption
from rapidformer.launch.rendezvous import Rounds
from rapidformer.launch.watch import Watch

_STOP_SECONDS = 5


class Agent(WorkerAgent):
    """Starts, watches, restarts and stops the processes of this node."""

    def __init__(
        self,
        spec: WorkerSpec,
        *,
        rounds: Rounds,
        logs: RankLogs,
        watch: Watch,
        preemption: Preemption,
        say: Callable[[str], None],
    ) -> None:
        super().__init__(spec, logs)
        self._preemption = preemption
        self._rounds = rounds
        self._logs = logs
        self._watch = watch
        self._say = say
        self.failure: Failure | None = None
        """The first failure of this node's workers in the last round."""

    def after_rendezvous(self, worker_group: WorkerGroup) -> None:
        self.set_remaining_restarts(worker_group.spec.max_restarts - self._rounds.round)
        if self._rounds.round > 0 and self._rounds.plan.node_rank == 0:
            failures = self._rounds.read_failures(self._rounds.round - 1)
            why = choose_first(failures).summarize() if failures else "a node was lost"
            self._say(f"{why}\nrestart {self._rounds.round} of {self._rounds.max_restarts}")

    def before_start(self) -> None:
        self.failure = None

    def after_start(self, process_ids: dict[int, int]) -> None:
        self._watch.begin_round(self._rounds.round, process_ids)
        self._preemption.begin_round(process_ids)

    def change_local_rank(self, local_rank: int) -> int:
        return local_rank + self._rounds.plan.local_rank_offset

    def after_look(self, result: RunResult) -> None:
        if result.is_failed():
            self.failure = choose_first(self._read_failures(result))
            self._rounds.publish_failure(self.failure)
            is_mistake = self._rounds.find_first_failure(self.failure).is_mistake
            if is_mistake or self._preemption.caught is not None:
                self.set_remaining_restarts(0)

    def _read_failures(self, result: RunResult) -> Iterator[Failure]:
        plan = self._rounds.plan
        for rank, failure in result.failures.items():
            report: dict[str, Any] = {"time": float(failure.timestamp)}
            yield Failure(
                rank=rank,
                node=plan.node_rank,
                host=socket.gethostname(),
                nodes=plan.nodes,
                status=failure.exitcode,
                log=self._logs.get_path(rank),
                **(report | read_report(failure.error_file)),
            )

    def finish(self) -> None:
        self._rounds.finish()

    def stop_workers(self, death_sig: signal.Signals, timeout: int) -> None:
        with _undisturbed():
            self._watch.end_round()
            groups = self.get_process_ids()
            # torch allows 30 s; we promise the user seconds.
            super().stop_workers(death_sig, min(timeout, _STOP_SECONDS))
            for group in groups:
                # Workers lead their own groups; the leader may be dead and its children alive.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(group, signal.SIGKILL)
            self._logs.finish()


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Ignore signals meanwhile: what they ask for is already happening."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    names = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    before = {name: signal.signal(name, signal.SIG_IGN) for name in names}
    try:
        yield
    finally:
        for name, action in before.items():
            signal.signal(name, action)
