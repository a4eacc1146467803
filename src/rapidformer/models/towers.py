"""Models that see or hear: a language model, towers that read pictures or sound, and projectors.

The parts are found by the model's own structure, not by its family. The language model is what
``get_decoder()`` returns, with its embeddings and its head. Of the rest, whole models are towers,
and what leads from a tower into the language model is a projector.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rapidformer.compat.transformers_models import is_model
from rapidformer.config.task_sections import ModelArguments
from rapidformer.errors import list_some
from rapidformer.log import get_logger

if TYPE_CHECKING:
    from torch import nn

_MULTIMODAL = "AutoModelForMultimodalLM"
WHOLE = (_MULTIMODAL, "AutoModelForImageTextToText")
"""The Auto classes that build a model with its towers."""
_INSIDE_TOWERS = ("merger", "projector", "connector", "resampler")
"""What projectors are called that are a part of their tower, as in Qwen's models."""
_READS_PICTURES = "CrossAttention"
"""In the class names of a language model's blocks that read the tower's output, as in Mllama."""


@dataclass(frozen=True, kw_only=True)
class Towers:
    """Names of a model's parts; all empty if it reads text alone."""

    language: tuple[str, ...] = ()
    towers: tuple[str, ...] = ()
    projectors: tuple[str, ...] = ()
    """Some lie in a tower, or in the language model; some are single parameters."""

    def __bool__(self) -> bool:
        return bool(self.towers or self.projectors)

    def is_in_tower(self, name: str) -> bool:
        """Whether a module or a parameter belongs to a tower, and not to a projector in it."""
        return is_inside(name, self.towers) and not self.is_in_projector(name)

    def is_in_projector(self, name: str) -> bool:
        return is_inside(name, self.projectors)


def get_text_config(config: Any) -> Any:
    """The part that describes the language model, if the model also sees or hears."""
    part = getattr(config, "text_config", None)
    return config if part is None else part


def get_shared(config: Any, name: str, default: Any = None) -> Any:
    """A setting, unless transformers refuses to name one value, since blocks differ (Gemma 4)."""
    try:
        return getattr(config, name, default)
    except RuntimeError:
        return default


def list_values(config: Any, name: str) -> list[Any]:
    """A setting's value in each block, or the one that all share; empty if there is none."""
    blocks = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]
    values = (getattr(block, name, None) for block in blocks)
    return [value for value in values if value is not None]


def list_layer_kinds(config: Any) -> list[str]:
    """What each layer does along the tokens, in transformers' words; empty if it is not named."""
    config = get_text_config(config)
    names = ("layer_types", "layers_block_type")
    return next((list(kinds) for name in names if (kinds := get_shared(config, name))), [])


def choose_auto_class(name: str, config: Any) -> str:
    """The Auto class of the *whole* model: the one for text would leave its towers out."""
    is_whole = name != "AutoModelForCausalLM" or _find_class(config) is None
    return name if is_whole else _MULTIMODAL


def find_text_problem(config: Any) -> str | None:
    """Why a model that also sees or hears cannot be trained on text; None if it can."""
    if not reads_more_than_text(config):
        return None
    cls = _find_class(config)
    if cls is None:
        return "transformers has no class for it that reads text from left to right"
    parameters = list(inspect.signature(cls.forward).parameters.values())[1:]
    needed = [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    others = [name for name in needed if name != "input_ids"]
    return f"{cls.__name__} cannot be called without {' and '.join(others)}" if others else None


def reads_more_than_text(config: Any) -> bool:
    """Whether a configuration also describes what reads images or sound."""
    known = getattr(config, "sub_configs", ())
    parts = {name for name in known if getattr(config, name, None) is not None}
    return bool(parts & {"vision_config", "audio_config"}) or parts > {"text_config"}


def _find_class(config: Any) -> Any:
    """The class of a decoder with towers; None for any other model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING

    if get_text_config(config) is config or config.is_encoder_decoder:
        return None
    return MODEL_FOR_MULTIMODAL_LM_MAPPING.get(type(config), None)


def list_placeholders(config: Any) -> set[int]:
    """Tokens that stand for images or sound, which no text may contain."""
    if get_text_config(config) is config:
        return set()
    endings = ("_token_id", "_token_index")
    return {v for k, v in vars(config).items() if k.endswith(endings) and isinstance(v, int)}


def find_towers(model: Any) -> Towers:
    """The parts of a model, by name."""
    cls = _find_class(model.config) if is_model(model) else None
    if cls is None or not isinstance(model, cls):
        return Towers()
    decoder = model.get_decoder()
    inside = {id(part) for part in decoder.modules()}
    heads = (model.get_input_embeddings(), model.get_output_embeddings())
    outside = [head for head in heads if head is not None and id(head) not in inside]
    language = [id(part) for part in (decoder, *outside)]
    names = {id(module): name for name, module in model.named_modules()}
    towers: list[str] = []
    projectors: list[str] = []
    for name, part in _list_others(model, language):
        if not is_model(part):
            projectors.append(name)
            continue
        towers.append(name)
        children = [child for child, _ in part.named_children()]
        projectors += [
            f"{name}.{child}" for child in children if any(word in child for word in _INSIDE_TOWERS)
        ]
    for part in decoder.modules():
        name = names[id(part)]
        if _READS_PICTURES in type(part).__name__ and not is_inside(name, projectors):
            projectors.append(name)
    return Towers(
        language=tuple(names[part] for part in language),
        towers=tuple(towers), projectors=tuple(projectors),
    )  # fmt: skip


def _list_others(model: nn.Module, language: Collection[int]) -> Iterator[tuple[str, Any]]:
    """The largest modules, and single parameters, without anything of the language model."""
    yield from model.named_parameters(recurse=False)
    for name, child in model.named_children():
        parts = {id(part) for part in child.modules()}
        if id(child) in language:
            continue
        if not parts.isdisjoint(language):
            yield from ((f"{name}.{rest}", part) for rest, part in _list_others(child, language))
        elif any(True for _ in child.parameters()):
            yield name, child


def freeze_towers(model: nn.Module, args: ModelArguments) -> None:
    """Freeze what reads pictures or sound; ``--train-vision`` and ``--train-projector`` keep it."""
    parts = find_towers(model)
    count = 0
    for name, parameter in model.named_parameters():
        is_idle = not args.train_vision and parts.is_in_tower(name)
        if is_idle or (not args.train_projector and parts.is_in_projector(name)):
            parameter.requires_grad_(False)
            count += parameter.numel()
    if count:
        names = list_some(list_left_out(model, args))
        get_logger().info("frozen    %s: %s parameters keep their values", names, f"{count:,}")


def list_left_out(model: nn.Module, args: ModelArguments) -> list[str]:
    """The towers and projectors that the settings do not train."""
    parts = find_towers(model)
    names = [] if args.train_vision else list(parts.towers)
    if names and args.train_projector:  # a projector may be a part of its tower
        children = [
            f"{tower}.{name}"
            for tower in names
            for name, _ in model.get_submodule(tower).named_children()
        ]
        names = [name for name in children if not parts.is_in_projector(name)]
    elif not args.train_projector:
        names += [name for name in parts.projectors if not is_inside(name, names)]
    return names


def list_frozen_parts(model: nn.Module) -> list[str]:
    """The towers and projectors in which nothing is trained."""
    parts = find_towers(model)
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    return [
        part
        for part in (*parts.towers, *parts.projectors)
        if not any(is_inside(name, (part,)) for name in trained)
    ]


def is_inside(name: str, parts: Sequence[str]) -> bool:
    """Whether a module or a parameter is one of the parts, or lies in one."""
    return any(name == part or name.startswith(f"{part}.") for part in parts)
