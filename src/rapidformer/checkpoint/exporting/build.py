"""Build the trained model from where it was saved: in memory, or as recipes of its tensors.

Recipes are recorded (``models.recording``): transformers and peft do what they always do, on
tensors without values, and each weight can then be computed alone, whatever layout saved it. That
is how a model is merged, renamed and written while only one shard of it is in memory.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rapidformer.checkpoint.exporting.source import Source
from rapidformer.checkpoint.saving import read_adapter_name
from rapidformer.checkpoint.tensors import StoredTensors
from rapidformer.compat.torch_tensors import get_storage_key
from rapidformer.errors import CheckpointError, ModelError, RapidformerError, list_some
from rapidformer.log import get_logger
from rapidformer.models import gpt
from rapidformer.models.adapter_folder import wrap
from rapidformer.models.adapters import find_adapter, get_inner
from rapidformer.models.gpt.conversion import convert_config, convert_weights
from rapidformer.models.merging import check_mergeable, load_base, merge
from rapidformer.models.recording import Recording, Spans, record, take
from rapidformer.models.weight_files import list_file_dtypes, record_files

_PREFIX = "model."
"""What a checkpoint puts before the names of weights, as opposed to optimizer state."""


@dataclass(frozen=True)
class Recipes:
    """A model without values, and the values of its tensors one by one."""

    model: Any
    recording: Recording
    config: Any
    """What the exported model's ``config.json`` says."""
    files: dict[str, Tensor]
    """The tensors as files have them; empty for a model with an adapter in it."""

    def read(self, tensor: Tensor) -> Tensor:
        """The values of one of the tensors, in host memory."""
        return self.recording.read(tensor) if self.recording.holds(tensor) else tensor.detach()


@dataclass(frozen=True)
class _CheckpointTensor:
    """A recorded tensor's values: those of a checkpoint."""

    stored: StoredTensors
    name: str

    def __call__(self) -> Tensor:
        return self.stored.read(self.name)

    def read(self, spans: Spans) -> Tensor:
        return take(self(), spans)


def _find_class(config: Any) -> Any:
    """The class that was trained."""
    import transformers

    name = str(next(iter(config.architectures or ()), ""))
    if name in ("GPTModel", "GPTForCausalLM") and config.model_type == gpt.GPTConfig.model_type:
        return gpt.GPTForCausalLM
    if not hasattr(transformers, name):
        raise ModelError(
            f"{name or 'the model'} is not a class of transformers, so plain transformers could "
            "not load an export of it: use engine.export in the script that trained it."
        )
    return getattr(transformers, name)


def build_model(source: Source, config: Any) -> nn.Module:
    """The trained model in memory, in fp32, with its adapter next to the weights."""
    return get_inner(_build(source, config, None, _read_adapter(source))).eval()


def build_recipes(source: Source, config: Any, *, merges: bool) -> Recipes:
    """The trained model as recipes, with its adapter merged or, without ``merges``, as it is."""
    weights = _read_adapter(source)

    def build(recording: Recording | None) -> nn.Module:
        model = _build(source, config, recording, weights)
        if not merges:
            return get_inner(model)
        check_mergeable(find_adapter(model))
        plain: Any = merge(model)
        plain.tie_weights()
        return plain

    return _record(build)


def build_start(source: Source, config: Any) -> tuple[Recipes, set[str]]:
    """The model that training started from, and the names of weights that it does not have."""
    fresh: set[str] = set()

    def build(_: Recording | None) -> nn.Module:
        nonlocal fresh
        model, fresh = load_base(_find_class(config), str(source.start), config)
        return model

    return _record(build), fresh


def _record(build: Callable[[Recording | None], nn.Module]) -> Recipes:
    """What cannot be recorded is built whole."""
    try:
        with record() as recording, record_files(recording):
            model = build(recording)
            config, files = _name_for_files(model)
        return Recipes(model, recording, config, files)
    except RapidformerError:
        raise
    except Exception as reason:  # whatever it is: a plain build fails too if the error is real
        get_logger().debug("the model is exported from memory: %r", reason)
        model = build(None)
        return Recipes(model, Recording(), *_name_for_files(model))


def _name_for_files(model: Any) -> tuple[Any, dict[str, Tensor]]:
    """The configuration and the tensors to write, under names that transformers loads."""
    from transformers.core_model_loading import revert_weight_conversion

    if find_adapter(model) is not None:
        return model.config, {}
    if isinstance(model, gpt.GPTModel):
        model = _convert_ours(model)
    weights: dict[str, Tensor] = drop_ties(model, model.state_dict())
    return model.config, revert_weight_conversion(model, weights)


def drop_ties(model: Any, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights without further names of tied ones, which transformers ties again."""
    ties: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}

    def is_tied(name: str) -> bool:
        first = weights.get(ties.get(name, ""))
        return first is not None and get_storage_key(first) == get_storage_key(weights[name])

    return {name: tensor for name, tensor in weights.items() if not is_tied(name)}


def _convert_ours(model: gpt.GPTModel) -> Any:
    import transformers

    config = convert_config(model.config)
    with torch.device("meta"):
        theirs = getattr(transformers, config.architectures[0])(config)
    weights = convert_weights(model.config, model.state_dict())
    # Only further names of tied weights may be missing: tie_weights gives them theirs.
    problems = theirs.load_state_dict(weights, strict=False, assign=True)
    left = set(problems.missing_keys) - set(theirs.all_tied_weights_keys)
    assert not left and not problems.unexpected_keys, (left, problems.unexpected_keys)
    theirs.tie_weights()
    return theirs


def _build(
    source: Source, config: Any, recording: Recording | None, adapter: dict[str, Tensor] | None
) -> Any:
    """The trained model; inside peft's own class if it has an adapter."""
    location = source.base or (None if source.is_checkpoint else str(source.folder))
    if location is not None:
        model, _ = load_base(_find_class(config), location, config)
    else:
        with torch.device("meta" if recording else "cpu"):
            model = _find_class(config)(copy.deepcopy(config))
    if source.adapter is not None:
        # Not load_adapter: peft's reader of files cannot be recorded.
        model = wrap(model, source.adapter, read_adapter_name(source.description), adapter)
    if source.is_checkpoint:
        _fill(get_inner(model), source, recording)
    return model


def _read_adapter(source: Source) -> dict[str, Tensor] | None:
    """The weights in an adapter's folder, which are few."""
    if source.adapter is None or source.is_checkpoint:
        return None
    from peft import load_peft_weights

    return load_peft_weights(str(source.adapter), device="cpu")


def _fill(model: Any, source: Source, recording: Recording | None) -> None:
    """Give a model the weights of a checkpoint; it must have all that the base does not."""
    stored = StoredTensors(source.folder / "state")
    ties: Mapping[str, str] = source.run.get("tied", {}) if source.run else {}
    wanted = model.state_dict()
    weights: dict[str, Tensor] = {}
    for name, tensor in wanted.items():
        key = ties.get(_PREFIX + name, _PREFIX + name)
        if key not in stored.kinds:
            continue
        shape, dtype = stored.kinds[key]
        if shape != tensor.shape:
            raise CheckpointError(
                f"{source.folder} has {name} in shape {list(shape)}, its configuration needs "
                f"{list(tensor.shape)}."
            )
        read = _CheckpointTensor(stored, key)
        weights[name] = recording.add_source(read, shape, dtype) if recording else read()
    known = {_PREFIX + name for name in wanted} | set(ties.values())
    others = [name for name in stored.kinds if name not in known and name.startswith(_PREFIX)]
    # The weights of a frozen base are in its own files.
    missing = [] if source.base else [name for name in wanted if name not in weights]
    unknown = [name.removeprefix(_PREFIX) for name in others]
    if missing or unknown:
        problems = [f"it lacks {list_some(missing)}"] if missing else []
        problems += [f"the model has no {list_some(unknown)}"] if unknown else []
        raise CheckpointError(
            f"{source.folder} does not fit its configuration: {'; '.join(problems)}."
        )
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()


def find_stored_dtype(source: Source) -> torch.dtype:
    """The type of most of the trained weights; on a base, one that loses nothing of either."""
    sizes: Counter[torch.dtype] = Counter()
    if source.is_checkpoint:
        for name, (shape, dtype) in StoredTensors(source.folder / "state").kinds.items():
            if name.startswith(_PREFIX) and dtype.is_floating_point:
                sizes[dtype] += shape.numel()
    else:
        sizes = list_file_dtypes(source.folder)
    trained = _get_most_common(sizes)
    if source.base is None:
        return trained
    return torch.promote_types(trained, _get_most_common(list_file_dtypes(Path(source.base))))


def _get_most_common(sizes: Counter[torch.dtype]) -> torch.dtype:
    return sizes.most_common(1)[0][0] if sizes else torch.float32
