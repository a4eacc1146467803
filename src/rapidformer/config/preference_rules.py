"""The rules between the settings of learning from preferences."""

from __future__ import annotations

from collections.abc import Iterator

from rapidformer.config.settings import Settings
from rapidformer.nearest import suggest

LOSSES = ("sigmoid", "ipo", "hinge", "robust", "apo_zero", "simpo", "orpo", "kto")
_SMOOTHED = ("sigmoid", "robust", "simpo")
_ALWAYS_NORMALIZED = ("simpo", "orpo")


def find_preference_problems(args: Settings) -> Iterator[str]:
    """Every rule that the settings of --task preference or reward break."""
    if args.task not in ("preference", "reward"):
        return
    if args.packing:
        yield (
            f"--packing: --task {args.task} keeps the answers of a pair in rows of their own, and "
            "padding is not computed anyway (--dynamic-shape). Leave it out."
        )
    if args.train_on_prompts:
        yield f"--train-on-prompts: --task {args.task} compares answers. Leave it out."
    if args.task == "reward" and args.center_rewards_coefficient < 0:
        yield (
            "--center-rewards-coefficient must not be negative, got "
            f"{args.center_rewards_coefficient}."
        )
    if args.task != "preference":
        return
    loss = args.loss or "sigmoid"
    if loss not in LOSSES:
        yield f"--loss {loss}: use one of {', '.join(LOSSES)}.{suggest(loss, LOSSES)}"
        return
    if args.beta is not None and args.beta <= 0:
        yield f"--beta must be positive, got {args.beta}."
    for name in ("sft_weight", "desirable_weight", "undesirable_weight"):
        if getattr(args, name) < 0:
            yield f"--{name.replace('_', '-')} must not be negative, got {getattr(args, name)}."
    if args.sft_weight and loss in ("orpo", "kto"):
        why = "has a likelihood term of its own" if loss == "orpo" else "has no chosen answers"
        yield f"--sft-weight {args.sft_weight}: --loss {loss} {why}. Leave it out."
    if args.label_smoothing and loss not in _SMOOTHED:
        yield (
            f"--label-smoothing is part of --loss {', '.join(_SMOOTHED)}, not of {loss}: leave it "
            "out."
        )
    if loss == "robust" and args.label_smoothing >= 0.5:
        yield (
            f"--label-smoothing {args.label_smoothing} with --loss robust must be below 0.5: at "
            "most half of the pairs may be labelled the wrong way round."
        )
    if args.length_normalized is False and loss in _ALWAYS_NORMALIZED:
        yield f"--no-length-normalized: --loss {loss} is one of means over tokens. Leave it out."
    if args.length_normalized and loss == "kto":
        yield "--length-normalized: --loss kto is one of sums over tokens. Leave it out."
