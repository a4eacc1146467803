"""The arguments of FlagAI's ``Trainer``, with its defaults, and what each does here."""

from __future__ import annotations

from typing import Any

from rapidformer.foreign_names import ForeignName, honoured, ignored, mapped

# name -> (FlagAI's default, what it does here)
FLAGAI: dict[str, tuple[Any, ForeignName]] = {
    "env_type": ("pytorch", honoured("pytorch, pytorchDDP, deepspeed or deepspeed+mpu")),
    "timers": (None, ignored("the log has its own times")),
    "pytorch_device": ("cpu", honoured("only with env_type='pytorch'", "device")),
    "experiment_name": ("glm_large", honoured("the folder inside tensorboard_dir")),
    "batch_size": (1, mapped("micro_batch_size")),
    "gradient_accumulation_steps": (1, mapped("gradient_accumulation_steps")),
    "weight_decay": (0.1, mapped("weight_decay")),
    "lr": (1e-3, mapped("lr")),
    "warm_up": (0.1, mapped("lr_warmup_fraction")),
    "epochs": (0, honoured("0 evaluates only", "epochs")),
    "save_interval": (1000, mapped("save_interval")),
    "eval_interval": (100, honoured("0 or None: only at the end", "eval_interval")),
    "log_interval": (100, mapped("log_interval")),
    "seed": (1234, mapped("seed")),
    "fp16": (False, mapped("fp16", "fp32 weights with fp16 arithmetic and dynamic loss scaling")),
    "clip_grad": (1.0, mapped("clip_grad", "once per optimizer step, not per micro-batch")),
    "checkpoint_activations": (False, mapped("checkpoint_activations", "any model with blocks")),
    "tokenizer": (None, honoured("saved with the model and passed to metrics")),
    "save_dir": ("checkpoints", mapped("save", "an earlier run moves to its `previous/`")),
    "save_best": (None, honoured("a function (best score, metrics) -> score; default: the loss")),
    "save_optim": (False, mapped("save_optim")),
    "save_rng": (False, mapped("save_rng")),
    "load_dir": (None, honoured("weights only; the run starts at step 0")),
    "load_type": ("latest", honoured("latest, or best for any other word")),
    "load_optim": (False, honoured("True resumes the run: optimizer, schedule and position")),
    "load_rng": (False, mapped("load_rng")),
    "tensorboard_dir": ("tensorboard_summary", honoured("TensorBoard is written there",
                                                        "tensorboard_dir")),
    "deepspeed_activation_checkpointing": (
        False, honoured("the same as checkpoint_activations", "checkpoint_activations")
    ),
    "num_checkpoints": (1, ignored("DeepSpeed's number of activation checkpoints per layer group")),
    "master_ip": ("localhost", mapped("master_addr")),
    "master_port": (17750, mapped("master_port", "across nodes; on one, any free port is used")),
    "num_nodes": (1, mapped("nnodes")),
    "num_gpus": (1, mapped("nproc_per_node")),
    "hostfile": (None, honoured("a file that does not exist means one node", "hostfile")),
    "deepspeed_config": (None, honoured("overrides the arguments, with a note", "deepspeed")),
    "model_parallel_size": (1, mapped("tensor_model_parallel_size", "for Hugging Face models too")),
    "model_paralle_size": (1, mapped("tensor_model_parallel_size", "FlagAI's own misspelling")),
    "training_script": ("train.py", honoured("the script to start on every rank")),
    "optimizer_type": ("adam", mapped("optimizer", "adam, adamw or adafactor")),
    "lora": (False, honoured("True trains adapters instead of the model's weights")),
    "lora_r": (8, honoured("the rank; only with lora=True", "lora_rank")),
    "lora_alpha": (16, honoured("only with lora=True", "lora_alpha")),
    "lora_dropout": (0.05, honoured("only with lora=True", "lora_dropout")),
    "lora_target_modules": (
        ["wq", "wv"], honoured("only with lora=True", "lora_target_modules")
    ),
    "extra_args": (None, ignored("a script's own flags are passed on unchanged")),
}  # fmt: skip

# As flags and YAML keys: the names above that are a setting of ours, and these.
FLAGAI_FLAGS: dict[str, ForeignName] = {
    name: row
    for name, (_, row) in FLAGAI.items()
    if row.outcome == "mapped" and row.setting != name
} | {
    "warm_up_iters": mapped("lr_warmup_iters"),
    "load_dir": mapped("load"),
    "deepspeed_config": mapped("deepspeed"),
}
