"""Every model under every layout of every kind of parallelism, beside one process.

    python tests/parity/matrix.py [MODEL ...]

A cell is the worst relative difference of a loss and of a gradient (under DeepSpeed, of a weight
too); a dash, that the combination is refused (with the reason below the table). Models in stages
have eight blocks and a table of their own; so has DeepSpeed, where it is installed. The whole takes
more than an hour on two cores; models may be asked for one by one.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from rapidformer.verification.compare import compare
from rapidformer.verification.trace import Trace
from tests.parity.harness import (
    PIPELINE,
    TENSOR,
    UNPADDED,
    Case,
    Settings,
    Training,
    run_on,
    run_one,
)
from tests.parity.limits import check_copies, get_ties
from tests.parity.models import SAMPLES, TARGETS
from tests.parity.under_deepspeed import build_case

Layouts = dict[str, tuple[int, Settings]]
LAYOUTS: Layouts = {
    "DP2": (2, {}),
    "DP4": (4, {}),
    **{f"ZeRO-{n} 2": (2, {f"zero_{n}_memory_optimization": True}) for n in (1, 2, 3)},
    "ZeRO-3 4 recompute": (4, {"zero_3_memory_optimization": True, "checkpoint_activations": True}),
    "TP2": (2, {TENSOR: 2}),
    "TP2 SP": (2, {TENSOR: 2, "sequence_parallel": True}),
    "TP4": (4, {TENSOR: 4}),
    "TP4 SP": (4, {TENSOR: 4, "sequence_parallel": True}),
    "DP2xTP2": (4, {TENSOR: 2}),
    "ZeRO-1 2xTP2": (4, {TENSOR: 2, "zero_1_memory_optimization": True}),
    "ZeRO-2 2xTP2": (4, {TENSOR: 2, "zero_2_memory_optimization": True}),
    "FSDP2xTP2": (4, {TENSOR: 2, "fsdp_memory_optimization": True}),
    "FSDP2xTP2 SP": (
        4,
        {TENSOR: 2, "fsdp_memory_optimization": True, "sequence_parallel": True},
    ),
}
CONTEXT, EXPERT = "context_parallel_size", "expert_model_parallel_size"
ZERO_3 = {"zero_3_memory_optimization": True}
LAYOUTS |= {
    "CP2": (2, {CONTEXT: 2}),
    "CP4": (4, {CONTEXT: 4}),
    "CP2xDP2": (4, {CONTEXT: 2}),
    "CP2 ZeRO-3 recompute": (2, {CONTEXT: 2, **ZERO_3, "checkpoint_activations": True}),
    "CP2xTP2 SP": (4, {CONTEXT: 2, TENSOR: 2, "sequence_parallel": True}),
    "EP2": (2, {EXPERT: 2}),
    "EP2xDP2": (4, {EXPERT: 2}),
    "EP2xDP2 ZeRO-3": (4, {EXPERT: 2, **ZERO_3}),
    "EP2 CP2": (2, {EXPERT: 2, CONTEXT: 2}),
}
COPIES = {"hybrid_sharding_size": 2, "micro_batch_size": 1}
for _stage_number in (1, 2, 3):
    _zero = {f"zero_{_stage_number}_memory_optimization": True}
    LAYOUTS[f"ZeRO-{_stage_number} copies 2x2"] = (4, {**_zero, **COPIES})
    LAYOUTS[f"ZeRO-{_stage_number} offload"] = (2, {**_zero, "cpu_offload": True})
LAYOUTS |= {
    "ZeRO-3 copies 2x2xTP2": (8, {**ZERO_3, **COPIES, TENSOR: 2}),
    "ZeRO-3 2xTP2 offload": (4, {**ZERO_3, TENSOR: 2, "cpu_offload": True}),
    "CP2 ZeRO-3 copies 2x2": (4, {**ZERO_3, CONTEXT: 2, "hybrid_sharding_size": 2}),
    "EP2xDP2 ZeRO-3 offload": (4, {EXPERT: 2, **ZERO_3, "cpu_offload": True}),
}
ADAPTED = (
    "gpt2-lora", "gpt2-dora", "experts-lora", *(f"{name}-lora" for name in TARGETS),
)  # fmt: skip
MODELS = (
    "bert", "bert-mlm", "roberta", "gpt2", "t5", "llama", "qwen3", "gemma2", "gemma4", "mixtral",
    "apertus", "deepseek", "gpt-oss", "phi3", "gpt", "gpt-rope", "gpt-moe", "vit", "custom",
    "unplanned",
    *ADAPTED,
)  # fmt: skip
WITH_EXPERTS = ("gpt-moe", "mixtral", "mixtral-lora", "experts-lora")
LIMIT = 1e-5
EPOCHS = 4
"""Of three updates each: the promise is made for ten."""

_SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")


def _stage(schedule: str, size: int = 2, **more: Any) -> dict[str, Any]:
    return {PIPELINE: size, "pipeline_schedule": schedule, **more}


STAGED_LAYOUTS: Layouts = {
    **{f"PP2 {name}": (2, _stage(name)) for name in _SCHEDULES},
    **{f"PP4 {name}": (4, _stage(name, 4)) for name in _SCHEDULES},
    "PP2xTP2": (4, _stage("1f1b", **{TENSOR: 2})),
    "PP2xTP2 zero-bubble": (4, _stage("zero-bubble", **{TENSOR: 2})),
    "PP2xDP2": (4, _stage("1f1b")),
    "PP2xDP2 zero-bubble": (4, _stage("zero-bubble")),
    "PP2xZeRO-1": (4, _stage("1f1b", zero_1_memory_optimization=True)),
    "PP2xZeRO-2": (4, _stage("interleaved", zero_2_memory_optimization=True)),
    "PP2xFSDP2": (4, _stage("1f1b", fsdp_memory_optimization=True, checkpoint_activations=True)),
    "TP2xPP2xDP2": (8, _stage("1f1b", **{TENSOR: 2})),
}

STAGED = (
    "llama", "qwen3", "mistral", "gpt2", "bert", "bert-mlm", "gpt", "gpt2-frozen", "custom",
    "shared-bias", "gpt2-lora", "gpt2-dora", "llama-lora",
)  # fmt: skip

CPU = {"device": "cpu"}
DEEPSPEED_LAYOUTS: Layouts = {
    "stage 0": (2, {}),
    "stage 1": (2, {"zero_optimization": {"stage": 1}}),
    "stage 2": (2, {"zero_optimization": {"stage": 2}}),
    "stage 2, offload": (2, {"zero_optimization": {"stage": 2, "offload_optimizer": CPU}}),
    "stage 3": (2, {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}),
    "stage 3, offload": (
        2,
        {"zero_optimization": {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU}},
    ),
    "stage 3, 4 processes": (4, {"zero_optimization": {"stage": 3}}),
    "tensor 2": (2, {"tensor_parallel": {"autotp_size": 2}}),
    "stage 2, 2 x tensor 2": (
        4,
        {"zero_optimization": {"stage": 2}, "tensor_parallel": {"autotp_size": 2}},
    ),
}
UNDER_DEEPSPEED = ("bert", "bert-mlm", "gpt2", "t5", "llama", "plain", "gpt2-lora")


def describe(model: str, settings: Settings) -> Case | None:
    """What a cell of the first table trains; None, if the layout has nothing to do there."""
    if EXPERT in settings and model not in WITH_EXPERTS:
        return None
    if model != "gpt-moe":
        return Training(model, rows=16, epochs=EPOCHS), settings
    # A mixture's loss is a mean over the micro-batch: the same ones must be added up.
    training = Training(model, rows=16, epochs=EPOCHS, is_by_row=True)
    return training, {**settings, "micro_batch_size": 1}


def describe_staged(model: str, settings: Settings) -> Case:
    return Training(model, layers=8, rows=SAMPLES, epochs=2), settings


def describe_under_deepspeed(model: str, content: Settings) -> Case:
    return build_case(model, content, Path(tempfile.mkdtemp()), rows=2 * SAMPLES)


@dataclass
class Table:
    """Layouts by models."""

    layouts: Layouts
    models: tuple[str, ...]
    describe: Callable[[str, Settings], Case | None]
    quantities: tuple[str, ...] = ("loss", "gradients")
    has_copies: bool = False
    reasons: list[str] = field(default_factory=list)
    is_exact: bool = True

    def show(self, asked: list[str]) -> None:
        names = [name for name in self.models if name in asked or not asked]
        if not names:
            return
        print("| layout | " + " | ".join(names) + " |")
        print("|---" * (len(names) + 1) + "|")
        for layout in self.layouts:
            cells = [self._fill(layout, name) for name in names]
            print(f"| {layout} | " + " | ".join(cells) + " |", flush=True)
        print("\n".join(["", *self.reasons, ""]))

    def _fill(self, layout: str, model: str) -> str:
        world_size, settings = self.layouts[layout]
        case = self.describe(model, settings)
        if case is None:
            return ""
        training, given = case
        try:
            (traces,) = run_on(world_size, [(training, {**UNPADDED, **given})])
        except AssertionError as error:
            self.reasons.append(f"- {model}, {layout}: {str(error).strip().splitlines()[-1]}")
            return "-"
        if self.has_copies and TENSOR not in settings:
            check_copies(traces)
        return self._compare(run_one(training), traces)

    def _compare(self, reference: Trace, traces: list[Trace]) -> str:
        found = compare(reference, traces)
        worst = [found.quantities[name].value for name in self.quantities]
        self.is_exact &= not found.problems and max(worst) < LIMIT
        self.is_exact &= get_ties(traces) == get_ties([reference])
        return " ".join(f"{value:.0e}" for value in worst)


def main(asked: list[str]) -> int:
    torch.set_num_threads(1)
    tables = [
        Table(LAYOUTS, MODELS, describe),
        Table(STAGED_LAYOUTS, STAGED, describe_staged, has_copies=True),
    ]
    if importlib.util.find_spec("deepspeed") is not None:
        quantities = ("loss", "gradients", "updated weights")
        tables.append(
            Table(DEEPSPEED_LAYOUTS, UNDER_DEEPSPEED, describe_under_deepspeed, quantities)
        )
    for table in tables:
        table.show(asked)
    return 0 if all(table.is_exact for table in tables) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
