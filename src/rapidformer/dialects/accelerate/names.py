"""The names of Accelerate (1.x, and the older ``fp16=``), and what each does here."""

from __future__ import annotations

from rapidformer.foreign_names import ForeignName, honoured, ignored, mapped, refused

_LOADER = "the engine distributes a DataLoader over the ranks itself"

ACCELERATOR: dict[str, ForeignName] = {
    "device_placement": ignored("batches and the model are always put on the device"),
    "split_batches": honoured("a DataLoader's batch_size is then that of all ranks together"),
    "mixed_precision": honoured('"no", "fp16" or "bf16"', "mixed_precision"),
    "fp16": honoured('the old spelling of mixed_precision="fp16"', "mixed_precision"),
    "gradient_accumulation_steps": honoured(
        "with accumulate(model), the exact mean over all labels of an update, including the "
        "last, smaller update of an epoch; without it, backward() divides by this number and "
        "optimizer.step() decides, as in Accelerate",
        "gradient_accumulation_steps"),
    "gradient_accumulation_plugin": honoured(
        "its num_steps; sync_with_dataloader=False is refused", "gradient_accumulation_steps"),
    "cpu": honoured("same as device cpu", "device"),
    "deepspeed_plugin": honoured(
        "zero_stage is our own ZeRO, with the same result; a file in hf_ds_config runs DeepSpeed"),
    "fsdp_plugin": honoured("ZeRO-3; its cpu_offload", "zero_3_memory_optimization"),
    "parallelism_config": refused(
        "give it to the launcher, with `rapidformer launch --config FILE` or flags"),
    "megatron_lm_plugin": refused("tensor and pipeline parallelism are flags of the launcher"),
    "torch_tp_plugin": refused("tensor parallelism is a flag of the launcher"),
    "step_scheduler_with_optimizer": honoured(
        "False: a prepared scheduler moves by one whenever it is called"),
    "log_with": honoured(
        '"tensorboard": log() writes TensorBoard files, and metrics.jsonl in project_dir; "wandb", '
        '"mlflow", "trackio" and your own "module:Class" as with --report-to; a tracker object '
        "(three methods, or Accelerate's GeneralTracker) is called; other names need Accelerate, "
        'whose class writes to them, and the tracker\'s package; "all": all that are installed'),
    "dynamo_backend": honoured("compiles each block", "compile_backend"),
    "dynamo_plugin": refused("use dynamo_backend"),
    "project_dir": honoured("where log() writes, and save_state() if it names checkpoints itself"),
    "project_config": honoured(
        "its folders, automatic_checkpoint_naming, total_limit and iteration"),
    "logging_dir": honoured("where TensorBoard's files go, instead of project_dir"),
    "dataloader_config": honoured(
        f"its split_batches, data_seed and use_stateful_dataloader; otherwise {_LOADER}"),
    "dispatch_batches": ignored(_LOADER),
    "even_batches": ignored("batches that only keep ranks in step are never counted"),
    "use_seedable_sampler": ignored("the order follows set_seed() on any number of ranks"),
    "rng_types": ignored("each rank has its own random numbers, derived from one seed"),
    "kwargs_handlers": honoured(
        "a ProfileKwargs is for profile(); others tune DistributedDataParallel and GradScaler, "
        "which are not used"),
}  # fmt: skip

DEEPSPEED_PLUGIN: dict[str, ForeignName] = {
    "zero_stage": honoured("our own ZeRO of that stage", "zero_2_memory_optimization"),
    "gradient_accumulation_steps": mapped("gradient_accumulation_steps"),
    "gradient_clipping": mapped("clip_grad"),
    "offload_optimizer_device": honoured('"cpu" or "none"', "cpu_offload"),
    "offload_param_device": honoured('"cpu" or "none"', "cpu_offload"),
    "hf_ds_config": honoured(
        "a DeepSpeed file, its content or an HfDeepSpeedConfig: DeepSpeed runs the training",
        "deepspeed"),
    "zero3_init_flag": ignored("ZeRO-3 shards a model when it is prepared"),
    "zero3_save_16bit_model": ignored("save_model() writes whole weights"),
    "is_train_batch_min": ignored("the batch size is that of the training DataLoader"),
}  # fmt: skip

# Keys of the file that `accelerate config` writes.
ACCELERATE_FILE: dict[str, ForeignName] = {
    "num_processes": honoured("over all machines", "nproc_per_node"),
    "num_machines": mapped("nnodes"),
    "machine_rank": mapped("node_rank"),
    "main_process_ip": mapped("master_addr"),
    "main_process_port": mapped("master_port"),
    "mixed_precision": honoured('"no", "fp16" or "bf16"', "mixed_precision"),
    "fp16": honoured("the old spelling of mixed_precision: fp16", "mixed_precision"),
    "use_cpu": honoured("same as device: cpu", "device"),
    "distributed_type": honoured("MULTI_CPU computes on the CPU, FSDP is ZeRO-3", "device"),
    "deepspeed_config": honoured("as DeepSpeedPlugin's arguments"),
    "fsdp_config": honoured("fsdp_offload_params, fsdp_sharding_strategy (ZeRO-2 or -3)"),
    "gradient_accumulation_steps": mapped("gradient_accumulation_steps"),
    "compute_environment": honoured("only LOCAL_MACHINE"),
    "main_training_function": ignored("the script is run as `python SCRIPT` would run it"),
    "rdzv_backend": ignored("nodes meet at main_process_ip and main_process_port"),
    "same_network": ignored("nodes meet at main_process_ip and main_process_port"),
    **dict.fromkeys(
        ("downcast_bf16", "tpu_env", "tpu_use_cluster", "tpu_use_sudo"), ignored("it is for TPUs")),
    "gpu_ids": ignored("set CUDA_VISIBLE_DEVICES to choose GPUs"),
    "enable_cpu_affinity": ignored("the operating system places processes on cores"),
    "debug": ignored("shapes are always checked when ranks gather"),
    "dynamo_config": ignored("use --compile"),
}  # fmt: skip
