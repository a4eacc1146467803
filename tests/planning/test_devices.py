"""The devices of a plan: `--devices`, `--memory-gib`, `--tflops`, and the one at hand."""

from __future__ import annotations

import pytest

from rapidformer.errors import ConfigurationError
from rapidformer.planning.devices import DEVICES, fit_device, parse_devices, recognize


@pytest.mark.parametrize(
    ("text", "name", "count"),
    [
        ("H200", "H200", 1), ("8xH200", "H200", 8), ("64xA100-80", "A100-80", 64),
        ("2 x rtx3090", "RTX-3090", 2), ("4090", "RTX-4090", 1), ("A100", "A100-80", 1),
        ("h100-sxm", "H100", 1), ("a100-40gb", "A100-40", 1),
    ],
)  # fmt: skip
def test_names(text: str, name: str, count: int) -> None:
    found = parse_devices(text)
    assert (found.device.name, found.count) == (name, count)


def test_another_device_needs_memory_and_rate() -> None:
    found = parse_devices("4xOwn", memory_gib=10, tflops=100)
    assert (found.device.name, found.device.memory) == ("Own", 10)
    assert found.device.bf16 == pytest.approx(100)
    for given in ({}, {"memory_gib": 10.0}):
        with pytest.raises(ConfigurationError, match=r"Own is not one of B200, H200.*--memory-gib"):
            parse_devices("4xOwn", **given)
    with pytest.raises(ConfigurationError, match="Did you mean H200"):
        parse_devices("8xH2000")
    with pytest.raises(ConfigurationError, match="--tflops 0: give a number above 0"):
        parse_devices("H200", tflops=0)
    with pytest.raises(ConfigurationError, match="give a number and a device, like 8xH200"):
        parse_devices("0xH200")


def test_a_precision_that_a_device_does_not_have() -> None:
    assert DEVICES["T4"].get_rate("fp16") == pytest.approx(0.82 * 65e12)
    with pytest.raises(ConfigurationError, match="T4 does not compute in bf16"):
        DEVICES["T4"].get_rate("bf16")


@pytest.mark.parametrize(
    ("name", "memory", "known"),
    [
        ("NVIDIA A100-SXM4-40GB", 39.4, "A100-40"), ("NVIDIA A100-SXM4-80GB", 79.1, "A100-80"),
        ("NVIDIA GeForce RTX 4090", 23.6, "RTX-4090"), ("NVIDIA L40S", 44.5, "L40S"),
        ("NVIDIA L4", 22.0, "L4"), ("Tesla T4", 14.6, "T4"), ("NVIDIA H200", 139.8, "H200"),
    ],
)  # fmt: skip
def test_drivers_names(name: str, memory: float, known: str) -> None:
    found = recognize(name, memory)
    assert found is not None and found.name == known


def test_the_device_at_hand_has_its_own_rate() -> None:
    assert fit_device("NVIDIA H200", 139.0, "bf16", 800e12).get_rate("bf16") == pytest.approx(8e14)
    unknown = fit_device("Own", 10.0, "bf16", 5e12)
    assert unknown.get_rate("bf16") == pytest.approx(5e12)
    assert (unknown.name, unknown.memory) == ("Own", 10.0)
    half = fit_device("NVIDIA H200", 139.0, "fp16", 800e12)
    assert half.name == "H200" and half.get_rate("bf16") == pytest.approx(8e14)
