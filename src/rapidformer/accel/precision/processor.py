"""Which 16-bit arithmetic this CPU has in hardware: emulated, it is hundreds of times slower."""

from __future__ import annotations

import os
import platform
import subprocess
from functools import cache
from pathlib import Path

# Set to 1 to compute in 16 bits even if the CPU must emulate it: for tests of numerics.
EMULATE_VARIABLE = "RAPIDFORMER_EMULATE_16_BIT"
_CPU_INFO = Path("/proc/cpuinfo")
# x86's names of the flags; ARM says `bf16`. torch has no fp16 matrix product for ARM that is faster
# than fp32, whatever the CPU can do.
_BF16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
_FP16 = frozenset({"avx512_fp16", "amx_fp16"})


def has_bf16() -> bool:
    """Whether this CPU multiplies in bf16."""
    return is_emulation_wanted() or bool(_BF16 & _read_flags())


def has_fp16() -> bool:
    """Whether this CPU multiplies in fp16."""
    return is_emulation_wanted() or bool(_FP16 & _read_flags())


def is_emulation_wanted() -> bool:
    """Whether a test asks for arithmetic that this CPU must emulate."""
    return os.environ.get(EMULATE_VARIABLE, "") not in ("", "0")


@cache
def _read_flags() -> frozenset[str]:
    if platform.system() == "Darwin":
        ask = ["sysctl", "-n", "hw.optional.arm.FEAT_BF16"]
        answer = subprocess.run(ask, capture_output=True, text=True, check=False).stdout
        return frozenset({"bf16"} if answer.strip() == "1" else ())
    try:
        text = _CPU_INFO.read_text(encoding="ascii", errors="replace")
    except OSError:
        return frozenset()
    return parse_flags(text)


def parse_flags(text: str) -> frozenset[str]:
    """The flags of the first CPU in Linux's list: ``flags`` on x86, ``Features`` on ARM."""
    for line in text.splitlines():
        name, _, values = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(values.split())
    return frozenset()
