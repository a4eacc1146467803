"""How many processes to start and where, from flags and environment variables.

No torch here: a single CPU process should not pay for the launcher.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rapidformer.errors import ConfigurationError
from rapidformer.launch.slurm import SlurmStep, count_idle_nodes, read_int, read_slurm_step

if TYPE_CHECKING:  # a new process ties itself to its launcher before it reads the settings
    from rapidformer.config.sections import LaunchArguments

# Set on a node that the hostfile's launcher started; overrides flags and variables.
NODE_VARIABLE = "RAPIDFORMER_NODE"


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """Processes per node, nodes, and the address of node 0."""

    processes: int
    nodes: int
    node_rank: int
    master_addr: str
    master_port: int
    local_rank_offset: int = 0
    """LOCAL_RANK of the first process; not 0 if Slurm starts one task per GPU."""
    has_lifeline: bool = False
    """Whether this node stops when its standard input closes: a launcher elsewhere holds it."""

    @property
    def endpoint(self) -> str:
        return f"{self.master_addr}:{self.master_port}"

    @property
    def world_size(self) -> int:
        """Total number of processes, if every node has as many as this one."""
        return self.processes * self.nodes

    def to_text(self) -> str:
        """For ``NODE_VARIABLE``."""
        return json.dumps(dataclasses.asdict(self))


def is_launched() -> bool:
    """Whether a launcher (ours or torchrun) started this process."""
    return all(name in os.environ for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))


def is_started_node() -> bool:
    """Whether a hostfile launcher started this node; the file is not read again."""
    return NODE_VARIABLE in os.environ


def needs_agent(plan: LaunchPlan, settings: LaunchArguments) -> bool:
    """Whether processes need watching; a single process without special flags runs right here."""
    return plan.world_size > 1 or settings.max_restarts > 0 or settings.log_dir is not None


def plan_launch(settings: LaunchArguments) -> LaunchPlan:
    """Flags first, then NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT, then Slurm's variables."""
    if is_started_node():
        text = os.environ[NODE_VARIABLE]
        try:
            plan = _read_plan(text)
        except (ValueError, TypeError, RecursionError):
            raise ConfigurationError(
                f"{NODE_VARIABLE} is {text[:60]!r}, but only a launcher sets it for the nodes of "
                "its --hostfile: unset it."
            ) from None
        return _fill_processes(settings, plan)
    step = None
    if settings.nnodes is None and not os.environ.get("NNODES", "").strip():
        step = read_slurm_step(os.environ)
        if idle := count_idle_nodes(os.environ):
            raise ConfigurationError(
                f"this Slurm job has {idle + 1} nodes, and without srun {idle} of them would stay "
                "idle: put srun in front of the command, or say --nnodes 1."
            )
    plan = _build_plan(settings, step)
    if plan.nodes < 1:
        raise ConfigurationError(f"--nnodes (or NNODES) must be at least 1, got {plan.nodes}.")
    if not 0 <= plan.node_rank < plan.nodes:
        raise ConfigurationError(
            f"NODE_RANK is {plan.node_rank}, but with NNODES {plan.nodes} it must be "
            f"0 to {plan.nodes - 1}."
        )
    if plan.nodes > 1 and not plan.master_port:
        raise ConfigurationError(
            f"{plan.nodes} nodes must meet at one port: set MASTER_PORT (and MASTER_ADDR) on each."
        )
    return _fill_processes(settings, plan)


def _read_plan(text: str) -> LaunchPlan:
    plan = LaunchPlan(**json.loads(text))
    wanted = {field.name: field.type for field in dataclasses.fields(plan)}
    if any(type(value).__name__ != wanted[name] for name, value in vars(plan).items()):
        raise TypeError
    return plan


def _build_plan(settings: LaunchArguments, step: SlurmStep | None) -> LaunchPlan:
    nodes, rank, port = settings.nnodes, settings.node_rank, settings.master_port
    processes = offset = 0
    if step is None:
        nodes = nodes if nodes is not None else read_int(os.environ, "NNODES", 1)
        rank = rank if rank is not None else read_int(os.environ, "NODE_RANK", 0)
    else:
        nodes, rank = step.nodes, step.node_rank
        if step.is_task_per_gpu:
            # A task that Slurm gave one GPU sees only that one, as its first.
            processes, offset = 1, step.local_rank if count_gpus() > 1 else 0
    address, default_port = (step.master_addr, step.master_port) if step else ("127.0.0.1", 0)
    return LaunchPlan(
        processes=processes,
        nodes=nodes,
        node_rank=rank,
        master_addr=settings.master_addr or os.environ.get("MASTER_ADDR") or address,
        master_port=port if port is not None else read_int(os.environ, "MASTER_PORT", default_port),
        local_rank_offset=offset,
    )


def _fill_processes(settings: LaunchArguments, plan: LaunchPlan) -> LaunchPlan:
    if plan.processes:
        return plan
    processes = settings.nproc_per_node
    if processes is None:
        processes = 1 if settings.device == "cpu" else max(count_gpus(), 1)
    if processes < 1:
        raise ConfigurationError(f"--nproc-per-node must be at least 1, got {processes}.")
    return dataclasses.replace(plan, processes=processes)


def count_gpus() -> int:
    """GPUs that CUDA_VISIBLE_DEVICES leaves visible, from the driver rather than torch."""
    if shutil.which("nvidia-smi") is None:
        return 0
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    present = sum(line.startswith("GPU ") for line in listing.stdout.splitlines())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    return min(present, sum(part.strip() not in ("", "-1") for part in visible.split(",")))
