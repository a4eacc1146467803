"""Slurm: node lists without scontrol, and a task's place from its variables."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rapidformer.config import parse_arguments
from rapidformer.errors import ConfigurationError
from rapidformer.launch import environment
from rapidformer.launch.environment import LaunchPlan, expand_nodelist, plan_launch, read_slurm_plan
from tests.launch.commands import FOREIGN

STEP = {
    "SLURM_JOB_ID": "1234567", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "gpu[08-10]",
    "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "gpu[09-10]",
    "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "1",
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("login1", ["login1"]),
        ("node[1-3]", ["node1", "node2", "node3"]),
        ("node[08-10,12],login1", ["node08", "node09", "node10", "node12", "login1"]),
        ("a[1-2]b[3,5]", ["a1b3", "a1b5", "a2b3", "a2b5"]),
        ("rack1-n[099-101].site.org", [f"rack1-n{n}.site.org" for n in ("099", "100", "101")]),
        ("", []),
    ],
)
def test_node_lists(text: str, names: list[str]) -> None:
    assert expand_nodelist(text) == names


@given(
    st.lists(
        st.tuples(
            st.from_regex(r"[a-z][a-z0-9]{0,4}[a-z-]", fullmatch=True),
            st.integers(0, 995),
            st.integers(0, 4),
            st.integers(1, 4),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_any_list_of_ranges_gives_every_name_in_order(
    groups: list[tuple[str, int, int, int]],
) -> None:
    parts, names = [], []
    for prefix, first, more, width in groups:
        parts.append(f"{prefix}[{first:0{width}d}-{first + more:0{width}d}]")
        names += [f"{prefix}{number:0{width}d}" for number in range(first, first + more + 1)]
    assert expand_nodelist(",".join(parts)) == names


@pytest.mark.parametrize("text", ["node[1-3", "node[a-b]", "node[]"])
def test_lists_that_cannot_be(text: str) -> None:
    with pytest.raises(ConfigurationError, match="SLURM_JOB_NODELIST"):
        expand_nodelist(text)


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in FOREIGN:
        monkeypatch.delenv(name, raising=False)
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def plan(*words: str) -> LaunchPlan:
    return plan_launch(parse_arguments(words))


def test_one_task_per_node_starts_all_processes_of_its_node(slurm: pytest.MonkeyPatch) -> None:
    expected = LaunchPlan(
        processes=4, nodes=2, node_rank=1, master_addr="gpu09", master_port=20000 + 14567
    )
    assert plan("--nproc-per-node", "4") == expected
    slurm.setenv("NNODES", "")
    assert plan("--nproc-per-node", "4") == expected, "set but empty is not set"


@pytest.mark.parametrize(("gpus", "local_rank"), [(1, 0), (4, 3), (0, 0)])
def test_one_task_per_gpu_is_one_process(
    gpus: int, local_rank: int, slurm: pytest.MonkeyPatch
) -> None:
    slurm.setattr(environment, "count_gpus", lambda: gpus)
    for name, value in {"NUM_TASKS": "8", "NUM_NODES": "2"}.items():
        slurm.setenv(f"SLURM_STEP_{name}", value)
    slurm.setenv("SLURM_PROCID", "7")
    slurm.setenv("SLURM_LOCALID", "3")
    found = plan()
    assert (found.processes, found.nodes, found.node_rank) == (1, 8, 7)
    assert found.local_rank_offset == local_rank, "a task with its own GPU sees it as the first"


def test_variables_and_flags_win_over_slurm(slurm: pytest.MonkeyPatch) -> None:
    assert plan("--nnodes", "1", "--device", "cpu").nodes == 1
    assert plan("--master-addr", "head", "--master-port", "9").endpoint == "head:9"
    slurm.setenv("NNODES", "1")
    assert plan("--device", "cpu").nodes == 1


def test_job_of_several_nodes_without_srun_is_refused(slurm: pytest.MonkeyPatch) -> None:
    for name in STEP:
        if name.startswith("SLURM_STEP"):
            slurm.delenv(name)
    with pytest.raises(ConfigurationError, match=r"2 nodes, and without srun 1 .*put srun in fro"):
        plan("--device", "cpu")
    assert plan("--device", "cpu", "--nnodes", "1").nodes == 1
    slurm.setenv("SLURM_JOB_NUM_NODES", "1")
    assert plan("--device", "cpu").nodes == 1


def test_shell_that_salloc_opens_is_not_a_task(slurm: pytest.MonkeyPatch) -> None:
    """It stands in a step of Slurm's own, of one task: the other nodes would stay idle."""
    for name, value in {"ID": "4294967290", "NUM_TASKS": "1", "NUM_NODES": "1"}.items():
        slurm.setenv(f"SLURM_STEP_{name}", value)
    slurm.setenv("SLURM_PROCID", "0")
    with pytest.raises(ConfigurationError, match="put srun in front of the command"):
        plan("--device", "cpu")
    slurm.setenv("SLURM_STEP_ID", "3")
    assert plan("--device", "cpu").nodes == 1, "srun of one task"


def test_variable_that_is_not_a_number_is_named() -> None:
    with pytest.raises(ConfigurationError, match="SLURM_STEP_NUM_NODES must be a whole number"):
        read_slurm_plan({**STEP, "SLURM_STEP_NUM_NODES": "two"})
