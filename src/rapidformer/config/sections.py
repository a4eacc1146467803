"""Every setting a user can give, in small sections: how to train; ``task_sections.py`` says what.

A single source: a field and the docstring under it define the flag, the help text, the YAML key and
the row in the docs. A bool is a switch (``--deterministic``, ``--no-deterministic``). Names follow
the documented flags; other systems' names are registered with ``foreign_names.py``.
``None`` means "not given": ``derive.py`` fills in what follows from the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(kw_only=True, frozen=True)
class TrainingLengthArguments:
    """Training"""

    micro_batch_size: int | None = None
    """samples per forward pass of a rank, at most --global-batch-size / ranks (default: 8, or as
    --global-batch-size implies)"""
    global_batch_size: int | None = None
    """samples per optimizer step over all ranks; if larger than micro-batch x ranks, gradients are
    accumulated"""
    gradient_accumulation_steps: int | None = None
    """micro-batches per optimizer step and rank (default: follows from the batch sizes)"""
    eval_micro_batch_size: int | None = None
    """samples per forward pass of a rank in evaluation (default: --micro-batch-size)"""
    epochs: int | float | None = None
    """passes over the training data; may be a fraction (default: 3 with --task)"""
    train_iters: int | None = None
    """total number of optimizer steps; overrides --epochs"""
    train_samples: int | None = None
    """total number of samples to train on, instead of --train-iters"""
    train_tokens: int | None = None
    """total number of tokens to train on (samples x --seq-length), instead of --train-iters"""
    rampup_batch_size: list[int] | None = None
    """start, increment, samples: grow the global batch from start to --global-batch-size in steps
    of increment over this many samples"""
    eval_interval: int | float | None = None
    """optimizer steps between evaluations; below 1, a fraction of the run (default: fine-tuning
    evaluates after each epoch)"""
    eval_strategy: Literal["no", "steps", "epoch"] | None = None
    """when to evaluate: never, every --eval-interval steps or after each epoch (default: steps if
    an interval is given)"""
    eval_on_start: bool = False
    """also evaluate before the first optimizer step"""
    eval_delay: float = 0.0
    """no evaluation before this many steps (or epochs, with --eval-strategy epoch)"""
    eval_iters: int = 100
    """global batches per evaluation in pre-training"""
    eval_split: str = "validation"
    """split that `rapidformer evaluate` uses"""
    exit_interval: int | None = None
    """save and stop when the step number is a multiple of this"""
    exit_duration_in_mins: float | None = None
    """save and stop after this many minutes"""
    metric_for_best_model: str | None = None
    """metric that selects the best model (default: the task's own)"""
    greater_is_better: bool | None = None
    """whether a higher --metric-for-best-model is better (default: known from the metric)"""
    load_best_model_at_end: bool = False
    """end with the weights of the best evaluation instead of the last step's"""
    early_stopping_patience: int | None = None
    """stop after this many evaluations in a row without an improvement"""
    early_stopping_threshold: float = 0.0
    """smallest improvement that counts for --early-stopping-patience"""
    on_bad_loss: Literal["stop", "skip", "rollback"] = "stop"
    """what to do about a loss or gradient that is NaN, infinite or a spike: stop the run, skip the
    batch, or return to the newest checkpoint and continue with the samples after the batch"""
    loss_spike_threshold: float | None = None
    """a loss or gradient norm above this many times its median over the last 64 steps is bad, too
    (default: off)"""
    max_rollbacks: int = 3
    """--on-bad-loss rollback: stop instead if the run has been rolled back this often"""
    label_smoothing: float = 0.0
    """fraction of each label's probability that is spread over all classes; for preference, the
    fraction of pairs assumed to be labelled the wrong way round"""
    neftune_noise_alpha: float | None = None
    """NEFTune: strength of the noise on the input embeddings in training, such as 5"""


@dataclass(kw_only=True, frozen=True)
class OptimizerArguments:
    """Optimizer and learning rate"""

    optimizer: Literal["adam", "adamw", "sgd", "adafactor", "muon"] = "adam"
    """adam and adamw both mean AdamW with decoupled weight decay"""
    lr: float | None = None
    """peak learning rate (default: 5e-5 with --task; 1e-6 for preference and grpo, 1e-4 for
    reward)"""
    min_lr: float = 0.0
    """final learning rate of the decay"""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root"] = "linear"
    """shape of the decay"""
    lr_decay_iters: int | None = None
    """optimizer steps until --min-lr is reached (default: the whole run)"""
    lr_decay_samples: int | None = None
    """samples until --min-lr is reached"""
    lr_warmup_iters: int = 0
    """optimizer steps over which the learning rate warms up from 0"""
    lr_warmup_fraction: float | None = None
    """fraction of the decay over which the learning rate warms up from 0"""
    lr_warmup_samples: int = 0
    """samples over which the learning rate warms up from 0"""
    weight_decay: float = 0.01
    """decoupled weight decay; not applied to biases and norms"""
    clip_grad: float = 1.0
    """clip gradients to this norm; 0 turns clipping off, as does an own optimizer in an own loop,
    unless this is given"""
    adam_beta1: float = 0.9
    """Adam's decay rate for the mean of the gradients"""
    adam_beta2: float = 0.999
    """Adam's decay rate for the mean of their squares"""
    adam_eps: float = 1e-8
    """Adam's epsilon"""
    sgd_momentum: float = 0.9
    """momentum of SGD and Muon"""
    optimizer_state_dtype: Literal["fp32", "bf16", "int8"] = "fp32"
    """precision of Adam's moments: bf16 takes half the memory of fp32, int8 (needs torchao) a
    quarter; both change the result"""


@dataclass(kw_only=True, frozen=True)
class AdapterArguments:
    """Adapters"""

    lora_rank: int | None = None
    """train LoRA adapters of this rank; the model's own weights stay frozen"""
    lora_alpha: float | None = None
    """LoRA: adapters are scaled by alpha / rank (default: twice the rank)"""
    lora_dropout: float = 0.0
    """LoRA: dropout on the inputs of the adapters"""
    lora_target_modules: list[str] | None = None
    """LoRA: names of the layers that get an adapter, one regular expression, or all-linear
    (default: what peft chooses for the architecture, else all-linear)"""
    use_dora: bool = False
    """LoRA: also learn the length of each weight vector (DoRA)"""
    peft_config: str | None = None
    """JSON file with any configuration of peft, such as an adapter_config.json"""
    quantize_base: Literal["8bit", "4bit"] | None = None
    """QLoRA: keep the frozen weights in 8 or 4 bits (needs bitsandbytes)"""


@dataclass(kw_only=True, frozen=True)
class AccelerationArguments:
    """Acceleration switches"""

    mixed_precision: Literal["auto", "bf16", "fp16"] | None = None
    """16-bit arithmetic on fp32 weights: bf16 if the device supports it, else fp16; a CPU with
    hardware support for neither stays in fp32"""
    fp16: bool = False
    """mixed precision in fp16, with dynamic loss scaling"""
    bf16: bool = False
    """mixed precision in bf16"""
    fp8: bool = False
    """the blocks' large matrix products in 8 bits, in bf16 training on Ada, Hopper and newer GPUs;
    faster with --compile, and less precise"""
    initial_loss_scale: float = 2.0**16
    """fp16: initial loss scale"""
    loss_scale: float | None = None
    """fp16: fixed loss scale (default: dynamic)"""
    min_loss_scale: float = 1.0
    """fp16: lower limit of the loss scale"""
    loss_scale_window: int = 1000
    """fp16: optimizer steps without an overflow after which the scale doubles"""
    hysteresis: int = 2
    """fp16: overflows tolerated before the scale halves"""
    checkpoint_activations: bool = False
    """recompute activations in the backward pass instead of storing them"""
    recompute_granularity: Literal["full", "selective"] | None = None
    """full: recompute whole blocks; selective: store matrix products and attention outputs"""
    recompute_interval: int = 1
    """recompute every n-th block only"""
    fused_loss: Literal["auto", "on", "off"] = "auto"
    """compute the loss of a large vocabulary from the hidden states, so that its logits never exist
    all at once: auto = from 4,096 words on, if it saves memory"""
    dynamic_shape: Literal["auto", "on", "off"] = "auto"
    """remove padding before the first block: blocks, head and loss compute on real tokens only, and
    a step whose loss reads padding is computed with it. auto = if the model gives equal results"""
    tokens_per_micro_batch: int | None = None
    """fill micro-batches up to this many tokens, padding included, instead of --micro-batch-size
    samples. An optimizer step still takes --global-batch-size samples"""
    attention: Literal["auto", "sdpa", "cudnn", "flash", "flex", "eager"] = "auto"
    """how attention is computed: auto = on Hopper and newer GPUs in 16 bits, cuDNN first (for text,
    if lengths are multiples of 64), and on Hopper and data-centre Blackwell our own kernel for a
    learned bias; else sdpa. sdpa = the model's own, in torch's order of kernels; cudnn, flash =
    that kernel first; flex, eager = as implemented by transformers"""
    activation_offload: bool = False
    """keep each block's activations in pinned host memory until the backward pass"""
    compile: bool = False
    """compile each transformer block with torch.compile"""
    cuda_graph: Literal["auto", "on", "off"] = "auto"
    """replay a step (forward, backward, clipping, AdamW) as one CUDA graph, which saves launching
    each kernel; with data parallelism as two, before and after the exchange of gradients. If your
    own Python prevents that, the model or its blocks are replayed, and so they are in prediction:
    auto = if launches matter and a replay gives the same result. Padded batches are rounded to a
    few sizes, so dropout draws other masks for them than with off"""
    onnx_runtime_training: bool = False
    """same as --compile: ONNX Runtime's training package has been discontinued"""
    compile_backend: str = "auto"
    """backend of torch.compile: auto = inductor on a GPU; on a CPU, where it was slower, nothing
    unless you ask for inductor"""
    zero_1_memory_optimization: bool = False
    """ZeRO-1: shard the optimizer state over the data-parallel ranks"""
    zero_2_memory_optimization: bool = False
    """ZeRO-2: shard the gradients too"""
    zero_3_memory_optimization: bool = False
    """ZeRO-3: shard the weights too"""
    fsdp_memory_optimization: bool = False
    """same as --zero-3-memory-optimization"""
    hybrid_sharding_size: int | None = None
    """ranks to shard the state over; each group of this size has a complete copy (default: all)"""
    cpu_offload: bool = False
    """with ZeRO: keep weights, gradients and optimizer state in host memory"""
    deepspeed: str | None = None
    """train with DeepSpeed, configured by this JSON file, or by what would be in it"""
    without: list[str] | None = None
    """leave out these changes that are otherwise made by themselves, such as host-masks
    (`rapidformer explain` lists them)"""

    @property
    def zero_stage(self) -> int:
        """0 to 3: how much of the training state is sharded over the data-parallel ranks."""
        if self.zero_3_memory_optimization or self.fsdp_memory_optimization:
            return 3
        return 2 if self.zero_2_memory_optimization else int(self.zero_1_memory_optimization)


@dataclass(kw_only=True, frozen=True)
class ParallelArguments:
    """Parallelism"""

    data_parallel: int | None = None
    """number of data-parallel ranks: follows from the sizes below, and is checked if given"""
    tensor_model_parallel_size: int = 1
    """ranks to split each layer over"""
    sequence_parallel: bool = False
    """with tensor parallelism: split the tokens between the split layers (norms, dropout) too"""
    pipeline_model_parallel_size: int = 1
    """stages to split the stack of layers into"""
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble"] | None = None
    """order of micro-batches in a pipeline (default: 1f1b; with virtual stages interleaved)"""
    num_layers_per_virtual_pipeline_stage: int | None = None
    """layers per virtual stage: each rank then has several stages, interleaved with the others'"""
    context_parallel_size: int = 1
    """ranks to split each sequence over, for long sequences (Ulysses)"""
    expert_model_parallel_size: int = 1
    """ranks to distribute the experts of a mixture over"""


@dataclass(kw_only=True, frozen=True)
class CheckpointArguments:
    """Checkpoints"""

    save: str | None = None
    """folder of the run: checkpoints, metrics.jsonl, best and last model; none saves nothing
    (default: runs/TASK-MODEL-DATE, or the run that --load resumes)"""
    save_interval: int | float | None = None
    """optimizer steps between checkpoints; below 1, a fraction of the run (default: fine-tuning
    saves after each epoch)"""
    save_strategy: Literal["no", "steps", "epoch", "best"] | None = None
    """when to save a checkpoint: never, every --save-interval steps, after each epoch, or after
    each new best evaluation (default: steps if an interval is given)"""
    save_total_limit: int | None = None
    """keep only the newest N checkpoints (default: all)"""
    save_optim: bool = True
    """save the optimizer state in checkpoints"""
    save_rng: bool = True
    """save the random states in checkpoints"""
    async_save: Literal["auto", "on", "off"] = "auto"
    """write checkpoints in the background while training continues: auto = from 64 MiB on, if half
    of the free host memory holds a copy, but not under DeepSpeed"""
    load: str | None = None
    """run to resume, or for `evaluate` and `predict` to use; one of its checkpoints, or a model
    folder"""
    resume: Literal["auto"] | None = None
    """auto: resume the run in --save from its newest checkpoint, or start it if it has none, so
    that one command can be repeated (a requeued job, say)"""
    load_optim: bool = True
    """restore the optimizer state"""
    load_rng: bool = True
    """restore the random states"""
    finetune: bool = False
    """take only the weights from --load and start at step 0"""
    allow_partial_load: bool = False
    """if the names or shapes of saved weights do not match the model's, list them and load the
    rest, instead of stopping"""
    overwrite: bool = False
    """let --save replace a run that is already in that folder"""


@dataclass(kw_only=True, frozen=True)
class LoggingArguments:
    """Logging"""

    log_interval: int | float = 10
    """optimizer steps between log lines; below 1, a fraction of the run"""
    log_strategy: Literal["no", "steps", "epoch"] = "steps"
    """when to log: never, every --log-interval steps or after each epoch"""
    log_first_step: bool = True
    """also log the first step"""
    progress: bool | None = None
    """progress bar instead of log lines (default: if the output is a terminal)"""
    tensorboard_dir: str | None = None
    """folder for TensorBoard (default: tensorboard inside --save)"""
    report_to: list[str] | None = None
    """trackers that get the numbers of the run: tensorboard, wandb, mlflow, trackio, clearml,
    codecarbon, comet_ml, dagshub, dvclive, neptune, swanlab or a class of your own as module:Class;
    all: those that are installed; none: not even TensorBoard (default: tensorboard)"""
    report: Literal["page", "off"] = "page"
    """page: write report.html, the run's page, into its folder when the run ends
    (`rapidformer report` writes it at any time)"""
    run_name: str | None = None
    """name of the run in trackers (default: that of its folder)"""
    project: str | None = None
    """project of the run in trackers, an experiment in MLflow (default: rapidformer)"""
    plan: bool = False
    """predict memory and time in a process beside the run (see `rapidformer plan`), and compare at
    its end"""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """lowest level of messages to show"""


@dataclass(kw_only=True, frozen=True)
class LaunchArguments:
    """Launch"""

    nproc_per_node: int | None = None
    """processes to start on this node (default: one per visible GPU, or one on the CPU)"""
    nnodes: int | None = None
    """number of nodes (default: the environment variable NNODES, or 1)"""
    node_rank: int | None = None
    """rank of this node (default: the environment variable NODE_RANK, or 0)"""
    master_addr: str | None = None
    """address of node 0 (default: the environment variable MASTER_ADDR, or this machine)"""
    master_port: int | None = None
    """port of node 0 (default: the environment variable MASTER_PORT, or a free one)"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """device to train on"""
    hostfile: str | None = None
    """start the nodes listed in this file (lines `host slots=N`) over ssh; the first is node 0"""
    ssh_port: int | None = None
    """ssh port of the hosts (default: ssh's own)"""
    ssh_user: str | None = None
    """user on the hosts (default: ssh's own)"""
    ssh_command: str = "ssh"
    """command to use instead of ssh, with its own flags if needed"""
    max_restarts: int = 0
    """how often to restart a failed run from its last checkpoint in --save"""
    log_dir: str | None = None
    """folder for each rank's output (default: SAVE/logs; without --save only the terminal)"""
    stall_timeout_minutes: float = 5.0
    """report which rank is missing when no rank has made progress for this long; 0: never"""
    distributed_timeout_minutes: float = 10.0
    """how long ranks wait for each other before the run fails"""
