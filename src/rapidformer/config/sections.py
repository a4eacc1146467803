"""Everything that a user may set, in small sections.

One source: a field and the docstring under it make the flag, the help text, the YAML key and the
table in the docs. A bool is a switch (``--mixed-precision``, ``--no-mixed-precision``). Names
follow the documented Rapidformer/Megatron flags; other systems' names stand in ``dialects.py``
alone. ``None`` means "not said": ``derive.py`` fills in what follows from the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(kw_only=True, frozen=True)
class RunArguments:
    """What to run"""

    task: str | None = None
    """black-box task, such as sequence_classification; `rapidformer tasks` lists them"""
    user_script: str | None = None
    """Python file with a PreTrainer or Finetuner (white box), run in every process"""
    config: str | None = None
    """YAML file with settings; a flag on the command line wins over it"""
    seed: int = 1234
    """seed of every random choice: weights, dropout, order of the data"""
    deterministic: bool = False
    """same numbers bit for bit on the same GPU, at some cost in speed (a CPU always gives them)"""
    input: list[str] | None = None
    """`rapidformer predict`: texts to predict on, or JSON objects with the task's columns"""
    output: str | None = None
    """`rapidformer predict`: file for the predictions (default: the terminal)"""
    local_rank: int | None = None
    """set by launchers; the environment variable LOCAL_RANK wins"""


@dataclass(kw_only=True, frozen=True)
class ModelArguments:
    """Model"""

    pretrained_model_name_or_path: str | None = None
    """Hugging Face model: a name on the Hub or a local folder"""
    from_scratch: bool = False
    """take the model's configuration only and start from fresh weights"""
    allow_untrained: bool = False
    """`rapidformer evaluate` and `predict`: accept a model that was never trained for the task"""
    model_type: str | None = None
    """architecture for a model built from size flags alone, such as bert, gpt2, t5 or vit"""
    num_layers: int | None = None
    """number of transformer layers"""
    hidden_size: int | None = None
    """width of the hidden states"""
    ffn_hidden_size: int | None = None
    """width inside the feed-forward layers (default: 4 x hidden size)"""
    num_attention_heads: int | None = None
    """number of attention heads"""
    max_position_embeddings: int | None = None
    """longest sequence that the position embeddings can number"""
    vocab_size: int | None = None
    """size of the vocabulary of a model built from scratch (default: the tokenizer's)"""
    image_size: int | None = None
    """height and width in pixels of the images of a vision model built from scratch"""
    patch_size: int | None = None
    """pixels per patch of a vision model built from scratch"""
    num_labels: int | None = None
    """number of classes (default: found in the data)"""
    problem_type: (
        Literal["regression", "single_label_classification", "multi_label_classification"] | None
    ) = None
    """what kind of labels a classifier learns (default: found in the data)"""
    hidden_dropout: float | None = None
    """dropout on hidden states (default: the model's own)"""
    attention_dropout: float | None = None
    """dropout on attention weights (default: the model's own)"""
    init_method_std: float | None = None
    """standard deviation of fresh weights (default: the model's own)"""
    make_vocab_size_divisible_by: int = 128
    """GPTModel, and pre-training from scratch: the vocabulary is padded to a multiple of this"""
    position_embedding_type: Literal["learned_absolute", "rope", "none"] = "learned_absolute"
    """GPTModel: how positions are told"""
    rotary_base: float = 10000.0
    """GPTModel: base of rotary positions"""
    rotary_percent: float = 1.0
    """GPTModel: share of each head that rotary positions turn"""
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """GPTModel: kind of normalisation"""
    layernorm_epsilon: float = 1e-5
    """GPTModel: epsilon of the normalisation"""
    swiglu: bool = False
    """GPTModel: gated feed-forward layers (SwiGLU) instead of GELU"""
    num_query_groups: int | None = None
    """GPTModel: key/value heads that the attention heads share (default: one for each head)"""
    add_bias_linear: bool = True
    """GPTModel: biases in linear layers"""
    untie_embeddings_and_output_weights: bool = False
    """GPTModel: an output layer of its own instead of the embedding's weights"""
    num_experts: list[int] | None = None
    """GPTModel: experts per mixture-of-experts layer, one number for all or one for each"""
    moe_layer_freq: int = 1
    """GPTModel: every n-th layer is a mixture of experts"""
    moe_router_topk: int = 2
    """GPTModel: experts that each token goes to"""
    moe_loss_coeff: float = 0.01
    """GPTModel: weight of the loss that keeps experts evenly loaded"""
    moe_z_loss_coeff: float = 0.0
    """GPTModel: weight of the loss that keeps the router's logits small"""
    trust_remote_code: bool = False
    """run Python code that comes with a model or data set from the Hub"""
    cache_dir: str | None = None
    """folder for downloaded models and data (default: Hugging Face's own)"""


@dataclass(kw_only=True, frozen=True)
class DataArguments:
    """Data"""

    data_path: str | list[str] | None = None
    """data: a Hub name, a file, a folder, or for pre-training one or more (weight and) prefix"""
    data_name: str | None = None
    """name of the data set inside --data-path, such as mrpc in glue"""
    data_dir: str | None = None
    """folder with fine-tuning data (another way to say --data-path)"""
    train_data: list[str] | None = None
    """files of the training split, where names do not tell the split"""
    valid_data: list[str] | None = None
    """files of the validation split"""
    test_data: list[str] | None = None
    """files of the test split"""
    validation_split: float | None = None
    """share of the training rows to hold out, where the data has no validation split"""
    seq_length: int | None = None
    """longest input in tokens (default: what the model takes, at most 512)"""
    decoder_seq_length: int | None = None
    """longest target in tokens of encoder-decoder models (default: 128)"""
    text_column: str | None = None
    """column with the text (default: found by name)"""
    text_pair_column: str | None = None
    """column with the second text of a pair (default: found by name)"""
    label_column: str | None = None
    """column with the label (default: found by name)"""
    target_column: str | None = None
    """column with the target text of seq2seq_lm (default: found by name)"""
    question_column: str | None = None
    """column with the question (default: found by name)"""
    context_column: str | None = None
    """column with the context (default: found by name)"""
    answers_column: str | None = None
    """column with the answers (default: found by name)"""
    choice_columns: list[str] | None = None
    """columns with the choices of multiple_choice (default: found by name)"""
    image_column: str | None = None
    """column with the image (default: found by name)"""
    source_prefix: str | None = None
    """text put before every source of seq2seq_lm, such as "summarize: " """
    label_all_tokens: bool = False
    """token_classification: label every piece of a word, not only its first"""
    group_texts: bool = True
    """masked_lm, causal_lm: join texts and cut them into full rows of --seq-length"""
    doc_stride: int = 128
    """question_answering: tokens that neighbouring windows of a long context share"""
    max_answer_length: int = 30
    """question_answering: longest answer in tokens"""
    n_best: int = 20
    """question_answering: candidates looked at per window"""
    num_beams: int = 1
    """beams when generating text"""
    max_new_tokens: int | None = None
    """longest generated text in tokens (default: --decoder-seq-length)"""
    max_train_samples: int | None = None
    """use only the first N training examples"""
    max_eval_samples: int | None = None
    """evaluate only the first N examples, of whichever split"""
    max_predict_samples: int | None = None
    """predict only the first N examples"""
    num_workers: int | None = None
    """data loading processes (default: 2 with a GPU, none without)"""
    preprocessing_workers: int | None = None
    """processes that tokenize (default: 1)"""
    keep_last: bool = True
    """train on the last, smaller batch of an epoch too"""
    group_by_length: bool = False
    """batches of samples of similar length: less padding, in an order that is still random"""
    length_column: str = "length"
    """column with the lengths for --group-by-length (default: the tokens are counted)"""
    data_seed: int | None = None
    """seed of the order of the data (default: --seed)"""
    dataloader_type: Literal["single", "cyclic"] | None = None
    """order of training samples: single = as the data set gives them, cyclic = shuffled each epoch
    (default: cyclic for fine-tuning, single for pre-training)"""
    tokenizer_type: (
        Literal[
            "BertWordPieceLowerCase",
            "BertWordPieceCase",
            "GPT2BPETokenizer",
            "SentencePieceTokenizer",
            "GPTSentencePieceTokenizer",
            "HuggingFaceTokenizer",
            "NullTokenizer",
        ]
        | None
    ) = None
    """tokenizer made from --vocab-file (and --merge-file), --tokenizer-model or --vocab-size"""
    vocab_file: str | None = None
    """vocabulary file of --tokenizer-type"""
    merge_file: str | None = None
    """merges file of GPT2BPETokenizer"""
    tokenizer_model: str | None = None
    """SentencePiece model file"""
    tokenizer_name_or_path: str | None = None
    """Hugging Face tokenizer: a folder or a name on the Hub (default: the model's own)"""
    vocab_extra_ids: int = 0
    """T5 sentinels (<extra_id_0>, ...) to add to the vocabulary"""
    train_data_path: list[str] | None = None
    """pre-training prefixes (with weights, if several) of the training data alone, unsplit"""
    valid_data_path: list[str] | None = None
    """pre-training prefixes of the validation data alone"""
    test_data_path: list[str] | None = None
    """pre-training prefixes of the test data alone"""
    data_cache_path: str | None = None
    """folder for the index maps of pre-training data (default: index-cache beside the data)"""
    data_impl: Literal["mmap", "lazy", "cached", "infer"] = "infer"
    """kind of pre-training data files"""
    split: str = "969, 30, 1"
    """proportions of training, validation and test data in one pre-training corpus"""
    mask_prob: float = 0.15
    """share of tokens that masked language modelling hides"""
    short_seq_prob: float = 0.1
    """share of deliberately short BERT pre-training rows"""
    mmap_warmup: bool = False
    """read the pre-training files once before training"""
    reset_position_ids: bool = False
    """GPT: start positions anew after each end of document"""
    reset_attention_mask: bool = False
    """GPT: do not attend across an end of document"""
    eod_mask_loss: bool = False
    """GPT: leave end-of-document tokens out of the loss"""
    messages_column: str | None = None
    """causal_lm: column with the turns of a conversation (default: found by name)"""
    prompt_column: str | None = None
    """causal_lm: column with the prompt (default: found by name)"""
    response_column: str | None = None
    """causal_lm: column with the answer to the prompt (default: found by name)"""
    system_column: str | None = None
    """causal_lm: column with the system message of a prompt (default: found by name)"""
    chat_template: str | None = None
    """causal_lm: Jinja file (or template) that writes conversations as text, saved with the
    tokenizer; none = prompt and answer as they are (default: the tokenizer's own)"""
    train_on_prompts: bool = False
    """causal_lm: put the loss on whole conversations, not on the answers alone"""
    packing: bool = False
    """causal_lm: several examples in a row of --seq-length, attention kept inside each"""


@dataclass(kw_only=True, frozen=True)
class TrainingLengthArguments:
    """Training"""

    micro_batch_size: int | None = None
    """samples per process and forward pass (default: 8 for the black box)"""
    global_batch_size: int | None = None
    """samples per update over all processes; more than micro x processes accumulates gradients"""
    gradient_accumulation_steps: int | None = None
    """forward passes per update and process (follows from the batch sizes)"""
    eval_micro_batch_size: int | None = None
    """samples per process and forward pass in evaluation (default: --micro-batch-size)"""
    epochs: int | float | None = None
    """passes over the training data; may be a fraction"""
    train_iters: int | None = None
    """updates to do in all; wins over --epochs where both are given"""
    train_samples: int | None = None
    """samples to train on in all, instead of --train-iters"""
    train_tokens: int | None = None
    """tokens to train on in all (samples x --seq-length), instead of --train-iters"""
    rampup_batch_size: list[int] | None = None
    """start, increment, samples: grow the global batch from start to --global-batch-size in steps
    of increment over the first so many samples"""
    eval_interval: int | float | None = None
    """updates between evaluations, or a share of the run below 1 (default: fine-tuning evaluates
    after each epoch)"""
    eval_strategy: Literal["no", "steps", "epoch"] | None = None
    """when to evaluate: never, every --eval-interval updates or after each epoch (default: steps
    where an interval is given)"""
    eval_on_start: bool = False
    """evaluate before the first update as well"""
    eval_delay: float = 0.0
    """no evaluation before so many updates (or epochs, with --eval-strategy epoch)"""
    eval_iters: int = 100
    """global batches per evaluation in pre-training"""
    eval_split: str = "validation"
    """split that `rapidformer evaluate` looks at"""
    exit_interval: int | None = None
    """save and stop when the update count is a multiple of this"""
    exit_duration_in_mins: float | None = None
    """save and stop after this many minutes"""
    metric_for_best_model: str | None = None
    """metric that decides which model is kept as the best (default: the task's own)"""
    greater_is_better: bool | None = None
    """whether more of that metric is better (default: by its name; less of a loss is better)"""
    load_best_model_at_end: bool = False
    """end with the weights of the best evaluation instead of the last ones"""
    early_stopping_patience: int | None = None
    """stop after so many evaluations in a row without a better one"""
    early_stopping_threshold: float = 0.0
    """by how much a metric must be better to count for --early-stopping-patience"""
    label_smoothing: float = 0.0
    """share of each label that is spread over all classes"""
    neftune_noise_alpha: float | None = None
    """NEFTune: noise on the input embeddings in training, such as 5"""


@dataclass(kw_only=True, frozen=True)
class OptimizerArguments:
    """Optimizer and learning rate"""

    optimizer: Literal["adam", "adamw", "sgd", "adafactor", "muon"] = "adam"
    """adam and adamw both mean AdamW with decoupled weight decay"""
    lr: float | None = None
    """peak learning rate (default: 5e-5 for the black box)"""
    min_lr: float = 0.0
    """learning rate at the end of the decay, and after it"""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root"] = "linear"
    """shape of the decay"""
    lr_decay_iters: int | None = None
    """updates until --min-lr is reached (default: the whole run)"""
    lr_decay_samples: int | None = None
    """samples until --min-lr is reached"""
    lr_warmup_iters: int = 0
    """updates over which the learning rate rises from 0"""
    lr_warmup_fraction: float | None = None
    """share of the decay over which the learning rate rises from 0"""
    lr_warmup_samples: int = 0
    """samples over which the learning rate rises from 0"""
    weight_decay: float = 0.01
    """decoupled weight decay; biases and norms are left out"""
    clip_grad: float = 1.0
    """largest norm of the gradient of an update; 0 switches clipping off"""
    adam_beta1: float = 0.9
    """Adam's decay rate of the mean"""
    adam_beta2: float = 0.999
    """Adam's decay rate of the square"""
    adam_eps: float = 1e-8
    """Adam's epsilon"""
    sgd_momentum: float = 0.9
    """momentum of SGD and Muon"""


@dataclass(kw_only=True, frozen=True)
class AccelerationArguments:
    """Acceleration switches"""

    mixed_precision: Literal["auto", "bf16", "fp16"] | None = None
    """16-bit arithmetic over fp32 weights: bf16 where the device has it, fp16 otherwise; a
    processor that has neither in hardware stays in fp32"""
    fp16: bool = False
    """mixed precision in fp16, with dynamic loss scaling"""
    bf16: bool = False
    """mixed precision in bf16"""
    initial_loss_scale: float = 2.0**16
    """fp16: first loss scale"""
    loss_scale: float | None = None
    """fp16: fixed loss scale (default: dynamic)"""
    min_loss_scale: float = 1.0
    """fp16: the scale never falls below this"""
    loss_scale_window: int = 1000
    """fp16: clean updates after which the scale doubles"""
    hysteresis: int = 2
    """fp16: overflows that are waited for before the scale halves"""
    checkpoint_activations: bool = False
    """recompute activations in the backward pass instead of keeping them"""
    recompute_granularity: Literal["full", "selective"] | None = None
    """full: recompute whole blocks; selective: keep matrix products and attention"""
    recompute_interval: int = 1
    """recompute every n-th block only"""
    activation_offload: bool = False
    """keep what the backward pass needs of each block in pinned host memory"""
    compile: bool = False
    """compile each transformer block with torch.compile"""
    onnx_runtime_training: bool = False
    """graph optimisation; ONNX Runtime's training package has ended, so this means --compile"""
    compile_backend: str = "inductor"
    """backend of torch.compile"""
    zero_1_memory_optimization: bool = False
    """ZeRO-1: each process keeps its share of the optimizer state"""
    zero_2_memory_optimization: bool = False
    """ZeRO-2: and of the gradients"""
    zero_3_memory_optimization: bool = False
    """ZeRO-3: and of the weights"""
    fsdp_memory_optimization: bool = False
    """the same as --zero-3-memory-optimization"""
    hybrid_sharding_size: int | None = None
    """processes that split the state between them; each such group has a copy (default: all)"""
    cpu_offload: bool = False
    """with ZeRO: keep weights, gradients and optimizer state in the host's memory"""
    deepspeed: str | None = None
    """train by DeepSpeed, with this JSON file of settings"""


@dataclass(kw_only=True, frozen=True)
class ParallelArguments:
    """Parallelism"""

    data_parallel: int | None = None
    """processes that see other samples: follows from the sizes below, and is checked if given"""
    tensor_model_parallel_size: int = 1
    """processes that share each layer"""
    sequence_parallel: bool = False
    """with tensor parallelism: split the tokens too, where layers would otherwise be whole"""
    pipeline_model_parallel_size: int = 1
    """processes that share the stack of layers"""
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble"] | None = None
    """order of micro-batches in a pipeline (default: 1f1b, interleaved with virtual stages)"""
    num_layers_per_virtual_pipeline_stage: int | None = None
    """layers of a virtual stage: each process then has several, in turn with the others"""
    context_parallel_size: int = 1
    """processes that share each sequence, for long ones (Ulysses)"""
    expert_model_parallel_size: int = 1
    """processes that share the experts of a mixture"""


@dataclass(kw_only=True, frozen=True)
class CheckpointArguments:
    """Checkpoints"""

    save: str | None = None
    """folder of the run: checkpoints, metrics.jsonl, the best and the last model; none keeps
    nothing (default: runs/TASK-MODEL-DATE, or the run that --load resumes)"""
    save_interval: int | float | None = None
    """updates between checkpoints, or a share of the run below 1 (default: fine-tuning saves after
    each epoch)"""
    save_strategy: Literal["no", "steps", "epoch", "best"] | None = None
    """when to save a checkpoint: never, every --save-interval updates, after each epoch, or after
    each best evaluation (default: steps where an interval is given)"""
    save_total_limit: int | None = None
    """keep only the newest N checkpoints (default: all)"""
    save_optim: bool = True
    """put the optimizer state into checkpoints"""
    save_rng: bool = True
    """put the random states into checkpoints"""
    load: str | None = None
    """run to resume, one of its checkpoints, or a model folder to start from"""
    load_optim: bool = True
    """restore the optimizer state"""
    load_rng: bool = True
    """restore the random states"""
    finetune: bool = False
    """take only the weights from --load and start at step 0"""
    overwrite: bool = False
    """let --save replace the run that is already in that folder"""


@dataclass(kw_only=True, frozen=True)
class LoggingArguments:
    """Logging"""

    log_interval: int | float = 10
    """updates between log lines, or a share of the run below 1"""
    log_strategy: Literal["no", "steps", "epoch"] = "steps"
    """when to log: never, every --log-interval updates or after each epoch"""
    log_first_step: bool = True
    """log the first update as well"""
    progress: bool | None = None
    """progress bar instead of log lines (default: on a terminal)"""
    tensorboard_dir: str | None = None
    """folder for TensorBoard (default: tensorboard inside --save)"""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """least important messages that are shown"""


@dataclass(kw_only=True, frozen=True)
class LaunchArguments:
    """Launch"""

    nproc_per_node: int | None = None
    """processes to start on this node (default: one per visible GPU, or one on the CPU)"""
    nnodes: int | None = None
    """number of nodes (default: the environment variable NNODES, or 1)"""
    node_rank: int | None = None
    """number of this node (default: the environment variable NODE_RANK, or 0)"""
    master_addr: str | None = None
    """address of node 0 (default: the environment variable MASTER_ADDR, or this machine)"""
    master_port: int | None = None
    """port of node 0 (default: the environment variable MASTER_PORT, or a free one)"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where to compute"""
    hostfile: str | None = None
    """start the nodes of this file (lines `host slots=N`) over ssh; the first one is node 0"""
    ssh_port: int | None = None
    """port of the hosts' ssh (default: what ssh itself takes)"""
    ssh_user: str | None = None
    """user on the hosts (default: what ssh itself takes)"""
    ssh_command: str = "ssh"
    """what to call in place of ssh, with flags of its own if need be"""
    max_restarts: int = 0
    """how often a run that broke is started again, from its last checkpoint in --save"""
    log_dir: str | None = None
    """folder for each rank's output (default: SAVE/logs; without --save the terminal alone)"""
    stall_timeout_minutes: float = 5.0
    """tell which rank is missing when no rank has moved for so long; 0: never"""
    distributed_timeout_minutes: float = 10.0
    """how long processes wait for each other before the run fails"""


SECTIONS: tuple[type, ...] = (
    RunArguments,
    ModelArguments,
    DataArguments,
    TrainingLengthArguments,
    OptimizerArguments,
    AccelerationArguments,
    ParallelArguments,
    CheckpointArguments,
    LoggingArguments,
    LaunchArguments,
)
