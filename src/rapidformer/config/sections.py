"""Every setting a user can give, in small sections.

A single source: a field and the docstring under it define the flag, the help text, the YAML key and
the row in the docs. A bool is a switch (``--deterministic``, ``--no-deterministic``). Names follow
the documented flags; other systems' names are registered with ``foreign_names.py``.
``None`` means "not given": ``derive.py`` fills in what follows from the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeVar

_T = TypeVar("_T")


def _read_by(*tasks: str, default: _T) -> _T:
    """The default of a setting that only these tasks read; its help text begins with them."""
    value: _T = field(default=default, metadata={"tasks": tasks})
    return value


@dataclass(kw_only=True, frozen=True)
class RunArguments:
    """What to run"""

    task: str | None = None
    """task to run without a script, such as sequence_classification (see `rapidformer tasks`)"""
    user_script: str | None = None
    """Python file with a PreTrainer or Finetuner, run on every rank"""
    config: str | None = None
    """YAML file with settings; flags on the command line override it"""
    seed: int = 1234
    """seed for everything random: initial weights, dropout, data order"""
    deterministic: bool = False
    """bitwise reproducible results on the same GPU, somewhat slower (a CPU always reproduces)"""
    input: list[str] | None = None
    """`rapidformer predict`: texts, JSON objects with the task's columns, files, or - for standard
    input"""
    output: str | None = None
    """file for the predictions of `rapidformer predict`, by its name .jsonl, .json, .csv, .tsv or
    .parquet (default: the terminal), or for the metrics of `evaluate` (default: a .json in RUN)"""
    local_rank: int | None = None
    """set by launchers; the environment variable LOCAL_RANK overrides it"""


@dataclass(kw_only=True, frozen=True)
class ModelArguments:
    """Model"""

    pretrained_model_name_or_path: str | None = None
    """Hugging Face model: a Hub name or a local folder"""
    from_scratch: bool = False
    """use only the model's configuration and start from newly initialised weights"""
    allow_untrained: bool = False
    """`rapidformer evaluate` and `predict`: accept a model that was never trained for the task"""
    model_type: str | None = None
    """architecture of a model built from size flags, such as bert, gpt2, t5 or vit"""
    num_layers: int | None = None
    """number of transformer layers"""
    hidden_size: int | None = None
    """width of the hidden states"""
    ffn_hidden_size: int | None = None
    """width of the feed-forward layers (default: 4 x hidden size)"""
    num_attention_heads: int | None = None
    """number of attention heads"""
    max_position_embeddings: int | None = None
    """longest sequence the position embeddings support"""
    vocab_size: int | None = None
    """vocabulary size of a model built from scratch (default: the tokenizer's)"""
    image_size: int | None = None
    """image height and width, in pixels, of a vision model built from scratch"""
    patch_size: int | None = None
    """patch height and width, in pixels, of a vision model built from scratch"""
    num_labels: int | None = None
    """number of classes (default: found in the data)"""
    problem_type: (
        Literal["regression", "single_label_classification", "multi_label_classification"] | None
    ) = None
    """kind of labels a classifier learns (default: found in the data)"""
    hidden_dropout: float | None = None
    """dropout on hidden states (default: the model's own)"""
    attention_dropout: float | None = None
    """dropout on attention weights (default: the model's own)"""
    init_method_std: float | None = None
    """standard deviation of newly initialised weights (default: the model's own)"""
    make_vocab_size_divisible_by: int = 128
    """GPTModel and pre-training from scratch: pad the vocabulary to a multiple of this"""
    position_embedding_type: Literal["learned_absolute", "rope", "none"] = "learned_absolute"
    """GPTModel: kind of position embeddings"""
    rotary_base: float = 10000.0
    """GPTModel: base of the rotary position embeddings"""
    rotary_percent: float = 1.0
    """GPTModel: fraction of each head that is rotated"""
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """GPTModel: kind of normalisation"""
    layernorm_epsilon: float = 1e-5
    """GPTModel: epsilon of the normalisation"""
    swiglu: bool = False
    """GPTModel: SwiGLU feed-forward layers instead of GELU"""
    num_query_groups: int | None = None
    """GPTModel: number of key/value heads, for grouped-query attention (default: one per head)"""
    add_bias_linear: bool = True
    """GPTModel: biases in linear layers"""
    untie_embeddings_and_output_weights: bool = False
    """GPTModel: a separate output layer instead of the embedding's weights"""
    num_experts: list[int] | None = None
    """GPTModel: experts per mixture-of-experts layer, one number for all layers or one for each"""
    moe_layer_freq: int = 1
    """GPTModel: every n-th layer is a mixture of experts"""
    moe_router_topk: int = 2
    """GPTModel: experts each token is routed to"""
    moe_loss_coeff: float = 0.01
    """GPTModel: weight of the load-balancing loss"""
    moe_z_loss_coeff: float = 0.0
    """GPTModel: weight of the z-loss, which keeps the router's logits small"""
    trust_remote_code: bool = False
    """run Python code shipped with a model or data set on the Hub"""
    cache_dir: str | None = None
    """folder for downloaded models and data (default: Hugging Face's own)"""


@dataclass(kw_only=True, frozen=True)
class DataArguments:
    """Data"""

    data_path: str | list[str] | None = None
    """Hub name, file or folder; for pre-training one or more prefixes, with weights if several"""
    data_name: str | None = None
    """name of the data set inside --data-path, such as mrpc in glue"""
    data_dir: str | None = None
    """folder with fine-tuning data (same as --data-path)"""
    train_data: list[str] | None = None
    """files of the training split, if their names do not show it"""
    valid_data: list[str] | None = None
    """files of the validation split"""
    test_data: list[str] | None = None
    """files of the test split"""
    validation_split: float | None = None
    """fraction of the training rows to hold out if the data has no validation split"""
    seq_length: int | None = None
    """longest input in tokens (default: the model's maximum, up to 512)"""
    decoder_seq_length: int | None = None
    """longest target of encoder-decoder models, in tokens (default: 128)"""
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
    source_prefix: str | None = _read_by("seq2seq_lm", default=None)
    """text to put before every source, such as "summarize: " """
    label_all_tokens: bool = _read_by("token_classification", default=False)
    """label every piece of a word, not only its first"""
    group_texts: bool = _read_by("masked_lm", "causal_lm", default=True)
    """concatenate texts and cut them into full rows of --seq-length"""
    doc_stride: int | None = _read_by("question_answering", default=None)
    """overlap in tokens between the windows of a long context (default: 128, at
    most half a window)"""
    max_answer_length: int = _read_by("question_answering", default=30)
    """longest answer in tokens"""
    n_best: int = _read_by("question_answering", default=20)
    """candidate answers considered per window"""
    max_train_samples: int | None = None
    """use only the first N training examples"""
    max_eval_samples: int | None = None
    """evaluate only the first N examples, of whichever split"""
    max_predict_samples: int | None = None
    """predict only the first N examples"""
    num_workers: int | None = None
    """data-loading processes (default: 2 with a GPU, none without)"""
    preprocessing_workers: int | None = None
    """tokenizing processes (default: 1)"""
    keep_last: bool = True
    """train on the last, smaller batch of an epoch too"""
    group_by_length: bool = False
    """batch samples of similar length together: less padding; the order stays random"""
    length_column: str = "length"
    """column with the lengths (or the tokens) of samples for --group-by-length and
    --tokens-per-micro-batch (if the data has none, input_ids are counted)"""
    data_seed: int | None = None
    """seed for the data order (default: --seed)"""
    dataloader_type: Literal["single", "cyclic"] | None = None
    """order of training samples: single = in the data set's order, cyclic = shuffled each epoch
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
    """tokenizer built from --vocab-file (and --merge-file), --tokenizer-model or --vocab-size"""
    vocab_file: str | None = None
    """vocabulary file of --tokenizer-type"""
    merge_file: str | None = None
    """merges file of GPT2BPETokenizer"""
    tokenizer_model: str | None = None
    """SentencePiece model file"""
    tokenizer_name_or_path: str | None = None
    """Hugging Face tokenizer: a Hub name or a local folder (default: the model's own)"""
    vocab_extra_ids: int = 0
    """T5 sentinels (<extra_id_0>, ...) to add to the vocabulary"""
    train_data_path: list[str] | None = None
    """pre-training prefixes (with weights, if several) used for training only, not split"""
    valid_data_path: list[str] | None = None
    """pre-training prefixes used for validation only"""
    test_data_path: list[str] | None = None
    """pre-training prefixes used for testing only"""
    data_cache_path: str | None = None
    """folder for the index maps of pre-training data (default: index-cache next to the data)"""
    data_impl: Literal["mmap", "lazy", "cached", "infer"] = "infer"
    """format of the pre-training data files"""
    split: str = "969, 30, 1"
    """proportions of training, validation and test data in one pre-training corpus"""
    mask_prob: float = _read_by("masked_lm", "pretraining", default=0.15)
    """fraction of the tokens that are masked"""
    short_seq_prob: float = 0.1
    """fraction of BERT pre-training samples that are deliberately short"""
    mmap_warmup: bool = False
    """read the pre-training files once before training, to warm the page cache"""
    reset_position_ids: bool = False
    """GPT: restart positions after each end of document"""
    reset_attention_mask: bool = False
    """GPT: do not attend across an end of document"""
    eod_mask_loss: bool = False
    """GPT: exclude end-of-document tokens from the loss"""
    messages_column: str | None = _read_by("causal_lm", default=None)
    """column with the turns of a conversation (default: found by name)"""
    prompt_column: str | None = _read_by("causal_lm", default=None)
    """column with the prompt (default: found by name)"""
    response_column: str | None = _read_by("causal_lm", default=None)
    """column with the response to the prompt (default: found by name)"""
    system_column: str | None = _read_by("causal_lm", default=None)
    """column with the system message of a prompt (default: found by name)"""
    tools_column: str | None = _read_by("causal_lm", default=None)
    """column with the tools that a conversation may call (default: tools, if there)"""
    chat_template: str | None = _read_by("causal_lm", default=None)
    """Jinja file (or template) that formats conversations, saved with the tokenizer;
    none = join prompt and response unchanged (default: the tokenizer's own)"""
    chat_template_kwargs: str | None = _read_by("causal_lm", default=None)
    """variables for the chat template as JSON, such as '{"enable_thinking": false}'"""
    train_on_prompts: bool = _read_by("causal_lm", default=False)
    """compute the loss on whole conversations, not only on the responses"""
    packing: bool = _read_by("causal_lm", default=False)
    """pack several examples into a row of --seq-length; each attends only to itself"""


@dataclass(kw_only=True, frozen=True)
class GenerationArguments:
    """Text generation"""

    max_new_tokens: int | None = None
    """longest generated text in tokens (default: 64, or --decoder-seq-length for seq2seq_lm)"""
    num_beams: int = 1
    """number of beams"""
    do_sample: bool = False
    """draw tokens by their probability, reproducibly by --seed, instead of the most likely one"""
    temperature: float | None = None
    """with --do-sample: below 1 likely tokens become likelier (default: the model's own)"""
    top_k: int | None = None
    """with --do-sample: draw from the K likeliest tokens (default: the model's own)"""
    top_p: float | None = None
    """with --do-sample: draw from the likeliest tokens whose probabilities add up to P (default:
    the model's own)"""
    min_p: float | None = None
    """with --do-sample: draw from tokens at least P times as likely as the likeliest (default: the
    model's own)"""
    repetition_penalty: float | None = None
    """above 1, tokens that have already occurred become less likely (default: the model's own)"""
    num_return_sequences: int = 1
    """answers per prompt; more than one needs --do-sample or as many beams"""
    stop_strings: list[str] | None = None
    """end an answer before any of these texts, in addition to the model's own end tokens"""
    stream: bool = False
    """`rapidformer predict`: print each answer token by token, one prompt after the other"""
    chat: bool = False
    """`rapidformer predict`: a conversation in the terminal; /new starts over, /exit leaves"""


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
    """fraction of each label's probability that is spread over all classes"""
    neftune_noise_alpha: float | None = None
    """NEFTune: strength of the noise on the input embeddings in training, such as 5"""


@dataclass(kw_only=True, frozen=True)
class OptimizerArguments:
    """Optimizer and learning rate"""

    optimizer: Literal["adam", "adamw", "sgd", "adafactor", "muon"] = "adam"
    """adam and adamw both mean AdamW with decoupled weight decay"""
    lr: float | None = None
    """peak learning rate (default: 5e-5 with --task)"""
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
    """clip gradients to this norm; 0 turns clipping off"""
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
    each kernel: auto = on one GPU, if launches matter and a replay gives the same result. Padded
    batches are rounded to a few sizes, so dropout draws other masks for them than with off"""
    onnx_runtime_training: bool = False
    """same as --compile: ONNX Runtime's training package has been discontinued"""
    compile_backend: str = "inductor"
    """backend of torch.compile"""
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
    """train with DeepSpeed, configured by this JSON file"""
    without: list[str] | None = None
    """leave out these changes that are otherwise made by themselves, such as host-masks
    (`rapidformer explain` lists them)"""


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


SECTIONS: tuple[type, ...] = (
    RunArguments,
    ModelArguments,
    DataArguments,
    GenerationArguments,
    TrainingLengthArguments,
    OptimizerArguments,
    AdapterArguments,
    AccelerationArguments,
    ParallelArguments,
    CheckpointArguments,
    LoggingArguments,
    LaunchArguments,
)
