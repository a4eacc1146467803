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


# Ports for node 0, one per job, so that two jobs on one node don't collide.
_FIRST_PORT, _PORTS = 20000, 20000
# Steps that Slurm creates itself (batch, interactive, ...) are numbered from here on.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
_GROUP = re.compile(r"\[([^][]*)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


@dataclass(frozen=True, kw_only=True)
class SlurmStep:
    """A task of ``srun``; to us, one task is one node."""

    nodes: int
    node_rank: int
    master_addr: str
    master_port: int
    is_task_per_gpu: bool
    """Whether Slurm starts every process; otherwise one task per node starts its own."""
    local_rank: int
    """The index of this task on its machine."""


def read_slurm_step(variables: Mapping[str, str]) -> SlurmStep | None:
    """This task's place; None outside ``srun``."""
    if not _is_task(variables) or "SLURM_PROCID" not in variables:
        return None
    tasks = read_int(variables, "SLURM_STEP_NUM_TASKS")
    hosts = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST", "")
    return SlurmStep(
        nodes=tasks,
        node_rank=read_int(variables, "SLURM_PROCID"),
        master_addr=next(iter(expand_nodelist(hosts)), "127.0.0.1"),
        master_port=_FIRST_PORT + read_int(variables, "SLURM_JOB_ID") % _PORTS,
        is_task_per_gpu=tasks > read_int(variables, "SLURM_STEP_NUM_NODES"),
        local_rank=read_int(variables, "SLURM_LOCALID"),
    )


def _is_task(variables: Mapping[str, str]) -> bool:
    """Whether srun started this process; a batch script's or salloc's shell has variables, too."""
    step = read_int(variables, "SLURM_STEP_ID", 0)
    return "SLURM_STEP_NUM_TASKS" in variables and step < _FIRST_SPECIAL_STEP


def count_idle_nodes(variables: Mapping[str, str]) -> int:
    """Number of nodes that stay idle if the command runs without ``srun``."""
    if "SLURM_JOB_ID" not in variables or _is_task(variables):
        return 0
    return max(read_int(variables, "SLURM_JOB_NUM_NODES", 1) - 1, 0)


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
