"""Read a task's place from Slurm's variables: its node, the number of nodes, and where node 0 is.

Only a task started by ``srun`` has peers. A batch script's shell and the shell opened by ``salloc``
have most of the variables too, but run once, on the first node; ``srun`` is still missing there.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rapidformer.errors import ConfigurationError

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
    """Whether srun started this process, as opposed to a shell inside one of Slurm's own steps."""
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
