"""How many processes, where: flags first, then the shell's variables, then this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rapidformer.config import parse_arguments
from rapidformer.config.derive import is_launched
from rapidformer.errors import ConfigurationError
from rapidformer.launch import environment
from rapidformer.launch.environment import LaunchPlan, count_gpus, plan_launch

NAMES = (
    "MASTER_ADDR", "MASTER_PORT", "NNODES", "NODE_RANK", "CUDA_VISIBLE_DEVICES",
    "RANK", "LOCAL_RANK", "WORLD_SIZE",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def set_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, count: int) -> None:
    """A driver tool that lists so many GPUs, first on the path."""
    tool = tmp_path / "nvidia-smi"
    lines = "".join(f"echo 'GPU {i}: NVIDIA H200 (UUID: GPU-{i})'\n" for i in range(count))
    tool.write_text(f"#!/bin/sh\n{lines}")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")


def plan(*words: str) -> LaunchPlan:
    return plan_launch(parse_arguments(words))


def test_one_process_on_a_machine_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "count_gpus", lambda: 0)
    found = plan()
    assert (found.processes, found.nodes, found.node_rank, found.world_size) == (1, 1, 0, 1)


def test_one_process_per_visible_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    set_gpus(monkeypatch, tmp_path, 8)
    assert plan().processes == 8
    assert plan("--device", "cpu").processes == 1
    assert plan("--nproc-per-node", "2").processes == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")  # as in the seeds
    assert plan().processes == 4


@pytest.mark.parametrize(
    ("visible", "count"), [(None, 3), ("0", 1), ("0,1", 2), ("", 0), ("-1", 0), ("0,1,2,3,4", 3)]
)
def test_visible_gpus(
    visible: str | None, count: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    set_gpus(monkeypatch, tmp_path, 3)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert count_gpus() == count


def test_driver_tool_that_fails_means_no_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert count_gpus() == 0


def test_variables_of_the_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "MASTER_ADDR": "node0", "MASTER_PORT": "6010", "NNODES": "2", "NODE_RANK": "1",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    assert plan("--nproc-per-node", "4") == LaunchPlan(
        processes=4, nodes=2, node_rank=1, master_addr="node0", master_port=6010
    )
    assert plan("--nproc-per-node", "4").world_size == 8


def test_flags_win_over_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "MASTER_ADDR": "node0", "MASTER_PORT": "6010", "NNODES": "9", "NODE_RANK": "8",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    words = ["--nnodes", "3", "--node-rank", "0", "--master-addr", "other", "--master-port", "7"]
    assert plan("--nproc-per-node", "1", *words) == LaunchPlan(
        processes=1, nodes=3, node_rank=0, master_addr="other", master_port=7
    )


def test_variables_that_are_set_but_empty_count_as_not_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT", "NNODES", "NODE_RANK"):
        monkeypatch.setenv(name, "")
    assert plan("--nproc-per-node", "1") == LaunchPlan(
        processes=1, nodes=1, node_rank=0, master_addr="127.0.0.1", master_port=0
    )


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"NNODES": "two"}, "NNODES must be a whole number, got 'two'"),
        ({"NNODES": "2"}, "2 nodes must meet at one port: set MASTER_PORT"),
        ({"NODE_RANK": "1"}, "NODE_RANK is 1, but with NNODES 1 it must be 0 to 0"),
        (
            {"NNODES": "2", "NODE_RANK": "2", "MASTER_PORT": "1"},
            "NODE_RANK is 2, but with NNODES 2 it must be 0 to 1",
        ),
        ({"MASTER_PORT": "http"}, "MASTER_PORT must be a whole number, got 'http'"),
    ],
    ids=str,
)
def test_variables_that_cannot_be(
    variables: dict[str, str], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=text):
        plan("--device", "cpu")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, False),
        # DLC says WORLD_SIZE for nodes and RANK for this node.
        ({"RANK": "0", "WORLD_SIZE": "2"}, False),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, True),
    ],
)
def test_whether_a_launcher_was_here(
    variables: dict[str, Any], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert is_launched() is expected
