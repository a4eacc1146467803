"""Other systems' names for our settings: one table, and no dialect code anywhere else.

A name on the left works wherever one of ours does: as a flag (with dashes), as a YAML key and as an
attribute of the arguments.
"""

from __future__ import annotations

ALIASES: dict[str, str] = {
    # Spellings found in Rapidformer's own documentation
    "dataset_path": "data_path",
    "dataset_name": "data_name",
    # Megatron
    "encoder_seq_length": "seq_length",
    "vocab": "vocab_file",
    "merges": "merge_file",
    "moe_aux_loss_coeff": "moe_loss_coeff",
    "norm_epsilon": "layernorm_epsilon",
    "recompute_activations": "checkpoint_activations",
    "lr_scheduler_type": "lr_decay_style",
    "use_distributed_optimizer": "zero_1_memory_optimization",
    "valid_batch_size": "eval_micro_batch_size",
    # Megatron-DeepSpeed
    "cpu_optimizer": "cpu_offload",
    "remote_device": "cpu_offload",
    # Hugging Face
    "learning_rate": "lr",
    "num_train_epochs": "epochs",
    "max_steps": "train_iters",
    "per_device_train_batch_size": "micro_batch_size",
    "per_device_eval_batch_size": "eval_micro_batch_size",
    "warmup_steps": "lr_warmup_iters",
    "warmup_ratio": "lr_warmup_fraction",
    "max_grad_norm": "clip_grad",
    "adam_epsilon": "adam_eps",
    "logging_steps": "log_interval",
    "eval_steps": "eval_interval",
    "save_steps": "save_interval",
    "output_dir": "save",
    "overwrite_output_dir": "overwrite",
    "resume_from_checkpoint": "load",
    "model_name_or_path": "pretrained_model_name_or_path",
    "dataloader_num_workers": "num_workers",
    "gradient_checkpointing": "checkpoint_activations",
    "torch_compile": "compile",
    "max_seq_length": "seq_length",
    "full_determinism": "deterministic",
    "logging_dir": "tensorboard_dir",
    "optim": "optimizer",
    "label_smoothing_factor": "label_smoothing",
    "logging_strategy": "log_strategy",
    "evaluation_strategy": "eval_strategy",
    "logging_first_step": "log_first_step",
    "length_column_name": "length_column",
    # FlagAI
    "batch_size": "micro_batch_size",
    "warm_up": "lr_warmup_fraction",
    "warm_up_iters": "lr_warmup_iters",
    "save_dir": "save",
    "load_dir": "load",
    "model_parallel_size": "tensor_model_parallel_size",
    "model_paralle_size": "tensor_model_parallel_size",
    "optimizer_type": "optimizer",
    "deepspeed_config": "deepspeed",
    "master_ip": "master_addr",
    "num_nodes": "nnodes",
    "num_gpus": "nproc_per_node",
    # MindFormers
    "model_parallel": "tensor_model_parallel_size",
    "pipeline_stage": "pipeline_model_parallel_size",
    "pipeline_parallel": "pipeline_model_parallel_size",
    "micro_batch_num": "gradient_accumulation_steps",
    "sink_size": "log_interval",
    "expert_parallel": "expert_model_parallel_size",
    "context_parallel": "context_parallel_size",
}

# Other words for a value, by setting; None unsets it.
VALUES: dict[str, dict[str, bool | str | None]] = {
    "cpu_offload": {"cpu": True, "none": False},  # --remote-device cpu
    # Hugging Face
    "optimizer": {"adamw_torch": "adamw", "adamw_torch_fused": "adamw"},
    "lr_decay_style": {"constant_with_warmup": "constant"},
    "train_iters": {"-1": None},
    "save": {"none": None},  # save nothing; without --save, a run gets a default folder
}

# Switches that another system's scripts give bare, next to the flag with the value.
BARE_BESIDE: dict[str, str] = {
    "--deepspeed": "--deepspeed-config",  # DeepSpeed's launcher
}

# Accepted so that existing scripts run; a warning says once that they have no effect, and why.
WITHOUT_EFFECT: dict[str, str] = {
    "DDP_impl": "gradients are always reduced by torch.distributed",
    "no_contiguous_buffers_in_local_ddp": "gradients are always reduced by torch.distributed",
    "distributed_backend": "NCCL is used on GPUs and gloo on CPUs",
    "lazy_mpu_init": "process groups are always set up when the engine is created",
    "use_cpu_initialization": "weights are always initialised on the CPU",
    "no_masked_softmax_fusion": "fused attention comes from torch",
    "no_bias_gelu_fusion": "--compile does the fusion",
    "no_bias_dropout_fusion": "--compile does the fusion",
    "no_query_key_layer_scaling": "attention is always computed with an fp32 softmax",
    "tensorboard_queue_size": "TensorBoard is written at every log interval",
    "override_lr_scheduler": "current settings always override those of a checkpoint",
    "use_checkpoint_lr_scheduler": "current settings always override those of a checkpoint",
    "recompute_method": "every block is recomputed by itself; --recompute-interval leaves some out",
    "recompute_num_layers": "--recompute-interval leaves blocks out",
    "activations_checkpoint_method": "every block is recomputed by itself",
    "activations_checkpoint_num_layers": "every block is recomputed by itself",
    "distribute_checkpointed_activations": "--sequence-parallel splits stored activations",
    "tensorboard_log_interval": "TensorBoard is written at every log interval",
    "log_timers_to_tensorboard": "step times are always logged",
    "log_batch_size_to_tensorboard": "the batch size is always in arguments.yaml",
    "log_validation_ppl_to_tensorboard": "every metric of an evaluation is always logged",
    "log_memory_to_tensorboard": "memory is always logged on a GPU",
    "no_log_learnig_rate_to_tensorboard": "the learning rate is always logged",
    "no_log_loss_scale_to_tensorboard": "the loss scale is always logged",
    "overlapping_eval": "evaluation sees every example once",
    "app_name": "--task overrides it; without --task, it chooses the task",
    "sink_mode": "sink_size says how often the host looks at a run",
}

# Flags of Megatron's scripts and the vendor's that would change the result, and why they cannot.
REFUSED: dict[str, str] = {
    "mlp_type": "--num-experts makes a layer a mixture of experts",
    "router_type": "tokens go to the experts with the highest scores",
    "top_k_linear_strategy": "use --moe-router-topk",
    "moe_linear_layer_type": "experts are plain feed-forward blocks",
    "use_expert_residual_network": "a residual expert is not built in",
    "disable_moe_token_dropping": "tokens are never dropped; leave it out",
    "moe_min_capacity": "experts have no capacity limit, so no token is dropped",
    "moe_train_capacity_factor": "experts have no capacity limit, so no token is dropped",
    "moe_eval_capacity_factor": "experts have no capacity limit, so no token is dropped",
    "log_params_norm": "the norm of the weights is not logged; grad_norm is",
    "log_num_zeros_in_grad": "zeros in gradients are not counted; grad_norm is logged",
}
