"""``python script.py`` that starts itself in every process it asks for.

The process becomes the launcher (``exec``), so that signals reach it and its exit status is the
run's. In the processes that it starts, the same script runs on.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from rapidformer.errors import ConfigurationError
from rapidformer.log import configure_logging, get_logger


def is_launched() -> bool:
    """Whether a launcher (ours, torchrun, deepspeed) has started this process."""
    return all(name in os.environ for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))


def launch_self(
    script: str,
    *,
    processes: int,
    nodes: int = 1,
    hostfile: str | None = None,
    master_addr: str | None = None,
    master_port: int | None = None,
) -> None:
    """Start the script in every process; returns only where there is nothing to start."""
    if is_launched():
        return
    flags = ["--nproc-per-node", str(processes)]
    has_hosts = hostfile is not None and Path(hostfile).expanduser().is_file()
    if hostfile is not None and not has_hosts:
        configure_logging()
        get_logger().info(f"there is no hostfile {hostfile}: the run is on this node alone")
    if has_hosts:
        flags = ["--hostfile", str(hostfile)]
    elif nodes > 1 and hostfile is None:
        flags += ["--nnodes", str(nodes)]
        if master_addr is not None:
            flags += ["--master-addr", master_addr, "--master-port", str(master_port)]
    elif processes == 1:
        return
    _become_launcher(flags, script)


def _become_launcher(flags: list[str], script: str) -> None:
    path = Path(script)
    if not path.is_file():
        raise ConfigurationError(
            f"training_script={script!r} is not a file: pass training_script=__file__, so that "
            "every process can run it."
        )
    if hasattr(sys, "ps1") or "ipykernel" in sys.modules:
        raise ConfigurationError(
            "a notebook cannot start itself in several processes: save it as a script and use "
            "`rapidformer launch script.py`."
        )
    words = ["-m", "rapidformer.cli.main", "launch", *flags, str(path.resolve()), *sys.argv[1:]]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *words])
