"""What a loss must not use if each rank holds one stage of the model.

The loss is computed on the last stage. What it takes from other stages besides the hidden state
(activations caught by hooks, their parameters) would be missing there, and nothing would fail. The
same goes for a norm over ``model.parameters()``: each rank has only its own stage's.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from torch import nn

from rapidformer.accel.pipeline.gates import StageContext
from rapidformer.accel.pipeline.layout import FLAG, Layout
from rapidformer.accel.watched import describe_watched, find_watched, list_inner_modules
from rapidformer.errors import RapidformerError
from rapidformer.models.plan import ModelPlan

_CLIPPING = ("torch.nn.utils.clip_grad", "clip_grad_norm_")


def list_far_modules(model: nn.Module, layout: Layout, plan: ModelPlan) -> dict[str, nn.Module]:
    """The blocks, and their modules, that do not run where the loss is computed."""
    return list_inner_modules(model, plan.blocks[: layout.stages[-1].start])


def find_hook_problem(far: Mapping[str, nn.Module]) -> str:
    """The problem with a hook that sees what the loss cannot; empty if there is none."""
    watched = find_watched(far)
    if not watched:
        return ""
    return (
        f"{FLAG}: there is a hook on {describe_watched(watched)}, which runs on another stage than "
        "the loss, so a loss that uses its results would be wrong. Hook blocks of the last stage "
        "only, or use --tensor-model-parallel-size or --zero-3-memory-optimization instead. If the "
        "hook only looks, set hook.only_looks = True."
    )


def refuse_reading_all(context: StageContext) -> None:
    """Raise if all parameters are read for a loss, or for torch's clipping by their norm."""
    if context.stage is not None and not context.is_in_model:
        raise RapidformerError(
            f"{FLAG}: the forward step iterates over model.parameters(), but each rank holds only "
            "those of its own stage, so a penalty over them would be wrong. For a penalty on their "
            "size use --weight-decay; otherwise use --tensor-model-parallel-size or data "
            "parallelism, which support such a loss."
        )
    if _is_clipping():
        raise RapidformerError(
            f"{FLAG}: torch's clip_grad_norm_ uses the norm of this rank's own stage only. Call "
            "engine.clip_grad_norm(max_norm) instead, or leave it to --clip-grad."
        )


def _is_clipping() -> bool:
    """Whether the caller is torch's own clipping."""
    frame = inspect.currentframe()
    for _ in range(8):
        if frame is None:
            break
        if (frame.f_globals.get("__name__"), frame.f_code.co_name) == _CLIPPING:
            return True
        frame = frame.f_back
    return False


def explain_gradient_error(error: RuntimeError) -> Exception:
    """The same error, or an explanation if the forward step asked for gradients itself."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__"))
    if not where.startswith("torch.autograd"):
        return error
    return RapidformerError(
        f"{FLAG}: the forward step takes a gradient (torch.autograd.grad) with respect to what "
        "another stage has computed, such as an embedding's output. Stages exchange hidden states "
        "only: use --tensor-model-parallel-size, --context-parallel-size or data parallelism. "
        f"({error})"
    )
