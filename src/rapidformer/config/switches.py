"""Every switch as one row, in the order of application.

Everything that needs only facts about a switch reads them here: which combinations are refused and
which settings have no effect (``layout_rules.py``, ``idle_settings.py``), what a setting implies
(``derive.py``), what DeepSpeed does itself, what ``rapidformer verify`` turns off, what
``rapidformer config`` asks, and the tables in the docs. ``accel/parallelize.py`` walks the same
rows and calls ``apply`` of each row's module.

A new switch is a field in ``sections.py`` (its docstring is the text in help and docs), a row
here, a module in ``accel/`` and a parity test. A setting without a row fails a test.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rapidformer.config.schema import get_settings
from rapidformer.config.settings import Settings

Moment = Literal["whole", "placed", "final"]
"""When a switch is applied. whole: to the model as built, before its weights are moved; placed:
weights are on the device and equal on every rank; final: no parameter is replaced any more."""

Verification = Literal["off", "left out", "refused"]
"""What ``rapidformer verify`` does with a switch. off: on in the verified run, off in the reference
run; left out: off in both, for the reason given; refused: the run cannot be verified."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Another switch, or certain values of one of its settings, and why it matters here."""

    switch: str
    setting: str = ""
    values: tuple[str, ...] = ()
    reason: str = ""

    def holds(self, args: Settings) -> bool:
        """Whether that switch is on, with one of the values if any are listed."""
        is_met = not self.setting or getattr(args, self.setting) in self.values
        return is_met and get_switch(self.switch).is_on(args)

    def describe(self, args: Settings | None = None) -> str:
        """The flag to name in a message: the one given, or the switch's first."""
        if self.setting:
            return f"{to_flag(self.setting)} {self.values[0]}"
        return get_switch(self.switch).describe(args)


@dataclass(frozen=True, kw_only=True)
class Implication:
    """A setting that sets another one, unless that one or one of ``unless`` is set."""

    setting: str
    sets: str
    to: Any
    unless: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Question:
    """What ``rapidformer config`` asks about a switch; the answer ``no`` leaves it off."""

    flag: str
    text: str
    answers: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Switch:
    """One switch: everything about it except the code that applies it."""

    name: str
    """Its name in start-up lines and docs."""
    turned_on_by: tuple[str, ...] = ()
    """Any of these settings turns it on. If empty, it is on whenever its needs are met."""
    options: tuple[str, ...] = ()
    """Settings that configure it; without effect while it is off."""
    off: Mapping[str, Any] = field(default_factory=dict)
    """The values that turn it off, if those are not the defaults."""
    kinds: Mapping[str, Any] = field(default_factory=dict)
    """What each setting that turns it on stands for; two different ones exclude each other."""

    module: str = ""
    """The module with its ``apply``, under ``accel``; empty if another row's module applies it."""
    moment: Moment = "placed"
    done_by_deepspeed: bool = False
    """Under ``--deepspeed``, DeepSpeed does it, and it is not applied here."""

    needs: tuple[Rule, ...] = ()
    """One of these must hold, or it has no effect."""
    is_refused_alone: bool = False
    """Whether unmet needs are an error rather than a warning."""
    excludes: tuple[Rule, ...] = ()
    """Each pair once, on either side."""
    implies: tuple[Implication, ...] = ()

    verification: Verification = "off"
    why: str = ""
    """Why verification cannot compare it."""
    question: Question | None = None
    exact: str = "to 1e-6"
    """For the docs: how closely its result matches a run without it."""

    @property
    def settings(self) -> tuple[str, ...]:
        """All of its settings."""
        return (*self.turned_on_by, *self.options)

    def is_on(self, args: Settings) -> bool:
        """Whether the settings turn it on."""
        if not self.turned_on_by:
            return True
        off = self.get_off_values()
        return any(getattr(args, name) != off[name] for name in self.turned_on_by)

    def has_what_it_needs(self, args: Settings) -> bool:
        """Whether it would have an effect."""
        return not self.needs or any(rule.holds(args) for rule in self.needs)

    def list_given(self, args: Settings, names: tuple[str, ...] | None = None) -> list[str]:
        """Those of its settings (or of ``names``) that are not at their defaults."""
        names = self.settings if names is None else names
        return [name for name in names if getattr(args, name) != get_settings()[name].default]

    def get_off_values(self) -> dict[str, Any]:
        """The settings that turn it off."""
        return {name: get_settings()[name].default for name in self.settings} | dict(self.off)

    def describe(self, args: Settings | None = None) -> str:
        """Its flag: the one that turned it on, or its first."""
        given = self.list_given(args, self.turned_on_by) if args is not None else []
        return to_flag((given or self.turned_on_by)[0])

    def find_contradiction(self, args: Settings) -> list[str]:
        """The flags that turn it on in different ways; empty if they agree."""
        given = self.list_given(args, self.turned_on_by) if self.kinds else []
        kinds = {name: self.kinds.get(name, getattr(args, name)) for name in given}
        if len(set(kinds.values()) - {"auto"}) < 2:
            return []
        return [
            to_flag(name) if name in self.kinds else f"{to_flag(name)} {kind}"
            for name, kind in kinds.items()
        ]


def to_flag(name: str) -> str:
    """A setting's name as a command-line flag."""
    return "--" + name.replace("_", "-")


def get_switch(name: str) -> Switch:
    """The row of that name."""
    return next(switch for switch in SWITCHES if switch.name == name)


_ZERO_STAGES = {
    "zero_1_memory_optimization": 1,
    "zero_2_memory_optimization": 2,
    "zero_3_memory_optimization": 3,
    "fsdp_memory_optimization": 3,
}
_NEW_DROPOUT = "; dropout only in distribution"

SWITCHES: tuple[Switch, ...] = (
    # First, so that no rank processes blocks that it will not keep.
    Switch(
        name="pipeline",
        turned_on_by=("pipeline_model_parallel_size",),
        options=("pipeline_schedule", "num_layers_per_virtual_pipeline_stage"),
        module="pipeline.switch",
        moment="whole",
        exact=f"to 5e-6{_NEW_DROPOUT}",
    ),
    Switch(
        name="DeepSpeed",
        turned_on_by=("deepspeed",),
        module="deepspeed.switch",
        moment="whole",
        excludes=(
            Rule(
                switch="pipeline",
                reason="use a pipeline with --zero-1-memory-optimization instead of DeepSpeed",
            ),
            Rule(
                switch="sequence parallelism",
                reason="use it with --tensor-model-parallel-size and without DeepSpeed",
            ),
            Rule(
                switch="context parallelism",
                reason="use --zero-3-memory-optimization instead of DeepSpeed",
            ),
            Rule(
                switch="expert parallelism",
                reason="use --zero-1-memory-optimization instead of DeepSpeed",
            ),
            Rule(
                switch="hybrid sharding",
                reason="set zero_optimization.zero_hpz_partition_size in its file instead",
            ),
            Rule(switch="fp8", reason="use --zero-3-memory-optimization instead of DeepSpeed"),
        ),
        verification="refused",
        why="verify cannot read the gradients that DeepSpeed keeps internally: verify the same "
        "stage with --zero-1-, --zero-2- or --zero-3-memory-optimization instead",
        exact="to 2e-6, unless its file asks for 16 bits",
    ),
    # Everything below sees the split layers.
    Switch(
        name="tensor parallelism",
        turned_on_by=("tensor_model_parallel_size",),
        module="tensor.switch",
        exact=f"to 3e-6{_NEW_DROPOUT}",
    ),
    Switch(
        name="sequence parallelism",
        turned_on_by=("sequence_parallel",),
        module="tensor.sequence",
        needs=(Rule(switch="tensor parallelism"),),
        exact=f"to 3e-6{_NEW_DROPOUT}",
    ),
    Switch(
        name="loss over a split vocabulary",
        module="tensor.vocabulary_loss",
        needs=(Rule(switch="tensor parallelism"),),
        exact="to 3e-6",
    ),
    # Before everything that replaces a model's sdpa attention by its own.
    Switch(
        name="attention",
        turned_on_by=("attention",),
        off={"attention": "sdpa"},
        module="attention.kernel_order",
        exact=f"up to rounding: kernels sum in a different order{_NEW_DROPOUT}",
    ),
    Switch(
        name="fused loss",
        turned_on_by=("fused_loss",),
        off={"fused_loss": "off"},
        module="fused_loss.fused_loss",
    ),
    # Before compilation, which fuses the rounding into neighbouring kernels.
    Switch(
        name="fp8",
        turned_on_by=("fp8",),
        module="fp8.layers",
        excludes=(
            Rule(
                switch="tensor parallelism",
                reason="layers are converted whole; use --zero-3-memory-optimization instead of "
                "split layers",
            ),
            Rule(
                switch="pipeline",
                setting="pipeline_schedule",
                values=("zero-bubble",),
                reason="use 1f1b or interleaved. (Zero-bubble computes the gradients of inputs and "
                "weights separately; an fp8 layer computes both at once.)",
            ),
        ),
        implies=(Implication(setting="fp8", sets="mixed_precision", to="bf16", unless=("fp16",)),),
        verification="left out",
        why="fp8 changes the numbers by design; both runs are in fp32",
        exact="no: it trades precision for speed",
    ),
    # Before compilation, so that a compiled block is recomputed as compiled.
    Switch(
        name="recompute",
        turned_on_by=("checkpoint_activations", "recompute_granularity"),
        options=("recompute_interval",),
        module="recompute.blocks",
        implies=(
            Implication(setting="recompute_granularity", sets="checkpoint_activations", to=True),
            Implication(setting="checkpoint_activations", sets="recompute_granularity", to="full"),
        ),
        exact="yes, dropout included",
    ),
    Switch(
        name="compilation",
        turned_on_by=("compile", "onnx_runtime_training"),
        options=("compile_backend",),
        module="compile.compilation",
        excludes=(
            Rule(
                switch="pipeline",
                setting="pipeline_schedule",
                values=("zero-bubble",),
                reason="use 1f1b or interleaved. (Zero-bubble computes the gradients of inputs and "
                "weights separately; compiled blocks compute both at once.)",
            ),
        ),
        implies=(Implication(setting="onnx_runtime_training", sets="compile", to=True),),
        exact=f"up to rounding: fused kernels sum in a different order{_NEW_DROPOUT}",
    ),
    # Around both: for a recomputed block, only its inputs are kept and sent to the host.
    Switch(
        name="activation offload",
        turned_on_by=("activation_offload",),
        module="activation_offload",
        exact="yes, dropout included",
    ),
    Switch(
        name="dynamic shape",
        turned_on_by=("dynamic_shape",),
        off={"dynamic_shape": "off"},
        module="unpad.unpadding",
        exact=f"to 1e-6{_NEW_DROPOUT}",
    ),
    # The loader's: a step takes the same samples, divided into other micro-batches.
    Switch(
        name="token budget",
        turned_on_by=("tokens_per_micro_batch",),
        excludes=(
            Rule(
                switch="pipeline",
                reason="stages exchange micro-batches of one size; use --micro-batch-size",
            ),
            Rule(
                switch="DeepSpeed",
                reason="it expects equally many micro-batches in every step; use "
                "--zero-1-memory-optimization, -2- or -3- instead of DeepSpeed",
            ),
        ),
        exact=f"to 1e-6{_NEW_DROPOUT}",
    ),
    # Outside all of these: tokens are split before the first block and joined after the last.
    Switch(
        name="context parallelism",
        turned_on_by=("context_parallel_size",),
        module="context.switch",
        excludes=(
            Rule(
                switch="pipeline",
                reason="use --zero-3-memory-optimization instead of pipeline stages",
            ),
        ),
        exact=f"to 2e-6{_NEW_DROPOUT}",
    ),
    # Before sharding, which shards each rank's experts further.
    Switch(
        name="expert parallelism",
        turned_on_by=("expert_model_parallel_size",),
        module="expert.switch",
        excludes=(
            Rule(
                switch="tensor parallelism",
                reason="experts need different tokens on each rank, split layers the same ones. "
                "Most of a mixture's weights are experts: use --expert-model-parallel-size, and "
                "--zero-3-memory-optimization for the rest",
            ),
            Rule(
                switch="pipeline",
                reason="use --zero-3-memory-optimization instead of pipeline stages",
            ),
        ),
    ),
    # Sharding must see the final blocks.
    Switch(
        name="ZeRO",
        turned_on_by=tuple(_ZERO_STAGES),
        kinds=_ZERO_STAGES,
        module="sharding.switch",
        done_by_deepspeed=True,
        question=Question(
            flag="zero",
            text="Shard the training state over the ranks? (no, 1, 2, 3: the ZeRO stage)",
            answers={str(stage): {name: True} for name, stage in list(_ZERO_STAGES.items())[:3]},
        ),
    ),
    Switch(
        name="hybrid sharding",
        turned_on_by=("hybrid_sharding_size",),
        needs=(
            Rule(
                switch="ZeRO",
                reason="it sets how many ranks shard the state; without ZeRO nothing is sharded",
            ),
            Rule(switch="CPU offload"),
        ),
        is_refused_alone=True,
    ),
    Switch(
        name="CPU offload",
        turned_on_by=("cpu_offload",),
        done_by_deepspeed=True,
        implies=(
            # Offloaded weights must be fetched block by block, like ZeRO-3's.
            Implication(
                setting="cpu_offload",
                sets="zero_3_memory_optimization",
                to=True,
                unless=(*_ZERO_STAGES, "deepspeed"),
            ),
        ),
    ),
    # It hooks parameters, which must not be replaced after this.
    Switch(
        name="data parallelism",
        options=("data_parallel",),
        module="gradient_sums",
        moment="final",
        done_by_deepspeed=True,
    ),
    # Around everything: the whole model runs under autocast.
    Switch(
        name="precision",
        turned_on_by=("mixed_precision", "fp16", "bf16"),
        kinds={"fp16": "fp16", "bf16": "bf16"},
        module="precision.autocast",
        moment="final",
        implies=(
            Implication(setting="fp16", sets="mixed_precision", to="fp16"),
            Implication(setting="bf16", sets="mixed_precision", to="bf16"),
        ),
        verification="left out",
        why="precision changes the numbers by design; both runs are in fp32",
        question=Question(
            flag="mixed_precision",
            text="Mixed precision? (no, fp16, bf16)",
            answers={kind: {"mixed_precision": kind} for kind in ("fp16", "bf16")},
        ),
        exact="no: it trades precision for speed",
    ),
    # Last: the passes are recorded with everything above in them.
    Switch(
        name="CUDA graph",
        turned_on_by=("cuda_graph",),
        off={"cuda_graph": "off"},
        module="cuda_graph.obstacles",
        moment="final",
        exact="yes; padded batches to 1e-6, their dropout only in distribution",
    ),
    Switch(
        name="loss scaling",
        options=(
            "initial_loss_scale",
            "loss_scale",
            "min_loss_scale",
            "loss_scale_window",
            "hysteresis",
        ),
        needs=(Rule(switch="precision", setting="mixed_precision", values=("fp16", "auto")),),
        verification="left out",
        why="both runs are in fp32",
        exact="no: it belongs to fp16",
    ),
)
