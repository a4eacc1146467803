"""The rules between settings, each with its numbers and a way out; see ``layout_rules``, too."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rapidformer.config.layout_rules import AXES_OF_A_SAMPLE, find_layout_problems, list_choices
from rapidformer.config.objective_rules import find_objective_problems
from rapidformer.config.schema import get_settings
from rapidformer.config.sections import OptimizerArguments
from rapidformer.config.settings import Settings
from rapidformer.config.stream_rules import find_stream_problems
from rapidformer.config.switches import SWITCHES, to_flag
from rapidformer.config.task_sections import DataArguments, RunArguments
from rapidformer.config.tracker_names import find_tracker_problems
from rapidformer.errors import count
from rapidformer.hub import is_hub_name, is_missing_folder, suggest_path
from rapidformer.strict_json import parse_json

_AT_LEAST_ONE = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "vocab_size",
    "max_position_embeddings", "image_size", "patch_size", "seq_length", "decoder_seq_length",
    "micro_batch_size", "global_batch_size", "gradient_accumulation_steps", "eval_micro_batch_size",
    "train_samples", "train_iters", "save_total_limit", "early_stopping_patience", "nproc_per_node",
    "nnodes", "max_train_samples", "max_eval_samples", "max_predict_samples", "num_beams",
    "max_new_tokens", "n_best", "max_answer_length", "exit_interval", "lr_decay_iters",
    "lr_decay_samples", "preprocessing_workers", "ssh_port", "train_tokens",
    "make_vocab_size_divisible_by", "num_query_groups", "moe_layer_freq", "moe_router_topk",
    "lora_rank", "updates_per_generation", "shuffle_buffer", "mask_time_length",
    "mask_feature_length",
)  # fmt: skip
_INTERVALS = ("eval_interval", "save_interval", "log_interval")
_POSITIVE = (
    "distributed_timeout_minutes", "neftune_noise_alpha", "lora_alpha", "distillation_temperature",
    "max_audio_seconds", *_INTERVALS,
)  # fmt: skip
_NOT_NEGATIVE = (
    "epochs", "lr", "min_lr", "lr_warmup_iters", "lr_warmup_samples", "weight_decay", "clip_grad",
    "num_workers", "doc_stride", "adam_eps", "sgd_momentum", "eval_iters", "vocab_extra_ids",
    "moe_loss_coeff", "moe_z_loss_coeff", "max_restarts", "stall_timeout_minutes", "eval_delay",
    "early_stopping_threshold", "max_rollbacks", "clip_epsilon", "clip_epsilon_high",
    "sft_weight", "desirable_weight", "undesirable_weight", "center_rewards_coefficient",
    "eval_generations",
)  # fmt: skip
_FRACTIONS = (
    "lr_warmup_fraction", "mask_prob", "short_seq_prob", "hidden_dropout", "attention_dropout",
    "label_smoothing", "validation_split", "lora_dropout", "adam_beta1", "adam_beta2",
)  # fmt: skip
_SHARES = ("distillation_alpha", "distillation_beta", "mask_time_prob", "mask_feature_prob")
# Settings of which only one may be given.
_SAME = (
    ("lr_warmup_iters", "lr_warmup_fraction", "lr_warmup_samples"),
    ("lr_decay_iters", "lr_decay_samples"),
)
_LENGTHS = ("train_iters", "train_samples", "train_tokens")
_SAMPLING = ("temperature", "top_k", "top_p", "min_p")
# Arguments of apply_chat_template that differ from row to row, or are not the template's.
_SET_BY_CHAT = {"conversation", "messages", "tools", "add_generation_prompt", "tokenize"}


def find_problems(args: Settings) -> list[str]:
    """Every rule that the settings break, in terms of the user's flags."""
    return [
        *_check_ranges(args), *_check_learning_rate(args), *_check_length(args),
        *_check_evaluation(args), *_check_bad_loss(args), *_check_generation(args),
        *find_layout_problems(args), *_check_sizes(args), *_check_pretraining(args),
        *_check_adapters(args), *_check_chat(args), *find_objective_problems(args),
        *_check_run_folder(args), *_check_files(args), *find_tracker_problems(args),
        *find_stream_problems(args),
    ]  # fmt: skip


def has_sound_batches(args: Settings) -> bool:
    """Whether the batch sizes are valid enough to compute with."""
    sizes = (args.micro_batch_size, args.global_batch_size, args.gradient_accumulation_steps)
    axes = [getattr(args, name) for name in AXES_OF_A_SAMPLE]
    is_divided = all(ranks > 0 for ranks in axes) and args.world_size % math.prod(axes) == 0
    return is_divided and all(size is None or size > 0 for size in sizes)


def _check_ranges(args: Settings) -> Iterator[str]:
    # The numbers of switches are all above 0.
    settings, names = get_settings(), [name for switch in SWITCHES for name in switch.settings]
    counts, numbers = ([n for n in names if settings[n].kind is kind] for kind in (int, float))
    yield from _check_each(args, (*_AT_LEAST_ONE, *counts), lambda v: v >= 1, "be at least 1")
    yield from _check_each(args, (*_POSITIVE, *numbers), lambda v: v > 0, "be positive")
    yield from _check_each(args, _NOT_NEGATIVE, lambda v: v >= 0, "not be negative")
    yield from _check_each(args, _FRACTIONS, lambda v: 0 <= v < 1, "be at least 0 and below 1")
    yield from _check_each(args, _SHARES, lambda v: 0 <= v <= 1, "be between 0 and 1")


def list_sampling(args: Settings) -> list[str]:
    """The given settings that mean ``--do-sample``; none if the command line overrides a file's."""
    if not args.do_sample and args.sources.get("do_sample") == "command line":
        return []
    return [name for name in _SAMPLING if getattr(args, name) is not None]


def _check_each(
    args: Settings, names: Iterable[str], is_fine: Callable[[Any], bool], rule: str
) -> Iterator[str]:
    for name in names:
        value = getattr(args, name)
        if value is not None and not is_fine(value):
            what = "be a number" if value != value else rule
            yield f"{to_flag(name)} must {what}, got {value}."


def _check_learning_rate(args: OptimizerArguments) -> Iterator[str]:
    if args.lr is not None and args.min_lr > args.lr >= 0:
        yield f"--min-lr {args.min_lr} is above --lr {args.lr}."
    for names in _SAME:
        yield from _refuse_several([name for name in names if getattr(args, name)])
    if args.lr_decay_iters and 0 < args.lr_decay_iters <= args.lr_warmup_iters:
        yield (
            f"--lr-warmup-iters {args.lr_warmup_iters} must be below "
            f"--lr-decay-iters {args.lr_decay_iters}."
        )


def _refuse_several(names: list[str]) -> Iterator[str]:
    if len(names) > 1:
        flags = " and ".join(map(to_flag, names))
        yield f"{flags} set the same thing: give only one of them."


def _check_length(args: Settings) -> Iterator[str]:
    given = [n for n in _LENGTHS if args.is_given(n) and getattr(args, n) is not None]
    yield from _refuse_several(given)
    if args.train_tokens is not None and args.seq_length is None:
        yield f"--train-tokens {args.train_tokens} needs --seq-length: the tokens per sample."
    limit = args.max_position_embeddings
    if limit is not None and args.seq_length is not None and args.seq_length > limit:
        yield f"--seq-length {args.seq_length} is above --max-position-embeddings {limit}."


def _check_bad_loss(args: Settings) -> Iterator[str]:
    threshold = args.loss_spike_threshold
    if threshold is not None and not threshold > 1:
        yield f"--loss-spike-threshold must be above 1 (a multiple of the median), got {threshold}."
    if args.on_bad_loss == "rollback" and (args.keeps_nothing or args.save_strategy == "no"):
        yield (
            "--on-bad-loss rollback needs checkpoints to return to: leave out --save none and "
            "--save-strategy no, or use --on-bad-loss skip."
        )
    if args.on_bad_loss == "skip" and threshold is not None and args.deepspeed is not None:
        yield (
            "DeepSpeed applies every finite gradient, so --on-bad-loss skip cannot skip spikes "
            "under --deepspeed: use --on-bad-loss rollback, or leave out --loss-spike-threshold."
        )


def _check_evaluation(args: Settings) -> Iterator[str]:
    for name in _INTERVALS:
        interval = getattr(args, name)
        if interval is not None and interval > 1 and interval % 1:
            yield (
                f"{to_flag(name)} must be a whole number of steps, or below 1 for a fraction of "
                f"the run, got {interval}."
            )
    if args.load_best_model_at_end and args.keeps_nothing:
        yield "--load-best-model-at-end needs a run folder: leave out --save none."
    for name in ("early_stopping_patience", "load_best_model_at_end"):
        if getattr(args, name) and args.eval_strategy == "no":
            yield f"{to_flag(name)} needs evaluations, but --eval-strategy is no."
    split = [name for name in AXES_OF_A_SAMPLE if getattr(args, name) > 1]
    if args.label_smoothing and split and args.task != "preference":
        yield (
            f"--label-smoothing needs whole logits, but {to_flag(split[0])} splits them: give only "
            "one of them."
        )


def _check_generation(args: Settings) -> Iterator[str]:
    if args.task is None:
        return  # a script may have flags of these names, with other rules
    counts, shares = ("top_k", "num_return_sequences"), ("top_p", "min_p")
    yield from _check_each(args, counts, lambda v: v >= 1, "be at least 1")
    if args.temperature == 0:
        yield "--temperature 0 would draw nothing: leave it out to get the most likely tokens."
    scales = ("repetition_penalty", *(("temperature",) if args.temperature else ()))
    yield from _check_each(args, scales, lambda v: v > 0, "be positive")
    yield from _check_each(args, shares, lambda v: 0 < v <= 1, "be above 0 and at most 1")
    yield from _check_answers(args)


def _check_answers(args: Settings) -> Iterator[str]:
    """How tokens are chosen, how many answers there are and where they go."""
    beams, answers = args.num_beams, args.num_return_sequences
    refuses = args.is_given("do_sample") and not args.do_sample
    for name in _SAMPLING if refuses else ():
        if getattr(args, name) is not None and args.sources["do_sample"] == args.sources.get(name):
            yield (
                f"{to_flag(name)} {getattr(args, name)} says how to sample, and --no-do-sample not "
                "to: give only one of them."
            )
    if answers > max(beams, 1) and (beams > 1 or not (args.do_sample or list_sampling(args))):
        other = "" if beams > 1 else "--do-sample or "
        reason = f"{beams} beams give {beams}" if beams > 1 else "all answers would be the same"
        yield f"--num-return-sequences {answers} needs {other}--num-beams {answers}: {reason}."
    for name in ("pipeline_model_parallel_size", "context_parallel_size"):
        if args.eval_generations and getattr(args, name) > 1:
            yield f"--eval-generations does not work with {to_flag(name)}: leave one of them out."
    if "" in (args.stop_strings or ()):
        yield "--stop-strings must not be empty: every text contains the empty one."
    for name in ("stream", "chat"):
        if getattr(args, name):
            yield from _check_live_answers(args, to_flag(name))


def _check_live_answers(args: Settings, flag: str) -> Iterator[str]:
    """A terminal shows one answer at a time."""
    for name in ("num_beams", "num_return_sequences"):
        if getattr(args, name) > 1:
            yield (
                f"{flag} prints one answer while it is generated, so it cannot be combined with "
                f"{to_flag(name)} {getattr(args, name)}."
            )
    if args.output is not None:
        yield f"{flag} prints to the terminal: give either {flag} or --output {args.output}."
    ranks = math.prod(getattr(args, name) for name in AXES_OF_A_SAMPLE)
    if ranks > 0 and args.world_size > ranks:
        yield (
            f"{flag} prints one answer at a time, but this run has {args.world_size // ranks} "
            f"data-parallel ranks: start {ranks} with --nproc-per-node {ranks}."
        )


def _check_sizes(args: Settings) -> Iterator[str]:
    heads, groups = args.num_attention_heads, args.num_query_groups
    if args.hidden_size and heads and args.hidden_size % heads:
        yield f"--num-attention-heads {heads} does not divide --hidden-size {args.hidden_size}."
    tensor = args.tensor_model_parallel_size
    if heads and heads % max(tensor, 1):
        yield (
            f"--tensor-model-parallel-size {tensor} does not divide the "
            f"{count(heads, 'attention head')} of --num-attention-heads: use "
            f"{list_choices(heads)}."
        )
    if heads and groups and heads % groups:
        yield f"--num-query-groups {groups} does not divide --num-attention-heads {heads}."


def _check_pretraining(args: Settings) -> Iterator[str]:
    if args.task != "pretraining" or args.user_script is not None:
        return
    if args.seq_length is None:
        yield "--task pretraining needs --seq-length, the tokens per sample."
    if args.data_path is None and args.train_data_path is None:
        yield (
            "--task pretraining needs --data-path, the prefix of .bin and .idx files "
            "(`rapidformer preprocess` writes them), or --train-data-path."
        )
    if args.data_path is not None and args.train_data_path is not None:
        yield "--data-path and --train-data-path exclude each other: give only one of them."
    if args.data_weights is not None:
        yield (
            "--data-weights is not for pre-training: give weights and prefixes by turns, as in "
            "--data-path 0.7 books 0.3 web."
        )


def _check_adapters(args: Settings) -> Iterator[str]:
    if args.lora_rank is not None and args.peft_config is not None:
        yield "--lora-rank and --peft-config exclude each other: give only one of them."
    if args.peft_config is not None:
        yield from _check_peft_config(args.peft_config)
    if args.quantize_base is None:
        return
    given = f"--quantize-base {args.quantize_base}"
    if find_spec("bitsandbytes") is None:
        yield (
            f"{given} needs the package bitsandbytes: pip install bitsandbytes. LoRA also works "
            "without it, on whole weights: leave the flag out."
        )


def _check_run_folder(args: Settings) -> Iterator[str]:
    for name in ("save", "load"):
        if getattr(args, name) == "":
            yield f"{to_flag(name)} is empty: name a folder, or leave the flag out."
    if args.resume and (args.save is None or args.keeps_nothing):
        yield "--resume auto needs --save: the folder tells which run to resume."
    if args.resume and args.overwrite and args.is_given("overwrite"):
        yield "--resume auto and --overwrite contradict each other: give only one of them."


def _check_chat(args: DataArguments) -> Iterator[str]:
    given = args.chat_template_kwargs
    try:
        variables = {} if given is None else parse_json(given)
    except ValueError:
        variables = None
    if not isinstance(variables, dict):
        yield (
            f"--chat-template-kwargs {given}: give a JSON object, such as "
            "'{\"enable_thinking\": false}'."
        )
        return
    for name in sorted(_SET_BY_CHAT & variables.keys()):
        yield f"--chat-template-kwargs: {name} is set for each row and cannot be given."


def _check_peft_config(given: str) -> Iterator[str]:
    """The file must be a configuration at all; peft checks what is in it."""
    if given.lstrip().startswith("{"):  # JSON itself, from Python
        return
    path = Path(given).expanduser()
    if not path.is_file():
        yield f"--peft-config {given} is not a file."
        return
    try:
        content = parse_json(path.read_bytes())
    except (OSError, ValueError) as reason:
        yield f"--peft-config {given} is not JSON: {reason}."
        return
    if not isinstance(content, dict) or "peft_type" not in content:
        yield f"--peft-config {given} lacks peft_type, such as LORA, IA3 or PREFIX_TUNING."


def loads_from_hub(args: Settings) -> bool:
    """Whether ``--load`` names a model or adapter on the Hub to start from."""
    is_start = args.is_given("load") and args.pretrained_model_name_or_path is None
    return is_start and not _is_script(args) and is_hub_name(args.load or "")


def _is_script(args: RunArguments) -> bool:
    return args.user_script is not None or args.task is None


def _check_files(args: Settings) -> Iterator[str]:
    if args.user_script is not None and not Path(args.user_script).is_file():
        yield f"--user-script {args.user_script} is not a file."
    if args.is_given("load") and args.load is not None:
        # A script may mean any Hub name: it calls from_pretrained(args.load) itself.
        may_be_name = _is_script(args) and not is_missing_folder(args.load)
        path = Path(args.load).expanduser()
        if not path.exists() and not may_be_name and not loads_from_hub(args):
            yield f"--load {args.load}: no such folder.{suggest_path(path)}"
    if args.output is not None and not Path(args.output).expanduser().parent.is_dir():
        yield f"--output {args.output}: there is no folder {Path(args.output).parent}."
    for name in ("vocab_file", "merge_file", "tokenizer_model"):
        value = getattr(args, name)
        if value is not None and not Path(value).is_file():
            yield f"{to_flag(name)} {value} is not a file."
