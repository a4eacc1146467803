"""The configuration of a GPT: sizes, components and the mixture of experts.

Names are Megatron's; Hugging Face's names for the same sizes are views of them. The defaults are
Megatron's GPT, which is GPT-2. ``vocab_size`` counts the rows of the embedding, padding included;
``tokenizer_vocab_size`` is the number of meaningful ids.

From a run's flags (``GPTModel()`` in a white-box script), the vocabulary is padded to a multiple of
``--make-vocab-size-divisible-by`` alone. Megatron also multiplies by the tensor-parallel size, so
every layout gives a different model; here any vocabulary can be split over any number of ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedConfig

from rapidformer.config import Settings
from rapidformer.config.schema import to_flag
from rapidformer.context import get_args, get_tokenizer
from rapidformer.errors import ConfigurationError, RapidformerError

_POSITIONS = ("learned_absolute", "rope", "none")
_NORMS = ("LayerNorm", "RMSNorm")
# Flags with the configuration's own names and meanings; unset ones keep its defaults.
_SAME = (
    "num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size",
    "position_embedding_type", "rotary_base", "rotary_percent", "normalization",
    "layernorm_epsilon", "swiglu", "add_bias_linear", "hidden_dropout", "attention_dropout",
    "init_method_std", "num_experts", "moe_layer_freq", "moe_router_topk", "moe_loss_coeff",
    "moe_z_loss_coeff",
)  # fmt: skip
_NEEDED = ("num_layers", "hidden_size", "num_attention_heads")


class GPTConfig(PreTrainedConfig):
    """Sizes and options of a ``GPTModel``; all problems are reported at once."""

    model_type = "rapidformer_gpt"
    attribute_map = {  # noqa: RUF012 - transformers declares it as a class variable
        "num_hidden_layers": "num_layers", "intermediate_size": "ffn_hidden_size",
        "num_key_value_heads": "num_query_groups", "initializer_range": "init_method_std",
    }  # fmt: skip
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012

    num_layers: int = 12
    hidden_size: int = 768
    num_attention_heads: int = 12
    num_query_groups: int | None = None
    """Key/value heads that the attention heads share (default: one for each head)."""
    ffn_hidden_size: int | None = None
    """Default: 4 x hidden_size; with SwiGLU two thirds of it, rounded to multiples of 64."""
    max_position_embeddings: int = 1024
    vocab_size: int = 50304
    tokenizer_vocab_size: int | None = None
    """Ids from here up to ``vocab_size`` are padding and never generated (default: none)."""

    position_embedding_type: str = "learned_absolute"
    rotary_base: float = 10000.0
    rotary_percent: float = 1.0
    normalization: str = "LayerNorm"
    layernorm_epsilon: float = 1e-5
    swiglu: bool = False
    add_bias_linear: bool = True
    tie_word_embeddings: bool = True

    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    init_method_std: float = 0.02

    num_experts: int | list[int] | None = None
    """Experts of every mixture-of-experts layer, or one number for each; 1 means a dense layer."""
    moe_layer_freq: int = 1
    """Every n-th layer is a mixture: 2 means the second, the fourth, ..."""
    moe_router_topk: int = 2
    moe_loss_coeff: float = 0.01
    moe_z_loss_coeff: float = 0.0

    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        # The views (num_hidden_layers, ...) are among kwargs: set them before sizes are derived.
        super().__post_init__(**kwargs)
        if self.num_query_groups is None:
            self.num_query_groups = self.num_attention_heads
        if self.ffn_hidden_size is None:
            width = 4 * self.hidden_size
            self.ffn_hidden_size = max(width * 2 // 3 // 64, 1) * 64 if self.swiglu else width
        problems = list(self._find_problems())
        if problems:
            raise ConfigurationError(problems)

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def rotary_size(self) -> int:
        """How many dimensions of each head are rotated."""
        return int(self.head_size * self.rotary_percent)

    @property
    def experts_per_layer(self) -> list[int]:
        """The number of experts of each layer; 1 is a dense layer."""
        places = range(self.moe_layer_freq - 1, self.num_layers, self.moe_layer_freq)
        counts = self._get_expert_counts()
        counts = counts * len(places) if len(counts) == 1 else counts
        layers = [1] * self.num_layers
        for place, count in zip(places, counts, strict=True):
            layers[place] = count
        return layers

    def _get_expert_counts(self) -> list[int]:
        if self.num_experts is None:
            return [1]
        return [self.num_experts] if isinstance(self.num_experts, int) else list(self.num_experts)

    def _find_problems(self) -> Iterator[str]:
        for name, known in (("position_embedding_type", _POSITIONS), ("normalization", _NORMS)):
            if getattr(self, name) not in known:
                yield f"{name} {getattr(self, name)!r} is unknown: use {' or '.join(known)}."
        sizes = ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups",
                 "ffn_hidden_size", "max_position_embeddings", "vocab_size", "moe_layer_freq",
                 "moe_router_topk")  # fmt: skip
        small = [name for name in sizes if getattr(self, name) < 1]
        if small:
            yield f"{', '.join(small)} must be at least 1."
            return
        if self.hidden_size % self.num_attention_heads:
            yield (
                f"num_attention_heads {self.num_attention_heads} does not divide "
                f"hidden_size {self.hidden_size}."
            )
        if self.num_attention_heads % (self.num_query_groups or 1):
            yield (
                f"num_query_groups {self.num_query_groups} does not divide "
                f"num_attention_heads {self.num_attention_heads}."
            )
        is_turned = self.position_embedding_type == "rope"
        if is_turned and (self.rotary_size % 2 or not self.rotary_size):
            yield (
                f"rotary positions turn pairs: rotary_percent {self.rotary_percent} of the head "
                f"size {self.head_size} is {self.rotary_size}, which is no even number above 0."
            )
        yield from self._find_expert_problems()

    def _find_expert_problems(self) -> Iterator[str]:
        counts = self._get_expert_counts()
        if min(counts, default=0) < 1:
            yield f"num_experts is {counts}: give numbers of at least 1, which is a dense layer."
            return
        if counts == [1]:
            return
        num_mixtures = self.num_layers // self.moe_layer_freq
        if num_mixtures == 0:
            yield (
                f"moe_layer_freq {self.moe_layer_freq} leaves no mixture-of-experts layer in "
                f"{self.num_layers} layers."
            )
        elif len(counts) not in (1, num_mixtures):
            yield (
                f"num_experts has {len(counts)} numbers, but there are {num_mixtures} "
                f"mixture-of-experts layers (every {self.moe_layer_freq}. of {self.num_layers}): "
                f"give one number, or {num_mixtures}."
            )
        few = [count for count in counts if 1 < count < self.moe_router_topk]
        if few:
            yield f"moe_router_topk {self.moe_router_topk} is above num_experts {min(few)}."
        if self.moe_z_loss_coeff and not self.moe_loss_coeff:
            yield (
                "moe_z_loss_coeff needs a moe_loss_coeff above 0: both losses leave the model as "
                "one number, which is multiplied by moe_loss_coeff."
            )


def config_from_arguments(args: Settings, vocab_size: int) -> GPTConfig:
    """The configuration described by the flags; one error names every missing size."""
    problems = _find_missing_sizes(args)
    if problems:
        raise ConfigurationError(problems)
    multiple = args.make_vocab_size_divisible_by
    values = {name: getattr(args, name) for name in _SAME}
    return GPTConfig(
        **{name: value for name, value in values.items() if value is not None},
        max_position_embeddings=args.max_position_embeddings or args.seq_length,
        vocab_size=-(-vocab_size // multiple) * multiple,
        tokenizer_vocab_size=vocab_size,
        tie_word_embeddings=not args.untie_embeddings_and_output_weights,
    )


def config_from_context() -> GPTConfig:
    """The configuration of the current run."""
    args = get_args()
    has_tokenizer = args.tokenizer_type is not None or args.tokenizer_name_or_path is not None
    vocab_size = int(args.vocab_size or 0)
    try:
        if args.vocab_size is None or has_tokenizer:  # never less than the tokenizer's ids need
            vocab_size = max(vocab_size, int(get_tokenizer().vocab_size))
    except RapidformerError as error:
        needed = f"GPTModel() needs --vocab-size, or a tokenizer: {error}"
        raise ConfigurationError([*_find_missing_sizes(args), needed]) from error
    config = config_from_arguments(args, vocab_size)
    with contextlib.suppress(RapidformerError):
        # Not every tokenizer has an end-of-document token; if there is one, generation stops there.
        config.eos_token_id = get_tokenizer().eod
    return config


def _find_missing_sizes(args: Settings) -> list[str]:
    missing = [to_flag(name) for name in _NEEDED if getattr(args, name) is None]
    if args.max_position_embeddings is None and args.seq_length is None:
        missing.append("--seq-length (or --max-position-embeddings)")
    if not missing:
        return []
    names = missing[0] if len(missing) == 1 else f"{', '.join(missing[:-1])} and {missing[-1]}"
    return [f"GPTModel() reads its sizes from the flags: give {names}."]
