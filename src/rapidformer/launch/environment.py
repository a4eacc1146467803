"""How many processes to start and where, from flags and environment variables.

No torch here: a single CPU process should not pay for the launcher.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rapidformer.errors import ConfigurationError

if TYPE_CHECKING:
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
    plan = _build_plan(settings)
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


def _build_plan(settings: LaunchArguments) -> LaunchPlan:
    nodes, rank, port = settings.nnodes, settings.node_rank, settings.master_port
    is_open = nodes is None and not os.environ.get("NNODES", "").strip()
    plan = read_slurm_plan(os.environ) if is_open else None
    plan = plan or LaunchPlan(
        processes=0, nodes=read_int(os.environ, "NNODES", 1) if nodes is None else nodes,
        node_rank=read_int(os.environ, "NODE_RANK", 0) if rank is None else rank,
        master_addr="127.0.0.1", master_port=0,
    )  # fmt: skip
    if port is None:
        port = read_int(os.environ, "MASTER_PORT", plan.master_port)
    address = settings.master_addr or os.environ.get("MASTER_ADDR") or plan.master_addr
    return dataclasses.replace(plan, master_addr=address, master_port=port)


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


# Ports for node 0, one per job, so that two jobs on one node don't collide.
_FIRST_PORT, _PORTS = 20000, 20000
# Steps that Slurm creates itself (batch, interactive, ...) are numbered from here on.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
_GROUP = re.compile(r"\[([^][]*)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def read_slurm_plan(variables: Mapping[str, str]) -> LaunchPlan | None:
    """That of this task of ``srun``, which is a node to us; None outside of it."""
    # srun started this process; a batch script's or salloc's shell has variables, too.
    is_special = read_int(variables, "SLURM_STEP_ID", 0) >= _FIRST_SPECIAL_STEP
    is_task = "SLURM_STEP_NUM_TASKS" in variables and not is_special
    idle = read_int(variables, "SLURM_JOB_NUM_NODES", 1) - 1
    if "SLURM_JOB_ID" in variables and not is_task and idle > 0:
        raise ConfigurationError(
            f"this Slurm job has {idle + 1} nodes, and without srun {idle} of them would stay "
            "idle: put srun in front of the command, or say --nnodes 1."
        )
    if not is_task or "SLURM_PROCID" not in variables:
        return None
    tasks, local = (read_int(variables, f"SLURM_{n}") for n in ("STEP_NUM_TASKS", "LOCALID"))
    # Slurm starts every process, or one task on each node, which starts its own.
    is_per_gpu = tasks > read_int(variables, "SLURM_STEP_NUM_NODES")
    hosts = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST", "")
    return LaunchPlan(
        processes=int(is_per_gpu), nodes=tasks, node_rank=read_int(variables, "SLURM_PROCID"),
        master_addr=next(iter(expand_nodelist(hosts)), "127.0.0.1"),
        master_port=_FIRST_PORT + read_int(variables, "SLURM_JOB_ID") % _PORTS,
        # A task that Slurm gave one GPU sees only that one, as its first.
        local_rank_offset=local if is_per_gpu and count_gpus() > 1 else 0,
    )  # fmt: skip


def expand_nodelist(text: str) -> list[str]:
    """``node[08-10,12],login1`` -> every name, in Slurm's order; leading zeros are kept."""
    if text.count("[") != text.count("]"):
        raise ConfigurationError(f"SLURM_JOB_NODELIST {text!r}: a bracket is not closed.")
    names: list[str] = []
    for part in re.findall(r"(?:[^,\[]|\[[^]]*\])+", text):
        pieces = _GROUP.split(part.strip())
        # Text and groups alternate: node, 08-10, "".
        choices = [
            list(_expand_group(piece, text)) if index % 2 else [piece]
            for index, piece in enumerate(pieces)
        ]
        names += ["".join(combination) for combination in itertools.product(*choices)]
    return names


def _expand_group(group: str, text: str) -> Iterator[str]:
    for item in group.split(","):
        match = _RANGE.fullmatch(item.strip())
        if match is None:
            raise ConfigurationError(
                f"SLURM_JOB_NODELIST {text!r}: [{group}] must hold numbers and ranges."
            )
        first, last = match[1], match[2] or match[1]
        for number in range(int(first), int(last) + 1):
            yield f"{number:0{len(first)}d}"


def read_int(variables: Mapping[str, str], name: str, default: int | None = None) -> int:
    """A variable's number; the default, if there is one, if it is missing or empty."""
    text = variables.get(name, "").strip()
    if not text and default is not None:
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigurationError(f"{name} must be a whole number, got {text!r}.") from None
