"""What a loss must not use if each rank holds one stage of the model.

The loss is computed on the last stage. What it takes from other stages besides the hidden state
(activations caught by hooks, their parameters) would be missing there, and nothing would fail.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from rapidformer.accel.pipeline.gates import (
    StageContext,
    describe_gradient_problem,
    refuse_gradient,
)
from rapidformer.accel.pipeline.layout import FLAG, Layout
from rapidformer.errors import RapidformerError
from rapidformer.models.plan import ModelPlan
from rapidformer.models.tensor_plans import describe_other_splits
from rapidformer.models.watched import describe_watched, find_watched, list_inner_modules
from rapidformer.overlay import extend


def list_far_modules(model: nn.Module, layout: Layout, plan: ModelPlan) -> dict[str, nn.Module]:
    """The blocks, and their modules, that do not run where the loss is computed."""
    return list_inner_modules(model, plan.blocks[: layout.stages[-1].start])


def find_hook_problem(far: Mapping[str, nn.Module], instead: str) -> str:
    """The problem with a hook that sees what the loss cannot; empty if there is none."""
    watched = find_watched(far)
    if not watched:
        return ""
    return (
        f"{FLAG}: there is a hook on {describe_watched(watched)}, which runs on another stage than "
        "the loss, so a loss that uses its results would be wrong. Hook blocks of the last stage "
        f"only, or use {instead}. If the hook only looks, set hook.only_looks = True."
    )


def explain_absence(context: StageContext, is_in_block: bool, name: str) -> str:
    """Why user code cannot use a parameter of another rank; empty if its value does not count."""
    is_lost = context.stage is not None and not context.stage.is_last
    if is_lost or context.is_in_model or (context.is_in_module and not is_in_block):
        return ""
    return f"{FLAG}: {name} is not on this rank but on another stage. {_say_instead(context)}"


def _say_instead(context: StageContext) -> str:
    return f"For a penalty on their size use --weight-decay; otherwise use {context.instead}."


def refuse_partial_reads(
    model: nn.Module, absent: Iterable[str], blocks: Iterable[str], context: StageContext
) -> None:
    """Make modules without some of their parameters refuse to list them for a loss."""
    # All modules around a parameter, the model's own (empty) name included.
    holders = {
        ".".join(parts[:count])
        for parts in (name.split(".") for name in absent)
        for count in range(len(parts))
    }
    prefixes = tuple(f"{block}." for block in blocks)
    # Those outside the blocks may still be called by themselves (the embedding, by user code).
    builders = [
        functools.partial(_build_partial, context=context, may_be_called=may_be_called)
        for may_be_called in (True, False)
    ]
    for name in sorted(holders):
        is_in_block = f"{name}.".startswith(prefixes)
        extend(model.get_submodule(name), "stages", builders[is_in_block], is_shared=True)


def _build_partial(cls: Any, context: StageContext, may_be_called: bool) -> dict[str, Any]:
    """The overlay of a module that lacks some of its parameters on this rank."""

    def named_parameters(self: Any, *args: Any, **kwargs: Any) -> Any:
        yield from cls.named_parameters(self, *args, **kwargs)
        # At the end of the list: reading the first one's device is harmless.
        if context.is_at_loss:
            raise RapidformerError(
                f"{FLAG}: the forward step iterates over the parameters of a {cls.__name__}, but "
                "each rank holds only those of its own stage, so a penalty over them would be "
                f"wrong. {_say_instead(context)}"
            )

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        before, context.is_in_module = context.is_in_module, True
        try:
            return cls.__call__(self, *args, **kwargs)
        finally:
            context.is_in_module = before

    members = {"named_parameters": named_parameters}
    return {**members, "__call__": call} if may_be_called else members


def refuse_shared_gradients(
    parameters: Iterable[nn.Parameter], context: StageContext
) -> list[RemovableHandle]:
    """Refuse a gradient that the forward step takes of a parameter that other stages use too."""

    def check(gradient: Tensor) -> None:
        refuse_gradient(context)

    return [p.register_hook(check) for p in parameters if p.requires_grad]


def explain_gradient_error(error: RuntimeError, context: StageContext) -> Exception:
    """The same error, or an explanation if the forward step asked for gradients itself."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not str(frames[-1].f_globals.get("__name__")).startswith("torch.autograd"):
        return error
    return RapidformerError(f"{describe_gradient_problem(context)} ({error})")


def find_model_problem(model: Any, plan: ModelPlan) -> str:
    """Why a model cannot be cut into stages; empty if it can."""
    config = getattr(model, "config", None)
    instead = f"Use {describe_other_splits(model, plan)} instead."
    name = type(model).__name__
    if getattr(config, "is_encoder_decoder", False):
        return f"{FLAG}: {name} has an encoder and a decoder, not one stack. {instead}"
    if getattr(config, "model_type", "") == "albert":
        return f"{FLAG}: all layers of {name} are the same module. {instead}"
    if not plan.blocks:
        return (
            f"{FLAG}: no repeated blocks were found in {name}. Give it a method "
            "rapidformer_plan() that returns {'blocks': 'name.of.list'}."
        )
    return f"{FLAG}: {name} {plan.pipeline_problem} {instead}" if plan.pipeline_problem else ""
