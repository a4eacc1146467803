"""Other systems' names as flags and YAML keys: the tables of all dialects, joined for the parser.

A name works wherever one of ours does: as a flag (with dashes), as a YAML key and as an attribute
of the arguments. Megatron's flags are here since importing ``dialects.megatron`` has an effect.
"""

from __future__ import annotations

from rapidformer.dialects.accelerate.file import translate_file
from rapidformer.dialects.easynlp import APPLICATIONS, EASYNLP, take_user_defined
from rapidformer.dialects.flagai.names import FLAGAI_FLAGS
from rapidformer.dialects.huggingface.names import HUGGING_FACE_FLAGS, HUGGING_FACE_VALUES
from rapidformer.dialects.mindformers.names import MINDFORMERS_FLAGS
from rapidformer.foreign_names import (
    ForeignFlags,
    ForeignName,
    Table,
    find_names,
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

# Spellings found in Rapidformer's own documentation
_DOCUMENTED: dict[str, ForeignName] = {
    "dataset_path": mapped("data_path"),
    "dataset_name": mapped("data_name"),
}
# Megatron and Megatron-DeepSpeed. What is refused would change the result.
_MEGATRON: dict[str, ForeignName] = {
    "encoder_seq_length": mapped("seq_length"),
    "vocab": mapped("vocab_file"),
    "merges": mapped("merge_file"),
    "moe_aux_loss_coeff": mapped("moe_loss_coeff"),
    "norm_epsilon": mapped("layernorm_epsilon"),
    "recompute_activations": mapped("checkpoint_activations"),
    "lr_scheduler_type": mapped("lr_decay_style"),
    "use_distributed_optimizer": mapped("zero_1_memory_optimization"),
    "valid_batch_size": mapped("eval_micro_batch_size"),
    "cpu_optimizer": mapped("cpu_offload"),
    "remote_device": mapped("cpu_offload"),
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
_NAMES: Table = {
    **_DOCUMENTED, **_MEGATRON, **HUGGING_FACE_FLAGS, **FLAGAI_FLAGS, **MINDFORMERS_FLAGS,
    **EASYNLP,
}  # fmt: skip


def _rewrite(words: list[str], problems: list[str]) -> tuple[list[str], dict[str, str]]:
    words, extras = take_user_defined(words, problems)
    return _drop_bare_deepspeed(words), extras


def _drop_bare_deepspeed(words: list[str]) -> list[str]:
    """``--deepspeed --deepspeed-config FILE``, as DeepSpeed's launcher has it, is just the file."""
    has_file = any(word.partition("=")[0] == "--deepspeed-config" for word in words)
    return [
        word
        for place, word in enumerate(words)
        if not (has_file and word == "--deepspeed" and _is_bare(words, place))
    ]


def _is_bare(words: list[str], place: int) -> bool:
    return place + 1 == len(words) or words[place + 1].startswith("--")


FLAGS = ForeignFlags(
    names=_NAMES,
    aliases={name: _NAMES[name].setting for name in find_names(_NAMES, "mapped")},
    values={"cpu_offload": {"cpu": True, "none": False}, **HUGGING_FACE_VALUES},
    tasks={"app_name": APPLICATIONS},
    rewrite=_rewrite,
    read_file=translate_file,
)
