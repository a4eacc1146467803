"""Dropout on several ranks: the one thing that switches cannot keep bit for bit.

Replicas must use different masks, ranks that share a layer the same ones. Nothing is synchronized
later, so every rank must start from the right seed, whatever random numbers it used while building
its model.
"""

from __future__ import annotations

import torch
from torch import nn

from rapidformer.accel.assembly import Assembly
from rapidformer.dist.topology import Topology
from rapidformer.log import warn_once

DROPOUTS = (
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout,
)  # fmt: skip
"""torch's dropout layers, each with its rate ``p``."""
_WHAT_CHANGES = {
    "tensor": "--tensor-model-parallel-size with dropout: all slices of a layer (its heads) get "
    "the same mask",
    "pipeline": "--pipeline-model-parallel-size with dropout: each stage draws the masks of its "
    "own blocks",
    "context": "--context-parallel-size with dropout: each rank draws the masks of its own tokens",
}


def apply(assembly: Assembly) -> str | None:
    """Seed this rank's masks; last, since building may have used random numbers."""
    is_seeded = seed_dropout(assembly.model, assembly.args.seed, assembly.topology)
    return f"those of replica {assembly.topology.get_rank('data')}" if is_seeded else None


def seed_dropout(model: nn.Module, seed: int, topology: Topology) -> bool:
    """Seed dropout if ranks differ, and tell once how; False: one process goes on with its own."""
    replica = topology.get_rank("data")
    split = [what for axis, what in _WHAT_CHANGES.items() if topology.get_size(axis) > 1]
    if replica or split:
        torch.manual_seed(seed + replica)
    is_told = topology.is_first_process and has_dropout(model)
    for what in split if is_told else ():
        warn_once(
            f"{what}. A run therefore uses other masks than one process, each with the same "
            "distribution; everything else is exact."
        )
    return bool(replica or split)


def has_dropout(model: nn.Module) -> bool:
    """Whether the model uses dropout in training."""
    to_dict = getattr(getattr(model, "config", None), "to_dict", dict)
    values: dict[str, object] = to_dict()
    rates = [value for name, value in values.items() if "drop" in name]
    rates += [m.p for m in model.modules() if isinstance(m, DROPOUTS)]
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


def apply_no_dropout(model: nn.Module, *, changes_config: bool = False) -> None:
    """Set every dropout rate to zero: in layers, and in attributes passed to functions.

    A configuration that is saved with the model should stay as it is.
    """
    for module in model.modules():
        if isinstance(module, DROPOUTS):
            module.p = 0.0
        for owner in (module, getattr(module, "config", None) if changes_config else None):
            for name, value in list(getattr(owner, "__dict__", {}).items()):
                if "drop" in name and isinstance(value, float):
                    setattr(owner, name, 0.0)
