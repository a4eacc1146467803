"""The names of transformers' ``TrainingArguments`` (5.17), and what each does here."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, get_type_hints

from rapidformer.foreign_names import ForeignName, honoured, ignored, mapped, refused

Options = dict[str, Any] | str | None
"""A dictionary, its JSON, or the path of a file."""
_HUB = "used by push_to_hub()"
_TRACKIO = "a snapshot is made with trackio.freeze"
_DDP = "gradients are reduced by our own hooks, not by DistributedDataParallel"
_WORKERS = "the loader chooses it"
NEEDS_METRICS = ("reduce_lr_on_plateau", "greedy")
"""Schedules that look at an evaluation."""
_STRATEGIES = ("eval_strategy", "save_strategy", "logging_strategy", "lr_scheduler_type", "optim",
               "hub_strategy")  # fmt: skip


@dataclass
class AcceleratorOptions:
    """``accelerator_config``: the arguments always hold one, and scripts set its fields."""

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = True
    non_blocking: bool = False
    gradient_accumulation_kwargs: dict[str, Any] | None = None
    use_configured_state: bool = False


@dataclass(repr=False)
class NamedFields:
    """The fields of ``TrainingArguments`` in transformers' order, each with its row."""

    output_dir: Annotated[str | None, mapped(
        "save", "an earlier run in that folder moves to its `previous/`")] = None  # fmt: skip
    # ---- length, learning rate, optimizer
    per_device_train_batch_size: Annotated[int, mapped("micro_batch_size")] = 8
    num_train_epochs: Annotated[float, mapped("epochs", "may be a fraction")] = 3.0
    max_steps: Annotated[int, honoured(
        "-1 means that num_train_epochs decides", "train_iters")] = -1  # fmt: skip
    learning_rate: Annotated[float, mapped("lr")] = 5e-5
    lr_scheduler_type: Annotated[str, honoured(
        "all; reduce_lr_on_plateau and greedy move after an evaluation",
        "lr_decay_style")] = "linear"  # fmt: skip
    lr_scheduler_kwargs: Annotated[Options, honoured(
        "passed to transformers' get_scheduler")] = None  # fmt: skip
    warmup_steps: Annotated[float, honoured(
        "below 1, a fraction of the run", "lr_warmup_iters")] = 0  # fmt: skip
    optim: Annotated[str, honoured(
        "adamw_torch(_fused), sgd, adagrad and rmsprop from torch, adafactor; pass any other "
        "in optimizers=(optimizer, None)", "optimizer")] = "adamw_torch_fused"  # fmt: skip
    optim_args: Annotated[str | None, refused(
        "pass your own optimizer in optimizers=(optimizer, None)")] = None  # fmt: skip
    weight_decay: Annotated[float, mapped("weight_decay", "not applied to biases and norms")] = 0.0
    adam_beta1: Annotated[float, mapped("adam_beta1")] = 0.9
    adam_beta2: Annotated[float, mapped("adam_beta2")] = 0.999
    adam_epsilon: Annotated[float, mapped("adam_eps")] = 1e-8
    optim_target_modules: Annotated[str | None, refused(
        "GaLore and APOLLO optimizers are not built in")] = None  # fmt: skip
    gradient_accumulation_steps: Annotated[int, mapped("gradient_accumulation_steps")] = 1
    average_tokens_across_devices: Annotated[bool, ignored(
        "gradients are always those of the mean over all labels of the "
        "global batch")] = True  # fmt: skip
    max_grad_norm: Annotated[float, mapped("clip_grad")] = 1.0
    label_smoothing_factor: Annotated[float, mapped(
        "label_smoothing", "of the model's own loss")] = 0.0  # fmt: skip
    # ---- precision and memory
    bf16: Annotated[bool, mapped("bf16")] = False
    fp16: Annotated[bool, mapped("fp16")] = False
    bf16_full_eval: Annotated[bool, ignored("evaluation uses the precision of training")] = False
    fp16_full_eval: Annotated[bool, ignored("evaluation uses the precision of training")] = False
    tf32: Annotated[bool | None, honoured("sets torch's matmul precision")] = None
    gradient_checkpointing: Annotated[bool, mapped("checkpoint_activations")] = False
    gradient_checkpointing_kwargs: Annotated[Options, ignored(
        "recomputation is always non-reentrant")] = None  # fmt: skip
    torch_compile: Annotated[bool, mapped(
        "compile", "compiles each block, not the whole model")] = False  # fmt: skip
    torch_compile_backend: Annotated[str | None, honoured(
        "implies torch_compile", "compile_backend")] = None  # fmt: skip
    torch_compile_mode: Annotated[str | None, refused(
        "blocks are compiled in torch's default mode")] = None  # fmt: skip
    use_liger_kernel: Annotated[bool, refused("torch_compile fuses the same operations")] = False
    liger_kernel_config: Annotated[Options, refused(
        "torch_compile fuses the same operations")] = None  # fmt: skip
    use_cache: Annotated[bool, honoured("sets model.config.use_cache during training")] = False
    neftune_noise_alpha: Annotated[float | None, mapped("neftune_noise_alpha")] = None
    torch_empty_cache_steps: Annotated[int | None, ignored(
        "emptying the allocator's cache only slows a run down")] = None  # fmt: skip
    auto_find_batch_size: Annotated[bool, refused(
        "a batch size found by trial changes the run; set per_device_train_batch_size and "
        "gradient_accumulation_steps")] = False  # fmt: skip
    # ---- logging
    logging_strategy: Annotated[str, mapped("log_strategy")] = "steps"
    logging_steps: Annotated[float, mapped("log_interval", "below 1, a fraction of the run")] = 500
    logging_first_step: Annotated[bool, mapped("log_first_step")] = False
    log_on_each_node: Annotated[bool, ignored("only rank 0 logs")] = True
    logging_nan_inf_filter: Annotated[bool, ignored("a NaN loss stops the run")] = True
    include_num_input_tokens_seen: Annotated[str, honoured(
        '"all" counts padding, "non_padding" leaves out what the attention mask '
        'hides')] = "no"  # fmt: skip
    log_level: Annotated[str, honoured('"passive" means info', "log_level")] = "passive"
    log_level_replica: Annotated[str, ignored("only rank 0 logs")] = "warning"
    disable_tqdm: Annotated[bool | None, honoured(
        "True: log lines instead of a progress bar", "progress")] = None  # fmt: skip
    report_to: Annotated[str | list[str], honoured(
        "wandb, mlflow, trackio and your own module:Class as with --report-to; the others by "
        "transformers' integrations")] = "none"  # fmt: skip
    run_name: Annotated[str | None, honoured("read by the trackers of report_to")] = None
    project: Annotated[str, honoured("read by the trackers of report_to")] = "huggingface"
    trackio_space_id: Annotated[str | None, honoured("passed to trackio.init")] = None
    trackio_bucket_id: Annotated[str | None, honoured("passed to trackio.init")] = None
    trackio_static_space_id: Annotated[str | None, ignored(_TRACKIO)] = None
    # ---- evaluation
    eval_strategy: Annotated[str, mapped("eval_strategy")] = "no"
    eval_steps: Annotated[float | None, honoured(
        "below 1, a fraction of the run; default: logging_steps",
        "eval_interval")] = None  # fmt: skip
    eval_delay: Annotated[float, mapped("eval_delay")] = 0
    per_device_eval_batch_size: Annotated[int, mapped("eval_micro_batch_size")] = 8
    prediction_loss_only: Annotated[bool, honoured("evaluate() returns only the loss")] = False
    eval_on_start: Annotated[bool, mapped("eval_on_start")] = False
    eval_do_concat_batches: Annotated[bool, honoured(
        "False: compute_metrics gets a list of batches")] = True  # fmt: skip
    eval_use_gather_object: Annotated[bool, ignored(
        "objects and tensors are both gathered")] = False  # fmt: skip
    eval_accumulation_steps: Annotated[int | None, ignored(
        "predictions leave the device after every batch")] = None  # fmt: skip
    include_for_metrics: Annotated[list[str], honoured(
        '"inputs" and "loss" reach '
        'compute_metrics')] = dataclasses.field(default_factory=list)  # fmt: skip
    batch_eval_metrics: Annotated[bool, honoured(
        "compute_metrics is called per batch with compute_result")] = False  # fmt: skip
    # ---- saving
    save_only_model: Annotated[bool, honoured(
        "checkpoints without optimizer and random states")] = False  # fmt: skip
    save_strategy: Annotated[str, mapped("save_strategy")] = "steps"
    save_steps: Annotated[float, mapped("save_interval", "below 1, a fraction of the run")] = 500
    save_on_each_node: Annotated[bool, ignored(
        "a run has one folder, on a file system shared by all nodes")] = False  # fmt: skip
    save_total_limit: Annotated[int | None, mapped(
        "save_total_limit", "the best checkpoint is kept as well")] = None  # fmt: skip
    enable_jit_checkpoint: Annotated[bool, ignored(
        "the launcher restarts a run from its last checkpoint")] = False  # fmt: skip
    push_to_hub: Annotated[bool, honoured("pushes at the end of train()")] = False
    hub_token: Annotated[str | None, honoured(_HUB)] = None
    hub_private_repo: Annotated[bool | None, honoured(_HUB)] = None
    hub_model_id: Annotated[str | None, honoured(_HUB)] = None
    hub_strategy: Annotated[str, ignored("the model is pushed once, at the end")] = "every_save"
    hub_always_push: Annotated[bool, ignored("the model is pushed once, at the end")] = False
    hub_revision: Annotated[str | None, honoured(_HUB)] = None
    load_best_model_at_end: Annotated[bool, mapped("load_best_model_at_end")] = False
    metric_for_best_model: Annotated[str | None, mapped("metric_for_best_model")] = None
    greater_is_better: Annotated[bool | None, mapped("greater_is_better")] = None
    ignore_data_skip: Annotated[bool, refused(
        "a resumed run continues at the exact sample where it stopped, without reading the data "
        "before it")] = False  # fmt: skip
    restore_callback_states_from_checkpoint: Annotated[bool, honoured(
        "the state of transformers' ExportableState is in each checkpoint's "
        "trainer_state.json")] = False  # fmt: skip
    # ---- reproducibility, device
    full_determinism: Annotated[bool, mapped("deterministic")] = False
    seed: Annotated[int, mapped("seed")] = 42
    data_seed: Annotated[int | None, mapped("data_seed")] = None
    use_cpu: Annotated[bool, honoured("same as device cpu", "device")] = False
    accelerator_config: Annotated[Options | AcceleratorOptions, honoured(
        "num_steps of its gradient_accumulation_kwargs; on several processes, split_batches is an "
        "error that says which batch size to give; the rest has no effect")] = None  # fmt: skip
    parallelism_config: Annotated[Options, honoured(
        "tp_size, cp_size or sp_size, and dp_shard_size (ZeRO-3); an object or a "
        "dictionary")] = None  # fmt: skip
    # ---- data
    dataloader_drop_last: Annotated[bool, honoured(
        "the last, smaller batch of training is dropped", "keep_last")] = False  # fmt: skip
    dataloader_num_workers: Annotated[int, mapped("num_workers")] = 0
    dataloader_pin_memory: Annotated[bool, ignored(
        "memory is always pinned if there is a GPU")] = True  # fmt: skip
    dataloader_persistent_workers: Annotated[bool, ignored(_WORKERS)] = False
    dataloader_prefetch_factor: Annotated[int | None, ignored(_WORKERS)] = None
    dataloader_multiprocessing_context: Annotated[str | None, ignored(_WORKERS)] = None
    dataloader_in_order: Annotated[bool, ignored(
        "the order of samples is part of a run and never changes")] = True  # fmt: skip
    remove_unused_columns: Annotated[bool, honoured(
        "by the signature of the model's forward")] = True  # fmt: skip
    label_names: Annotated[list[str] | None, honoured("the keys of a batch that are labels")] = None
    train_sampling_strategy: Annotated[str, honoured(
        "random, sequential or group_by_length; batch_rebalance means group_by_length",
        "dataloader_type")] = "random"  # fmt: skip
    length_column_name: Annotated[str, mapped("length_column")] = "length"
    # ---- several processes
    ddp_find_unused_parameters: Annotated[bool | None, ignored(_DDP)] = None
    ddp_bucket_cap_mb: Annotated[int | None, ignored(_DDP)] = None
    ddp_broadcast_buffers: Annotated[bool | None, ignored(_DDP)] = None
    ddp_static_graph: Annotated[bool | None, ignored(_DDP)] = None
    ddp_backend: Annotated[str | None, ignored("NCCL is used on GPUs and gloo on CPUs")] = None
    ddp_timeout: Annotated[int, honoured("in seconds", "distributed_timeout_minutes")] = 1800
    fsdp: Annotated[str | None, honoured(
        "full_shard is ZeRO-3, shard_grad_op ZeRO-2; offload, hybrid_shard")] = None  # fmt: skip
    fsdp_config: Annotated[Options, honoured(
        "reshard_after_forward, cpu_offload and activation_checkpointing; the model's plan says "
        "what to wrap")] = None  # fmt: skip
    deepspeed: Annotated[Options, honoured("a JSON file or a dictionary", "deepspeed")] = None
    # ---- the rest
    debug: Annotated[str, ignored("`rapidformer verify` compares a run with one process")] = ""
    skip_memory_metrics: Annotated[bool, ignored("memory is in every log line of a GPU run")] = True
    do_train: Annotated[bool, honoured("read by scripts, not by the Trainer")] = False
    do_eval: Annotated[bool, honoured("read by scripts, not by the Trainer")] = False
    do_predict: Annotated[bool, honoured("read by scripts, not by the Trainer")] = False
    resume_from_checkpoint: Annotated[str | None, honoured(
        "read by scripts, which pass it to train()")] = None  # fmt: skip
    local_rank: Annotated[int, ignored("the launcher's LOCAL_RANK is read")] = -1

    def use_plain_words(self) -> None:
        """Replace transformers' enums by their words, and short forms by what they stand for."""
        for name in _STRATEGIES:  # an enum holds its word in `value`
            setattr(self, name, getattr(getattr(self, name), "value", getattr(self, name)))
        seen: Any = self.include_num_input_tokens_seen
        self.include_num_input_tokens_seen = {True: "all", False: "no"}.get(seen, seen)
        self.report_to = list_reports(self.report_to)
        if self.report_to == ["all"]:
            from transformers.integrations import get_available_reporting_integrations

            self.report_to = get_available_reporting_integrations()
        self._report_to_launcher()
        self.torch_compile = self.torch_compile or self.torch_compile_backend is not None

    def _report_to_launcher(self) -> None:
        """Kubeflow's trainer starts its jobs with this address, and waits for their progress."""
        is_off = os.environ.get("DISABLE_KUBEFLOW_INTEGRATION", "").upper() == "TRUE"
        is_told = "KUBEFLOW_TRAINER_SERVER_URL" in os.environ and not is_off
        if is_told and "kubeflow" not in self.report_to:
            self.report_to = [*self.report_to, "kubeflow"]


def list_reports(given: str | list[str] | None) -> list[str]:
    """The names in ``report_to``."""
    named = [given] if isinstance(given, str) else given or []
    return [name for name in named if name not in ("none", "")]


def list_changed(arguments: NamedFields) -> list[str]:
    """The names whose values are not the defaults."""

    def get_default(field: dataclasses.Field[Any]) -> Any:
        make: Any = field.default_factory
        return make() if make is not dataclasses.MISSING else field.default

    fields = dataclasses.fields(arguments)
    changed = {f.name for f in fields if getattr(arguments, f.name) != get_default(f)}
    if not arguments.report_to:
        changed.discard("report_to")  # "none" has become an empty list
    if arguments.accelerator_config == AcceleratorOptions():
        changed.discard("accelerator_config")
    return [field.name for field in fields if field.name in changed]


def read_rows(cls: type) -> dict[str, ForeignName]:
    """What becomes of each field of a dataclass that says it."""
    hints = get_type_hints(cls, include_extras=True)
    rows = {name: getattr(hint, "__metadata__", (None,))[0] for name, hint in hints.items()}
    return {name: row for name, row in rows.items() if isinstance(row, ForeignName)}


def _take_rows() -> dict[str, ForeignName]:
    """The table of all names; each field gets a text that ``HfArgumentParser`` shows."""
    rows = read_rows(NamedFields)
    for field in dataclasses.fields(NamedFields):
        row = rows[field.name]
        flag = f"--{row.setting.replace('_', '-')}" if row.setting else ""
        text = ": ".join(filter(None, (row.outcome, flag, row.note))).replace("%", "%%")
        field.metadata = MappingProxyType({"help": text})
    return rows


HUGGING_FACE = _take_rows()
# As flags and YAML keys: the names above that are a setting of ours, and these.
HUGGING_FACE_FLAGS: dict[str, ForeignName] = {
    name: row
    for name, row in HUGGING_FACE.items()
    if row.outcome == "mapped" and row.setting != name
} | {
    "max_steps": mapped("train_iters"), "warmup_steps": mapped("lr_warmup_iters"),
    "warmup_ratio": mapped("lr_warmup_fraction"), "eval_steps": mapped("eval_interval"),
    "overwrite_output_dir": mapped("overwrite"), "resume_from_checkpoint": mapped("load"),
    "model_name_or_path": mapped("pretrained_model_name_or_path"),
    "max_seq_length": mapped("seq_length"), "logging_dir": mapped("tensorboard_dir"),
    "optim": mapped("optimizer"), "evaluation_strategy": mapped("eval_strategy"),
}  # fmt: skip
HUGGING_FACE_VALUES: dict[str, dict[str, bool | str | None]] = {
    "optimizer": {"adamw_torch": "adamw", "adamw_torch_fused": "adamw"},
    "lr_decay_style": {"constant_with_warmup": "constant"},
    "train_iters": {"-1": None},
}
