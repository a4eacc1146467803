"""How state may be split into copies and kept elsewhere, and in whose words."""

from __future__ import annotations

import pytest

from rapidformer.config import Settings, parse_arguments, resolve
from rapidformer.errors import ConfigurationError


def read(flags: str, world_size: int = 1) -> Settings:
    return resolve(parse_arguments(flags.split()), world_size=world_size)


@pytest.mark.parametrize(
    ("flags", "world_size", "message"),
    [
        (
            "--fsdp-memory-optimization --hybrid-sharding-size 3",
            4,
            "does not divide the 4 data-parallel ranks into equal groups: use 1 or 2 or 4.",
        ),
        (
            "--fsdp-memory-optimization --hybrid-sharding-size 4 --tensor-model-parallel-size 4",
            8,
            "the 2 data-parallel ranks into equal groups: use 1 or 2.",
        ),
        (
            "--fsdp-memory-optimization --hybrid-sharding-size 2 --context-parallel-size 4",
            8,
            "into equal groups of whole sequences (4 ranks each): use 4 or 8.",
        ),
        (
            "--hybrid-sharding-size 2",
            4,
            "needs --zero-1-memory-optimization or --cpu-offload: it sets",
        ),
        ("--hybrid-sharding-size 0", 1, "--hybrid-sharding-size must be at least 1, got 0."),
        ("--remote-device nvme", 1, "--remote-device (--cpu-offload) is a switch and takes true"),
    ],
)
def test_sizes_that_cannot_work_are_refused_with_choices(
    flags: str, world_size: int, message: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        read(flags, world_size)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "flags", ["--cpu-offload", "--cpu-optimizer", "--remote-device cpu", "--remote_device=cpu"]
)
def test_offload_in_other_systems_words(flags: str) -> None:
    assert read(flags).cpu_offload
    assert not read("--remote-device none").cpu_offload


def test_offload_alone_brings_weights_block_by_block() -> None:
    args = read("--cpu-offload", 2)
    assert args.zero_stage == 3
    assert args.sources["zero_3_memory_optimization"] == "derived: --cpu-offload"
    assert read("--cpu-offload --zero-1-memory-optimization", 2).zero_stage == 1
    assert read("--cpu-offload --hybrid-sharding-size 2", 4).hybrid_sharding_size == 2
