"""``torch.compile``, block by block.

Equal blocks share one compiled graph, so a deep model compiles as fast as a shallow one, and code
around the blocks (user code, losses, data-dependent branches) cannot break a graph.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from rapidformer.accel.assembly import Assembly
from rapidformer.compat.torch_modules import call_plainly, set_compiled_call
from rapidformer.log import warn_once
from rapidformer.models.plan import ModelPlan


def apply(assembly: Assembly) -> str:
    """Compile the blocks of this rank."""
    args, plan = assembly.args, assembly.plan
    apply_compile(assembly.model, plan, backend=args.compile_backend)
    what = f"{len(plan.blocks)} blocks" if plan.blocks else "the whole model"
    why = (
        " (--onnx-runtime-training: ONNX Runtime's training package has been discontinued)"
        if args.onnx_runtime_training
        else ""
    )
    return f"torch.compile of {what} with {args.compile_backend}{why}"


def apply_compile(model: nn.Module, plan: ModelPlan, *, backend: str = "inductor") -> nn.Module:
    """Compile each block in place, or the whole model if it has no blocks."""
    if plan.blocks:
        compiled = torch.compile(_run, backend=backend)
        for block in plan.get_blocks(model):
            # Not block.compile(): torch skips frames of torch.nn, so a block that is one of torch's
            # own layers would silently stay uncompiled. The frame of `_run` is ours.
            set_compiled_call(block, functools.partial(compiled, block))
    else:
        warn_once(
            f"--compile: no repeated blocks were found in {type(model).__name__}, "
            "so the whole model is compiled."
        )
        compiled = torch.compile(_run, backend=backend)
        set_compiled_call(model, functools.partial(compiled, model))
    return model


def _run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return call_plainly(module, *args, **kwargs)
