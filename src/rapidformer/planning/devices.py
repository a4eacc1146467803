"""The devices that a plan knows, by nominal figures, and ``--devices 8xH200``. Without torch."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from rapidformer.errors import ConfigurationError
from rapidformer.nearest import suggest

GIB = 2**30


@dataclass(frozen=True)
class Device:
    """One accelerator. Its rates are dense, in TFLOP/s; 0: not supported."""

    name: str
    memory: float
    """GiB that a framework is shown, which is less than what the box says."""
    bf16: float
    fp8: float
    fp32: float
    """Without TF32."""
    bandwidth: float
    """Of its memory, GB/s."""
    inside: float
    """GB/s in one direction to the others of its node."""
    between: float
    """The same to other nodes, by usual networks: no data sheet of a device promises them."""
    host: float = 55.0
    """The same to host memory."""
    per_node: int = 8
    fp16: float = 0.0
    """If it is not that of bf16."""
    matrix_share: float = 0.82
    """The part of a rate that a large product reaches; measured on an H200."""
    memory_share: float = 0.84
    """The part of the bandwidth that a large copy reaches; measured on an H200."""

    def get_nominal(self, precision: str) -> float:
        """TFLOP/s; 0: not supported."""
        return float(getattr(self, precision) or (self.bf16 if precision == "fp16" else 0.0))

    def get_rate(self, precision: str) -> float:
        """Operations per second of a large matrix product."""
        nominal = self.get_nominal(precision)
        if not nominal:
            raise ConfigurationError(f"{self.name} does not compute in {precision}.")
        return float(nominal * 1e12 * self.matrix_share)

    @property
    def copy_rate(self) -> float:
        """Bytes per second that are read or written."""
        return self.bandwidth * 1e9 * self.memory_share


_TABLE = (
    Device("B200", 178.4, 2250, 4500, 75, 8000, 900, 50),
    Device("H200", 139.8, 989, 1979, 67, 4800, 450, 50),
    Device("H100", 79.1, 989, 1979, 67, 3350, 450, 50),
    Device("H100-PCIe", 79.1, 756, 1513, 51, 2000, 64, 25),
    Device("MI300X", 191.7, 1307, 2615, 163, 5300, 448, 50),
    Device("A100-80", 79.1, 312, 0, 19.5, 2039, 300, 25, host=25),
    Device("A100-40", 39.4, 312, 0, 19.5, 1555, 300, 25, host=25),
    Device("V100-32", 31.7, 0, 0, 15.7, 900, 150, 12.5, host=12, fp16=125),
    Device("L40S", 44.4, 362, 733, 91.6, 864, 32, 12.5, host=25),
    Device("L4", 22.0, 121, 242, 30.3, 300, 32, 3, host=25),
    Device("A10", 22.0, 125, 0, 31.2, 600, 32, 3, host=25),
    Device("RTX-A6000", 47.4, 155, 0, 38.7, 768, 32, 3, host=25),
    Device("T4", 14.6, 0, 0, 8.1, 320, 16, 3, host=12, fp16=65),
    Device("RTX-5090", 31.4, 210, 419, 105, 1792, 64, 3, per_node=1),
    Device("RTX-4090", 23.5, 165, 330, 82.6, 1008, 32, 3, host=25, per_node=1),
    Device("RTX-3090", 23.6, 71, 0, 35.6, 936, 32, 3, host=25, per_node=1),
)
DEVICES = {device.name: device for device in _TABLE}
UNKNOWN = DEVICES["A100-80"]
"""What a device is like that is not in the table, apart from what is known of it."""


@dataclass(frozen=True)
class Cluster:
    """Equal devices in equal nodes."""

    device: Device
    count: int = 1

    @property
    def nodes(self) -> int:
        return -(-self.count // self.device.per_node)

    def describe(self) -> str:
        """Like ``64 x A100-80``."""
        return f"{self.count} x {self.device.name}" if self.count > 1 else self.device.name


def parse_devices(
    text: str, *, memory_gib: float | None = None, tflops: float | None = None
) -> Cluster:
    """Of ``H200``, ``8xH200`` or ``64xA100-80``; the other two replace what the table says."""
    matched = re.fullmatch(r"(?:(\d+) *[xX*] *)?(.*\S)", text.strip())
    number, name = matched.groups() if matched else ("0", text)
    if int(number or 1) < 1:
        raise ConfigurationError(f"--devices {text}: give a number and a device, like 8xH200.")
    device = _find_named(name)
    if device is None and memory_gib is not None:
        device = recognize(name, memory_gib)
    if device is None and (memory_gib is None or tflops is None):
        raise ConfigurationError(
            f"--devices {text}: {name} is not one of {', '.join(DEVICES)}."
            f"{suggest(name, DEVICES)} For another device, add --memory-gib and --tflops."
        )
    device = adjust(device or replace(UNKNOWN, name=name), memory_gib=memory_gib, tflops=tflops)
    return Cluster(device, int(number or 1))


def _find_named(name: str) -> Device | None:
    """By its name, or by one that begins like it: A100, 4090, H100-SXM."""
    wanted = _fold(name)
    folded = {_fold(known): device for known, device in DEVICES.items()}
    begun = (
        device for known, device in folded.items() if known.startswith((wanted, f"rtx{wanted}"))
    )
    longer = (device for known, device in folded.items() if wanted in (f"{known}sxm", f"{known}gb"))
    return folded.get(wanted) or next(begun, None) or next(longer, None)


def _fold(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.casefold())


def adjust(device: Device, *, memory_gib: float | None, tflops: float | None) -> Device:
    """The device with another memory, and another nominal rate in 16 bits and in proportion."""
    for flag, value in (("--memory-gib", memory_gib), ("--tflops", tflops)):
        if value is not None and value <= 0:
            raise ConfigurationError(f"{flag} {value:g}: give a number above 0.")
    if memory_gib is not None:
        device = replace(device, memory=memory_gib)
    if tflops is not None:
        factor = tflops / (device.bf16 or device.fp16)
        rates = {name: factor * getattr(device, name) for name in ("bf16", "fp16", "fp8", "fp32")}
        device = replace(device, **rates)
    return device


def recognize(driver_name: str, memory: float) -> Device | None:
    """By a driver's name, like ``NVIDIA A100-SXM4-80GB``, and its memory in GiB."""
    words = [_fold(word) for word in driver_name.split()]
    known = [
        device
        for device in DEVICES.values()
        if any(word.startswith(_get_core(device)) for word in words)
    ]
    return min(known, key=lambda device: abs(device.memory - memory), default=None)


def fit_device(name: str, memory: float, precision: str, rate: float) -> Device:
    """A device at hand, whose rate of a large product was measured, in operations per second."""
    device = recognize(name, memory) or replace(UNKNOWN, name=name)
    if nominal := device.get_nominal(precision):
        return replace(device, memory=memory, matrix_share=rate / 1e12 / nominal)
    measured: Any = {precision: rate / 1e12}
    return replace(device, memory=memory, matrix_share=1.0, **measured)


def _get_core(device: Device) -> str:
    """The part of its name that every name for it has."""
    return _fold(device.name.removeprefix("RTX-").partition("-")[0])
