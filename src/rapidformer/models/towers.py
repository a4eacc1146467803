"""The parts of a model that sees or hears: its towers, its projectors, its language model."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from rapidformer.config import Settings
from rapidformer.models.adapters import find_adapter


class Towers(NamedTuple):
    """Names of submodules."""

    towers: tuple[str, ...]
    projectors: tuple[str, ...]
    language: str | None


_TOWERS = ("vision_tower", "vision_model", "visual", "audio_tower")
_PROJECTORS = ("multi_modal_projector", "connector", "merger", "deepstack_merger_list")
_LANGUAGE = ("language_model", "text_model")


def find_towers(model: nn.Module) -> Towers:
    """The towers, projectors and language model, by their names in the model."""
    names = [name for name, _ in model.named_modules() if name]
    ends = {name: name.rpartition(".")[2] for name in names}
    towers = tuple(n for n in names if ends[n] in _TOWERS and "language_model" not in n)
    projectors = tuple(n for n in names if ends[n] in _PROJECTORS)
    return Towers(towers, projectors, next((n for n in names if ends[n] in _LANGUAGE), None))


def freeze_towers(model: nn.Module, args: Settings) -> None:
    """Freeze towers and projectors unless --train-vision and --train-projector say otherwise."""
    if find_adapter(model) is not None:
        return  # it has frozen them, and chosen its own places
    found = find_towers(model)
    for name, parameter in model.named_parameters():
        if _is_inside(name, found.projectors):  # Qwen's is inside the tower
            parameter.requires_grad_(args.train_projector)
        elif _is_inside(name, found.towers):
            parameter.requires_grad_(args.train_vision)


def _is_inside(name: str, modules: tuple[str, ...]) -> bool:
    return any(name.startswith(f"{module}.") for module in modules)
