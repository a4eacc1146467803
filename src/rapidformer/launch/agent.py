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
from collections.abc import Callable
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from rapidformer.compat.torch_elastic import close_workers, list_process_ids, set_remaining_restarts
from rapidformer.launch.failures import Failure, choose_first, read_report
from rapidformer.launch.logs import RankLogs
from rapidformer.launch.rendezvous import Rounds
from rapidformer.launch.signals import Preemption, handling
from rapidformer.launch.watch import Watch

_STOP_SECONDS = 5
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class Agent(LocalElasticAgent):
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
        self._rounds, self._logs, self._watch = rounds, logs, watch
        self._preemption, self._say = preemption, say
        self.failure: Failure | None = None
        """The first failure of this node's workers in the last round."""

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        super()._rendezvous(worker_group)
        set_remaining_restarts(self, worker_group.spec.max_restarts - self._rounds.round)
        if self._rounds.round > 0 and self._rounds.plan.node_rank == 0:
            failures = self._rounds.read_failures(self._rounds.round - 1)
            why = choose_first(failures).summarize() if failures else "a node was lost"
            self._say(f"{why}\nrestart {self._rounds.round} of {self._rounds.max_restarts}")

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self.failure = None
        ids: dict[int, Any] = super()._start_workers(worker_group)
        by_rank = {worker.global_rank: ids[worker.local_rank] for worker in worker_group.workers}
        self._watch.begin_round(self._rounds.round, by_rank)
        self._preemption.begin_round(by_rank)
        return ids

    def _set_local_rank_env(
        self, worker_env: dict[str, str | None], local_rank: int, spec: WorkerSpec
    ) -> None:
        super()._set_local_rank_env(worker_env, local_rank, spec)
        worker_env["LOCAL_RANK"] = str(local_rank + self._rounds.plan.local_rank_offset)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.is_failed():
            plan, host = self._rounds.plan, socket.gethostname()
            self.failure = choose_first(
                Failure(
                    rank=rank, node=plan.node_rank, host=host, nodes=plan.nodes,
                    status=failure.exitcode, log=self._logs.get_path(rank),
                    **({"time": float(failure.timestamp)} | read_report(failure.error_file)),
                )
                for rank, failure in result.failures.items()
            )  # fmt: skip
            self._rounds.publish_failure(self.failure)
            is_mistake = self._rounds.find_first_failure(self.failure).is_mistake
            if is_mistake or self._preemption.caught is not None:
                set_remaining_restarts(self, 0)
        return result

    def _exit_barrier(self) -> None:
        self._rounds.finish()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        # Signals are ignored meanwhile: what they ask for is already happening.
        with handling(_SIGNALS, signal.SIG_IGN):
            self._watch.end_round()
            groups = list_process_ids(self)
            # torch allows 30 s; we promise the user seconds.
            close_workers(self, death_sig, min(timeout, _STOP_SECONDS))
            super()._shutdown(death_sig)
            for group in groups:
                # Workers lead their own groups; the leader may be dead and its children alive.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(group, signal.SIGKILL)
            self._logs.finish()
