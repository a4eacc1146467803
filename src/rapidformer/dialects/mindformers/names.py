"""The names of MindFormers (1.0 to 1.3), and what each does here."""

from __future__ import annotations

from typing import Any

from rapidformer.foreign_names import ForeignName, honoured, ignored, mapped, refused

_SHARDS = "a checkpoint resumes on any number of ranks"
_MODEL = "pretrained_model_name_or_path"

# Names of its TrainingArguments that Hugging Face's class does not have.
TRAINING_ARGUMENTS: dict[str, ForeignName] = {
    "batch_size": honoured("per data-parallel rank", "micro_batch_size"),
    "sink_mode": ignored("sink_size sets how often a run is logged", default=True),
    "sink_size": honoured("optimizer steps between log lines", "log_interval"),
    "lr_end": mapped("min_lr"),
    "warmup_ratio": honoured("a fraction of the run", "lr_warmup_fraction"),
    "evaluation_strategy": honoured("same as eval_strategy", "eval_strategy"),
    "eval_step_interval": honoured("evaluates during training", "eval_interval"),
    "use_parallel": ignored("the launcher sets the number of ranks"),
    "data_parallel": honoured("checked against the number of ranks"),
    "model_parallel": mapped("tensor_model_parallel_size"),
    "pipeline_stage": mapped("pipeline_model_parallel_size"),
    "expert_parallel": mapped("expert_model_parallel_size"),
    "context_parallel": mapped("context_parallel_size"),
    "micro_batch_num": honoured("only with pipeline_stage above 1", "gradient_accumulation_steps"),
    "use_seq_parallel": mapped("sequence_parallel"),
    "optimizer_shard": mapped("zero_1_memory_optimization"),
    "enable_parallel_optimizer": mapped("zero_1_memory_optimization"),
    "recompute": mapped("checkpoint_activations"),
    "select_recompute": honoured("selective", "recompute_granularity"),
    "profile": refused("use torch.profiler in a callback"),
    "only_save_strategy": refused(_SHARDS),
    "auto_trans_ckpt": ignored(_SHARDS),
    "resume_training": honoured("True: from the newest checkpoint", "load"),
    "integrated_save": ignored(_SHARDS),
    "save_seconds": refused("use save_steps"),
    "mode": ignored("graph mode exists only in MindSpore"),
    "device_target": honoured("CPU, or a GPU if there is one", "device"),
    "device_id": ignored("the launcher assigns a device to every rank"),
}

# Hugging Face's names with another default in MindFormers.
DEFAULTS: dict[str, object] = {
    "output_dir": "./output", "lr_scheduler_type": "cosine", "logging_steps": 1,
    "save_total_limit": 5, "dataloader_drop_last": True,
}  # fmt: skip

OPTIMIZERS = {
    "AdamWeightDecay": "adamw_torch", "FP32StateAdamWeightDecay": "adamw_torch",
    "FusedAdamWeightDecay": "adamw_torch_fused", "AdamW": "adamw_torch",
    "adamw": "adamw_torch", "adam": "adamw_torch",
    "fused_adamw": "adamw_torch_fused", "fp32_adamw": "adamw_torch",
}  # fmt: skip

TRAINER: dict[str, ForeignName] = {
    "args": honoured("a TrainingArguments, or the path of a YAML file of MindFormers"),
    "task": honoured("its names for our tasks", "task"),
    "model": honoured("a name, a folder, a Hub name or an instance", _MODEL),
    "model_name": honoured("the same, if model is not given", _MODEL),
    "train_dataset": honoured("a path or a data set", "train_data"),
    "eval_dataset": honoured("a path or a data set", "valid_data"),
    "tokenizer": honoured("replaces the one in the model's folder"),
    "image_processor": honoured("replaces the one in the model's folder"),
    "pet_method": honoured("lora: rank 8, alpha 16, no dropout; ptuning2: prefix tuning"),
    "audio_processor": refused("there are no audio tasks"),
    "wrapper": refused("override training_step() in a subclass"),
    "eval_callbacks": refused("give them in callbacks"),
    "optimizers": honoured("with a model instance"),
    "callbacks": honoured("transformers' callbacks"),
    "compute_metrics": honoured("its metrics come in addition to the task's"),
    "data_collator": honoured("with a model instance"),
    "save_config": ignored("every run writes its arguments.yaml"),
    "reset_model": ignored("the model is rebuilt whenever the parallel settings change"),
}

# What each adapter stands for. MindFormers' dropout of 0.01 is left out: a run that splits layers
# could not use one process's masks.
PET_METHODS: dict[str, dict[str, Any]] = {
    "lora": {"lora_rank": 8, "lora_alpha": 16.0},
    "ptuning2": {"peft_config": '{"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 128}'},
}

TASKS = {
    "text_generation": "causal_lm", "text_classification": "sequence_classification",
    "token_classification": "token_classification", "question_answering": "question_answering",
    "fill_mask": "masked_lm", "masked_language_modeling": "masked_lm", "translation": "seq2seq_lm",
    "image_classification": "image_classification",
}  # fmt: skip

# Its names for models whose weights the Hub has.
MODELS = {
    "gpt2": "gpt2", "gpt2_xl": "gpt2-xl", "gpt2_txtcls": "gpt2",
    "llama_7b": "huggyllama/llama-7b", "llama_13b": "huggyllama/llama-13b",
    "llama_65b": "huggyllama/llama-65b", "llama2_7b": "meta-llama/Llama-2-7b-hf",
    "llama2_13b": "meta-llama/Llama-2-13b-hf", "llama2_70b": "meta-llama/Llama-2-70b-hf",
    "codellama_34b": "codellama/CodeLlama-34b-hf", "bloom_560m": "bigscience/bloom-560m",
    "bloom_7.1b": "bigscience/bloom-7b1", "bert_base_uncased": "bert-base-uncased",
    "txtcls_bert_base_uncased": "bert-base-uncased", "qa_bert_base_uncased": "bert-base-uncased",
    "tokcls_bert_base_chinese": "bert-base-chinese", "t5_small": "t5-small",
    "vit_base_p16": "google/vit-base-patch16-224",
    "swin_base_p4w7": "microsoft/swin-base-patch4-window7-224",
}  # fmt: skip

PARALLEL_CONFIG: dict[str, ForeignName] = {
    name: TRAINING_ARGUMENTS[name]
    for name in (
        "data_parallel", "model_parallel", "expert_parallel", "pipeline_stage", "context_parallel",
        "micro_batch_num", "use_seq_parallel", "optimizer_shard",
    )
} | {
    "micro_batch_interleave_num": ignored("communication always overlaps with computation"),
    "gradient_aggregation_group": ignored("gradients are summed in buckets of 25 MiB"),
    "vocab_emb_dp": ignored("the embedding is split with the model if its size allows it"),
}  # fmt: skip

RECOMPUTE_CONFIG: dict[str, ForeignName] = {
    "recompute": TRAINING_ARGUMENTS["recompute"],
    "select_recompute": TRAINING_ARGUMENTS["select_recompute"],
    "parallel_optimizer_comm_recompute": ignored("torch decides what is gathered again"),
    "mp_comm_recompute": ignored("torch decides what is gathered again"),
    "recompute_slice_activation": ignored("use_seq_parallel splits stored activations"),
}

# As flags and YAML keys.
MINDFORMERS_FLAGS: dict[str, ForeignName] = {
    name: TRAINING_ARGUMENTS[name]
    for name in ("model_parallel", "pipeline_stage", "expert_parallel", "context_parallel")
} | {
    "pipeline_parallel": mapped("pipeline_model_parallel_size"),
    "micro_batch_num": mapped("gradient_accumulation_steps"),
    "sink_size": mapped("log_interval"),
    "sink_mode": ignored("sink_size says how often the host looks at a run"),
}
