"""A weight with several names is stored once; the checkpoint says which names it answers to."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from rapidformer.checkpoint.run_file import blaming, read_run
from rapidformer.checkpoint.tensors import load_tensors, read_shapes
from rapidformer.dist.topology import Topology

Ties = dict[str, str]
"""Further names of a tensor to the one that it is stored under."""


def drop_tied(tensors: dict[str, torch.Tensor], model: nn.Module) -> Ties:
    """Take the further names of tied weights out of what is to be saved."""
    first_names: dict[int, str] = {}
    ties: Ties = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = first_names.setdefault(id(parameter), name)
        stored, other = f"model.{first}", f"model.{name}"
        if first != name and stored in tensors and other in tensors:
            del tensors[other]
            ties[other] = stored
    return ties


def read_saved_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes by every name that a checkpoint answers to."""
    shapes = read_shapes(folder / "state")
    with blaming(folder):
        return shapes | {name: shapes[first] for name, first in read_ties(folder).items()}


def load_named(tensors: dict[str, torch.Tensor], folder: Path, topology: Topology) -> None:
    """Fill the tensors in place, each by its own name or the one that it is stored under."""
    ties = read_ties(folder)
    own = {name: tensor for name, tensor in tensors.items() if name not in ties}
    load_tensors(own, folder / "state", topology)
    for name, tensor in tensors.items():
        # By themselves: a stage of a pipeline, or an untied model, has a copy of its own.
        if name in ties:
            load_tensors({ties[name]: tensor}, folder / "state", topology)


def read_ties(folder: Path) -> Ties:
    """The ties of a checkpoint; older ones have none, and store such weights under each name."""
    ties: Ties = read_run(folder).get("tied", {})
    return ties
