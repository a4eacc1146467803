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

from rapidformer.checkpoint.description import read_adapter_name
from rapidformer.checkpoint.exporting.naming import name_for_files
from rapidformer.checkpoint.exporting.source import Source
from rapidformer.checkpoint.tensors import StoredTensors
from rapidformer.errors import CheckpointError, ModelError, RapidformerError
from rapidformer.log import get_logger
from rapidformer.models.adapter_folder import wrap
from rapidformer.models.adapters import find_adapter, get_inner
from rapidformer.models.location import check_folder, explain_failure, quiet_transformers
from rapidformer.models.merging import check_mergeable, merge
from rapidformer.models.recording import Recording, record
from rapidformer.models.steps import Spans, take
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


def load_config(folder: Path) -> Any:
    """The configuration of a model that was trained."""
    from transformers import AutoConfig

    import rapidformer.models.gpt  # noqa: F401 - makes transformers know our own model

    with quiet_transformers(str(folder)), explain_failure(str(folder), "model"):
        return AutoConfig.from_pretrained(folder, local_files_only=True)


def find_class(config: Any) -> Any:
    """The class that was trained."""
    import transformers

    from rapidformer.models import gpt

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
    return _record(lambda recording: _finish(_build(source, config, recording, weights), merges))


def build_start(source: Source, config: Any) -> tuple[Recipes, set[str]]:
    """The model that training started from, and the names of weights that it does not have."""
    reports: list[dict[str, Any]] = []

    def build(_: Recording | None) -> nn.Module:
        model, report = _load_base(str(source.start), config)
        reports.append(report)
        return model  # type: ignore[no-any-return]

    recipes = _record(build)
    mismatched = {entry[0] for entry in reports[-1]["mismatched_keys"]}
    return recipes, {*reports[-1]["missing_keys"], *mismatched}


def _record(build: Callable[[Recording | None], nn.Module]) -> Recipes:
    """What cannot be recorded is built whole."""
    try:
        with record() as recording, record_files(recording):
            model = build(recording)
            config, files = _name(model)
        return Recipes(model, recording, config, files)
    except RapidformerError:
        raise
    except Exception as reason:  # whatever it is: a plain build fails too if the error is real
        get_logger().debug("the model is exported from memory: %r", reason)
        model = build(None)
        return Recipes(model, Recording(), *_name(model))


def _name(model: Any) -> tuple[Any, dict[str, Tensor]]:
    return (model.config, {}) if find_adapter(model) is not None else name_for_files(model)


def _finish(model: Any, merges: bool) -> nn.Module:
    if not merges:
        return get_inner(model)
    check_mergeable(find_adapter(model))
    plain: Any = merge(model)
    plain.tie_weights()
    return plain  # type: ignore[no-any-return]


def _build(
    source: Source,
    config: Any,
    recording: Recording | None,
    adapter_weights: dict[str, Tensor] | None,
) -> Any:
    """The trained model; inside peft's own class if it has an adapter."""
    location = source.base or (None if source.is_checkpoint else str(source.folder))
    if location is not None:
        model, _ = _load_base(location, config)
    else:
        with torch.device("meta" if recording else "cpu"):
            model = find_class(config)(copy.deepcopy(config))
    if source.adapter is not None:
        # Not load_adapter: peft's reader of files cannot be recorded.
        name = read_adapter_name(source.description)
        model = wrap(model, source.adapter, name, adapter_weights)
    if source.is_checkpoint:
        _fill(get_inner(model), source, recording)
    return model


def _read_adapter(source: Source) -> dict[str, Tensor] | None:
    """The weights in an adapter's folder, which are few."""
    if source.adapter is None or source.is_checkpoint:
        return None
    from peft import load_peft_weights

    weights: dict[str, Tensor] = load_peft_weights(str(source.adapter), device="cpu")
    return weights


def _load_base(location: str, config: Any) -> tuple[Any, dict[str, Any]]:
    check_folder(location, needs_weights=True)
    with quiet_transformers(location), explain_failure(location, "model"):
        return find_class(config).from_pretrained(  # type: ignore[no-any-return]
            location,
            config=copy.deepcopy(config),
            dtype=torch.float32,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )


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
    _check_names(source, wanted, weights, [n for n in stored.kinds if n not in known])
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()


def _check_names(
    source: Source, wanted: Mapping[str, Any], weights: Mapping[str, Any], others: list[str]
) -> None:
    frozen = source.base is not None  # whose weights are in the base model's files
    missing = [] if frozen else [name for name in wanted if name not in weights]
    unknown = [name.removeprefix(_PREFIX) for name in others if name.startswith(_PREFIX)]
    if missing or unknown:
        raise CheckpointError(
            f"{source.folder} does not fit its configuration: "
            + "; ".join(
                f"{what} {', '.join(names[:3])}" + (f" and {len(names) - 3} more" * bool(names[3:]))
                for what, names in (("it lacks", missing), ("the model has no", unknown))
                if names
            )
            + "."
        )


def find_stored_dtype(source: Source) -> torch.dtype:
    """The type that most of the trained weights were saved in.

    Of an adapter on other weights: one that loses nothing of either.
    """
    sizes = _count_by_dtype(source)
    if source.base is not None:
        base = list_file_dtypes(Path(source.base))
        under = base.most_common(1)[0][0] if base else torch.float32
        trained = sizes.most_common(1)[0][0] if sizes else torch.float32
        return torch.promote_types(trained, under)
    return sizes.most_common(1)[0][0] if sizes else torch.float32


def _count_by_dtype(source: Source) -> Counter[torch.dtype]:
    if not source.is_checkpoint:
        return list_file_dtypes(source.folder)
    counts: Counter[torch.dtype] = Counter()
    for name, (shape, dtype) in StoredTensors(source.folder / "state").kinds.items():
        if name.startswith(_PREFIX) and dtype.is_floating_point:
            counts[dtype] += shape.numel()
    return counts
