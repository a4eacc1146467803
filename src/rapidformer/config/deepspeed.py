"""Merge a DeepSpeed JSON file with our own settings, so that a run has one value of each.

Values in both places must agree; a value in one place is used; ``"auto"`` (a Hugging Face
convention) is filled from ours. A value from the file becomes an ordinary setting of the run, with
the file as its origin, so batches, schedule and reports see it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from rapidformer.config.deepspeed_file import (
    AUTO,
    OUR_OPTIMIZERS,
    Section,
    find_value,
    get_zero_stage,
    load_deepspeed_file,
    modernize,
    name_deepspeed_file,
)
from rapidformer.config.settings import Settings
from rapidformer.config.switches import get_switch, to_flag
from rapidformer.errors import ConfigurationError, count

_Pairs = tuple[tuple[str, str, Callable[[Any], Any]], ...]
# Keys of the file that mean the same as a setting of ours.
_PAIRS: _Pairs = (
    ("train_batch_size", "global_batch_size", int),
    ("train_micro_batch_size_per_gpu", "micro_batch_size", int),
    ("gradient_accumulation_steps", "gradient_accumulation_steps", int),
    ("gradient_clipping", "clip_grad", float),
    ("optimizer.params.weight_decay", "weight_decay", float),
    ("optimizer.params.eps", "adam_eps", float),
    ("optimizer.params.momentum", "sgd_momentum", float),
    ("scheduler.params.warmup_num_steps", "lr_warmup_iters", int),
    ("scheduler.params.total_num_steps", "lr_decay_iters", int),
    ("tensor_parallel.autotp_size", "tensor_model_parallel_size", lambda size: max(int(size), 1)),
)
_FP16_PAIRS: _Pairs = (
    ("fp16.initial_scale_power", "initial_loss_scale", lambda power: 2.0 ** int(power)),
    ("fp16.loss_scale_window", "loss_scale_window", int),
    ("fp16.hysteresis", "hysteresis", int),
    ("fp16.min_loss_scale", "min_loss_scale", float),
    ("fp16.loss_scale", "loss_scale", lambda scale: float(scale) or None),
)
# Schedule settings that the file's scheduler has no key for.
_SCHEDULE = ("lr_decay_style", "min_lr", "lr_warmup_fraction", "lr_warmup_samples")
# DeepSpeed's own defaults that differ from ours.
_OPTIMIZER_DEFAULTS = {"weight_decay": 0.0, "sgd_momentum": 0.0}
# Sections that change the result or need another way of running, each with the reason.
_REFUSED = {
    "amp": "apex has been discontinued: use fp16, bf16 or --mixed-precision",
    "autotuning": "run DeepSpeed's own tuner first, then use its result",
    "compression_training": "it changes the model",
    "curriculum_learning": "it changes the data",
    "data_efficiency": "it changes the data",
    "elasticity": "use --max-restarts; a checkpoint resumes on any number of ranks",
    "hybrid_engine": "it is for reinforcement learning",
    "pipeline": "use --pipeline-model-parallel-size without --deepspeed",
    "progressive_layer_drop": "it changes the model",
    "sparse_attention": "it changes the model",
    "sparse_gradients": "it drops small gradients",
}


def merge_deepspeed(args: Settings) -> tuple[Settings, list[str]]:
    """The settings with the file's values merged in, and every disagreement."""
    if args.deepspeed is None:
        return args, []
    try:
        content = load_deepspeed_file(args.deepspeed)
    except ConfigurationError as reason:
        return args, reason.problems
    merge = _Merge(args, content, name_deepspeed_file(args.deepspeed))
    merge.take_all()
    return merge.args, [*merge.problems, *_find_refused(merge.args, content, merge.file)]


@dataclass
class _Merge:
    """The settings merged so far, and the problems found on the way."""

    args: Settings
    content: Section
    file: str
    problems: list[str] = field(default_factory=list)

    def take_all(self) -> None:
        self._take_optimizer()
        pairs = _PAIRS if not find_value(self.content, "fp16.enabled") else _PAIRS + _FP16_PAIRS
        for key, name, convert in pairs:
            self._take(key, name, convert)
        # The scheduler's rate overrides the optimizer's, as in DeepSpeed.
        peak = "scheduler.params.warmup_max_lr"
        key = peak if find_value(self.content, peak) is not None else "optimizer.params.lr"
        self._take(key, "lr", float)
        betas = find_value(self.content, "optimizer.params.betas")
        if isinstance(betas, list) and len(betas) == 2:
            for place, beta in enumerate(betas):
                self._put(f"optimizer.params.betas[{place}]", f"adam_beta{place + 1}", beta, beta)
        self._take_precision()
        self._compare_stages()
        self._compare_batches()
        kind = find_value(self.content, "scheduler.type")
        is_open = find_value(self.content, "scheduler.params.warmup_num_steps") is None
        for name in _SCHEDULE if kind else ():
            if self.args.is_given(name) and not (is_open and name == "lr_warmup_fraction"):
                self.problems.append(
                    f"{_describe(self.args, name)} and scheduler {kind} in {self.file} both set "
                    "the learning rate: give only one of them."
                )

    def _take(self, key: str, name: str, convert: Callable[[Any], Any]) -> None:
        theirs = find_value(self.content, key)
        if theirs is None:
            return
        try:
            value = convert(theirs)
        except (TypeError, ValueError):
            self.problems.append(f"{key} in {self.file} must be a number, got {theirs!r}.")
            return
        self._put(key, name, value, theirs)

    def _put(self, key: str, name: str, value: Any, theirs: Any) -> None:
        if self.args.is_given(name):
            if getattr(self.args, name) != value:
                self._disagree(name, f"{key} {theirs}")
        else:
            self.args = self.args.replace(f"{self.file}: {key}", **{name: value})

    def _disagree(self, name: str, theirs: str) -> None:
        self.problems.append(
            f"{_describe(self.args, name)} and {theirs} in {self.file} disagree: "
            "make them equal, or give only one of them."
        )

    def _take_optimizer(self) -> None:
        kind = find_value(self.content, "optimizer.type")
        if kind is None:
            return
        ours = OUR_OPTIMIZERS.get(str(kind).lower())
        same = {"adam": "adamw"}.get(self.args.optimizer, self.args.optimizer)
        if self.args.is_given("optimizer") and same != {"adam": "adamw"}.get(ours or "", ours):
            self._disagree("optimizer", f"optimizer.type {kind}")
        elif ours is not None and not self.args.is_given("optimizer"):
            self.args = self.args.replace(f"{self.file}: optimizer.type", optimizer=ours)
        parameters = self.content["optimizer"].get("params") or {}
        for name, value in _OPTIMIZER_DEFAULTS.items():
            if name.removeprefix("sgd_") not in parameters and not self.args.is_given(name):
                source = f"{self.file}: DeepSpeed's default"
                self.args = self.args.replace(source, **{name: value})

    def _take_precision(self) -> None:
        kinds = [k for k in ("fp16", "bf16") if find_value(modernize(self.content), f"{k}.enabled")]
        if find_value(self.content, "torch_autocast.enabled"):
            half = str(find_value(self.content, "torch_autocast.dtype") or "bfloat16")
            kinds.append("fp16" if half.endswith("float16") and "b" not in half else "bf16")
        if len(set(kinds)) > 1:
            self.problems.append(f"{self.file} turns on {' and '.join(kinds)}: keep only one.")
            return
        flag = next((name for name in ("fp16", "bf16") if getattr(self.args, name)), None)
        asked, name = flag or self.args.mixed_precision, flag or "mixed_precision"
        is_off = asked is None and self.args.is_given("mixed_precision")
        if kinds and (is_off or asked not in (None, AUTO, kinds[0])):
            self._disagree(name, f"{kinds[0]}.enabled true")
        elif kinds:
            source = f"{self.file}: {kinds[0]}.enabled"
            self.args = self.args.replace(source, mixed_precision=kinds[0])
        elif asked and find_value(modernize(self.content), f"{asked}.enabled") is False:
            self._disagree(name, f"{asked}.enabled false")

    def _compare_stages(self) -> None:
        stage = get_zero_stage(self.args, self.content)
        for name, ours in get_switch("ZeRO").kinds.items():
            if getattr(self.args, name) and ours != stage:
                self._disagree(name, f"zero_optimization.stage {stage}")
        device = find_value(modernize(self.content), "zero_optimization.offload_optimizer.device")
        if self.args.cpu_offload and device == "none":
            self._disagree("cpu_offload", "zero_optimization.offload_optimizer.device none")

    def _compare_batches(self) -> None:
        """Reported here in the file's terms; mistakes in our own flags alone are reported later."""
        keys, names = zip(*((key, name) for key, name, _ in _PAIRS[:3]), strict=True)
        total, micro, steps = (getattr(self.args, name) for name in names)
        is_in_file = any(find_value(self.content, key) is not None for key in keys)
        if not is_in_file or None in (total, micro, steps):
            return
        replicas = self.args.data_parallel_size
        if total != micro * replicas * steps:
            given = ", ".join(_describe(self.args, name) for name in names)
            ranks = count(replicas, "data-parallel rank")
            self.problems.append(
                f"{given} disagree: {micro} x {ranks} x {steps} = {micro * replicas * steps}. "
                "Give only two of the three."
            )


def _find_refused(args: Settings, content: Section, file: str) -> Iterator[str]:
    for key, reason in _REFUSED.items():
        section = content.get(key)
        is_on = section.get("enabled", True) if isinstance(section, dict) else section
        if is_on:
            yield f"{key} in {file} is not supported: {reason}."
    stage = get_zero_stage(args, content)
    if stage not in (0, 1, 2, 3):
        yield f"zero_optimization.stage {stage} in {file} must be 0, 1, 2 or 3."
    if stage == 3 and args.tensor_model_parallel_size > 1:
        yield (
            f"{_describe(args, 'tensor_model_parallel_size')} with zero_optimization.stage 3 in "
            f"{file}: tensor parallelism under DeepSpeed needs stage 1 or 2. Use one of them, or "
            "--zero-3-memory-optimization without --deepspeed."
        )
    if stage == 3 and args.compile:
        yield (
            f"{_describe(args, 'compile')} with zero_optimization.stage 3 in {file}: DeepSpeed's "
            "gathering breaks every block into pieces that compile for minutes. Use stage 2, or "
            "--zero-3-memory-optimization without --deepspeed."
        )
    if stage and args.optimizer in ("adafactor", "muon"):
        yield (
            f"--optimizer {args.optimizer} needs whole matrices, but DeepSpeed's ZeRO-{stage} "
            "splits them: use adam or sgd, or stage 0."
        )
    if args.cpu_offload and not stage:
        yield (
            f"{_describe(args, 'cpu_offload')} needs a ZeRO stage: set zero_optimization.stage "
            f"to 1, 2 or 3 in {file}, or remove it there and add "
            "--zero-1-memory-optimization, -2- or -3-."
        )
    for part in ("offload_optimizer", "offload_param"):
        if find_value(content, f"zero_optimization.{part}.device") == "nvme":
            yield f"zero_optimization.{part}.device nvme in {file} is not supported: use cpu."
    kind = str(find_value(content, "optimizer.type") or "").lower()
    if kind.startswith(("onebit", "zeroone")):
        yield f"optimizer.type {kind} in {file} rounds gradients to one bit: use AdamW."
    if find_value(content, "data_types.grad_accum_dtype") == "fp32" and stage == 1:
        yield f"data_types.grad_accum_dtype fp32 in {file} needs zero_optimization.stage 2 or 3."
    if find_value(content, "gradient_allreduce_op") not in (None, "mean"):
        yield f"gradient_allreduce_op in {file} must be mean: the engine averages itself."


def _describe(args: Settings, name: str) -> str:
    """A setting the way the user gave it."""
    source, value, flag = args.sources.get(name, "default"), getattr(args, name), to_flag(name)
    if source == "command line" and value is True:
        return flag
    return f"{flag} {value}" + (f" ({source})" if source not in ("default", "command line") else "")
