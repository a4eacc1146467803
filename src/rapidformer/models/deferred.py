"""Models whose weights are created only once it is known which part of them this rank keeps.

If a run splits weights, ``build`` runs under a recording: parameters have no memory, and the recipe
of each is stored by name. Blocks may be removed before anything is created; what is never requested
is never read or drawn. Buffers are real from the start, since every rank needs them whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rapidformer.compat.torch_dispatch import tree_map_only
from rapidformer.compat.torch_modules import get_parameter_table
from rapidformer.config import Settings
from rapidformer.dist.collectives import broadcast_object, gather_from_all
from rapidformer.log import get_logger
from rapidformer.models.adapters import add_adapters
from rapidformer.models.recording import Recording, RecordingError, Spans, record, take
from rapidformer.models.weight_files import record_files
from rapidformer.overlay import find_fact, put_fact

_CONTAINERS = (Tensor, list, tuple, dict)


@dataclass(frozen=True, eq=False)
class DeferredWeights:
    """The recipes of a model's parameters, by name."""

    recording: Recording
    parameters: dict[str, Tensor]
    """All that existed when the model was built."""
    is_hollow: bool = False
    """Whether values are never asked for: the model is only looked at."""

    def read(self, name: str, spans: Spans) -> Tensor:
        """A part of a parameter, with the values one process would have."""
        parameter = self.parameters[name]
        if self.recording.holds(parameter):
            return self.recording.read(parameter, spans)
        return take(parameter, spans)

    def __deepcopy__(self, memo: Any) -> DeferredWeights:
        """A copy of the model is made by the same recipes, which go by name."""
        return self


_builds_hollow = False


@contextmanager
def building_hollow() -> Iterator[None]:
    """Inside, models are built without values, which nothing may ask for."""
    global _builds_hollow
    before, _builds_hollow = _builds_hollow, True
    try:
        yield
    finally:
        _builds_hollow = before


def is_hollow_wanted() -> bool:
    """Whether models are to be built without values."""
    return _builds_hollow


def build_hollow(build: Callable[[], nn.Module]) -> nn.Module:
    """``build()`` on the meta device; a frozen model beside it needs no values either."""
    with torch.device("meta"):
        model = build()
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            setattr(module, name, torch.zeros_like(buffer, device="cpu"))
    put_fact(model, DeferredWeights(Recording(), dict(model.named_parameters()), is_hollow=True))
    return model


def splits_weights(args: Settings) -> bool:
    """Whether each rank has only a part of the weights; ZeRO-1 and -2 need whole ones."""
    if args.world_size == 1 or args.deepspeed is not None:
        return False
    splits = (args.tensor_model_parallel_size, args.pipeline_model_parallel_size)
    return bool(args.zero_stage == 3) or max(*splits, args.expert_model_parallel_size) > 1


def get_deferred(model: nn.Module) -> DeferredWeights | None:
    """The recipes of a model without weights; None for any other model."""
    return find_fact(model, DeferredWeights)


def build_for_split(args: Settings, build: Callable[[], nn.Module]) -> nn.Module:
    """``build()`` with adapters, without weights if the run splits them and it can be recorded."""

    def build_adapted() -> nn.Module:
        return add_adapters(build(), args)

    if is_hollow_wanted():
        try:
            return build_hollow(build_adapted)
        except Exception:  # not every model can be built without values
            return build_adapted()
    if not splits_weights(args):
        return build_adapted()
    # Rank 0's random numbers for all: other ranks may have drawn some of their own.
    state = broadcast_object(torch.get_rng_state())
    torch.set_rng_state(state)
    model, reason = None, ""
    try:
        model = _build_recorded(build_adapted)
    except Exception as error:  # a plain build follows, and fails if the error is real
        reason = f"{type(error).__name__}: {error}"
    # All ranks must go the same way.
    reasons = [text for text in gather_from_all(reason) if text]
    if model is not None and not reasons:
        return model
    get_logger().debug("the model is built whole on every process: %s", reasons[0])
    torch.set_rng_state(state)
    return build_adapted()


def _build_recorded(build: Callable[[], nn.Module]) -> nn.Module:
    with record() as recording, record_files(recording):
        model = build()
    _make_buffers(model, recording)
    parameters = clear_parameters(model)
    for name, parameter in parameters.items():
        if parameter.is_meta and not recording.has_values(parameter):
            raise RecordingError(f"nothing gives {name} its values")
    put_fact(model, DeferredWeights(recording, parameters))
    return model


def _make_buffers(model: nn.Module, recording: Recording) -> None:
    """Give values to every tensor that is not a parameter, registered or not."""
    made: dict[int, Tensor] = {}

    def make(tensor: Tensor) -> Tensor:
        if isinstance(tensor, nn.Parameter) or not tensor.is_meta:
            return tensor
        if not recording.has_values(tensor):
            raise RecordingError("nothing gives a buffer its values")
        return made.setdefault(id(tensor), recording.read(tensor))

    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            setattr(module, name, make(buffer))
        for name, value in vars(module).items():
            if not name.startswith("_") and isinstance(value, _CONTAINERS):
                vars(module)[name] = tree_map_only(Tensor, make, value)


def clear_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter's recipe or value; allocated ones are replaced by ones without memory."""
    recipes: dict[str, Tensor] = {}
    replaced: dict[int, nn.Parameter] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, parameter in get_parameter_table(module).items():
            if parameter is None:
                continue
            recipes[f"{prefix}.{name}" if prefix else name] = parameter.detach()
            if not parameter.is_meta:
                empty = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
                get_parameter_table(module)[name] = replaced.setdefault(id(parameter), empty)
    return recipes
