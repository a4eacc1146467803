"""Settings that the user gave and that have no effect: a run starts, and says so."""

from __future__ import annotations

from collections.abc import Iterator

from rapidformer.config.derive import SMALLER_MICRO_BATCH
from rapidformer.config.settings import Settings
from rapidformer.config.switches import SWITCHES, Switch, to_flag
from rapidformer.errors import count

# Settings that only matter together with another one; a switch's are listed in its row.
_ONLY_WITH: dict[str, tuple[str, ...]] = {
    "save": ("overwrite",),
    "load": ("finetune",),
    "lora_rank": ("lora_alpha", "lora_dropout", "lora_target_modules", "use_dora"),
}


def find_idle_settings(args: Settings) -> list[str]:
    """Settings without effect, each with the reason."""
    idle = [
        f"{to_flag(name)} has no effect without {to_flag(needed)}."
        for needed, names in _ONLY_WITH.items()
        for name in names
        if args.is_changed(name) and not getattr(args, needed)
    ]
    for switch in SWITCHES:
        idle += _find_idle_settings_of(switch, args)
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


def _find_idle_settings_of(switch: Switch, args: Settings) -> Iterator[str]:
    """Options of a switch that is off, and a switch without what it needs."""
    names = [name for name in switch.options if args.is_changed(name)]
    if not switch.has_what_it_needs(args):
        names += switch.list_given(args, switch.turned_on_by)
        missing = " or ".join(rule.describe() for rule in switch.needs)
    elif not switch.is_on(args):
        missing = switch.describe()
    else:
        return
    for name in names:
        yield f"{to_flag(name)} has no effect without {missing}."
