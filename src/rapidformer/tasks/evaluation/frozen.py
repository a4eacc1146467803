"""The frozen models that a task's objective asks, for training and for evaluations."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from rapidformer.engine import RapidformerEngine
from rapidformer.errors import ConfigurationError
from rapidformer.models.location import is_from_scratch
from rapidformer.objectives import Context
from rapidformer.objectives.reference import REFERENCE
from rapidformer.tasks.base import FrozenModel, PreparedData, Task


def compose_frozen_models(
    engine: RapidformerEngine, task: Task, prepared: PreparedData
) -> dict[str, nn.Module]:
    """What the task builds, beside the model that learns."""
    built = task.build_frozen_models(engine.args, prepared)
    return {name: _compose(engine, model) for name, model in built.items()}


def _compose(engine: RapidformerEngine, model: FrozenModel) -> nn.Module:
    beside = engine.model.compose_beside(
        model.module, precision=model.precision, layout=model.layout
    )
    return beside.parallelized.model


def add_context(prepared: PreparedData, context: Context) -> PreparedData:
    """The data with what evaluations may ask besides the model."""
    parts = {name: add_context(part, context) for name, part in prepared.parts.items()}
    return replace(prepared, parts=parts, extras={**prepared.extras, "context": context})


def add_frozen_models(
    engine: RapidformerEngine, task: Task, prepared: PreparedData
) -> PreparedData:
    """The same for a model that is not trained; its reference is what its run started from."""
    asked = task.build_objective(engine.args).frozen
    if not asked:
        return prepared
    models = compose_frozen_models(engine, task, prepared)
    if REFERENCE in asked and REFERENCE not in models:
        start = engine.args.replace("the reference", load=None, lora_rank=None, peft_config=None)
        if is_from_scratch(start):
            raise ConfigurationError(
                f"evaluating --task {task.name} needs the model that the run started from: give it "
                "with --pretrained-model-name-or-path."
            )
        reference = FrozenModel(task.build_model(start, prepared), engine.args.reference_precision)
        models[REFERENCE] = _compose(engine, reference)
    return add_context(prepared, Context(frozen=models))
