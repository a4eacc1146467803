"""16-bit arithmetic on a CPU: only where the processor has it."""

from __future__ import annotations

import pytest
import torch

from rapidformer.accel.precision.precision import choose_precision, processor
from rapidformer.engine import RapidformerEngine

CPU = torch.device("cpu")
XEON = "processor : 0\nflags\t\t: fpu sse2 avx512f avx512_bf16 amx_bf16 avx512_fp16\n"
OLD_X86 = "processor : 0\nflags\t\t: fpu sse2 avx2 avx512f avx512bw\n"
NEOVERSE_N1 = "processor\t: 0\nFeatures\t: fp asimd fphp asimdhp cpuid asimddp\n"
GRAVITON_3 = "processor\t: 0\nFeatures\t: fp asimd fphp asimdhp sve bf16 i8mm\n"


def use(monkeypatch: pytest.MonkeyPatch, cpu_info: str) -> None:
    monkeypatch.delenv(processor.EMULATE_VARIABLE)
    monkeypatch.setattr(processor, "_read_flags", lambda: processor.parse_flags(cpu_info))


@pytest.mark.parametrize(
    ("cpu_info", "bf16", "fp16"),
    [
        (XEON, True, True),
        (OLD_X86, False, False),
        (NEOVERSE_N1, False, False),
        (GRAVITON_3, True, False),
        ("", False, False),
    ],
)
def test_the_processor_is_asked(
    cpu_info: str, bf16: bool, fp16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, cpu_info)
    assert (processor.has_bf16(), processor.has_fp16()) == (bf16, fp16)
    assert (choose_precision("auto", CPU).dtype is torch.bfloat16) == bf16
    assert (choose_precision("fp16", CPU).dtype is torch.float16) == fp16


@pytest.mark.parametrize(
    ("asked", "missing"), [("auto", "bf16"), ("bf16", "bf16"), ("fp16", "fp16")]
)
def test_without_16_bit_hardware_the_run_stays_in_fp32_and_says_so(
    asked: str, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, NEOVERSE_N1)
    said: list[str] = []
    monkeypatch.setattr(
        "rapidformer.accel.precision.precision.warn_once", lambda message, **_: said.append(message)
    )
    engine = RapidformerEngine(args={"mixed_precision": asked})
    assert engine.runtime.precision.dtype is None and engine.updates.scaler is None
    assert engine.runtime.precision.reason == f"fp32 (this processor has no {missing})"
    assert said == [
        f"this processor has no {missing}: the run stays in fp32, which is many times faster than "
        f"emulating {missing}."
    ]
