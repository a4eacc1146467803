"""Dropout in a run of several processes: the one thing that a switch cannot leave bit for bit.

Replicas must drop out other units, processes that share a layer the same ones. What a reader would
get wrong: nothing is synchronized later, so all must start from the right seed, whatever each has
drawn while it built its model.
"""

from __future__ import annotations

import torch
from torch import nn

from rapidformer.dist.topology import Topology
from rapidformer.log import warn_once

DROPOUTS = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)
"""torch's layers that drop something out, each with its rate ``p``."""
_WHAT_CHANGES = {
    "tensor": (
        "--tensor-model-parallel-size",
        "each process draws the masks of its own share, and shares of one layer (its heads) are "
        "masked alike",
    ),
    "pipeline": (
        "--pipeline-model-parallel-size",
        "each stage draws the masks of its own blocks",
    ),
    "context": (
        "--context-parallel-size",
        "each process draws the masks of its own tokens",
    ),
}


def seed_dropout(model: nn.Module, seed: int, topology: Topology) -> None:
    """Start the random numbers of training; say once what cannot be as in one process."""
    replica = topology.get_rank("data")
    split = [words for axis, words in _WHAT_CHANGES.items() if topology.get_size(axis) > 1]
    if replica or split:
        torch.manual_seed(seed + replica)
    if not topology.is_first_process or not has_dropout(model):
        return
    for flag, what in split:
        warn_once(
            f"{flag} with dropout: {what}, so a run differs from one of another size; only the "
            "distribution of each mask is kept. Everything else is exact."
        )


def has_dropout(model: nn.Module) -> bool:
    """Whether the model drops anything out in training."""
    to_dict = getattr(getattr(model, "config", None), "to_dict", dict)
    values: dict[str, object] = to_dict()
    rates = [value for name, value in values.items() if "drop" in name]
    rates += [m.p for m in model.modules() if isinstance(m, DROPOUTS)]
    return any(isinstance(rate, float) and rate > 0 for rate in rates)
