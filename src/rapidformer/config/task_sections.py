"""What is run, as sections of settings (see ``sections.py``): a task with its model and data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeVar

_T = TypeVar("_T")
_ProblemType = Literal["regression", "single_label_classification", "multi_label_classification"]
_TokenizerType = Literal[
    "BertWordPieceLowerCase", "BertWordPieceCase", "GPT2BPETokenizer", "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer", "HuggingFaceTokenizer", "NullTokenizer",
]  # fmt: skip


def read_by(*tasks: str, default: _T) -> _T:
    """The default of a setting that only these tasks read; its help text begins with them."""
    return field(default=default, metadata={"tasks": tasks})


_CHATS = ("causal_lm", "preference", "reward", "grpo", "image_text")
"""Tasks whose rows may be conversations."""


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
    problem_type: _ProblemType | None = None
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
    train_vision: bool = read_by("image_text", default=False)
    """train the towers that read images or sound too; by default they stay as they are"""
    train_projector: bool = read_by("image_text", default=False)
    """train what leads from these towers into the language model too"""
    trust_remote_code: bool = False
    """run Python code shipped with a model or data set on the Hub"""
    cache_dir: str | None = None
    """folder for downloaded models and data (default: Hugging Face's own)"""


@dataclass(kw_only=True, frozen=True)
class DataArguments:
    """Data"""

    data_path: str | list[str] | None = None
    """Hub name, file or folder, several of them (FILE#1000: its first 1000 rows, NAME:SPLIT) or a
    YAML list; for pre-training one or more prefixes, with weights if several"""
    data_weights: list[float] | None = None
    """share of each data set in --data-path (default: all rows of all sets)"""
    data_stopping: Literal["first", "all"] = "first"
    """weighted data sets: an epoch ends when the first of them has run out of rows, or when all
    have been used"""
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
    streaming: bool = False
    """read training rows while training, in constant memory: files of any size (.jsonl, .csv, .tsv,
    .txt, .gz, .zst, .parquet, .arrow, .tar), folders, patterns such as 'data/*.tar', or the Hub"""
    shuffle_buffer: int = 10_000
    """--streaming: rows that are shuffled together; shards are shuffled too"""
    label_names: list[str] | None = read_by(
        "sequence_classification", "token_classification", "image_classification", default=None
    )
    """names of the classes in their order (default: found in the data, or in its first rows)"""
    seq_length: int | None = None
    """longest input in tokens (default: the model's maximum, up to 512; 2048 for image_text)"""
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
    source_prefix: str | None = read_by("seq2seq_lm", default=None)
    """text to put before every source, such as "summarize: " """
    label_all_tokens: bool = read_by("token_classification", default=False)
    """label every piece of a word, not only its first"""
    group_texts: bool = read_by("masked_lm", "causal_lm", default=True)
    """concatenate texts and cut them into full rows of --seq-length"""
    eval_generations: int = read_by("causal_lm", default=0)
    """rows of the validation data that the model answers at each evaluation, for the run's page"""
    doc_stride: int | None = read_by("question_answering", default=None)
    """overlap in tokens between the windows of a long context (default: 128, at most half a
    window)"""
    max_answer_length: int = read_by("question_answering", default=30)
    """longest answer in tokens"""
    n_best: int = read_by("question_answering", default=20)
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
    tokenizer_type: _TokenizerType | None = None
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
    mask_prob: float = read_by("masked_lm", "pretraining", default=0.15)
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
    messages_column: str | None = read_by(*_CHATS, default=None)
    """column with the turns of a conversation (default: found by name)"""
    prompt_column: str | None = read_by(*_CHATS, default=None)
    """column with the prompt (default: found by name)"""
    response_column: str | None = read_by(*_CHATS, default=None)
    """column with the response to the prompt (default: found by name)"""
    system_column: str | None = read_by(*_CHATS, default=None)
    """column with the system message of a prompt (default: found by name)"""
    tools_column: str | None = read_by(*_CHATS, default=None)
    """column with the tools that a conversation may call (default: tools, if there)"""
    chat_template: str | None = read_by(*_CHATS, default=None)
    """Jinja file (or template) that formats conversations, saved with the tokenizer;
    none = join prompt and response unchanged (default: the tokenizer's own)"""
    chat_template_kwargs: str | None = read_by(*_CHATS, default=None)
    """variables for the chat template as JSON, such as '{"enable_thinking": false}'"""
    train_on_prompts: bool = read_by("causal_lm", "image_text", default=False)
    """compute the loss on whole conversations, not only on the responses"""
    packing: bool = read_by("causal_lm", default=False)
    """pack several examples into a row of --seq-length; each attends only to itself"""
    image: list[str] | None = read_by("image_text", default=None)
    """`rapidformer predict`: pictures to show with each text, or with the first of --chat"""


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
    """sample: below 1, likely tokens become likelier (default: the model's own)"""
    top_k: int | None = None
    """sample from the K likeliest tokens (default: the model's own)"""
    top_p: float | None = None
    """sample from the likeliest tokens whose probabilities add up to P (default: the model's
    own)"""
    min_p: float | None = None
    """sample from tokens at least P times as likely as the likeliest (default: the model's own)"""
    repetition_penalty: float | None = None
    """above 1, tokens that have already occurred become less likely (default: the model's own)"""
    num_return_sequences: int = 1
    """answers per prompt; more than one needs --do-sample or as many beams"""
    stop_strings: list[str] | None = None
    """end an answer before any of these texts, in addition to the model's own end tokens"""
    stream: bool = False
    """`rapidformer predict`: print each answer token by token, one prompt after the other"""
    system_prompt: str | None = None
    """`rapidformer predict`: the system message before a conversation or prompt without one"""
    chat: bool = False
    """`rapidformer predict`: a conversation in the terminal; /new starts over, /exit leaves"""
