"""Start this node's processes on torch's elastic agent, in this process.

When one fails, the agent ends the others; the first failure's own message is what the user sees.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import time
from pathlib import Path

from rapidformer.errors import RapidformerError
from rapidformer.launch.environment import LaunchPlan

_QUIET = "RAPIDFORMER_ERRORS_TO_PARENT"


class WorkerError(RapidformerError):
    """A process of the run has failed; carries its exit status."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def launch(plan: LaunchPlan, argv: list[str]) -> None:
    """Run ``rapidformer <argv>`` in every process of this node and wait for all of them."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # What the agent would log about a failure, we say ourselves and better.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    threads = max(len(os.sched_getaffinity(0)) // plan.processes, 1)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ[_QUIET] = "1"
    with tempfile.TemporaryDirectory(prefix="rapidformer-") as folder:
        config = LaunchConfig(
            min_nodes=plan.nodes,
            max_nodes=plan.nodes,
            nproc_per_node=plan.processes,
            run_id=f"rapidformer-{plan.master_port}",
            # On one node any free port will do; several nodes must know theirs beforehand.
            rdzv_backend="c10d" if plan.nodes == 1 else "static",
            rdzv_endpoint="localhost:0" if plan.nodes == 1 else plan.endpoint,
            rdzv_configs={"rank": plan.node_rank, "timeout": 900},
            max_restarts=0,
            monitor_interval=0.1,
            # Where each process leaves its error; removed when the run is over.
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        try:
            elastic_launch(config, sys.executable)("-m", "rapidformer.cli.main", *argv)
        except ChildFailedError as failure:
            rank, first = failure.get_first_failure()
            message = _read_message(first.error_file) or (
                f"rank {rank} ended with status {first.exitcode}; its own message stands above."
            )
            code = first.exitcode if first.exitcode > 0 else 128 - first.exitcode
            raise WorkerError(message, code) from None
        except SignalException as signal:
            name = signal.sigval.name
            raise WorkerError(f"stopped by signal {name}.", 128 + signal.sigval) from None


def report_failure(message: str) -> bool:
    """In a worker: leave the message for the parent to show. False where there is no parent."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or _QUIET not in os.environ:
        return False
    rank = os.environ.get("RANK", "0")
    content = {"message": message, "extraInfo": {"timestamp": str(int(time.time())), "rank": rank}}
    Path(path).write_text(json.dumps({"message": content}), encoding="utf-8")
    return True


def _read_message(path: str | None) -> str | None:
    try:
        content = json.loads(Path(path or "").read_text(encoding="utf-8"))["message"]
        rank, message = content["extraInfo"].get("rank", "0"), content["message"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if message.startswith("Traceback"):
        return f"rank {rank} failed:\n{message.rstrip()}"
    return str(message) if rank == "0" else f"rank {rank}: {message}"
