"""Settings that a run does not use because the script brings its own optimizer, schedule or loop.

A script may read a setting itself (``AdamW(lr=args.lr)``). So its source is searched for
``.lr`` and ``getattr(..., "lr")`` before ``--lr`` is said to have no effect.
"""

from __future__ import annotations

import ast
import functools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rapidformer.config import Settings
from rapidformer.config.switches import to_flag
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


def warn_about_unused_settings(args: Settings, *, has_guard: bool, **script: Any) -> None:
    """Say which settings have no effect, since the script brings these parts itself."""
    parts = list_own_parts(**script)
    if "loop" in parts and not has_guard:
        parts["loop"] = (*parts["loop"], "on_bad_loss", "loss_spike_threshold", "max_rollbacks")
    message = describe_unused(args, parts)
    if message is not None:
        get_logger().warning(message)


def list_own_parts(
    *, has_optimizer: bool, schedule: Any, has_loader: bool, has_loop: bool
) -> dict[str, tuple[str, ...]]:
    """What a script brings itself, with the settings that it replaces."""
    # A partial without a length is filled in from the settings.
    keywords = schedule.keywords if isinstance(schedule, functools.partial) else {}
    has_length = schedule is not None and None not in keywords.values()
    parts = {
        "optimizer": OPTIMIZER if has_optimizer else (),
        "schedule": SCHEDULE if schedule is not None else (),
        "DataLoader": LOADER if has_loader else (),
        "loop": LOOP + (LENGTH if has_length else ()) if has_loop else (),
    }
    return {what: names for what, names in parts.items() if names}


def describe_unused(args: Settings, made_by_script: dict[str, tuple[str, ...]]) -> str | None:
    """One sentence about every setting without effect; None if there is none.

    ``made_by_script`` maps what the script brings itself to the settings that describe ours.
    """
    given = {
        what: [name for name in names if args.is_changed(name)]
        for what, names in made_by_script.items()
    }
    if getattr(sys.modules.get("__main__"), "__file__", None) is None:
        return None  # a notebook: what its cells read cannot be searched
    read = _find_attributes() if any(given.values()) else set()
    parts = []
    for what, names in given.items():
        flags = [to_flag(name) for name in names if name not in read]
        if flags:
            parts.append(f"{', '.join(flags)} (your script has its own {what})")
    if not parts:
        return None
    return f"no effect here: {'; '.join(parts)}."


def _find_attributes() -> set[str]:
    """Names of all attributes that the script and the modules next to it read."""
    return {name for path in _list_sources() for name in _read_attributes(path)}


def _list_sources() -> Iterator[Path]:
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    if main is None:
        return
    # A script may be a link: its modules are next to the link or next to its target.
    folders = {Path(main).resolve().parent, Path(main).parent.resolve()}
    # Resolved once per folder: a process has thousands of modules.
    resolve = functools.cache(lambda folder: Path(folder).resolve())
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file and file.endswith(".py") and resolve(os.path.dirname(file)) in folders:  # noqa: PTH120
            yield Path(file)


def _read_attributes(path: Path) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name):
                yield name
            case ast.Call(ast.Name("getattr"), [_, ast.Constant(str(name)), *_]):
                yield name
