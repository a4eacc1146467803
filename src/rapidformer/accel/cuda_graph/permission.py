"""``--cuda-graph``: whether the engine may record the passes of a model."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from dataclasses import dataclass

from rapidformer.accel.assembly import Assembly
from rapidformer.accel.cuda_graph.filling import prove_filling
from rapidformer.accel.dropout_seeds import has_dropout
from rapidformer.accel.sharding.zero import ShardedGradients
from rapidformer.accel.unpad.calls import Removal
from rapidformer.config.effect import MOST_COPIED
from rapidformer.errors import ConfigurationError
from rapidformer.overlay import find_fact, list_layers, put_fact


@dataclass(frozen=True)
class MayCapture:
    """A fact on a model whose passes may be replayed."""

    is_asked: bool
    """Whether the user insists (``--cuda-graph on``)."""
    in_pieces: bool
    """Whether blocks may be replayed by themselves where a whole step cannot be."""


def apply(assembly: Assembly) -> str | None:
    """Allow the engine to capture; returns why not, if a model cannot be replayed."""
    obstacle, is_asked = _find_obstacle(assembly), assembly.args.cuda_graph == "on"
    if obstacle is None:
        may_yield = assembly.args.dynamic_shape == "auto"
        shards, dtype = assembly.synchronizer, assembly.precision.dtype
        placed = shards.place_weights() if isinstance(shards, ShardedGradients) else None
        with placed.whole() if placed is not None else nullcontext():
            prove_filling(assembly.model, assembly.plan, dtype, may_yield=may_yield)
        removal = find_fact(assembly.model, Removal)
        if removal is not None and removal.yields:
            row = assembly.applied.get_row("dynamic shape")
            row.find_obstacle = functools.partial(_find_yielding, removal)
        in_pieces = assembly.wants("graphs in pieces")
        put_fact(assembly.model, MayCapture(is_asked=is_asked, in_pieces=in_pieces))
    elif is_asked:
        raise ConfigurationError(f"--cuda-graph on: {obstacle}. Leave the flag out.")
    else:
        assembly.applied.leave_off(obstacle)
    return obstacle


def _find_yielding(removal: Removal) -> str | None:
    what = "steps are replayed as CUDA graphs, which only padded ones can be"
    return what if removal.yields else removal.problem


def _find_obstacle(assembly: Assembly) -> str | None:
    """What of this model cannot be replayed, beside what the row says."""
    if any("statistics" in list_layers(module) for module in assembly.model.modules()):
        return "the ranks exchange the statistics of BatchNorm in every pass"
    shards = assembly.synchronizer
    if isinstance(shards, ShardedGradients) and shards.scalars is not None:
        return "ZeRO leaves parameters that are single numbers out of the weights it gathers"
    size = sum(parameter.nbytes for parameter in assembly.model.parameters())
    if isinstance(shards, ShardedGradients) and shards.stage > 1 and size > MOST_COPIED:
        return (
            f"replayed steps need whole weights, {size / 2**30:.1f} GiB, and under "
            f"ZeRO-{shards.stage} no more than {MOST_COPIED / 2**30:.0f} GiB are kept whole"
        )
    if assembly.wants("recompute") and has_dropout(assembly.model):
        return "recomputed blocks with dropout need random numbers that a recording cannot repeat"
    return None
