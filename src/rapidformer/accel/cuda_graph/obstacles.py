"""Applies ``--cuda-graph``: decides whether this model's passes may be replayed at all.

The engine records them later (``accel/cuda_graph/graphs.py``), once it has seen them run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rapidformer.accel.assembly import Alone, Assembly
from rapidformer.accel.unpad.unpadding import prove_filling
from rapidformer.errors import ConfigurationError


@dataclass(frozen=True)
class MayCapture:
    """A fact on a model whose passes may be replayed."""

    is_asked: bool
    """Whether the user insists (``--cuda-graph on``)."""


def apply(assembly: Assembly) -> str | None:
    """Allow the engine to capture, unless the run has something that cannot be replayed."""
    is_asked = assembly.args.cuda_graph == "on"
    obstacle = _find_obstacle(assembly)
    if obstacle is None:
        prove_filling(assembly.model, assembly.plan, assembly.precision.dtype)
        assembly.applied.put_fact(assembly.model, MayCapture(is_asked=is_asked))
        return None
    if is_asked:
        raise ConfigurationError(_refuse(obstacle))
    return f"off: {obstacle}" if assembly.device.type == "cuda" else None


def find_graph_problem(device: torch.device) -> str | None:
    """Why ``--cuda-graph on`` cannot work on a device."""
    obstacle = _find_missing_device(device)
    return None if obstacle is None else _refuse(obstacle)


def _refuse(obstacle: str) -> str:
    return f"--cuda-graph on: {obstacle}. Leave the flag out."


def _find_missing_device(device: torch.device) -> str | None:
    return (
        None
        if device.type == "cuda"
        else f"it needs a CUDA device, and this run is on {device.type.upper()}"
    )


def _find_obstacle(assembly: Assembly) -> str | None:
    """Why this run's steps cannot be replayed."""
    args, topology = assembly.args, assembly.topology
    missing = _find_missing_device(assembly.device)
    if missing is not None:
        return missing
    if args.world_size > 1 or topology.mesh is not None:
        return "it works on a single rank only so far"
    if not isinstance(assembly.synchronizer, Alone) or assembly.uses_deepspeed:
        return "it does not work with ZeRO, offloading or DeepSpeed yet"
    if assembly.precision.needs_loss_scaling:
        return "fp16 skips steps whose gradients overflow, which a graph cannot do; use bf16"
    if args.checkpoint_activations or args.activation_offload:
        return "it does not work with recomputed or offloaded activations yet"
    return None
