"""Other systems' names as flags and YAML keys: the tables of all dialects, joined for the parser.

A name works wherever one of ours does: as a flag (with dashes), as a YAML key and as an attribute
of the arguments. Megatron's flags are here since importing ``dialects.megatron`` has an effect, and
EasyNLP's: keys of ``--user-defined-parameters`` that are a setting of ours, in any dialect, set it
(a flag on the command line wins); ``get_args().key`` gives the text of any other.
"""

from __future__ import annotations

from rapidformer.config.reading import split_words
from rapidformer.config.schema import get_settings
from rapidformer.dialects.accelerate.file import translate_file
from rapidformer.dialects.flagai.names import FLAGAI_FLAGS
from rapidformer.dialects.huggingface.names import HUGGING_FACE_FLAGS, HUGGING_FACE_VALUES
from rapidformer.dialects.mindformers.names import MINDFORMERS_FLAGS
from rapidformer.foreign_names import (
    ForeignFlags,
    ForeignName,
    Table,
    find_names,
    honoured,
    ignored,
    mapped,
    refused,
)

_REDUCED = "gradients are always reduced by torch.distributed"
_FUSED = "--compile does the fusion"
_BOARD = "TensorBoard is written at every log interval"
_CURRENT = "current settings always override those of a checkpoint"
_BLOCKS = "every block is recomputed by itself"
_CAPACITY = "experts have no capacity limit, so no token is dropped"

# Spellings found in Rapidformer's own documentation, and those of Megatron and Megatron-DeepSpeed.
_OTHER_SPELLINGS = {
    "dataset_path": "data_path", "dataset_name": "data_name", "encoder_seq_length": "seq_length",
    "vocab": "vocab_file", "merges": "merge_file", "moe_aux_loss_coeff": "moe_loss_coeff",
    "norm_epsilon": "layernorm_epsilon", "recompute_activations": "checkpoint_activations",
    "lr_scheduler_type": "lr_decay_style",
    "use_distributed_optimizer": "zero_1_memory_optimization",
    "valid_batch_size": "eval_micro_batch_size", "cpu_optimizer": "cpu_offload",
    "remote_device": "cpu_offload",
}  # fmt: skip
# Other flags of Megatron and Megatron-DeepSpeed. What is refused would change the result.
_MEGATRON: dict[str, ForeignName] = {
    "DDP_impl": ignored(_REDUCED),
    "no_contiguous_buffers_in_local_ddp": ignored(_REDUCED),
    "distributed_backend": ignored("NCCL is used on GPUs and gloo on CPUs"),
    "lazy_mpu_init": ignored("process groups are always set up when the engine is created"),
    "use_cpu_initialization": ignored("weights are always initialised on the CPU"),
    "no_masked_softmax_fusion": ignored("fused attention comes from torch"),
    "no_bias_gelu_fusion": ignored(_FUSED),
    "no_bias_dropout_fusion": ignored(_FUSED),
    "no_query_key_layer_scaling": ignored("attention is always computed with an fp32 softmax"),
    "tensorboard_queue_size": ignored(_BOARD),
    "override_lr_scheduler": ignored(_CURRENT),
    "use_checkpoint_lr_scheduler": ignored(_CURRENT),
    "recompute_method": ignored(f"{_BLOCKS}; --recompute-interval leaves some out"),
    "recompute_num_layers": ignored("--recompute-interval leaves blocks out"),
    "activations_checkpoint_method": ignored(_BLOCKS),
    "activations_checkpoint_num_layers": ignored(_BLOCKS),
    "distribute_checkpointed_activations": ignored("--sequence-parallel splits stored activations"),
    "tensorboard_log_interval": ignored(_BOARD),
    "log_timers_to_tensorboard": ignored("step times are always logged"),
    "log_batch_size_to_tensorboard": ignored("the batch size is always in arguments.yaml"),
    "log_validation_ppl_to_tensorboard": ignored("every metric of an evaluation is always logged"),
    "log_memory_to_tensorboard": ignored("memory is always logged on a GPU"),
    "no_log_learnig_rate_to_tensorboard": ignored("the learning rate is always logged"),
    "no_log_loss_scale_to_tensorboard": ignored("the loss scale is always logged"),
    "overlapping_eval": ignored("evaluation sees every example once"),
    "mlp_type": refused("--num-experts makes a layer a mixture of experts"),
    "router_type": refused("tokens go to the experts with the highest scores"),
    "top_k_linear_strategy": refused("use --moe-router-topk"),
    "moe_linear_layer_type": refused("experts are plain feed-forward blocks"),
    "use_expert_residual_network": refused("a residual expert is not built in"),
    "disable_moe_token_dropping": refused("tokens are never dropped; leave it out"),
    "moe_min_capacity": refused(_CAPACITY),
    "moe_train_capacity_factor": refused(_CAPACITY),
    "moe_eval_capacity_factor": refused(_CAPACITY),
    "log_params_norm": refused("the norm of the weights is not logged; grad_norm is"),
    "log_num_zeros_in_grad": refused("zeros in gradients are not counted; grad_norm is logged"),
}
_USER_DEFINED = "--user-defined-parameters"
# The spelling of EasyNLP's scripts.
_EASYNLP_SPELLINGS = {"pretrain_model_name_or_path": "pretrained_model_name_or_path"}
_EASYNLP: dict[str, ForeignName] = {
    "user_defined_parameters": honoured("key=value pairs: settings, and names of the script's own"),
    "app_name": ignored("--task overrides it; without --task, it chooses the task"),
}
_APPLICATIONS = {
    "text_classify": "sequence_classification", "text_match": "sequence_classification",
    "sequence_labeling": "token_classification",
    "machine_reading_comprehension": "question_answering", "sequence_generation": "seq2seq_lm",
    "text_generation": "causal_lm", "language_modeling": "pretraining",
}  # fmt: skip
"""EasyNLP's applications, as tasks."""
_NAMES: Table = {
    **{name: mapped(setting) for name, setting in _OTHER_SPELLINGS.items()}, **_MEGATRON,
    **HUGGING_FACE_FLAGS, **FLAGAI_FLAGS, **MINDFORMERS_FLAGS, **_EASYNLP,
}  # fmt: skip


def _take_user_defined(words: list[str], problems: list[str]) -> tuple[list[str], dict[str, str]]:
    """The words with the settings among the parameters in front, and the script's own ones."""
    places = (i for i, word in enumerate(words) if word.partition("=")[0] == _USER_DEFINED)
    place = next(places, None)
    if place is None:
        return words, {}
    _, equals, text = words[place].partition("=")
    after = place + 1
    if not equals:
        text, after = "".join(words[after : after + 1]), after + 1
    settings, flags = get_settings(), []
    extras = {"user_defined_parameters": text}
    for part in split_words(text, problems, _USER_DEFINED):
        key, equals, value = part.partition("=")
        if not equals or not key:
            problems.append(f"{_USER_DEFINED}: {part!r} must be key=value.")
            continue
        key = key.replace("-", "_")
        name = _EASYNLP_SPELLINGS.get(key, FLAGS.aliases.get(key, key))
        if name in settings:
            flags += [settings[name].flag, value]
        else:
            extras[key] = value
    return [*flags, *words[:place], *words[after:]], extras


def _rewrite(words: list[str], problems: list[str]) -> tuple[list[str], dict[str, str]]:
    words, extras = _take_user_defined(words, problems)
    if any(word.partition("=")[0] == "--deepspeed-config" for word in words):
        # `--deepspeed --deepspeed-config FILE`, as DeepSpeed's launcher has it, is just the file.
        pairs = zip(words, [*words[1:], "--"], strict=True)
        words = [word for word, after in pairs if word != "--deepspeed" or after[:2] != "--"]
    return words, extras


FLAGS = ForeignFlags(
    names=_NAMES,
    aliases={name: _NAMES[name].setting for name in find_names(_NAMES, "mapped")},
    values={"cpu_offload": {"cpu": True, "none": False}, **HUGGING_FACE_VALUES},
    tasks={"app_name": _APPLICATIONS},
    rewrite=_rewrite,
    read_file=translate_file,
)
