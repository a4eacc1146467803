"""Fill in what follows from the user's settings, as a new ``Settings``.

``resolve`` is the only entry point: it checks, derives and raises all problems together.
"""

from __future__ import annotations

import os

from rapidformer.config.batches import find_ramp_problems
from rapidformer.config.deepspeed import merge_deepspeed
from rapidformer.config.schema import get_settings
from rapidformer.config.settings import Settings
from rapidformer.config.switches import SWITCHES, Implication, to_flag
from rapidformer.config.validate import find_problems, has_sound_batches, loads_from_hub
from rapidformer.errors import ConfigurationError

_BLACK_BOX_MICRO_BATCH = 8
_BLACK_BOX_LEARNING_RATE = 5e-5
_BLACK_BOX_EPOCHS = 3


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
        args = args.replace(
            "derived: the launcher's LOCAL_RANK", local_rank=int(os.environ.get("LOCAL_RANK", "0"))
        )
    if args.data_path is None and args.data_dir is None and args.data_name is not None:
        # The documentation also shows `--dataset-name glue` on its own.
        args = args.replace(
            "derived: --data-name without --data-path", data_path=args.data_name, data_name=None
        )
    if args.load is None and args.pretrained_model_name_or_path is not None:
        # Users' scripts call `from_pretrained(args.load)`.
        args = args.replace(
            "derived: --pretrained-model-name-or-path", load=args.pretrained_model_name_or_path
        )
    if loads_from_hub(args):
        # It starts the run, it does not resume one.
        args = args.replace(
            "derived: --load", pretrained_model_name_or_path=args.load, load=args.load
        )
    if args.train_tokens is not None and args.seq_length is not None:
        args = args.replace(
            "derived: --train-tokens / --seq-length",
            train_samples=-(-args.train_tokens // args.seq_length),
        )
    if args.task is not None and args.user_script is None:
        args = _derive_black_box_defaults(args)
    return args


def _derive_black_box_defaults(args: Settings) -> Settings:
    reason = "derived: the task's default"
    if args.task == "pretraining":
        # Length and learning rate depend on the corpus, which only the user knows.
        return args
    if args.lr is None:
        args = args.replace(reason, lr=_BLACK_BOX_LEARNING_RATE)
    if args.epochs is None and args.train_iters is None and args.train_samples is None:
        args = args.replace(reason, epochs=_BLACK_BOX_EPOCHS)
    return args


def _derive_switches(args: Settings) -> Settings:
    for switch in SWITCHES:
        for implication in switch.implies:
            if _follows(implication, args):
                source = f"derived: {to_flag(implication.setting)}"
                args = args.replace(source, **{implication.sets: implication.to})
    return args


def _follows(implication: Implication, args: Settings) -> bool:
    def is_set(name: str) -> bool:
        # "auto" leaves it open: `--mixed-precision --fp16` means fp16.
        return getattr(args, name) not in (get_settings()[name].default, "auto")

    preventing = (implication.sets, *implication.unless)
    return is_set(implication.setting) and not any(map(is_set, preventing))


SMALLER_MICRO_BATCH = "derived: --global-batch-size / ranks"
"""The source of a micro-batch size that was reduced: the given one exceeds the global batch."""


def _derive_batches(args: Settings, problems: list[str]) -> Settings:
    """Global batch = micro-batch x data-parallel ranks x accumulation: two give the third."""
    replicas = args.data_parallel_size
    micro, total = args.micro_batch_size, args.global_batch_size
    steps = args.gradient_accumulation_steps
    reason = "derived: global = micro x ranks x accumulation"
    if micro is None and total is not None:
        unit = replicas * (steps or 1)
        if total % unit:
            problems.append(_explain_division(total, unit, f"{unit} micro-batches per step"))
            return args
        micro = total // unit
    if micro is None:
        micro = _BLACK_BOX_MICRO_BATCH
    if total is None:
        total = micro * replicas * (steps or 1)
    if steps is None and micro * replicas > total:
        if total % replicas:
            rule = f"{replicas} data-parallel ranks"
            problems.append(_explain_division(total, replicas, rule))
            return args
        micro = total // replicas
        args = args.replace(SMALLER_MICRO_BATCH, micro_batch_size=micro)
    unit = micro * replicas
    if total % unit and steps is None:
        rule = f"--micro-batch-size {micro} x {replicas} data-parallel ranks = {unit}"
        problems.append(_explain_division(total, unit, rule))
        return args
    if steps is not None and total != unit * steps:
        problems.append(
            f"--global-batch-size {total} and --gradient-accumulation-steps {steps} disagree: "
            f"--micro-batch-size {micro} x {replicas} ranks x {steps} = {unit * steps}. "
            "Give only one of them."
        )
        return args
    args = args.replace(
        reason,
        micro_batch_size=micro,
        global_batch_size=total,
        gradient_accumulation_steps=total // unit,
    )
    if args.eval_micro_batch_size is None:
        args = args.replace("derived: --micro-batch-size", eval_micro_batch_size=micro)
    return args


def _explain_division(total: int, unit: int, rule: str) -> str:
    below, above = total // unit * unit, (total // unit + 1) * unit
    choices = f"{below} or {above}" if below else f"{above}"
    return f"--global-batch-size {total} is not a multiple of {rule}: use {choices}."
