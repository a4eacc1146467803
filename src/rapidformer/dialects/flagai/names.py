"""The arguments of FlagAI's ``Trainer``, with its defaults, and what each does here."""

from __future__ import annotations

from rapidformer.foreign_names import ForeignName, honoured, ignored, mapped

FLAGAI: dict[str, ForeignName] = {
    "env_type": honoured("pytorch, pytorchDDP, deepspeed or deepspeed+mpu", default="pytorch"),
    "timers": ignored("the log has its own times"),
    "pytorch_device": honoured("only with env_type='pytorch'", "device", default="cpu"),
    "experiment_name": honoured("the folder inside tensorboard_dir", default="glm_large"),
    "batch_size": mapped("micro_batch_size", default=1),
    "gradient_accumulation_steps": mapped("gradient_accumulation_steps", default=1),
    "weight_decay": mapped("weight_decay", default=0.1),
    "lr": mapped("lr", default=1e-3),
    "warm_up": mapped("lr_warmup_fraction", default=0.1),
    "epochs": honoured("0 evaluates only", "epochs", default=0),
    "save_interval": mapped("save_interval", default=1000),
    "eval_interval": honoured("0 or None: only at the end", "eval_interval", default=100),
    "log_interval": mapped("log_interval", default=100),
    "seed": mapped("seed", default=1234),
    "fp16": mapped(
        "fp16", "fp32 weights with fp16 arithmetic and dynamic loss scaling", default=False),
    "clip_grad": mapped("clip_grad", "once per optimizer step, not per micro-batch", default=1.0),
    "checkpoint_activations": mapped(
        "checkpoint_activations", "any model with blocks", default=False),
    "tokenizer": honoured("saved with the model and passed to metrics"),
    "save_dir": mapped("save", "an earlier run moves to its `previous/`", default="checkpoints"),
    "save_best": honoured("a function (best score, metrics) -> score; default: the loss"),
    "save_optim": mapped("save_optim", default=False),
    "save_rng": mapped("save_rng", default=False),
    "load_dir": honoured("weights only; the run starts at step 0"),
    "load_type": honoured("latest, or best for any other word", default="latest"),
    "load_optim": honoured("True resumes the run: optimizer, schedule and position", default=False),
    "load_rng": mapped("load_rng", default=False),
    "tensorboard_dir": honoured(
        "TensorBoard is written there", "tensorboard_dir", default="tensorboard_summary"),
    "deepspeed_activation_checkpointing": honoured(
        "the same as checkpoint_activations", "checkpoint_activations", default=False),
    "num_checkpoints": ignored(
        "DeepSpeed's number of activation checkpoints per layer group", default=1),
    "master_ip": mapped("master_addr", default="localhost"),
    "master_port": mapped(
        "master_port", "across nodes; on one, any free port is used", default=17750),
    "num_nodes": mapped("nnodes", default=1),
    "num_gpus": mapped("nproc_per_node", default=1),
    "hostfile": honoured("a file that does not exist means one node", "hostfile"),
    "deepspeed_config": honoured("overrides the arguments, with a note", "deepspeed"),
    "model_parallel_size": mapped(
        "tensor_model_parallel_size", "for Hugging Face models too", default=1),
    "model_paralle_size": mapped(
        "tensor_model_parallel_size", "FlagAI's own misspelling", default=1),
    "training_script": honoured("the script to start on every rank", default="train.py"),
    "optimizer_type": mapped("optimizer", "adam, adamw or adafactor", default="adam"),
    "lora": honoured("True trains adapters instead of the model's weights", default=False),
    "lora_r": honoured("the rank; only with lora=True", "lora_rank", default=8),
    "lora_alpha": honoured("only with lora=True", "lora_alpha", default=16),
    "lora_dropout": honoured("only with lora=True", "lora_dropout", default=0.05),
    "lora_target_modules": honoured(
        "only with lora=True", "lora_target_modules", default=["wq", "wv"]),
    "extra_args": ignored("a script's own flags are passed on unchanged"),
}  # fmt: skip

# As flags and YAML keys: the names above that are a setting of ours, and these.
FLAGAI_FLAGS: dict[str, ForeignName] = {
    name: row for name, row in FLAGAI.items() if row.outcome == "mapped" and row.setting != name
} | {
    "warm_up_iters": mapped("lr_warmup_iters"),
    "load_dir": mapped("load"),
    "deepspeed_config": mapped("deepspeed"),
}  # fmt: skip
