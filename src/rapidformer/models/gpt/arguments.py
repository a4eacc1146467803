"""From a run's flags to a ``GPTConfig``: what ``GPTModel()`` does in a white-box script.

The vocabulary is padded to a multiple of ``--make-vocab-size-divisible-by`` alone. Megatron also
multiplies by the tensor-parallel size, so every layout gives a different model; here any vocabulary
can be split over any number of ranks.
"""

from __future__ import annotations

import contextlib

from rapidformer.config import Settings
from rapidformer.context import get_args, get_tokenizer
from rapidformer.errors import ConfigurationError, RapidformerError
from rapidformer.models.gpt.configuration import GPTConfig

# Flags with the configuration's own names and meanings; unset ones keep its defaults.
_SAME = (
    "num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size",
    "position_embedding_type", "rotary_base", "rotary_percent", "normalization",
    "layernorm_epsilon", "swiglu", "add_bias_linear", "hidden_dropout", "attention_dropout",
    "init_method_std", "num_experts", "moe_layer_freq", "moe_router_topk", "moe_loss_coeff",
    "moe_z_loss_coeff",
)  # fmt: skip
_NEEDED = ("num_layers", "hidden_size", "num_attention_heads")


def config_from_arguments(args: Settings, vocab_size: int) -> GPTConfig:
    """The configuration described by the flags; one error names every missing size."""
    problems = _find_missing_sizes(args)
    if problems:
        raise ConfigurationError(problems)
    multiple = args.make_vocab_size_divisible_by
    given = {name: getattr(args, name) for name in _SAME}
    return GPTConfig(
        **{name: value for name, value in given.items() if value is not None},
        max_position_embeddings=args.max_position_embeddings or args.seq_length,
        vocab_size=-(-vocab_size // multiple) * multiple,
        tokenizer_vocab_size=vocab_size,
        tie_word_embeddings=not args.untie_embeddings_and_output_weights,
    )


def config_from_context() -> GPTConfig:
    """The configuration of the current run."""
    args = get_args()
    try:
        vocab_size = _get_vocab_size(args)
    except RapidformerError as error:
        needed = f"GPTModel() needs --vocab-size, or a tokenizer: {error}"
        raise ConfigurationError([*_find_missing_sizes(args), needed]) from error
    config = config_from_arguments(args, vocab_size)
    with contextlib.suppress(RapidformerError):
        # Not every tokenizer has an end-of-document token; if there is one, generation stops there.
        config.eos_token_id = get_tokenizer().eod
    return config


def _get_vocab_size(args: Settings) -> int:
    """--vocab-size or the tokenizer's, and never less than the tokenizer's ids need."""
    has_tokenizer = args.tokenizer_type is not None or args.tokenizer_name_or_path is not None
    if args.vocab_size is not None and not has_tokenizer:
        return int(args.vocab_size)
    return max(args.vocab_size or 0, int(get_tokenizer().vocab_size))


def _find_missing_sizes(args: Settings) -> list[str]:
    missing = [f"--{name.replace('_', '-')}" for name in _NEEDED if getattr(args, name) is None]
    if args.max_position_embeddings is None and args.seq_length is None:
        missing.append("--seq-length (or --max-position-embeddings)")
    if not missing:
        return []
    names = missing[0] if len(missing) == 1 else f"{', '.join(missing[:-1])} and {missing[-1]}"
    return [f"GPTModel() reads its sizes from the flags: give {names}."]
