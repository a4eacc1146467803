"""A model's configuration: from its folder, or from `--model-type` and sizes.

Size flags *set* sizes only when training from scratch; for pretrained weights they are a claim that
is checked, since the weights' shapes are fixed.
"""

from __future__ import annotations

from typing import Any

from rapidformer.config import Settings
from rapidformer.config.task_sections import ModelArguments
from rapidformer.errors import ConfigurationError, ModelError
from rapidformer.hub import quiet_transformers
from rapidformer.log import warn
from rapidformer.models.adapter_folder import find_files
from rapidformer.models.location import (
    check_folder,
    explain_failure,
    get_hub_options,
    get_model_location,
    is_from_scratch,
    lacks_file,
)
from rapidformer.models.towers import get_shared, get_text_config
from rapidformer.nearest import suggest

# The families' own names for the sizes our flags set. A configuration gets every one of them that
# it has: encoder-decoder models count layers and heads twice.
_SIZES: dict[str, tuple[str, ...]] = {
    "num_layers": (
        "num_hidden_layers", "n_layer", "n_layers", "num_layers",
        "num_decoder_layers", "encoder_layers", "decoder_layers",
    ),
    "hidden_size": ("hidden_size", "n_embd", "d_model", "dim"),
    "num_attention_heads": (
        "num_attention_heads", "n_head", "n_heads", "num_heads",
        "encoder_attention_heads", "decoder_attention_heads",
    ),
    "ffn_hidden_size": (
        "intermediate_size", "n_inner", "d_ff", "hidden_dim", "encoder_ffn_dim", "decoder_ffn_dim",
    ),
    "max_position_embeddings": ("max_position_embeddings", "n_positions"),
    "vocab_size": ("vocab_size",),
    "image_size": ("image_size",),
    "patch_size": ("patch_size",),
}  # fmt: skip
# These may differ from a pretrained model's: they change no weight's shape.
_RATES: dict[str, tuple[str, ...]] = {
    "hidden_dropout": (
        "hidden_dropout_prob", "hidden_dropout", "dropout", "dropout_rate",
        "resid_pdrop", "embd_pdrop",
    ),
    "attention_dropout": ("attention_probs_dropout_prob", "attention_dropout", "attn_pdrop"),
    "init_method_std": ("initializer_range",),
}  # fmt: skip
# These number positions starting after the padding token's id.
_POSITIONS_AFTER_PADDING = (
    "roberta", "xlm-roberta", "camembert", "longformer", "mpnet", "xlm-roberta-xl", "data2vec-text",
)  # fmt: skip
_NAMING_HELP = (
    "give a model with --pretrained-model-name-or-path (a folder or a name on the Hub), or build "
    "one with --model-type and sizes such as --num-layers, --hidden-size, --num-attention-heads"
)


def load_config(args: Settings, **overrides: Any) -> Any:
    """The model's configuration, with the flags' sizes (from scratch) and the overrides applied."""
    location = find_files(get_model_location(args), "config.json")
    if location is None and args.model_type is None:
        raise ModelError(f"There is no model: {_NAMING_HELP}.")
    is_fresh = is_from_scratch(args)
    if location is not None and not (is_fresh and lacks_file(location, "config.json")):
        check_folder(location, needed="config.json")
        config = read_config(location, **get_hub_options(location, args))
    else:
        config = _make_config(args.model_type)
    if is_fresh:
        _set_sizes(config, args)
    else:
        _check_sizes(config, args, str(location))
    for flag, names in _RATES.items():
        _set_all(config, names, getattr(args, flag))
    # num_labels is a view of id2label: set it first, so that explicit names win.
    for name in sorted(overrides, key=lambda key: key != "num_labels"):
        if overrides[name] is not None:
            part = config if hasattr(config, name) else get_text_config(config)
            setattr(part, name, overrides[name])
    return config


def get_position_limit(config: Any) -> int | None:
    """The longest sequence that absolute position embeddings allow; None if there are none."""
    config = get_text_config(config)
    limit = getattr(config, "max_position_embeddings", None)
    if limit is None or getattr(config, "rope_parameters", None) is not None or limit <= 0:
        return None
    # RoBERTa numbers positions from pad_token_id + 1, so its 514 positions hold 512 tokens.
    if config.model_type in _POSITIONS_AFTER_PADDING and config.pad_token_id is not None:
        return int(limit) - int(config.pad_token_id) - 1
    return int(limit)


def get_target_limit(config: Any) -> int | None:
    """The same for what a model with a decoder writes."""
    decoder = getattr(config, "decoder", config)  # of two models joined
    limit = getattr(decoder, "max_decoder_position_embeddings", None)  # LED's
    return get_position_limit(decoder) if limit is None else int(limit)


def get_size(config: Any, flag: str) -> Any:
    """A model's size by our flag's name (``num_layers``); None if it has no such size."""
    for part in (config, get_text_config(config)):
        for name in _list_stored(part, _SIZES[flag]):
            return getattr(part, name)
    return None


def read_config(location: str, **options: Any) -> Any:
    """The configuration in a folder or on the Hub; without ``trust_remote_code``, nobody asks."""
    from transformers import AutoConfig

    import rapidformer.models.gpt  # noqa: F401 - makes transformers know our own model

    with quiet_transformers(location), explain_failure(location, "model"):
        return AutoConfig.from_pretrained(location, **{"trust_remote_code": False, **options})


def _make_config(model_type: str | None) -> Any:
    from transformers import CONFIG_MAPPING, AutoConfig

    if model_type is None:
        raise ModelError(
            "A model from scratch needs its architecture: give --model-type (bert, gpt2, t5, ...) "
            "or a folder with a config.json."
        )
    if model_type not in CONFIG_MAPPING:
        hint = suggest(model_type, CONFIG_MAPPING) or " Known are bert, gpt2, t5, vit, llama, ..."
        raise ModelError(f"--model-type {model_type} is not an architecture of transformers.{hint}")
    return AutoConfig.for_model(model_type)


# --- sizes ---------------------------------------------------------------------------------------


def _set_sizes(config: Any, args: Settings) -> None:
    sizes = {flag: getattr(args, flag) for flag in _SIZES}
    if sizes["hidden_size"] is not None and sizes["ffn_hidden_size"] is None:
        sizes["ffn_hidden_size"] = 4 * sizes["hidden_size"]
    for flag, value in sizes.items():
        if value is not None and not _list_stored(config, _SIZES[flag]):
            name = flag.replace("_", "-")
            warn(f"--{name} has no effect: {config.model_type} models have no such size.")
        _set_all(config, _SIZES[flag], value)
    limit = get_position_limit(config)
    # Make room for --seq-length, unless the positions were given.
    if args.max_position_embeddings is None and limit and (args.seq_length or 0) > limit:
        stored = get_size(config, "max_position_embeddings")
        _set_all(config, _SIZES["max_position_embeddings"], stored + args.seq_length - limit)
    hidden, heads = get_size(config, "hidden_size"), get_size(config, "num_attention_heads")
    if hidden and heads and hidden % heads:
        fitting = [str(n) for n in range(1, hidden + 1) if hidden % n == 0 and n <= 2 * heads]
        raise ConfigurationError(
            f"The hidden size {hidden} does not divide into {heads} attention heads: "
            f"use --num-attention-heads {', '.join(fitting[:-1])} or {fitting[-1]}."
        )
    if hidden and heads and (args.hidden_size or args.num_attention_heads) is not None:
        _set_all(config, ("head_dim", "d_kv"), hidden // heads)
        _set_all(config, ("pooler_hidden_size",), hidden)
        groups = get_shared(config, "num_key_value_heads")
        if groups is not None and heads % groups:
            config.num_key_value_heads = heads


def _check_sizes(config: Any, args: ModelArguments, location: str) -> None:
    problems = []
    for flag in _SIZES:
        wanted, actual = getattr(args, flag), get_size(config, flag)
        # An unset size (GPT-2's n_inner) means four times the width.
        if actual is None and flag == "ffn_hidden_size":
            actual = 4 * (get_size(config, "hidden_size") or 0) or None
        if wanted is not None and actual is not None and wanted != actual:
            problems.append(
                f"--{flag.replace('_', '-')} {wanted} contradicts {location}, which has {actual}: "
                f"leave the flag out, or add --from-scratch for fresh weights of that size."
            )
    if args.model_type is not None and args.model_type != config.model_type:
        problems.append(
            f"--model-type {args.model_type} contradicts {location}, which is a "
            f"{config.model_type} model: leave the flag out."
        )
    if problems:
        raise ConfigurationError(problems)


def _list_stored(config: Any, names: tuple[str, ...]) -> list[str]:
    """The names of one value that the configuration stores itself, not as a view of another."""
    views, missing = getattr(config, "attribute_map", {}), object()
    own = [name for name in names if name not in views]
    return [name for name in own if get_shared(config, name, missing) is not missing]


def _set_all(config: Any, names: tuple[str, ...], value: Any) -> None:
    if value is not None:
        for name in _list_stored(config, names):
            setattr(config, name, value)
