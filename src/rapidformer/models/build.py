"""Build Hugging Face models, tokenizers and processors.

From a Hub name, a local folder, or from scratch by `--model-type` and sizes. Weights are always
fp32, whatever the file holds: mixed precision is applied in training. A head of a different size is
*meant* to be re-initialised (that is what fine-tuning does), so it is reported, not refused.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from rapidformer.compat.transformers_processors import load_auto_processor
from rapidformer.config import Settings
from rapidformer.config.task_sections import DataArguments, ModelArguments
from rapidformer.errors import ConfigurationError, MissingPackageError, ModelError, list_some
from rapidformer.host_memory import measure_free_memory
from rapidformer.hub import quiet_transformers
from rapidformer.log import get_logger, warn, warn_once
from rapidformer.models.adapter_folder import (
    find_files,
    is_adapter_folder,
    list_weights,
    load_adapter,
    read_base,
)
from rapidformer.models.adapters import add_adapters, find_adapter, forget_base, hide_learned_tokens
from rapidformer.models.configuration import get_size, load_config
from rapidformer.models.location import (
    check_folder,
    check_has_tokenizer,
    check_head,
    explain_failure,
    get_hub_options,
    get_model_location,
    is_checkpoint_model,
    is_from_scratch,
    lacks_file,
    loads_checkpoint,
)
from rapidformer.models.quantizing import get_quantization, prepare_quantized
from rapidformer.models.towers import WHOLE, choose_auto_class, freeze_towers
from rapidformer.models.weight_names import check_names, find_trunk

if TYPE_CHECKING:
    from torch import nn

# To check these flags, the model itself is run once, so it must be built whole.
_TRIED_OUT = ("packing", "reset_attention_mask", "reset_position_ids")
_BYTES = 4  # of a weight: models are built in fp32
_GIB = 2**30
_CERTAINLY = 1000
"""Times the memory: so much too large that an estimate is enough."""


def build_pretrained(
    auto_class_name: str, args: Settings, *, must_be_trained: bool = False, **config_overrides: Any
) -> nn.Module:
    """A model by its Auto class, fp32, in evaluation mode; split weights are created later."""
    from rapidformer.models.deferred import (
        build_for_split,
        build_hollow,
        is_hollow_wanted,
        splits_weights,
    )

    config = load_config(args, **config_overrides)
    auto_class_name = choose_auto_class(auto_class_name, config)
    if is_hollow_wanted():
        return build_hollow(lambda: _adapt_fresh(auto_class_name, args, config, must_be_trained))
    if not splits_weights(args) or any(getattr(args, name) for name in _TRIED_OUT):
        if args.quantize_base is None:
            check_fits(config, lambda: _build_fresh(auto_class_name, args, config))
        return _build(auto_class_name, args, config, must_be_trained)
    return build_for_split(args, lambda: _build(auto_class_name, args, config, must_be_trained))


def check_fits(config: Any, build: Callable[[], nn.Module]) -> None:
    """Refuse a model larger than host memory: Linux would kill the run without a message."""
    layers, width = get_size(config, "num_layers"), get_size(config, "hidden_size")
    if not isinstance(layers, int) or not isinstance(width, int):
        return
    free = measure_free_memory()
    # A block has about 12 x width^2 weights. Only a model that may be too large is counted exactly.
    count = 12 * layers * width**2
    if count * _BYTES < free:
        return
    import torch

    try:
        # A damaged configuration may have more layers than anybody could count.
        if count * _BYTES < _CERTAINLY * free:
            with torch.device("meta"):
                count = sum(parameter.numel() for parameter in build().parameters())
    except Exception:  # not every model can be built without values
        return
    if count * _BYTES > free:
        raise ModelError(
            f"The model is too large for this machine: the weights of {count / 1e9:,.1f} G "
            f"parameters take {count * _BYTES / _GIB:,.0f} GiB, and {free / _GIB:,.0f} GiB of "
            "memory are free. Choose a smaller model, or split it over the ranks of several "
            "machines (--zero-3-memory-optimization, --tensor-model-parallel-size)."
        )


def _build(auto_class_name: str, args: Settings, config: Any, must_be_trained: bool) -> nn.Module:
    import torch
    import transformers

    if is_from_scratch(args) or is_checkpoint_model(str(get_model_location(args))):
        # Weights of a checkpoint are loaded later, into a model that is already split.
        adapted = _adapt_fresh(auto_class_name, args, config, must_be_trained)
        forget_base(adapted)
        return adapted
    location = str(get_model_location(args))
    base = read_base(location) if is_adapter_folder(location) else location
    check_folder(base, needs_weights=True)
    if must_be_trained:
        check_head(auto_class_name, config.architectures, location)
    auto_class = getattr(transformers, auto_class_name)
    with quiet_transformers(base), explain_failure(base, auto_class_name):
        model, report = auto_class.from_pretrained(
            base, config=config, dtype=torch.float32, ignore_mismatched_sizes=True,
            output_loading_info=True, **get_hub_options(base, args), **get_quantization(args),
        )  # fmt: skip
    trunk = find_trunk(model)
    model = prepare_quantized(model, args)
    if base != location:
        model = load_adapter(model, location)
        # The adapter brings these weights.
        known, mismatched = list_weights(location), report.get("mismatched_keys", ())
        report = {
            kind: [name for name in report.get(kind, ()) if name not in known]
            for kind in ("missing_keys", "unexpected_keys")
        }
        report["mismatched_keys"] = [entry for entry in mismatched if entry[0] not in known]
        adapter = find_adapter(model)
        if adapter is not None and (args.lora_rank is not None or args.peft_config is not None):
            warn_once(
                f"{location} has an adapter already ({adapter.describe()}): --lora-rank and "
                "--peft-config have no effect. For a new one, start from its base model or merge "
                "it first (rapidformer export)."
            )
    is_whole = auto_class_name in WHOLE  # training must not cost a part of the model
    check_names(report, trunk, base, allows_partial=args.allow_partial_load, is_whole=is_whole)
    if not must_be_trained:
        freeze_towers(model, args)
    if must_be_trained and (untrained := _list_fresh(report)):
        raise ModelError(
            f"{location} was never trained for this task: it has no weights for "
            f"{list_some(untrained, 4)}. Train it first and name that run, or pass "
            "--allow-untrained to continue with random ones."
        )
    if args.allow_partial_load or not loads_checkpoint(args):
        _report_fresh_weights(report, location)
    return hide_learned_tokens(add_adapters(model, args, fresh=_list_fresh(report)))


def _adapt_fresh(
    auto_class_name: str, args: Settings, config: Any, must_be_trained: bool
) -> nn.Module:
    """A model with new weights, with what is frozen and the adapters."""
    fresh = _build_fresh(auto_class_name, args, config)
    if not must_be_trained:
        freeze_towers(fresh, args)
    return hide_learned_tokens(add_adapters(fresh, args))


def _build_fresh(auto_class_name: str, args: ModelArguments, config: Any) -> nn.Module:
    import torch
    import transformers

    auto_class = getattr(transformers, auto_class_name)
    with quiet_transformers(None), explain_failure(config.model_type, auto_class_name):
        model: nn.Module = auto_class.from_config(
            config, dtype=torch.float32, trust_remote_code=args.trust_remote_code
        )
    return model


def load_tokenizer(args: Settings, **options: Any) -> Any:
    """The tokenizer of the model, or one made from --tokenizer-type and --vocab-file."""
    if args.vocab_file is not None:
        return _make_tokenizer(args)
    location = find_files(get_model_location(args), "tokenizer*")
    if location is None:
        raise ModelError(
            "There is no tokenizer: give a folder that has one with "
            "--pretrained-model-name-or-path, or --tokenizer-type and --vocab-file."
        )
    check_folder(location)
    check_has_tokenizer(location)
    from transformers import AutoTokenizer

    with quiet_transformers(location), explain_failure(location, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(
            location, **get_hub_options(location, args), **options
        )
    _give_padding(tokenizer)
    return tokenizer


def _give_padding(tokenizer: Any) -> None:
    if tokenizer.pad_token is None:
        # GPT-2 and similar have none; the attention mask excludes padding whatever it is.
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token


def load_processor(args: Settings) -> Any:
    """The processor of a model that reads images and text, with a padding token."""
    if find_spec("PIL") is None:
        raise MissingPackageError("pillow", "images", "image")
    location = find_files(get_model_location(args), "*processor_config.json")
    if location is None:
        raise ModelError(
            "There is no processor for images: give a folder or a Hub name that has one with "
            "--pretrained-model-name-or-path."
        )
    check_folder(location)
    check_has_tokenizer(location)
    with quiet_transformers(location), explain_failure(location, "processor"):
        processor = load_auto_processor(location, **get_hub_options(location, args))
    tokenizer = getattr(processor, "tokenizer", None)
    if tokenizer is None or not hasattr(processor, "image_processor"):
        raise ModelError(
            f"{location} has no processor for images and text (processor_config.json), only a "
            f"{type(processor).__name__}: choose a model that reads images."
        )
    _give_padding(tokenizer)
    return processor


def load_image_processor(args: Settings) -> Any:
    """The image processor of the model, or ViT's for the model's image size if it has none."""
    location = find_files(get_model_location(args), "preprocessor_config.json")
    if location is None or lacks_file(location, "preprocessor_config.json"):
        from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

        size = getattr(load_config(args), "image_size", None) or 224
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        return ViTImageProcessorPil(size={"height": height, "width": width})
    check_folder(location)
    # From its own module: the public name requires torchvision, which Pillow can replace.
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    with quiet_transformers(location), explain_failure(location, "image processor"):
        return AutoImageProcessor.from_pretrained(location, **get_hub_options(location, args))


def _make_tokenizer(args: DataArguments) -> Any:
    from transformers import BertTokenizer, GPT2Tokenizer

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


# --- newly initialised weights --------------------------------------------------------------------


def _list_fresh(report: dict[str, Any]) -> list[str]:
    """The weights that the files do not have, or not in this shape."""
    mismatched = [entry[0] for entry in report.get("mismatched_keys", ())]
    return sorted({*report.get("missing_keys", ()), *mismatched})


def _report_fresh_weights(report: dict[str, Any], location: str) -> None:
    mismatched = [
        f"{name} (saved {tuple(saved)}, needed {tuple(needed)})"
        for name, saved, needed in report.get("mismatched_keys", ())
    ]
    if mismatched:
        warn(
            f"Weights of {location} whose shape does not fit this task are newly initialised: "
            f"{'; '.join(sorted(mismatched))}."
        )
    missing = sorted(report.get("missing_keys", ()))
    if missing:
        get_logger().info(
            f"Weights that {location} does not have are newly initialised: {list_some(missing, 8)}."
        )
