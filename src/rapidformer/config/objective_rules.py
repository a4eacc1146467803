"""The rules between the settings of learning from preferences and from rewards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rapidformer.config.layout_rules import AXES_OF_A_SAMPLE
from rapidformer.config.objective_sections import PreferenceArguments
from rapidformer.config.settings import Settings
from rapidformer.config.switches import to_flag
from rapidformer.nearest import suggest

LOSSES = ("sigmoid", "ipo", "hinge", "robust", "apo_zero", "simpo", "orpo", "kto")
GRPO_LOSSES = ("dapo", "bnpo", "grpo", "dr_grpo")
_OTHER_NAMES = {"dpo": "sigmoid", "cdpo": "sigmoid"}
_SMOOTHED = ("sigmoid", "robust", "simpo")
_WITHOUT_SMOOTHING = ("reward", "distillation", "grpo", "embedding", "reranking")
_WITHOUT_SUMS = ("simpo", "orpo")
_NO_ANSWERS_YET = {
    "simpo": "--loss simpo has none", "orpo": "--loss orpo has none",
    "kto": "--loss kto asks it about prompts with the answers of others",
}  # fmt: skip


def find_objective_problems(args: Settings) -> Iterator[str]:
    """Every rule that the settings of what is learnt break."""
    if args.label_smoothing and args.task in _WITHOUT_SMOOTHING:
        yield f"--label-smoothing has no effect with --task {args.task}: leave it out."
    if args.task in ("preference", "reward"):
        yield from _check_pairs(args)
    if args.task == "image_text" and args.packing:
        yield (
            "--packing: --task image_text keeps each conversation in a row of its own, with its "
            "images. Leave it out; --group-by-length saves padding."
        )
    if args.task == "preference":
        yield from _check_loss(args, LOSSES)
        yield from _check_preference(args, args.loss or LOSSES[0])
    if args.task == "grpo":
        yield from _check_loss(args, GRPO_LOSSES)
        yield from _check_grpo(args)
    elif args.task is not None and args.updates_per_generation > 1:
        yield f"--updates-per-generation is for --task grpo, not for {args.task}: leave it out."


def _check_loss(args: PreferenceArguments, known: Sequence[str]) -> Iterator[str]:
    if args.loss is not None and args.loss not in known:
        near = suggest(_OTHER_NAMES.get(args.loss, args.loss), known)
        yield f"--loss {args.loss}: use one of {', '.join(known)}.{near}"


def _check_pairs(args: Settings) -> Iterator[str]:
    if args.packing:
        yield (
            f"--packing: --task {args.task} keeps the answers of a pair in rows of their own, and "
            "padding is not computed anyway (--dynamic-shape). Leave it out."
        )
    if args.train_on_prompts:
        yield f"--train-on-prompts: --task {args.task} compares answers. Leave it out."


def _check_preference(args: Settings, loss: str) -> Iterator[str]:
    if args.beta is not None and args.beta <= 0:
        yield f"--beta must be positive, got {args.beta}."
    if args.sft_weight and loss in ("orpo", "kto"):
        why = "has a likelihood term of its own" if loss == "orpo" else "has no chosen answers"
        yield f"--sft-weight {args.sft_weight}: --loss {loss} {why}. Leave it out."
    if args.precompute_reference and loss in _NO_ANSWERS_YET:
        yield (
            f"--precompute-reference asks the reference before training, and "
            f"{_NO_ANSWERS_YET[loss]}. Leave it out."
        )
    sizes = (args.micro_batch_size, args.gradient_accumulation_steps or 1, args.world_size)
    size = args.global_batch_size or (1 if sizes == (1, 1, 1) else None)
    if loss == "kto" and size == 1:
        yield (
            "--loss kto compares prompts with the answers of others in the global batch: use a "
            "--global-batch-size of at least 2, not 1."
        )
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
    if args.length_normalized is False and loss in _WITHOUT_SUMS:
        yield f"--no-length-normalized: --loss {loss} is one of means over tokens. Leave it out."
    if args.length_normalized and loss == "kto":
        yield "--length-normalized: --loss kto is one of sums over tokens. Leave it out."


def _check_grpo(args: Settings) -> Iterator[str]:
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
