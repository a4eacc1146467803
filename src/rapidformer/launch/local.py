"""Start this node's processes on torch's elastic agent; the first failure is shown."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rapidformer.compat.patches import variables
from rapidformer.config.sections import LaunchArguments
from rapidformer.errors import ConfigurationError
from rapidformer.launch.environment import LaunchPlan
from rapidformer.launch.failures import QUIET_VARIABLE, WorkerError
from rapidformer.launch.signals import Preemption, handling, raise_signal
from rapidformer.launch.worker import HEARTBEAT_VARIABLE

_ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_SIGNALS = (*_ENDINGS, signal.SIGQUIT)


def launch(
    plan: LaunchPlan,
    argv: list[str],
    settings: LaunchArguments,
    *,
    log_dir: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """Run ``rapidformer <argv>`` in every process of this node; ``say`` tells the user."""
    # torch's C++ code would complain about sockets it cannot resolve. The workers may log.
    with variables({"TORCH_CPP_LOG_LEVEL": "ERROR"}, keeps=True):
        from torch.distributed.elastic.multiprocessing import SignalException

    threads = max(len(os.sched_getaffinity(0)) // plan.processes, 1)
    with (
        tempfile.TemporaryDirectory(prefix="rapidformer-") as folder,
        variables({"OMP_NUM_THREADS": str(threads)}, keeps=True),
        variables({QUIET_VARIABLE: "1", HEARTBEAT_VARIABLE: folder}),
        handling(_SIGNALS, raise_signal),
    ):
        from rapidformer.launch.rendezvous import RefusedError, Rounds

        rounds: Rounds | None = None
        try:
            if plan.has_lifeline:
                _hold_lifeline()
            timeout = 60 * settings.distributed_timeout_minutes
            rounds = Rounds(plan, max_restarts=settings.max_restarts, timeout_seconds=timeout)
            _run_agent(rounds, argv, settings, Path(folder), log_dir, say)
        except WorkerError as error:
            if rounds is not None and not isinstance(error, RefusedError):
                rounds.close(str(error), error.exit_code)
            # The hostfile's launcher shows every node's output; once is enough.
            error.is_told = plan.has_lifeline and plan.node_rank > 0 and rounds is not None
            raise
        except SignalException as caught:
            message, code = f"stopped by signal {caught.sigval.name}.", 128 + caught.sigval
            is_training = argv[:1] not in (["predict"], ["evaluate"])
            if is_training and plan.nodes == 1 and caught.sigval in _ENDINGS:
                message += (
                    " All processes were ended; what came after the last checkpoint is lost. "
                    "--load RUN resumes from it."
                )
            if rounds is not None:
                who = f"node {plan.node_rank} was " if plan.nodes > 1 else ""
                rounds.close(who + message, code)
            stopped = WorkerError(message, code)
            stopped.is_told = plan.has_lifeline
            raise stopped from None


def _run_agent(
    rounds: Any,
    argv: list[str],
    settings: LaunchArguments,
    scratch: Path,
    log_dir: Path | None,
    say: Callable[[str], None],
) -> None:
    from torch.distributed.elastic.agent.server.api import WorkerSpec

    from rapidformer.launch.agent import Agent
    from rapidformer.launch.logs import RankLogs
    from rapidformer.launch.watch import Watch, note_in_run

    # We report failures ourselves, and more clearly than torch's agent.
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # each logger has its own level
    plan: LaunchPlan = rounds.plan
    try:
        logs = RankLogs(scratch, log_dir, has_terminal=plan.node_rank == 0)
    except OSError as reason:
        raise ConfigurationError(
            f"the ranks' output cannot be written to {log_dir}: {reason.strerror}. Give --log-dir."
        ) from None
    # Shorter than the collective's own timeout, so that the report comes first.
    minutes = min(settings.stall_timeout_minutes, 0.8 * settings.distributed_timeout_minutes)
    watch = Watch(scratch, rounds, stall_seconds=60 * minutes, say=say)
    spec = WorkerSpec(
        role="rapidformer", local_world_size=plan.processes, entrypoint=sys.executable,
        args=("-m", "rapidformer.cli.main", *argv), rdzv_handler=rounds,
        max_restarts=settings.max_restarts, monitor_interval=0.1,
    )  # fmt: skip
    preemption = Preemption(scratch, say)
    agent = Agent(spec, rounds=rounds, logs=logs, watch=watch, preemption=preemption, say=say)
    watch.start()
    try:
        result = agent.run()
    finally:
        watch.stop()
    if result.is_failed():
        assert agent.failure is not None
        first = rounds.find_first_failure(agent.failure)
        if preemption.caught is not None and preemption.is_outcome(first.status):
            name, code = preemption.caught.name, 128 + preemption.caught
            raise WorkerError(f"stopped by signal {name}. --resume auto continues the run.", code)
        message = first.describe()
        if first.is_consequence and watch.stall:
            message += f"\nBefore that, the run had stalled: {watch.stall}."
        note_in_run(scratch, "end", state="failed", reason=message)
        raise WorkerError(message, first.exit_code)


def _hold_lifeline() -> None:
    """Stop this node when standard input closes; its first line has secrets, others are signals."""
    stream = os.fdopen(os.dup(0), encoding="utf-8", errors="replace")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the workers must not read from it
    os.environ.update(json.loads(stream.readline() or "{}"))

    def watch() -> None:
        word = stream.readline().strip()
        number = getattr(signal, word, signal.SIGTERM) if word.startswith("SIG") else signal.SIGTERM
        os.kill(os.getpid(), number)

    threading.Thread(target=watch, name="rapidformer-lifeline", daemon=True).start()
