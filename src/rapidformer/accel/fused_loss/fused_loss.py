"""Applies ``--fused-loss``: the model's head leaves its outputs to the loss.

The loss runs inside a second call of the head, so that a head which is sharded on its own is
gathered when its weight is used. Tensor parallelism has already split the head; context parallelism
is applied later and puts its region on the head.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from rapidformer.accel.applied import Applied
from rapidformer.accel.assembly import Assembly
from rapidformer.accel.deepspeed.strategy import DeepSpeedStrategy
from rapidformer.accel.fused_loss.chunked import Losses, Recipe, compute_losses, get_compute_type
from rapidformer.accel.fused_loss.deferred import DTYPES, WATCHING
from rapidformer.accel.fused_loss.divergence import Teacher
from rapidformer.accel.fused_loss.followed import defer
from rapidformer.accel.fused_loss.head import Head
from rapidformer.accel.fused_loss.layered import deferring_layers, find_layered_head
from rapidformer.accel.sharding.zero import gather_weight
from rapidformer.accel.tensor.styles import ColwiseGathered, Split
from rapidformer.accel.unpad.on_demand import lacks_padding, map_tokens
from rapidformer.accel.unpad.promises import find_promise
from rapidformer.accel.unpad.tokenwise import pick_labelled
from rapidformer.compat.torch_dispatch import find_unknown_functions
from rapidformer.dist.context_region import ContextRegion
from rapidformer.dist.regions import copy_in
from rapidformer.dist.vocabulary import VocabularySlice
from rapidformer.dist.whole import gather_with_gradient
from rapidformer.errors import ConfigurationError
from rapidformer.models.watched import find_watched
from rapidformer.overlay import extend, find_fact, get_fact, get_own_class, list_layers, remove

_LARGE = 4096
"""Smallest vocabulary for ``auto``: below, logits are no larger than other activations."""


def apply(assembly: Assembly) -> str | None:
    """Defer the logits, if the model has a large head."""
    mode = assembly.args.fused_loss
    head = find_head(assembly.model)
    obstacle = _find_obstacle(assembly, head)
    if obstacle is not None:
        # In a pipeline, only the last stage has the head.
        if mode == "on" and assembly.pipeline is None:
            raise ConfigurationError(f"--fused-loss on: {obstacle}. Leave the flag out.")
        if head is not None:
            assembly.applied.leave_off(obstacle)
        return None
    assert head is not None
    if mode == "auto" and head.weight.shape[0] < _LARGE:
        return None
    unknown = find_unknown_functions()
    if unknown is not None and mode == "on":
        raise ConfigurationError(f"--fused-loss on: {unknown}. Leave the flag out.")
    if unknown is not None:
        assembly.applied.leave_off(unknown)
        return None

    def gather(parameter: Tensor) -> Tensor:
        # A loss over ``outputs.logits`` may run after the forward pass, when weights are sharded
        # again. Looked up late: a later switch creates the synchronizer.
        return gather_weight(assembly.synchronizer, parameter)

    apply_fused_loss(head, always=mode == "on", gather=gather, applied=assembly.applied)
    return f"the {head.weight.shape[0]:,} logits of a token exist only chunk by chunk"


def find_head(model: nn.Module) -> nn.Linear | None:
    """The layer that computes a logit for each word of the vocabulary."""
    find: Any = getattr(model, "get_output_embeddings", None)
    if callable(find):
        head: Any = find()
        return head if _is_plain(head) else None
    # A custom model does not say: its widest linear layer, if it has an output for each embedding.
    words = {m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)}
    linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
    widest = max((m.out_features for m in linears), default=0)
    heads = [m for m in linears if m.out_features == widest and widest in words]
    return heads[0] if len(heads) == 1 and _is_plain(heads[0]) else None


def _is_plain(head: Any) -> bool:
    # Not a subclass: its forward may do more than a product.
    return get_own_class(head) is nn.Linear and set(list_layers(head)) <= {"split"}


def _find_obstacle(assembly: Assembly, head: nn.Linear | None) -> str | None:
    """Why the logits cannot be deferred."""
    if head is None:
        return (
            f"{type(assembly.model).__name__} has no linear head over a vocabulary on this rank (a "
            "custom model can return its head from a method get_output_embeddings())"
        )
    if assembly.plan.has_split_losses and assembly.topology.tensor * assembly.topology.context > 1:
        return "the model's own loss is computed from each rank's slice of the logits"
    if assembly.wants("compilation") and not assembly.plan.blocks:
        return "--compile compiles the whole model, including head and loss"
    if isinstance(assembly.synchronizer, DeepSpeedStrategy) and assembly.synchronizer.stage == 3:
        return "DeepSpeed's ZeRO-3 gathers the head's weight for one call only"
    return None


def apply_fused_loss(
    head: nn.Linear,
    *,
    always: bool = True,
    gather: Callable[[Tensor], Tensor] = gather_with_gradient,
    applied: Applied | None = None,
) -> None:
    """Defer this head's outputs in training."""
    WATCHING.keep(applied)
    extend(head, "loss", functools.partial(_build_head, always=always, gather=gather))


def _build_head(
    cls: Any, *, always: bool, gather: Callable[[Tensor], Tensor], is_brief: bool = False
) -> dict[str, Any]:
    """The overlay of a head: its first call defers, a second one computes logits or the loss.

    ``is_brief``: it may be gone by the second one.
    """

    def forward(
        self: nn.Linear,
        hidden: Tensor,
        labels: Tensor | None = None,
        recipe: Recipe | None = None,
        teacher: Teacher | None = None,
        is_wanted: bool = False,
    ) -> Tensor | Losses:
        words = _find_words(self)
        if labels is None and not is_wanted:
            dtype = get_compute_type(hidden)
            # It pays if the logits would take more memory than the head's gradient, held instead.
            if _can_defer(self, hidden, dtype) and (
                always or hidden.shape[:-1].numel() * 2 >= self.in_features
            ):
                # Cast now: autocast may have ended when the logits are needed.
                hidden = hidden.to(dtype)
                lend = functools.partial(_lend, self, gather)
                # A call of the module gathers its weight, if it is sharded.
                call = functools.partial(forward, self) if is_brief else self
                head = Head(self, call, lend, hidden)
                width = self.out_features if words is None else words.length
                return defer(head, hidden, width, dtype)
            return cls.forward(self, hidden)
        weight, bias = (_read(each, words, gather) for each in (self.weight, self.bias))
        assert weight is not None
        if words is not None:
            hidden = map_tokens(hidden, functools.partial(copy_in, group=words.group))
        if labels is None:
            bias = None if bias is None else bias.to(hidden.dtype)
            logits: Tensor = functional.linear(hidden, weight.to(hidden.dtype), bias)
            return logits if words is None else map_tokens(logits, words.join)
        assert recipe is not None
        recipe = dataclasses.replace(recipe, words=words)
        region = find_fact(self, ContextRegion)
        is_summed = not recipe.is_by_row and recipe.noted is None and teacher is None
        if region is not None and is_summed:
            picked = pick_labelled(hidden, labels, recipe.ignore_index)
            hidden, labels = picked if picked is not None else (hidden, labels)
        if region is None or lacks_padding(hidden):
            return compute_losses(hidden, weight, bias, labels, recipe, teacher)
        # Every rank has the hidden states of all tokens after the last block: each takes a slice.
        own, length = region.slice(labels[None])[0], len(labels)
        if teacher is not None:
            teacher = teacher.map_rows(lambda rows: region.slice(rows[None])[0])
        rows, recipe = region.enter(hidden[None])[0], dataclasses.replace(recipe, labelled=None)
        losses = compute_losses(rows, weight, bias, own, recipe, teacher)
        return losses.map(functools.partial(_join_tokens, region, length, recipe.is_by_row))

    return {"forward": forward}


def _join_tokens(region: ContextRegion, length: int, is_by_row: bool, part: Tensor) -> Tensor:
    """From values of this rank's tokens, or their sum, to those of all."""
    if not is_by_row:
        return region.sum(part)
    return region.leave(part, length) if part.dim() == 2 else region.leave(part[None], length)[0]


def _lend(
    head: nn.Linear, gather: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor | None, VocabularySlice | None]:
    words = _find_words(head)
    with torch.no_grad():
        weight, bias = (_read(each, words, gather) for each in (head.weight, head.bias))
    assert weight is not None
    return weight, bias, words


@contextmanager
def deferring(model: nn.Module) -> Iterator[None]:
    """Inside, a large plain head that has no fused loss defers its outputs where nothing learns.

    A reference or a teacher need not be one that an engine has composed. A large head with adapters
    defers them everywhere.
    """
    layered = find_layered_head(model)
    if layered is not None and layered.base_layer.out_features >= _LARGE:
        with deferring_layers(layered):
            yield
        return
    head = None if torch.is_grad_enabled() else find_head(model)
    is_bare = head is not None and type(head) is nn.Linear and not isinstance(head.weight, DTensor)
    if head is None or not is_bare or len(head.weight) < _LARGE:
        yield
        return
    with WATCHING:
        build = functools.partial(
            _build_head, always=True, gather=gather_with_gradient, is_brief=True
        )
        extend(head, "loss", build)
        try:
            yield
        finally:
            remove(head, "loss")


def _find_words(head: nn.Linear) -> VocabularySlice | None:
    """This rank's slice of the vocabulary, if the head is split."""
    if not isinstance(head, ColwiseGathered):
        return None
    split = get_fact(head, Split)
    return VocabularySlice(split.group, split.length)


def _read(
    parameter: Tensor | None, words: VocabularySlice | None, gather: Callable[[Tensor], Tensor]
) -> Tensor | None:
    if parameter is None:
        return None
    whole = gather(parameter)
    return whole if words is None else words.cut(whole)


def _can_defer(head: nn.Linear, hidden: Tensor, dtype: torch.dtype) -> bool:
    if torch.compiler.is_compiling():
        return False
    is_trained = torch.is_grad_enabled() and (hidden.requires_grad or head.weight.requires_grad)
    promise = find_promise({})
    is_labelled = promise is not None and not promise.reads_all_tokens
    # A user's hook, or a function in place of its forward(), must see the head called once, with
    # real outputs.
    is_followed = "forward" in vars(head) or find_watched({"head": head})
    return (is_trained or is_labelled) and dtype in DTYPES and not is_followed
