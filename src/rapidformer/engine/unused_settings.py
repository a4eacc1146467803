"""Settings that were given and have no effect: a run starts, and says so.

Also those that a script replaces by its own optimizer, schedule or loop. It may read a setting
itself (``AdamW(lr=args.lr)``), so its source is searched for ``.lr`` and ``getattr(..., "lr")``
before ``--lr`` is said to have no effect.
"""

from __future__ import annotations

import ast
import functools
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rapidformer.config import Settings
from rapidformer.config.derive import SMALLER_MICRO_BATCH
from rapidformer.config.switches import SWITCHES, Situation, Switch, to_flag
from rapidformer.errors import count
from rapidformer.log import get_logger

OPTIMIZER = (
    "optimizer", "lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "sgd_momentum",
    "optimizer_state_dtype",
)  # fmt: skip
SCHEDULE = (
    "lr_decay_style", "min_lr", "lr_decay_iters", "lr_decay_samples", "lr_warmup_iters",
    "lr_warmup_fraction", "lr_warmup_samples",
)  # fmt: skip
LOADER = (
    "micro_batch_size", "tokens_per_micro_batch", "num_workers", "keep_last", "group_by_length",
    "dataloader_type",
)  # fmt: skip
LENGTH = ("epochs", "train_iters", "train_samples", "train_tokens")
LOOP = (
    "eval_interval", "eval_strategy", "eval_on_start", "eval_delay", "eval_iters",
    "eval_micro_batch_size", "exit_interval", "exit_duration_in_mins", "metric_for_best_model",
    "load_best_model_at_end", "early_stopping_patience", "early_stopping_threshold",
    "label_smoothing", "neftune_noise_alpha", "save_interval", "save_strategy", "log_interval",
    "log_strategy", "progress", "tensorboard_dir",
)  # fmt: skip
GUARD = ("on_bad_loss", "loss_spike_threshold", "max_rollbacks")


def warn_about_unused_settings(
    args: Settings,
    *,
    has_optimizer: bool,
    schedule: Any,
    has_loader: bool,
    has_loop: bool,
    has_guard: bool,
) -> None:
    """Say which settings have no effect, since the script brings these parts itself."""
    # A partial without a length is filled in from the settings.
    keywords = schedule.keywords if isinstance(schedule, functools.partial) else {}
    has_length = schedule is not None and None not in keywords.values()
    loop = (*LOOP, *(LENGTH if has_length else ()), *(() if has_guard else GUARD))
    parts = {
        "optimizer": OPTIMIZER if has_optimizer else (),
        "schedule": SCHEDULE if schedule is not None else (),
        "DataLoader": LOADER if has_loader else (),
        "loop": loop if has_loop else (),
    }
    changed = {part: list(filter(args.is_changed, names)) for part, names in parts.items()}
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    if main is None or not any(changed.values()):
        return  # in a notebook, what its cells read cannot be searched
    if not get_logger().isEnabledFor(logging.WARNING):
        return  # the sources need not be searched for what nobody is told
    read = {name for path in _list_sources(main) for name in _find_attributes(_read(path))}
    sentences = []
    for part, names in changed.items():
        flags = [to_flag(name) for name in names if name not in read]
        if flags:
            sentences.append(f"{', '.join(flags)} (your script has its own {part})")
    if sentences:
        get_logger().warning(f"no effect here: {'; '.join(sentences)}.")


def _list_sources(main: str) -> Iterator[Path]:
    """The script and the modules next to it."""
    # A script may be a link: its modules are next to the link or next to its target.
    path = Path(main).absolute()
    folders = {f"{folder}{os.sep}" for folder in (path.parent, path.resolve().parent)}
    # As texts: a process has thousands of modules.
    for file in [getattr(module, "__file__", None) for module in list(sys.modules.values())]:
        if file and file.endswith(".py") and file[: file.rfind(os.sep) + 1] in folders:
            yield Path(file)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


@functools.cache  # a process may compose many models
def _find_attributes(source: str) -> frozenset[str]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return frozenset()
    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name):
                names.add(name)
            case ast.Call(ast.Name("getattr"), [_, ast.Constant(str(name)), *_]):
                names.add(name)
    return frozenset(names)


# Settings that only matter together with another one; a switch's are listed in its row.
_ONLY_WITH: dict[str, tuple[str, ...]] = {
    "save": ("overwrite",),
    "load": ("finetune",),
    "lora_rank": ("lora_alpha", "lora_dropout", "lora_target_modules", "use_dora"),
}


def find_idle_settings(args: Settings, situation: Situation | None = None) -> list[str]:
    """Settings without effect, each with the reason."""
    idle = [
        f"{to_flag(name)} has no effect without {to_flag(needed)}."
        for needed, names in _ONLY_WITH.items()
        for name in names
        if args.is_changed(name) and not getattr(args, needed)
    ]
    for switch in SWITCHES:
        idle += _find_idle_settings_of(switch, args, situation or Situation())
    if args.keeps_nothing:
        idle += [
            f"{to_flag(name)} has no effect with --save none."
            for name in ("save_interval", "save_total_limit")
            if args.is_changed(name)
        ]
    if args.on_bad_loss != "rollback" and args.is_changed("max_rollbacks"):
        idle.append("--max-rollbacks has no effect without --on-bad-loss rollback.")
    if args.lr_decay_style == "constant" and args.is_changed("min_lr"):
        idle.append("--min-lr has no effect with --lr-decay-style constant.")
    if args.train_iters is not None and args.is_changed("epochs"):
        idle.append(f"--epochs has no effect: --train-iters {args.train_iters} overrides it.")
    if args.sources.get("micro_batch_size") == SMALLER_MICRO_BATCH:
        ranks = count(args.data_parallel_size, "data-parallel rank")
        idle.append(
            f"--micro-batch-size is too large for --global-batch-size {args.global_batch_size} on "
            f"{ranks}: {args.micro_batch_size} is used."
        )
    return idle


def _find_idle_settings_of(switch: Switch, args: Settings, situation: Situation) -> Iterator[str]:
    """Options of a switch that is off, and one that was asked for and cannot be applied."""
    names = [name for name in switch.options if args.is_changed(name)]
    if not switch.has_what_it_needs(args, situation):
        names += switch.list_given(args, switch.turned_on_by)
        missing = " or ".join(rule.describe() for rule in switch.needs)
    elif not switch.is_on(args):
        missing = switch.describe()
    else:
        obstacle = switch.find_obstacle(args, situation)
        if obstacle is not None and obstacle.if_asked == "warned of" and switch.is_asked(args):
            yield f"{switch.describe(args)} has no effect: {obstacle.reason}."
        return
    for name in names:
        yield f"{to_flag(name)} has no effect without {missing}."
