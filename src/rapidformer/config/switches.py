"""Every switch as one row, in the order in which they are applied to a model.

Whatever needs only facts about a switch reads them here: which combinations are refused and what
has no effect (``validate.py``), what one setting implies (``derive.py``), what is left to
DeepSpeed, what ``rapidformer verify`` turns off, what ``rapidformer config`` asks, the tables in
the docs. ``accel/parallelize.py`` walks the same rows and calls ``apply`` of each row's module.

A new switch is a field in ``sections.py`` (its docstring is the switch's sentence in help and
docs), a row here, a module in ``accel/`` and a parity test. A setting without a row fails a test.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rapidformer.config.schema import get_settings
from rapidformer.config.settings import Settings

Moment = Literal["whole", "placed", "made"]
"""When a switch is applied. whole: before weights are moved, while the model is as it was built;
placed: on the device, equal on every process; made: once every parameter is the final one."""

Verification = Literal["off", "left out", "refused"]
"""What ``rapidformer verify`` does with a switch. off: on in the verified run, off in the reference
run; left out: off in both, for the reason given; refused: the run cannot be verified."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Another switch, or some values of one of its settings, and why it matters here."""

    switch: str
    setting: str = ""
    values: tuple[str, ...] = ()
    reason: str = ""

    def holds(self, args: Settings) -> bool:
        """Whether that switch is on, with one of the values where there are some."""
        is_met = not self.setting or getattr(args, self.setting) in self.values
        return is_met and get_switch(self.switch).is_on(args)

    def describe(self, args: Settings | None = None) -> str:
        """The flag to name in a message: the one that was given, or the switch's first."""
        if self.setting:
            return f"{to_flag(self.setting)} {self.values[0]}"
        return get_switch(self.switch).describe(args)


@dataclass(frozen=True, kw_only=True)
class Implication:
    """A setting from which another one follows, unless that or one of ``unless`` is set."""

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
    """As the start-up lines and the docs call it."""
    turned_on_by: tuple[str, ...] = ()
    """Any of these settings turns it on. Without any it is on wherever it has what it needs."""
    options: tuple[str, ...] = ()
    """Settings that say how; without effect while it is off."""
    kinds: Mapping[str, Any] = field(default_factory=dict)
    """What a setting that turns it on stands for; two that differ exclude each other."""

    module: str = ""
    """Where its ``apply`` is, under ``accel``; empty: another row's module does it too."""
    moment: Moment = "placed"
    done_by_deepspeed: bool = False
    """Under ``--deepspeed`` it is DeepSpeed's task, and not applied here."""

    needs: tuple[Rule, ...] = ()
    """One of these must hold, or it has no effect."""
    is_refused_alone: bool = False
    """Whether missing what it needs is an error rather than a warning."""
    excludes: tuple[Rule, ...] = ()
    """Each pair once, on either side."""
    implies: tuple[Implication, ...] = ()

    verification: Verification = "off"
    why: str = ""
    """Why verification does not compare it."""
    question: Question | None = None
    exact: str = "to 1e-6"
    """For the docs: how its result compares with a run without it."""

    @property
    def settings(self) -> tuple[str, ...]:
        """Everything that a user may set about it."""
        return (*self.turned_on_by, *self.options)

    def is_on(self, args: Settings) -> bool:
        """Whether the settings ask for it."""
        return not self.turned_on_by or bool(self.list_given(args, self.turned_on_by))

    def has_what_it_needs(self, args: Settings) -> bool:
        """Whether it would have an effect."""
        return not self.needs or any(rule.holds(args) for rule in self.needs)

    def list_given(self, args: Settings, names: tuple[str, ...] | None = None) -> list[str]:
        """Those of its settings that are not what they are by default."""
        names = self.settings if names is None else names
        return [name for name in names if getattr(args, name) != get_settings()[name].default]

    def get_defaults(self) -> dict[str, Any]:
        """The settings that turn it off."""
        return {name: get_settings()[name].default for name in self.settings}

    def describe(self, args: Settings | None = None) -> str:
        """Its flag: the one that the settings turn it on by, or its first."""
        given = self.list_given(args, self.turned_on_by) if args is not None else []
        return to_flag((given or self.turned_on_by)[0])

    def find_contradiction(self, args: Settings) -> list[str]:
        """The flags that turn it on in different ways; empty where they agree."""
        given = self.list_given(args, self.turned_on_by) if self.kinds else []
        kinds = {name: self.kinds.get(name, getattr(args, name)) for name in given}
        if len(set(kinds.values()) - {"auto"}) < 2:
            return []
        return [
            to_flag(name) if name in self.kinds else f"{to_flag(name)} {kind}"
            for name, kind in kinds.items()
        ]


def to_flag(name: str) -> str:
    """A setting as it stands on a command line."""
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
_NEW_DROPOUT = "; dropout keeps its distribution only"

SWITCHES: tuple[Switch, ...] = (
    # First of all, so that no process works on blocks that it will not keep.
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
            Rule(switch="pipeline", reason="a pipeline goes with --zero-1-memory-optimization"),
            Rule(
                switch="sequence parallelism",
                reason="it goes with --tensor-model-parallel-size without DeepSpeed",
            ),
            Rule(
                switch="context parallelism",
                reason="long sequences go with --zero-3-memory-optimization",
            ),
            Rule(
                switch="expert parallelism",
                reason="experts go with --zero-1-memory-optimization",
            ),
            Rule(
                switch="hybrid sharding",
                reason="set zero_optimization.zero_hpz_partition_size in its file instead",
            ),
        ),
        verification="refused",
        why="DeepSpeed keeps gradients to itself, where verify cannot look: leave it out, and "
        "verify the same stage by --zero-1-, --zero-2- or --zero-3-memory-optimization",
        exact="to 2e-6; 16-bit sections of its file are a choice of precision",
    ),
    # Everything that follows sees layers as they are split.
    Switch(
        name="tensor parallelism",
        turned_on_by=("tensor_model_parallel_size",),
        module="tensor.switch",
        done_by_deepspeed=True,
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
        done_by_deepspeed=True,
        needs=(Rule(switch="tensor parallelism"),),
        exact="to 3e-6",
    ),
    # Before compilation, so that a compiled block is recomputed as compiled.
    Switch(
        name="recompute",
        turned_on_by=("checkpoint_activations", "recompute_granularity"),
        options=("recompute_interval",),
        module="recompute",
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
        module="compile",
        excludes=(
            Rule(
                switch="pipeline",
                setting="pipeline_schedule",
                values=("zero-bubble",),
                reason="use 1f1b or interleaved. (Compiled blocks compute both gradients at once, "
                "which zero-bubble takes apart.)",
            ),
        ),
        implies=(Implication(setting="onnx_runtime_training", sets="compile", to=True),),
        exact="to rounding: fused kernels add in another order",
    ),
    # Around both: of a recomputed block only the inputs are kept, and sent to the host.
    Switch(
        name="activation offload",
        turned_on_by=("activation_offload",),
        module="activation_offload",
        exact="yes, dropout included",
    ),
    # Outside of all these: tokens are cut before the first block and joined after the last.
    Switch(
        name="context parallelism",
        turned_on_by=("context_parallel_size",),
        module="context.switch",
        excludes=(
            Rule(
                switch="pipeline",
                reason="give --zero-3-memory-optimization instead of pipeline stages",
            ),
        ),
        exact=f"to 2e-6{_NEW_DROPOUT}",
    ),
    # Before sharding, which splits what each process holds of the experts.
    Switch(
        name="expert parallelism",
        turned_on_by=("expert_model_parallel_size",),
        module="expert.switch",
        excludes=(
            Rule(
                switch="tensor parallelism",
                reason="experts expect different tokens on each process, split layers the same. "
                "Experts are most of a mixture's weights: give --expert-model-parallel-size, and "
                "--zero-3-memory-optimization for the rest",
            ),
            Rule(
                switch="pipeline",
                reason="give --zero-3-memory-optimization instead of pipeline stages",
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
            text="Split the training state over the processes? (no, 1, 2, 3: ZeRO's stages)",
            answers={str(stage): {name: True} for name, stage in list(_ZERO_STAGES.items())[:3]},
        ),
    ),
    Switch(
        name="hybrid sharding",
        turned_on_by=("hybrid_sharding_size",),
        needs=(
            Rule(
                switch="ZeRO",
                reason="it says how many processes split the state, and without them nothing is "
                "split",
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
            # Weights that live elsewhere must come block by block, as ZeRO-3's do.
            Implication(
                setting="cpu_offload",
                sets="zero_3_memory_optimization",
                to=True,
                unless=(*_ZERO_STAGES, "deepspeed"),
            ),
        ),
    ),
    # Its hooks stand on parameters, which must stay the same from here on.
    Switch(
        name="data parallelism",
        options=("data_parallel",),
        module="gradient_sums",
        moment="made",
        done_by_deepspeed=True,
    ),
    # Around everything: the whole model runs under autocast.
    Switch(
        name="precision",
        turned_on_by=("mixed_precision", "fp16", "bf16"),
        kinds={"fp16": "fp16", "bf16": "bf16"},
        module="autocast",
        moment="made",
        implies=(
            Implication(setting="fp16", sets="mixed_precision", to="fp16"),
            Implication(setting="bf16", sets="mixed_precision", to="bf16"),
        ),
        verification="left out",
        why="a choice of precision changes numbers by design; both runs are in fp32",
        question=Question(
            flag="mixed_precision",
            text="Mixed precision? (no, fp16, bf16)",
            answers={kind: {"mixed_precision": kind} for kind in ("fp16", "bf16")},
        ),
        exact="no: a choice of precision",
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
        exact="no: a choice of precision",
    ),
)
