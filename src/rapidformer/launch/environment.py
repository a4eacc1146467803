"""How many processes to start and where, from flags and from the variables of the shell.

No torch here: a run of one process on a CPU should not pay for the launcher.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass

from rapidformer.config.sections import LaunchArguments
from rapidformer.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """Processes per node, nodes, and where node 0 is."""

    processes: int
    nodes: int
    node_rank: int
    master_addr: str
    master_port: int

    @property
    def endpoint(self) -> str:
        return f"{self.master_addr}:{self.master_port}"

    @property
    def world_size(self) -> int:
        return self.processes * self.nodes


def is_launched() -> bool:
    """Whether a launcher (ours, torchrun) has started this process already."""
    return all(name in os.environ for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))


def plan_launch(settings: LaunchArguments) -> LaunchPlan:
    """Flags first, then NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT, then this machine alone."""
    nodes = settings.nnodes if settings.nnodes is not None else _read_int("NNODES", 1)
    node_rank = settings.node_rank if settings.node_rank is not None else _read_int("NODE_RANK", 0)
    port = settings.master_port if settings.master_port is not None else _read_int("MASTER_PORT", 0)
    address = settings.master_addr or os.environ.get("MASTER_ADDR") or "127.0.0.1"
    if not 0 <= node_rank < nodes:
        raise ConfigurationError(
            f"NODE_RANK is {node_rank}, but with NNODES {nodes} it must be 0 to {nodes - 1}."
        )
    if nodes > 1 and not port:
        raise ConfigurationError(
            f"{nodes} nodes must meet at one port: set MASTER_PORT (and MASTER_ADDR) on each."
        )
    processes = settings.nproc_per_node
    if processes is None:
        processes = 1 if settings.device == "cpu" else max(count_gpus(), 1)
    return LaunchPlan(
        processes=processes,
        nodes=nodes,
        node_rank=node_rank,
        master_addr=address,
        master_port=port,
    )


def count_gpus() -> int:
    """GPUs that CUDA_VISIBLE_DEVICES leaves visible, asked of the driver and not of torch."""
    if shutil.which("nvidia-smi") is None:
        return 0
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    present = sum(line.startswith("GPU ") for line in listing.stdout.splitlines())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    return min(
        present, len([part for part in visible.split(",") if part.strip() not in ("", "-1")])
    )


def _read_int(name: str, default: int) -> int:
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigurationError(f"{name} must be a whole number, got {text!r}.") from None
