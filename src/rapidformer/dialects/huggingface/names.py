"""The names of ``transformers.TrainingArguments`` (5.17), and what each does here."""

from __future__ import annotations

from rapidformer.foreign_names import ForeignName, honoured, ignored, mapped, refused

_HUB = "used by push_to_hub()"
_TRACKIO = "pass transformers' TrackioCallback in callbacks= to use Trackio"
_DDP = "gradients are reduced by our own hooks, not by DistributedDataParallel"
_WORKERS = "the loader chooses it"

HUGGING_FACE: dict[str, ForeignName] = {
    "output_dir": mapped("save", "an earlier run in that folder moves to its `previous/`"),
    # ---- length, learning rate, optimizer
    "per_device_train_batch_size": mapped("micro_batch_size"),
    "num_train_epochs": mapped("epochs", "may be a fraction"),
    "max_steps": honoured("-1 means that num_train_epochs decides", "train_iters"),
    "learning_rate": mapped("lr"),
    "lr_scheduler_type": honoured(
        "all but reduce_lr_on_plateau and greedy, which look at metrics", "lr_decay_style"
    ),
    "lr_scheduler_kwargs": honoured("passed to transformers' get_scheduler"),
    "warmup_steps": honoured("below 1, a fraction of the run", "lr_warmup_iters"),
    "optim": honoured(
        "adamw_torch(_fused), adafactor, sgd, adagrad and rmsprop, all from torch; pass any other "
        "in optimizers=(optimizer, None)",
        "optimizer",
    ),
    "optim_args": refused("pass your own optimizer in optimizers=(optimizer, None)"),
    "weight_decay": mapped("weight_decay", "not applied to biases and norms (one dimension)"),
    "adam_beta1": mapped("adam_beta1"),
    "adam_beta2": mapped("adam_beta2"),
    "adam_epsilon": mapped("adam_eps"),
    "optim_target_modules": refused("GaLore and APOLLO optimizers are not built in"),
    "gradient_accumulation_steps": mapped("gradient_accumulation_steps"),
    "average_tokens_across_devices": ignored(
        "gradients are always those of the mean over all labels of the global batch"
    ),
    "max_grad_norm": mapped("clip_grad"),
    "label_smoothing_factor": mapped("label_smoothing"),
    # ---- precision and memory
    "bf16": mapped("bf16"),
    "fp16": mapped("fp16"),
    "bf16_full_eval": ignored("evaluation uses the precision of training"),
    "fp16_full_eval": ignored("evaluation uses the precision of training"),
    "tf32": honoured("sets torch's matmul precision"),
    "gradient_checkpointing": mapped("checkpoint_activations"),
    "gradient_checkpointing_kwargs": ignored("recomputation is always non-reentrant"),
    "torch_compile": mapped("compile", "compiles each block, not the whole model"),
    "torch_compile_backend": honoured("implies torch_compile", "compile_backend"),
    "torch_compile_mode": refused("blocks are compiled in torch's default mode"),
    "use_liger_kernel": refused("torch_compile fuses the same operations"),
    "liger_kernel_config": refused("torch_compile fuses the same operations"),
    "use_cache": honoured("sets model.config.use_cache during training"),
    "neftune_noise_alpha": mapped("neftune_noise_alpha"),
    "torch_empty_cache_steps": ignored("emptying the allocator's cache only slows a run down"),
    "auto_find_batch_size": refused(
        "a batch size found by trial changes the run; set per_device_train_batch_size and "
        "gradient_accumulation_steps"
    ),
    # ---- logging
    "logging_strategy": mapped("log_strategy"),
    "logging_steps": mapped("log_interval", "below 1, a fraction of the run"),
    "logging_first_step": mapped("log_first_step"),
    "log_on_each_node": ignored("only rank 0 logs"),
    "logging_nan_inf_filter": ignored("a NaN loss stops the run"),
    "include_num_input_tokens_seen": ignored("metrics.jsonl has tokens_per_second in every line"),
    "log_level": honoured('"passive" means info', "log_level"),
    "log_level_replica": ignored("only rank 0 logs"),
    "disable_tqdm": honoured("True: log lines instead of a progress bar", "progress"),
    "report_to": honoured("transformers' own integrations, as callbacks"),
    "run_name": honoured("read by the integrations of report_to"),
    "project": honoured("read by the integrations of report_to"),
    "trackio_space_id": ignored(_TRACKIO),
    "trackio_bucket_id": ignored(_TRACKIO),
    "trackio_static_space_id": ignored(_TRACKIO),
    # ---- evaluation
    "eval_strategy": mapped("eval_strategy"),
    "eval_steps": honoured(
        "below 1, a fraction of the run; default: logging_steps", "eval_interval"
    ),
    "eval_delay": mapped("eval_delay"),
    "per_device_eval_batch_size": mapped("eval_micro_batch_size"),
    "prediction_loss_only": honoured("evaluate() returns only the loss"),
    "eval_on_start": mapped("eval_on_start"),
    "eval_do_concat_batches": honoured("False: compute_metrics gets a list of batches"),
    "eval_use_gather_object": ignored("objects and tensors are both gathered"),
    "eval_accumulation_steps": ignored("predictions leave the device after every batch"),
    "include_for_metrics": honoured('"inputs" and "loss" reach compute_metrics'),
    "batch_eval_metrics": honoured("compute_metrics is called per batch with compute_result"),
    # ---- saving
    "save_only_model": honoured("checkpoints without optimizer and random states"),
    "save_strategy": mapped("save_strategy"),
    "save_steps": mapped("save_interval", "below 1, a fraction of the run"),
    "save_on_each_node": ignored("a run has one folder, on a file system shared by all nodes"),
    "save_total_limit": mapped("save_total_limit", "the best checkpoint is kept as well"),
    "enable_jit_checkpoint": ignored("the launcher restarts a run from its last checkpoint"),
    "push_to_hub": honoured("pushes at the end of train()"),
    "hub_token": honoured(_HUB),
    "hub_private_repo": honoured(_HUB),
    "hub_model_id": honoured(_HUB),
    "hub_strategy": ignored("the model is pushed once, at the end"),
    "hub_always_push": ignored("the model is pushed once, at the end"),
    "hub_revision": honoured(_HUB),
    "load_best_model_at_end": mapped("load_best_model_at_end"),
    "metric_for_best_model": mapped("metric_for_best_model"),
    "greater_is_better": mapped("greater_is_better"),
    "ignore_data_skip": refused(
        "a resumed run continues at the exact sample where it stopped, without reading the data "
        "before it"
    ),
    "restore_callback_states_from_checkpoint": honoured(
        "the state of transformers' ExportableState is in each checkpoint's trainer_state.json"
    ),
    # ---- reproducibility, device
    "full_determinism": mapped("deterministic"),
    "seed": mapped("seed"),
    "data_seed": mapped("data_seed"),
    "use_cpu": honoured("same as device cpu", "device"),
    "accelerator_config": ignored("Accelerate is not used; batches are always even"),
    "parallelism_config": honoured(
        "tp_size, cp_size or sp_size, and dp_shard_size (ZeRO-3); an object or a dictionary"
    ),
    # ---- data
    "dataloader_drop_last": honoured("the last, smaller batch of training is dropped", "keep_last"),
    "dataloader_num_workers": mapped("num_workers"),
    "dataloader_pin_memory": ignored("memory is always pinned if there is a GPU"),
    "dataloader_persistent_workers": ignored(_WORKERS),
    "dataloader_prefetch_factor": ignored(_WORKERS),
    "dataloader_multiprocessing_context": ignored(_WORKERS),
    "dataloader_in_order": ignored("the order of samples is part of a run and never changes"),
    "remove_unused_columns": honoured("by the signature of the model's forward"),
    "label_names": honoured("the keys of a batch that are labels"),
    "train_sampling_strategy": honoured(
        "random, sequential or group_by_length; batch_rebalance means group_by_length",
        "dataloader_type",
    ),
    "length_column_name": mapped("length_column"),
    # ---- several processes
    "ddp_find_unused_parameters": ignored(_DDP),
    "ddp_bucket_cap_mb": ignored(_DDP),
    "ddp_broadcast_buffers": ignored(_DDP),
    "ddp_static_graph": ignored(_DDP),
    "ddp_backend": ignored("NCCL is used on GPUs and gloo on CPUs"),
    "ddp_timeout": honoured("in seconds", "distributed_timeout_minutes"),
    "fsdp": honoured("full_shard is ZeRO-3, shard_grad_op ZeRO-2; offload, hybrid_shard"),
    "fsdp_config": honoured(
        "reshard_after_forward, cpu_offload and activation_checkpointing; the model's plan says "
        "what to wrap"
    ),
    "deepspeed": honoured("a JSON file or a dictionary", "deepspeed"),
    # ---- the rest
    "debug": ignored("`rapidformer verify` compares a run with one process"),
    "skip_memory_metrics": ignored("memory is in every log line of a GPU run"),
    "do_train": honoured("read by scripts, not by the Trainer"),
    "do_eval": honoured("read by scripts, not by the Trainer"),
    "do_predict": honoured("read by scripts, not by the Trainer"),
    "resume_from_checkpoint": honoured("read by scripts, which pass it to train()"),
    "local_rank": ignored("the launcher's LOCAL_RANK is read"),
}

# As flags and YAML keys: the names above that are a setting of ours, and these.
HUGGING_FACE_FLAGS: dict[str, ForeignName] = {
    name: row
    for name, row in HUGGING_FACE.items()
    if row.outcome == "mapped" and row.setting != name
} | {
    "max_steps": mapped("train_iters"),
    "warmup_steps": mapped("lr_warmup_iters"),
    "warmup_ratio": mapped("lr_warmup_fraction"),
    "eval_steps": mapped("eval_interval"),
    "overwrite_output_dir": mapped("overwrite"),
    "resume_from_checkpoint": mapped("load"),
    "model_name_or_path": mapped("pretrained_model_name_or_path"),
    "max_seq_length": mapped("seq_length"),
    "logging_dir": mapped("tensorboard_dir"),
    "optim": mapped("optimizer"),
    "evaluation_strategy": mapped("eval_strategy"),
}
HUGGING_FACE_VALUES: dict[str, dict[str, bool | str | None]] = {
    "optimizer": {"adamw_torch": "adamw", "adamw_torch_fused": "adamw"},
    "lr_decay_style": {"constant_with_warmup": "constant"},
    "train_iters": {"-1": None},
}
