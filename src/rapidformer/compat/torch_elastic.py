"""torch's elastic agent, with public hooks at the points where ours does more."""

from __future__ import annotations

import signal
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

__all__ = ["RunResult", "WorkerAgent", "WorkerGroup", "WorkerSpec"]

_AGENT = "torch.distributed.elastic.agent.server.local_elastic_agent.LocalElasticAgent"

PRIVATE_NAMES = {
    f"{_AGENT}._pcontext": "the process ids of the workers",
    f"{_AGENT}._remaining_restarts": "not restarting what cannot work",
}


class WorkerAgent(LocalElasticAgent):
    """Starts, watches, restarts and stops the processes of a node; the hooks do nothing here."""

    def after_rendezvous(self, worker_group: WorkerGroup) -> None:
        """All nodes have joined, and no worker runs yet."""

    def before_start(self) -> None:
        """The workers of a round are about to start."""

    def after_start(self, process_ids: dict[int, int]) -> None:
        """The workers run; their process ids by global rank."""

    def change_local_rank(self, local_rank: int) -> int:
        """The LOCAL_RANK given to a worker."""
        return local_rank

    def after_look(self, result: RunResult) -> None:
        """The workers have just been polled."""

    def finish(self) -> None:
        """All workers of this node have succeeded; returns when those of all other nodes have."""
        super()._exit_barrier()

    def stop_workers(self, death_sig: signal.Signals, timeout: int) -> None:
        """Stop the workers that still run."""
        if self._pcontext:
            # Not left to _shutdown, which takes no timeout in torch 2.11: it finds them ended.
            self._pcontext.close(death_sig, timeout)
        super()._shutdown(death_sig)

    def set_remaining_restarts(self, count: int) -> None:
        self._remaining_restarts = count

    def get_process_ids(self) -> list[int]:
        """The process ids of this node's workers; none before they have started."""
        return list(self._pcontext.pids().values()) if self._pcontext else []

    # ---- torch's names -------------------------------------------------------------------------

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        super()._rendezvous(worker_group)
        self.after_rendezvous(worker_group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self.before_start()
        ids: dict[int, Any] = super()._start_workers(worker_group)
        self.after_start({each.global_rank: ids[each.local_rank] for each in worker_group.workers})
        return ids

    def _set_local_rank_env(
        self, worker_env: dict[str, str | None], local_rank: int, spec: WorkerSpec
    ) -> None:
        super()._set_local_rank_env(worker_env, local_rank, spec)
        worker_env["LOCAL_RANK"] = str(self.change_local_rank(local_rank))

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        self.after_look(result)
        return result

    def _exit_barrier(self) -> None:
        self.finish()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self.stop_workers(death_sig, timeout)
