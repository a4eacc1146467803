"""The rules between ``--streaming`` and settings that must know all rows."""

from __future__ import annotations

from collections.abc import Iterator

from rapidformer.config.settings import Settings
from rapidformer.config.switches import to_flag

_NEEDS_ALL = {
    "group_by_length": "it sorts all rows by length; --tokens-per-micro-batch works",
    "validation_split": "the rows that it holds out are drawn from all: give --valid-data",
    "max_train_samples": "say how long to train with --train-iters",
    "precompute_reference": "it needs rows with numbers",
    "make_vocabulary": "the characters of all transcripts are not known: use the model's tokenizer",
}


def find_stream_problems(args: Settings) -> Iterator[str]:
    """Every rule that a stream breaks, except that of its length."""
    if not args.streaming:
        return
    if args.task == "pretraining":
        yield "--streaming: pre-training files are mapped, not loaded. Leave it out."
    for name, reason in _NEEDS_ALL.items():
        if getattr(args, name, None):
            yield f"{to_flag(name)} cannot be combined with --streaming: {reason}."


def find_length_problems(args: Settings) -> Iterator[str]:
    """What is missing for a run whose data has no known length."""
    if not args.streaming or any((args.train_iters, args.train_samples, args.train_tokens)):
        return
    paths = [args.data_path] if isinstance(args.data_path, str) else args.data_path or ()
    has_list = any(str(path).endswith((".yaml", ".yml")) for path in paths)
    has_several = has_list or len(args.data_weights or ()) > 1
    if has_several or not (args.is_given("epochs") and args.epochs):
        other = "" if has_several else ", or --epochs 1 --lr-decay-style constant for one pass"
        yield f"--streaming: the data has no known length: give --train-iters N{other}."
        return
    decays = args.lr_decay_style in ("linear", "cosine")
    if (decays and not (args.lr_decay_iters or args.lr_decay_samples)) or args.lr_warmup_fraction:
        yield (
            f"--streaming --epochs {args.epochs:g}: the number of steps is not known, which "
            f"--lr-decay-style {args.lr_decay_style} and --lr-warmup-fraction need: give "
            "--train-iters N, or --lr-decay-style constant (with --lr-warmup-iters)."
        )
    intervals = ("log_interval", "eval_interval", "save_interval")
    for name in (n for n in intervals if 0 < (getattr(args, n) or 1) < 1):
        yield (
            f"{to_flag(name)} {getattr(args, name)} is a share of a number of steps that is not "
            "known: give a number of steps."
        )
    if args.epochs % 1:
        yield f"--epochs {args.epochs:g}: a stream has no middle: give whole passes."
