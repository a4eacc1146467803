"""What follows from the user's settings: ``resolve`` checks, derives and raises all problems."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from rapidformer.config.deepspeed import merge_deepspeed
from rapidformer.config.schema import get_settings
from rapidformer.config.sections import TrainingLengthArguments
from rapidformer.config.settings import Settings
from rapidformer.config.switches import SWITCHES, to_flag
from rapidformer.config.validate import (
    find_problems,
    has_sound_batches,
    list_sampling,
    loads_from_hub,
)
from rapidformer.errors import ConfigurationError, count

_MICRO_BATCH, _LEARNING_RATE, _EPOCHS = 8, 5e-5, 3
"""The defaults of a task without a script."""
_LEARNING_RATES = {"preference": 1e-6, "reward": 1e-4, "grpo": 1e-6}
"""Those of tasks that need another one: the usual ones in their fields."""
SMALLER_MICRO_BATCH = "derived: --global-batch-size / ranks"
"""The source of a micro-batch size that was reduced: the given one exceeds the global batch."""


def is_launched() -> bool:
    """Whether a launcher (ours or torchrun) started this process."""
    return all(name in os.environ for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))


def resolve(args: Settings, *, world_size: int = 1, rank: int = 0) -> Settings:
    """Check the settings for this many ranks and fill in what follows from them."""
    args = args.replace("derived: the ranks of this run", world_size=world_size, rank=rank)
    args, disagreements = merge_deepspeed(args)
    problems = [*disagreements, *find_problems(args)]
    if not problems:
        args = _derive_switches(_derive_names(args))
    if has_sound_batches(args) and not disagreements:
        args = _derive_batches(args, problems)
        problems += find_ramp_problems(args)
    if problems:
        raise ConfigurationError(problems)
    return args


def _derive_names(args: Settings) -> Settings:
    if args.local_rank is None or "LOCAL_RANK" in os.environ:
        rank = int(os.environ.get("LOCAL_RANK", "0"))
        args = args.replace("derived: the launcher's LOCAL_RANK", local_rank=rank)
    if args.data_path is None and args.data_dir is None and args.data_name is not None:
        # The documentation also shows `--dataset-name glue` on its own.
        source = "derived: --data-name without --data-path"
        args = args.replace(source, data_path=args.data_name, data_name=None)
    model = args.pretrained_model_name_or_path
    if args.load is None and model is not None:
        # Users' scripts call `from_pretrained(args.load)`.
        args = args.replace("derived: --pretrained-model-name-or-path", load=model)
    if loads_from_hub(args):
        # It starts the run, it does not resume one.
        args = args.replace("derived: --load", pretrained_model_name_or_path=args.load)
    if drawn := list_sampling(args):
        args = args.replace(f"derived: {to_flag(drawn[0])}", do_sample=True)
    if args.train_tokens is not None and args.seq_length is not None:
        samples = -(-args.train_tokens // args.seq_length)
        args = args.replace("derived: --train-tokens / --seq-length", train_samples=samples)
    # Length and learning rate of pre-training depend on the corpus, which only the user knows.
    if args.task not in (None, "pretraining") and args.user_script is None:
        reason = "derived: the task's default"
        if args.lr is None:
            args = args.replace(reason, lr=_LEARNING_RATES.get(args.task, _LEARNING_RATE))
        if args.epochs is None and args.train_iters is None and args.train_samples is None:
            args = args.replace(reason, epochs=_EPOCHS)
    return args


def _derive_switches(args: Settings) -> Settings:
    for rule in (rule for switch in SWITCHES for rule in switch.implies):
        # "auto" leaves it open: `--mixed-precision --fp16` means fp16.
        is_set, *prevented = (
            getattr(args, name) not in (get_settings()[name].default, "auto")
            for name in (rule.setting, rule.sets, *rule.unless)
        )
        if is_set and not any(prevented):
            args = args.replace(f"derived: {to_flag(rule.setting)}", **{rule.sets: rule.to})
    return args


def _derive_batches(args: Settings, problems: list[str]) -> Settings:
    """Global batch = micro-batch x data-parallel ranks x accumulation: two give the third."""
    replicas = args.data_parallel_size
    micro, total = args.micro_batch_size, args.global_batch_size
    steps, ranks = args.gradient_accumulation_steps, count(replicas, "data-parallel rank")
    if micro is None and total is not None:
        unit = replicas * (steps or 1)
        if total % unit:
            problems.append(_explain_division(total, unit, f"{unit} micro-batches per step"))
            return args
        micro = total // unit
    if micro is None:
        micro = _MICRO_BATCH
    if total is None:
        total = micro * replicas * (steps or 1)
    if steps is None and micro * replicas > total:
        if total % replicas:
            problems.append(_explain_division(total, replicas, ranks))
            return args
        micro = total // replicas
        args = args.replace(SMALLER_MICRO_BATCH, micro_batch_size=micro)
    unit = micro * replicas
    if total % unit and steps is None:
        rule = f"--micro-batch-size {micro} x {ranks} = {unit}"
        problems.append(_explain_division(total, unit, rule))
        return args
    if steps is not None and total != unit * steps:
        problems.append(
            f"--global-batch-size {total} and --gradient-accumulation-steps {steps} disagree: "
            f"--micro-batch-size {micro} x {count(replicas, 'rank')} x {steps} = {unit * steps}. "
            "Give only one of them."
        )
        return args
    sizes = {"micro_batch_size": micro, "global_batch_size": total}
    sizes["gradient_accumulation_steps"] = total // unit
    args = args.replace("derived: global = micro x ranks x accumulation", **sizes)
    if args.eval_micro_batch_size is None:
        args = args.replace("derived: --micro-batch-size", eval_micro_batch_size=micro)
    return args


def _explain_division(total: int, unit: int, rule: str) -> str:
    below, above = total // unit * unit, (total // unit + 1) * unit
    choices = f"{below} or {above}" if below else f"{above}"
    return f"--global-batch-size {total} is not a multiple of {rule}: use {choices}."


@dataclass(frozen=True, kw_only=True)
class BatchSchedule:
    """The global batch as a function of the samples consumed.

    ``--rampup-batch-size 32 32 10000`` with ``--global-batch-size 128`` starts with 32 samples per
    update and adds 32 after each third of the first 10,000 samples.
    """

    final: int
    start: int
    increment: int = 0
    ramp_samples: int = 0

    @property
    def is_constant(self) -> bool:
        return self.start == self.final

    def get_size(self, consumed: int) -> int:
        """Samples in the update that begins after this many samples."""
        if self.is_constant or consumed >= self.ramp_samples:
            return self.final
        steps = consumed * self._num_increments // self.ramp_samples
        return self.start + steps * self.increment

    def count_samples(self, updates: int) -> int:
        """Samples taken by the first `updates` updates."""
        consumed = 0
        for size, length in self._iterate_stages():
            taken = updates if length is None else min(updates, length)
            consumed += taken * size
            updates -= taken
            if not updates:
                break
        return consumed

    def count_updates(self, samples: int) -> int:
        """The fewest updates that take this many samples."""
        done = 0
        for size, length in self._iterate_stages():
            needed = -(-samples // size)
            if length is None or needed <= length:
                return done + max(needed, 0)
            done += length
            samples -= length * size
        raise AssertionError("the last stage has no end")

    @property
    def _num_increments(self) -> int:
        return (self.final - self.start) // self.increment

    def _iterate_stages(self) -> Iterator[tuple[int, int | None]]:
        """Sizes in order, each with its number of updates; the last has no end."""
        consumed = 0
        while (size := self.get_size(consumed)) != self.final:
            stage = (size - self.start) // self.increment
            # The first whole number of samples at which `get_size` moves past this stage.
            end = -(-self.ramp_samples * (stage + 1) // self._num_increments)
            length = -(-(end - consumed) // size)
            yield size, length
            consumed += length * size
        yield self.final, None


def get_batch_schedule(args: TrainingLengthArguments) -> BatchSchedule:
    """The schedule described by checked settings."""
    final = args.global_batch_size or 1
    if args.rampup_batch_size is None:
        return BatchSchedule(final=final, start=final)
    start, increment, samples = args.rampup_batch_size
    return BatchSchedule(final=final, start=start, increment=increment, ramp_samples=samples)


def find_ramp_problems(args: Settings) -> Iterator[str]:
    """What is wrong with ``--rampup-batch-size``, once the other batch sizes are known."""
    ramp = args.rampup_batch_size
    if ramp is None:
        return
    given = f"--rampup-batch-size {' '.join(map(str, ramp))}"
    if len(ramp) != 3:
        yield f"{given} needs three numbers: the first batch size, the increment and the samples."
        return
    start, increment, _ = ramp
    final = args.global_batch_size or 1
    if min(ramp) < 1:
        yield f"{given}: every number must be at least 1."
        return
    if start > final or (final - start) % increment:
        yield (
            f"{given}: {start} must grow to --global-batch-size {final} in whole steps of "
            f"{increment}."
        )
    unit = (args.micro_batch_size or 1) * args.data_parallel_size
    if start % unit or (start != final and increment % unit):
        yield (
            f"{given}: the first batch size and the increment must be multiples of "
            f"--micro-batch-size {args.micro_batch_size} x "
            f"{count(args.data_parallel_size, 'data-parallel rank')} = {unit}."
        )
    if args.train_iters is None and args.train_samples is None and args.train_tokens is None:
        yield f"{given} needs --train-samples, --train-tokens or --train-iters."
