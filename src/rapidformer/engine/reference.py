"""The reference of preference training: what the run started from, whatever is trained.

Only one kind of run needs a second model: one that trains the model's own weights. Where adapters
are trained, the reference is the same model as it was: with its adapters off if they did nothing at
the start, otherwise with the values that its trained weights had then (a continued adapter,
PiSSA, trained biases). These are swapped in for the time of a question, shard by shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from rapidformer.accel.parallelize import Parallelized
from rapidformer.checkpoint.frozen import Checksums, compute_checksums, list_frozen
from rapidformer.compat.peft import adapters_off
from rapidformer.dist.collectives import gather_from_all
from rapidformer.dist.topology import Topology
from rapidformer.dist.whole import get_shard
from rapidformer.engine.model import RunModel
from rapidformer.errors import ConfigurationError
from rapidformer.models.evaluation_mode import evaluation_mode

T = TypeVar("T")
# What LoRA begins with is nothing if these are zero.
_ZERO_AT_FIRST = (".lora_B.", ".lora_embedding_A.")
# What is gone once adapters are off.
_SWITCHED_OFF = (".lora_A.", ".lora_B.", ".lora_embedding_", ".modules_to_save.")


@dataclass(frozen=True, eq=False, kw_only=True)
class Reference:
    """A model as the run found it, which answers without gradient and without dropout."""

    model: RunModel
    """The one that learns, or a frozen copy of it."""
    kind: str
    """What the start-up lines say."""
    is_without_adapters: bool = False
    start: Mapping[nn.Parameter, Tensor] = field(default_factory=dict)
    """The values that this rank's shards of the trained weights had."""

    def ask(self, question: Callable[[Any], T]) -> T:
        """``question(model)``, which calls the model once; the same answer on all stages."""
        parallelized = self.model.parallelized
        model, pipeline = parallelized.model, parallelized.pipeline
        with ExitStack() as state:
            state.enter_context(torch.no_grad())
            state.enter_context(evaluation_mode(model))
            if self.is_without_adapters:
                state.enter_context(adapters_off(model))
            if self.start:
                state.enter_context(_swapped(self.start, parallelized))
            if pipeline is None:
                return question(model)
            return pipeline.relay(lambda: question(model))


@contextmanager
def _swapped(values: Mapping[nn.Parameter, Tensor], parallelized: Parallelized) -> Iterator[None]:
    """Inside, these parameters have other values."""
    parallelized.settle()  # what is gathered would keep its values
    now = {parameter: _get_shard(parameter).clone() for parameter in values}
    _put(values)
    try:
        yield
    finally:
        parallelized.settle()
        _put(now)


def _put(values: Mapping[nn.Parameter, Tensor]) -> None:
    for parameter, value in values.items():
        _get_shard(parameter).copy_(value)


def _get_shard(parameter: nn.Parameter) -> Tensor:
    """This rank's part; a change of it does not count as one, since it is taken back."""
    with torch.no_grad():
        return get_shard(parameter).data


def build_reference(run: RunModel) -> Reference:
    """The reference of a composed model, whose weights are those that the run starts from."""
    if run.start is not None:
        precision = run.args.reference_precision
        weights = "" if precision is None else f", its weights in {precision}"
        return Reference(model=run.start, kind=f"a frozen copy of the model{weights}")
    if run.adapter is None:
        raise ConfigurationError(
            "the reference of a model whose own weights are trained is a copy of it, which was not "
            "made: set engine.model.keeps_start before engine.compose()."
        )
    if _does_nothing(run):
        kind = "the model with its adapters off"
        return Reference(model=run, kind=kind, is_without_adapters=True)
    if run.parallelized.deepspeed is not None:
        raise ConfigurationError(
            "--deepspeed: the reference is the adapter that the run starts from, whose values "
            "DeepSpeed does not let be swapped in: use --precompute-reference, or "
            "--zero-1-memory-optimization, -2- or -3- instead of DeepSpeed."
        )
    trained = [p for p in run.parameters if p.requires_grad]
    start = {parameter: _get_shard(parameter).clone() for parameter in trained}
    return Reference(model=run, kind="the model with the adapter it starts from", start=start)


def renew_start(run: RunModel) -> None:
    """Give the frozen copy the weights that the model has now: a checkpoint's, say."""
    if run.start is None:
        return
    if run.parallelized.deepspeed is not None:
        raise ConfigurationError(
            "--deepspeed with --finetune: the reference would be the weights of the checkpoint, "
            "which DeepSpeed has split: use --precompute-reference, or start from an exported "
            "model (--pretrained-model-name-or-path RUN/best)."
        )
    copies = run.start.parallelized.model.parameters()
    for parameter, kept in zip(run.parameters, copies, strict=True):
        _get_shard(kept).copy_(_get_shard(parameter))


def build_untouched(run: RunModel) -> Reference:
    """The model itself as the reference: only before its first update."""
    return Reference(model=run, kind="the model before its first step")


def compute_start_checksums(run: RunModel, topology: Topology) -> Checksums:
    """The checksums of all weights that decide what the reference says; for every rank to call."""
    parallelized = run.parallelized
    if parallelized.deepspeed is not None:
        return {}  # of a base model, DeepSpeed's checkpoints have them
    model = parallelized.model
    if any(parameter.is_meta for parameter in model.parameters()):
        return {}  # a model without values, which is only looked at
    names: Iterable[str] = (name for name, _ in model.named_parameters(remove_duplicate=False))
    if run.adapter is not None and _does_nothing(run):
        names = list_frozen(model)
    return compute_checksums(model, names, topology)


def _does_nothing(run: RunModel) -> bool:
    """Whether the model is the base model as long as it is not trained; agreed by all ranks."""
    trained = [(n, p) for n, p in run.parallelized.model.named_parameters() if p.requires_grad]
    shards = [_get_shard(p) for n, p in trained if any(part in n for part in _ZERO_AT_FIRST)]
    is_switched_off = all(any(part in n for part in _SWITCHED_OFF) for n, _ in trained)
    is_zero = is_switched_off and not any(bool(shard.any()) for shard in shards)
    return all(gather_from_all(is_zero))
