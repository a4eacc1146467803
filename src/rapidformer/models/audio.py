"""Load what turns audio into a model's inputs, and what is saved with a model that listens."""

from __future__ import annotations

from typing import Any

from rapidformer.config import Settings
from rapidformer.errors import ModelError
from rapidformer.hub import quiet_transformers
from rapidformer.models.adapter_folder import find_files
from rapidformer.models.location import (
    check_folder,
    explain_failure,
    get_hub_options,
    get_model_location,
    lacks_file,
)

_FILES = ("preprocessor_config.json", "processor_config.json")


def load_feature_extractor(args: Settings, config: Any) -> Any:
    """The feature extractor of the model, or its family's for a model without one."""
    location = find_files(get_model_location(args), "*processor_config.json")
    if location is None or all(lacks_file(location, file) for file in _FILES):
        return _make_feature_extractor(config)
    check_folder(location)
    from transformers import AutoFeatureExtractor

    with quiet_transformers(location), explain_failure(location, "feature extractor"):
        return AutoFeatureExtractor.from_pretrained(location, **get_hub_options(location, args))


def _make_feature_extractor(config: Any) -> Any:
    from transformers import FEATURE_EXTRACTOR_MAPPING

    if type(config) not in FEATURE_EXTRACTOR_MAPPING:
        raise ModelError(
            f"{config.model_type} models have no feature extractor for audio in transformers: "
            "choose a model that listens, such as whisper or wav2vec2."
        )
    options: dict[str, Any] = {}
    if getattr(config, "num_mel_bins", None) is not None:
        options["feature_size"] = config.num_mel_bins
    if hasattr(config, "feat_extract_norm"):
        # Models with a group norm were trained without a mask.
        options["return_attention_mask"] = config.feat_extract_norm == "layer"
    return FEATURE_EXTRACTOR_MAPPING[type(config)](**options)


def load_generation_config(args: Settings) -> Any | None:
    """How the model's authors generate with it; None if they do not say."""
    location = find_files(get_model_location(args), "generation_config.json")
    if location is None or lacks_file(location, "generation_config.json"):
        return None
    from transformers import GenerationConfig

    options = get_hub_options(location, args)
    options.pop("trust_remote_code")
    try:
        return GenerationConfig.from_pretrained(location, **options)
    except (OSError, ValueError):
        return None


def build_processor(config: Any, extractor: Any, tokenizer: Any) -> Any:
    """Feature extractor and tokenizer as the one object that ``AutoProcessor`` loads."""
    from transformers import PROCESSOR_MAPPING, Wav2Vec2Processor

    # Not every relative of wav2vec 2.0 is in the table (Data2VecAudio).
    processor_class: Any = PROCESSOR_MAPPING.get(type(config), Wav2Vec2Processor)
    return processor_class(feature_extractor=extractor, tokenizer=tokenizer)
