"""Hugging Face models, tokenizers and image processors: found, checked, built.

From a name on the Hub, a local folder, or from scratch by `--model-type` and sizes. Weights are
always fp32: mixed precision is the training's matter, whatever the file holds. What a reader would
get wrong: a head whose size does not fit is *meant* to be re-initialised here (that is what
fine-tuning does), so it is told and not refused.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import os
import socket
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rapidformer.errors import ConfigurationError, ModelError
from rapidformer.log import get_logger

if TYPE_CHECKING:
    from torch import nn

# The families' own names for the sizes that our flags set. A configuration is given every one
# of them that it has: encoder-decoder models count layers and heads twice.
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
_WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_NAMING_HELP = (
    "give a model with --pretrained-model-name-or-path (a folder or a name on the Hub), or build "
    "one with --model-type and sizes such as --num-layers, --hidden-size, --num-attention-heads"
)


def get_model_location(args: Any) -> str | None:
    """The folder or Hub name to take the model from; a model folder in --load comes first."""
    if args.load and (Path(args.load).expanduser() / "config.json").is_file():
        return str(Path(args.load).expanduser())
    location = args.pretrained_model_name_or_path
    if location is None:
        return None
    path = Path(location).expanduser()
    return str(path) if path.exists() else str(location)


def load_config(args: Any, **overrides: Any) -> Any:
    """The model's configuration with the flags' sizes (from scratch) and the overrides in it."""
    location = get_model_location(args)
    if location is None and args.model_type is None:
        raise ModelError(f"There is no model: {_NAMING_HELP}.")
    is_fresh = is_from_scratch(args)
    if location is not None and not (is_fresh and _lacks(location, "config.json")):
        config = _load_config_of(location, args)
    else:
        config = _make_config(args.model_type)
    if is_fresh:
        _set_sizes(config, args)
    else:
        _check_sizes(config, args, str(location))
    for flag, names in _RATES.items():
        _set_all(config, names, getattr(args, flag))
    # num_labels is a view of id2label: set first, so that names given beside it win.
    for name in sorted(overrides, key=lambda key: key != "num_labels"):
        if overrides[name] is not None:
            setattr(config, name, overrides[name])
    return config


def is_from_scratch(args: Any) -> bool:
    """Whether weights are drawn afresh: asked for, or only a model type was given."""
    return bool(args.from_scratch) or get_model_location(args) is None


def load_tokenizer(args: Any, **options: Any) -> Any:
    """The tokenizer of the model, or one made from --tokenizer-type and --vocab-file."""
    if args.vocab_file is not None:
        return _make_tokenizer(args)
    location = get_model_location(args)
    if location is None:
        raise ModelError(
            "There is no tokenizer: give a folder that has one with "
            "--pretrained-model-name-or-path, or --tokenizer-type and --vocab-file."
        )
    _check_folder(location, None, args)
    _check_has_tokenizer(location)
    from transformers import AutoTokenizer

    with _quiet_transformers(location), _explain_failure(location, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(
            location, **_hub_options(location, args), **options
        )
    if tokenizer.pad_token is None:
        # GPT-2 and its kin have none; the attention mask keeps padding out whatever it is.
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    return tokenizer


def load_image_processor(args: Any) -> Any:
    """The image processor of the model, or ViT's for the model's image size where it has none."""
    location = get_model_location(args)
    if location is None or _lacks(location, "preprocessor_config.json"):
        return _make_image_processor(load_config(args))
    _check_folder(location, None, args)
    # From its own module: the public name asks for torchvision, which Pillow can stand in for.
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    with _quiet_transformers(location), _explain_failure(location, "image processor"):
        return AutoImageProcessor.from_pretrained(location, **_hub_options(location, args))


def build_pretrained(auto_class_name: str, args: Any, **config_overrides: Any) -> nn.Module:
    """A model by the name of its Auto class, fp32, in evaluation mode as Hugging Face gives it."""
    import torch
    import transformers

    config = load_config(args, **config_overrides)
    auto_class = getattr(transformers, auto_class_name)
    if is_from_scratch(args):
        with _quiet_transformers(None), _explain_failure(config.model_type, auto_class_name):
            fresh: nn.Module = auto_class.from_config(
                config, dtype=torch.float32, trust_remote_code=args.trust_remote_code
            )
        return fresh
    location = str(get_model_location(args))
    _check_folder(location, auto_class_name, args)
    with _quiet_transformers(location), _explain_failure(location, auto_class_name):
        model, report = auto_class.from_pretrained(
            location,
            config=config,
            dtype=torch.float32,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **_hub_options(location, args),
        )
    _tell_fresh_weights(report, location)
    return model  # type: ignore[no-any-return]


def get_position_limit(config: Any) -> int | None:
    """The longest sequence that absolute position embeddings can number; None where no such."""
    limit = getattr(config, "max_position_embeddings", None)
    if limit is None or getattr(config, "rope_parameters", None) is not None or limit <= 0:
        return None
    # RoBERTa numbers positions from pad_token_id + 1 on, so its 514 take 512 tokens.
    if config.model_type in _POSITIONS_AFTER_PADDING and config.pad_token_id is not None:
        return int(limit) - int(config.pad_token_id) - 1
    return int(limit)


_POSITIONS_AFTER_PADDING = frozenset(
    {
        "roberta",
        "xlm-roberta",
        "camembert",
        "longformer",
        "mpnet",
        "xlm-roberta-xl",
        "data2vec-text",
    }
)


# --- sizes ---------------------------------------------------------------------------------------


def _load_config_of(location: str, args: Any) -> Any:
    _check_folder(location, None, args, needed="config.json")
    from transformers import AutoConfig

    with _quiet_transformers(location), _explain_failure(location, "model"):
        return AutoConfig.from_pretrained(location, **_hub_options(location, args))


def _make_config(model_type: str | None) -> Any:
    from transformers import CONFIG_MAPPING, AutoConfig

    if model_type is None:
        raise ModelError(
            "A model from scratch needs its architecture: give --model-type (bert, gpt2, t5, ...) "
            "or a folder with a config.json."
        )
    if model_type not in CONFIG_MAPPING:
        near = difflib.get_close_matches(model_type, list(CONFIG_MAPPING), n=1)
        hint = f" Did you mean {near[0]}?" if near else " Known are bert, gpt2, t5, vit, llama, ..."
        raise ModelError(f"--model-type {model_type} is not an architecture of transformers.{hint}")
    return AutoConfig.for_model(model_type)


def _own(config: Any, names: tuple[str, ...]) -> list[str]:
    """Those of the names that the configuration stores itself (not as another name's view)."""
    views = getattr(config, "attribute_map", {})
    return [name for name in names if name not in views and hasattr(config, name)]


def _set_all(config: Any, names: tuple[str, ...], value: Any) -> None:
    if value is not None:
        for name in _own(config, names):
            setattr(config, name, value)


def _set_sizes(config: Any, args: Any) -> None:
    sizes = {flag: getattr(args, flag) for flag in _SIZES}
    if sizes["hidden_size"] is not None and sizes["ffn_hidden_size"] is None:
        sizes["ffn_hidden_size"] = 4 * sizes["hidden_size"]
    for flag, value in sizes.items():
        if value is not None and not _own(config, _SIZES[flag]):
            get_logger().warning(
                "--%s has no effect: %s models have no such size.",
                flag.replace("_", "-"),
                config.model_type,
            )
        _set_all(config, _SIZES[flag], value)
    _fit_positions(config, args)
    hidden, heads = _get(config, "hidden_size"), _get(config, "num_attention_heads")
    if hidden and heads and hidden % heads:
        fitting = [str(n) for n in range(1, hidden + 1) if hidden % n == 0 and n <= 2 * heads]
        raise ConfigurationError(
            f"The hidden size {hidden} does not divide into {heads} attention heads: "
            f"use --num-attention-heads {', '.join(fitting[:-1])} or {fitting[-1]}."
        )
    if hidden and heads:
        _set_derived(config, args, hidden, heads)


def _set_derived(config: Any, args: Any, hidden: int, heads: int) -> None:
    if args.hidden_size is None and args.num_attention_heads is None:
        return
    _set_all(config, ("head_dim", "d_kv"), hidden // heads)
    _set_all(config, ("pooler_hidden_size",), hidden)
    groups = getattr(config, "num_key_value_heads", None)
    if groups is not None and heads % groups:
        config.num_key_value_heads = heads


def _fit_positions(config: Any, args: Any) -> None:
    """Room for --seq-length, where the positions were not said themselves."""
    limit = get_position_limit(config)
    if (
        args.max_position_embeddings is None
        and limit
        and args.seq_length
        and args.seq_length > limit
    ):
        stored = _get(config, "max_position_embeddings")
        _set_all(config, _SIZES["max_position_embeddings"], stored + args.seq_length - limit)


def _get(config: Any, flag: str) -> Any:
    names = _own(config, _SIZES[flag])
    return getattr(config, names[0]) if names else None


def _check_sizes(config: Any, args: Any, location: str) -> None:
    problems = []
    for flag in _SIZES:
        given, own = getattr(args, flag), _get(config, flag)
        # An unset size of the model (GPT-2's n_inner) means four times the width.
        if own is None and flag == "ffn_hidden_size":
            own = 4 * (_get(config, "hidden_size") or 0) or None
        if given is not None and own is not None and given != own:
            problems.append(
                f"--{flag.replace('_', '-')} {given} contradicts {location}, which has {own}: "
                f"leave the flag out, or add --from-scratch for fresh weights of that size."
            )
    if args.model_type is not None and args.model_type != config.model_type:
        problems.append(
            f"--model-type {args.model_type} contradicts {location}, which is a "
            f"{config.model_type} model: leave the flag out."
        )
    if problems:
        raise ConfigurationError(problems)


# --- tokenizers and image processors without a model ---------------------------------------------


def _make_tokenizer(args: Any) -> Any:
    from transformers import BertTokenizer, GPT2Tokenizer

    files = [args.vocab_file, args.merge_file] if args.merge_file else [args.vocab_file]
    missing = [file for file in files if not Path(file).expanduser().is_file()]
    if missing:
        raise ModelError(f"There is no vocabulary file {' or '.join(missing)}.")
    kind = args.tokenizer_type
    if kind is None:
        raise ConfigurationError(
            "--vocab-file needs --tokenizer-type: BertWordPieceLowerCase, BertWordPieceCase or "
            "GPT2BPETokenizer."
        )
    if kind == "GPT2BPETokenizer":
        if args.merge_file is None:
            raise ConfigurationError("--tokenizer-type GPT2BPETokenizer needs --merge-file too.")
        tokenizer = GPT2Tokenizer(vocab=args.vocab_file, merges=args.merge_file)
        tokenizer.pad_token = tokenizer.eos_token
        return tokenizer
    return BertTokenizer(vocab=args.vocab_file, do_lower_case=kind == "BertWordPieceLowerCase")


def _make_image_processor(config: Any) -> Any:
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    size = getattr(config, "image_size", None) or 224
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return ViTImageProcessorPil(size={"height": height, "width": width})


# --- what can go wrong ---------------------------------------------------------------------------


def _lacks(location: str, file: str) -> bool:
    path = Path(location)
    return path.is_dir() and not (path / file).is_file()


def _check_folder(
    location: str, auto_class_name: str | None, args: Any, needed: str | None = None
) -> None:
    path = Path(location)
    if not path.exists():
        if location.startswith((".", "/", "~")) or location.count("/") > 1:
            raise ModelError(_describe_missing_folder(path))
        return
    if not path.is_dir():
        raise ModelError(f"{location} is a file: a model is a folder with config.json and weights.")
    if needed is not None and _lacks(location, needed):
        raise ModelError(
            f"The model folder {location} lacks {needed}: it holds {_list_folder(path)}. Choose "
            "another folder, or give --model-type and --from-scratch for fresh weights."
        )
    if auto_class_name is not None and not any((path / name).is_file() for name in _WEIGHT_FILES):
        raise ModelError(
            f"The model folder {location} lacks weights (model.safetensors or "
            f"pytorch_model.bin): it holds {_list_folder(path)}. Add --from-scratch to start from "
            "fresh weights."
        )


def _check_has_tokenizer(location: str) -> None:
    """transformers makes an empty tokenizer of a folder without one, which knows no word."""
    path = Path(location)
    parts = (
        "tokenizer",
        "vocab",
        "merges",
        "spiece",
        "sentencepiece",
        "tiktoken",
        "tekken",
        ".bpe",
    )
    if path.is_dir() and not any(part in name for name in _list(path) for part in parts):
        raise ModelError(
            f"The folder {location} lacks a tokenizer (tokenizer.json or vocab.txt): it holds "
            f"{_list_folder(path)}. Save the tokenizer into it, or give --tokenizer-type and "
            "--vocab-file."
        )


def _list(path: Path) -> list[str]:
    return sorted(child.name for child in path.iterdir())


def _list_folder(path: Path) -> str:
    names = _list(path)
    return (", ".join(names[:8]) + (", ..." if len(names) > 8 else "")) or "nothing"


def _describe_missing_folder(path: Path) -> str:
    near: list[str] = []
    if path.parent.is_dir():
        near = difflib.get_close_matches(path.name, _list(path.parent), n=1, cutoff=0.5)
    hint = f" Did you mean {path.parent / near[0]}?" if near else ""
    return f"There is no model folder {path}.{hint}"


@contextlib.contextmanager
def _explain_failure(location: str, wanted: str) -> Iterator[None]:
    """Turn what transformers raises for bad input into one sentence."""
    try:
        yield
    except ModelError:
        raise
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, TypeError) as error:
        raise ModelError(_describe_failure(location, wanted, error)) from error
    except Exception as error:
        # safetensors' error for a damaged file has no public base class.
        if type(error).__name__ != "SafetensorError":
            raise
        raise ModelError(f"The weights in {location} are damaged: {error}.") from error


def _describe_failure(location: str, wanted: str, error: Exception) -> str:
    text = " ".join(str(error).split())
    if "trust_remote_code" in text:
        return f"{location} brings Python code of its own: add --trust-remote-code if you trust it."
    if "Unrecognized configuration class" in text:
        return (
            f"{location} cannot do this task: its architecture has no {wanted} in transformers; "
            "choose a model of another architecture."
        )
    if not Path(location).exists() and isinstance(error, OSError):
        if not _is_hub_reachable():
            return (
                f"The model {location} is neither a folder here nor in the local cache, and the "
                "Hugging Face Hub cannot be reached: check the spelling or the network, or give "
                "a local folder with --pretrained-model-name-or-path."
            )
        if "not a valid model identifier" in text or "Repository Not Found" in text:
            return (
                f"The model {location} is neither a folder here nor on the Hugging Face Hub (or "
                "it is private): check the spelling of --pretrained-model-name-or-path."
            )
    return f"The {wanted} of {location} cannot be loaded: {text[:300]}"


def _tell_fresh_weights(report: dict[str, Any], location: str) -> None:
    logger = get_logger()
    mismatched = [_describe_mismatch(entry) for entry in report.get("mismatched_keys", ())]
    if mismatched:
        logger.warning(
            "Weights of %s whose shape does not fit this task start afresh: %s.",
            location,
            "; ".join(sorted(mismatched)),
        )
    missing = sorted(report.get("missing_keys", ()))
    if missing:
        names = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if missing[8:] else "")
        logger.info("Weights that %s does not have start afresh: %s.", location, names)


def _describe_mismatch(entry: Any) -> str:
    if isinstance(entry, str):
        return entry
    name, saved, needed = entry
    return f"{name} (saved {tuple(saved)}, needed {tuple(needed)})"


@contextlib.contextmanager
def _quiet_transformers(location: str | None) -> Iterator[None]:
    """Our own lines tell what starts afresh; transformers' report and bar would say it twice.

    A download keeps its bar: it can take minutes.
    """
    from transformers.utils import logging

    level, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    if location is None or Path(location).exists():
        logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if had_bars:
            logging.enable_progress_bar()


def _hub_options(location: str, args: Any) -> dict[str, Any]:
    is_local = Path(location).exists()
    return {
        "trust_remote_code": args.trust_remote_code,
        "cache_dir": args.cache_dir,
        "local_files_only": is_local or not _is_hub_reachable(),
    }


@functools.cache
def _is_hub_reachable(seconds: float = 4.0) -> bool:
    """Whether a connection to the Hub opens; without this a lookup retries for a minute."""
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in {"1", "true", "yes", "on"}:
        return False
    if urllib.request.getproxies():
        return True
    endpoint = urllib.parse.urlparse(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    port = endpoint.port or (80 if endpoint.scheme == "http" else 443)
    opened: list[bool] = []

    def connect() -> None:
        with contextlib.suppress(OSError):
            socket.create_connection((endpoint.hostname or "", port), timeout=seconds).close()
            opened.append(True)

    # In a thread, because the look-up of the name knows no time limit.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(seconds)
    return bool(opened)
