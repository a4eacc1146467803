"""torch's elastic agent: its workers' processes, and how often it may still restart them."""

from __future__ import annotations

import signal
from typing import Any

_AGENT = "torch.distributed.elastic.agent.server.local_elastic_agent.LocalElasticAgent"

PRIVATE_NAMES = {
    f"{_AGENT}._pcontext": "the process ids of the workers",
    f"{_AGENT}._remaining_restarts": "not restarting what cannot work",
}


def set_remaining_restarts(agent: Any, count: int) -> None:
    agent._remaining_restarts = count


def list_process_ids(agent: Any) -> list[int]:
    """The process ids of this node's workers; none before they have started."""
    return list(agent._pcontext.pids().values()) if agent._pcontext else []


def close_workers(agent: Any, death_sig: signal.Signals, timeout: int) -> None:
    """Stop the workers that still run. The agent's own way takes no timeout in torch 2.11."""
    if agent._pcontext:
        agent._pcontext.close(death_sig, timeout)
