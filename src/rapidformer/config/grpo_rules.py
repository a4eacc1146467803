"""The rules between the settings of learning from rewards."""

from __future__ import annotations

from collections.abc import Iterator

from rapidformer.config.layout_rules import AXES_OF_A_SAMPLE
from rapidformer.config.settings import Settings
from rapidformer.config.switches import to_flag
from rapidformer.nearest import suggest

GRPO_LOSSES = ("dapo", "bnpo", "grpo", "dr_grpo")


def find_grpo_problems(args: Settings) -> Iterator[str]:
    """Every rule that the settings of --task grpo break."""
    if args.task not in (None, "grpo") and args.updates_per_generation > 1:
        yield f"--updates-per-generation is for --task grpo, not for {args.task}: leave it out."
    if args.task != "grpo":
        return
    loss = args.loss or GRPO_LOSSES[0]
    if loss not in GRPO_LOSSES:
        yield f"--loss {loss}: use one of {', '.join(GRPO_LOSSES)}.{suggest(loss, GRPO_LOSSES)}"
    if args.beta is not None and args.beta < 0:
        yield f"--beta must not be negative, got {args.beta}."
    if args.num_generations < 2:
        yield (
            f"--num-generations {args.num_generations}: a group needs at least 2 answers to "
            "compare."
        )
    layout = (*AXES_OF_A_SAMPLE, "expert_model_parallel_size")
    split = [to_flag(name) for name in layout if getattr(args, name) > 1]
    if args.deepspeed is not None:
        split.append("--deepspeed")
    if split:
        yield (
            f"--task grpo draws its answers on the GPUs that train, each with the whole model, and "
            f"{' and '.join(split)} splits it: use more data-parallel ranks, with "
            "--zero-3-memory-optimization to save memory. A model that needs more than that needs "
            "an inference server, which rapidformer does not have."
        )
    if args.precompute_reference:
        yield (
            "--precompute-reference needs answers that are known before training, and --task grpo "
            "draws them: leave it out."
        )
    if args.updates_per_generation > 1 and (args.group_by_length or args.tokens_per_micro_batch):
        yield (
            "--updates-per-generation repeats each batch, which --group-by-length and "
            "--tokens-per-micro-batch cannot: give only one of them."
        )
