"""Context parallelism: between embedding and head, each rank holds its slice of the tokens.

Tokens are taken before the first block and joined after the last, so user code sees whole
sequences. A block's ``__call__`` splits and joins (outside recompute and compile); its ``forward``
gets the rows' length as an argument, since a block recomputed in the backward pass must not see the
length of a later forward pass. Tokens that cannot be split (generation, short rows) stay whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from rapidformer.accel.assembly import Assembly
from rapidformer.accel.cache import takes_use_cache
from rapidformer.accel.context.arguments import find_argument_names, is_cache
from rapidformer.accel.context.exchanged_attention import (
    ATTENTION,
    KNOWN,
    SplitTorchAttention,
    apply_context_attention,
    find_configs,
)
from rapidformer.accel.context.proof import prove_context
from rapidformer.accel.double_backward import refuse_double_gradients
from rapidformer.accel.dropout_seeds import has_dropout
from rapidformer.accel.split.known_loss import find_head, has_labels, use_split_loss
from rapidformer.accel.split.on_demand import hand_out
from rapidformer.accel.tensor.styles import (
    Split,
    extend_module,
    get_first,
    replace_first,
    replace_output,
)
from rapidformer.accel.unpad.on_demand import lacks_padding
from rapidformer.compat.transformers_models import get_attention, has_fixed_attention
from rapidformer.config.layout_rules import list_choices
from rapidformer.dist.context_region import TOKENS, ContextRegion
from rapidformer.dist.seeding import RandomState, seed_torch
from rapidformer.dist.vocabulary import is_split_over_tokens, sum_losses_by_tokens
from rapidformer.dist.whole import join_parts
from rapidformer.errors import ConfigurationError, TrainingError
from rapidformer.log import warn_once
from rapidformer.models.plan import ModelPlan
from rapidformer.models.tensor_plans import describe_model
from rapidformer.models.watched import find_reader, list_inner_modules
from rapidformer.overlay import find_fact, get_fact, list_layers, put_fact

_FLAG = "--context-parallel-size"
_LENGTH = "rapidformer_length"


@dataclass(kw_only=True, eq=False)
class _Place:
    """What a block knows about its slice; stored on the block itself."""

    region: ContextRegion
    name: str
    is_first: bool
    is_last: bool
    draws: _OwnDraws
    uses_torch: bool
    """Whether attention is torch's own function rather than Hugging Face's interface."""
    token_dims: Mapping[str, int]
    """Arguments with a value per token, and the dimension of the tokens."""
    names: tuple[str, ...]
    """The block's positional arguments."""

    def slice_arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], length: int
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """This rank's slice of the per-token arguments; hidden states unchanged."""
        names = (*self.names, *[""] * len(args))
        pairs = zip(names[1:], args[1:], strict=False)
        sliced = {name: self._slice(name, value, length) for name, value in kwargs.items()}
        if not args and "hidden_states" in kwargs:
            sliced["hidden_states"] = kwargs["hidden_states"]
        return (*args[:1], *(self._slice(name, value, length) for name, value in pairs)), sliced

    def _slice(self, name: str, value: Any, length: int) -> Any:
        """Positions are split like hidden states; masks stay whole: attention sees all tokens."""
        if isinstance(value, (tuple, list)):
            return type(value)(self._slice(name, part, length) for part in value)
        if isinstance(value, dict):
            return {key: self._slice(name, part, length) for key, part in value.items()}
        if not isinstance(value, Tensor):
            return None if is_cache(value) else value
        dim = self.token_dims.get(name)
        if dim is None:
            is_per_token = value.dim() in (2, 3) and value.shape[TOKENS] == length
            if not is_per_token or "mask" in name:
                return value
            dim = TOKENS
        return self.region.slice(value, dim)


def apply(assembly: Assembly) -> str:
    """Split the tokens between the first block and the last."""
    model, plan, mesh = assembly.model, assembly.plan, assembly.topology.get_submesh("context")
    assert mesh is not None
    region = ContextRegion(mesh.get_group())
    if problems := list(_find_problems(model, plan, region.size)):
        raise ConfigurationError(problems)
    blocks = plan.get_blocks(model)
    if not plan.has_split_attention:
        assembly.applied.enter(ATTENTION)
        apply_context_attention(model, blocks, region)
    draws = _OwnDraws(region, is_needed=has_dropout(model))
    for number, (name, block) in enumerate(zip(plan.blocks, blocks, strict=True)):
        place = _Place(
            region=region, name=name, is_first=number == 0, is_last=number == len(blocks) - 1,
            draws=draws, uses_torch=plan.has_split_attention, token_dims=plan.token_dims,
            names=find_argument_names(block),
        )  # fmt: skip
        extend_module(block, SplitBlock, place)
        for module in block.modules():
            if hasattr(module, "context_region"):
                module.context_region = region  # type: ignore[assignment]
    head = apply_split_loss(model, plan, region, mesh)
    inner = list_inner_modules(model, plan.blocks)
    whole = _WholeModel(region=region, head=head, inner=inner, takes_cache=takes_use_cache(model))
    extend_module(model, SplitModel, whole)
    prove_context(model, region)
    refuse_double_gradients(assembly, _FLAG)
    return f"{mesh.size()} ranks"


# ---- what cannot work ----------------------------------------------------------------------------


def _find_problems(model: nn.Module, plan: ModelPlan, size: int) -> Iterator[str]:
    name = describe_model(model)
    if reason := _find_reason(model, plan):
        yield (
            f"{_FLAG} {size} cannot split the sequences of {name}: {reason} "
            "--zero-3-memory-optimization and --checkpoint-activations save memory on any model."
        )
        return
    splits = (find_fact(module, Split) for module in model.modules())
    tensor_size = next((int(split.mesh.size()) for split in splits if split is not None), 1)
    per_rank = " per tensor-parallel rank" if tensor_size > 1 else ""
    numbers = {getattr(c, "num_attention_heads", None) for c in find_configs(model)}
    for heads in sorted(number // tensor_size for number in numbers if isinstance(number, int)):
        if heads % size:
            yield (
                f"{_FLAG} {size} does not divide the {heads} attention heads{per_rank} of {name}: "
                f"use {list_choices(heads)}."
            )


def _find_reason(model: nn.Module, plan: ModelPlan) -> str | None:
    config: Any = getattr(model, "config", None)
    if any(getattr(config, n, False) for n in ("is_encoder_decoder", "add_cross_attention")):
        return "its decoder also uses an encoder's output, which has other tokens."
    if len({block.rpartition(".")[0] for block in plan.blocks}) != 1:
        return "its blocks are not one list."
    if any("forward" in vars(block) for block in plan.get_blocks(model)):
        return "forward was replaced on the blocks themselves (by another library's hooks)."
    if plan.has_split_attention:
        return None
    configs = find_configs(model)
    if not configs:
        return (
            "it is not known where it mixes tokens. If only in torch's "
            "scaled_dot_product_attention, let rapidformer_plan() return "
            "'has_split_attention': True."
        )
    others = sorted({get_attention(config) for config in configs} - set(KNOWN))
    if others:
        return f"its attention is {others[0]}; load it with attn_implementation='sdpa'."
    if has_fixed_attention(model):
        return "its attention does not go through transformers' attention interface."
    return None


@dataclass(kw_only=True, eq=False)
class _WholeModel:
    """What the whole model knows."""

    region: ContextRegion
    head: SplitHeadPlace | None
    """The output layer's state, if the model's own loss takes a slice of the tokens."""
    inner: dict[str, nn.Module]
    """The blocks and their modules."""
    takes_cache: bool
    """Whether it can be told to fill no cache."""


class SplitModel:
    """The whole model: decides when sequences stay whole, and avoids useless caches."""

    training: bool

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        place = get_fact(self, _WholeModel)
        region, head = place.region, place.head
        was_off = region.is_off
        if reader := find_reader(self, kwargs, place.inner):
            region.is_off = True
            if self.training:
                warn_once(
                    f"{_FLAG}: {reader} asks for activations of all tokens, so every rank computes "
                    "whole sequences: the result is right, but no memory is saved. (If a hook "
                    "only looks, set hook.only_looks = True.)"
                )
        if place.takes_cache and not any(map(is_cache, (*args, *kwargs.values()))):
            # A cache holds whole sequences, and would be built only to be discarded.
            kwargs.setdefault("use_cache", False)
        if head is not None:
            head.keeps_slice = self.training and has_labels(self, args, kwargs)
        try:
            return hand_out(super().forward(*args, **kwargs))  # type: ignore[misc]
        finally:
            region.is_off = was_off
            if head is not None:
                head.keeps_slice = False

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Step by step there is no sequence to split: every rank generates the same."""
        region = get_fact(self, _WholeModel).region
        region.is_off = True
        try:
            return super().generate(*args, **kwargs)  # type: ignore[misc]
        finally:
            region.is_off = False


class SplitBlock:
    """A block that works on this rank's tokens."""

    training: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        place = get_fact(self, _Place)
        region = place.region
        hidden = get_first(args, kwargs)
        length = hidden.shape[TOKENS] if place.is_first else region.incoming
        if place.is_first:
            is_split = hidden.dim() == 3 and region.can_split(length)
            for cache in filter(is_cache, (*args, *kwargs.values())):
                # Useless in training; elsewhere something may continue from it.
                is_split &= self.training and not cache.get_seq_length()
            region.incoming = length = length if is_split else 0
        if not length:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        args, kwargs = place.slice_arguments(args, kwargs, length)
        if place.is_first:
            place.draws.start(hidden.device, is_needed=self.training)
            args, kwargs = replace_first(args, kwargs, region.enter)
        output = super().__call__(*args, **kwargs, **{_LENGTH: length})  # type: ignore[misc]
        if not place.is_last:
            return output
        region.incoming = 0
        place.draws.stop()
        return replace_output(output, lambda hidden: region.leave(hidden, length))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        place = get_fact(self, _Place)
        region = place.region
        region.length = kwargs.pop(_LENGTH, 0)
        if not region.length:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        region.has_attended = False
        try:
            with SplitTorchAttention(region) if place.uses_torch else nullcontext():
                output = super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            region.length = 0
        if not region.has_attended:
            raise TrainingError(
                f"{_FLAG}: {place.name} did not call the attention that exchanges tokens, so it "
                "mixes them in some other way, and splitting them would change the result. "
                f"Remove {_FLAG} for this model."
            )
        return output


class _OwnDraws:
    """Inside the blocks, this rank's own random numbers: equal masks would drop alike."""

    def __init__(self, region: ContextRegion, *, is_needed: bool) -> None:
        self._region, self._is_needed = region, is_needed
        self._before: RandomState | None = None

    def start(self, device: torch.device, *, is_needed: bool) -> None:
        if self._is_needed and is_needed:
            seed = int(torch.randint(2**40, ()))
            self._before = RandomState(device)
            seed_torch(seed + self._region.rank, device)

    def stop(self) -> None:
        if self._before is not None:
            self._before.restore()
            self._before = None


@dataclass(kw_only=True, eq=False)
class SplitHeadPlace:
    """What the output layer knows."""

    region: ContextRegion
    mesh: DeviceMesh
    keeps_slice: bool = False
    """True while the model computes its own loss, in training."""


def apply_split_loss(
    model: Any, plan: ModelPlan, region: ContextRegion, mesh: DeviceMesh
) -> SplitHeadPlace | None:
    """Let the head work on a slice of the tokens if the model's loss allows it."""
    head = find_head(model)
    if not isinstance(head, nn.Linear):
        return None
    if "loss" in list_layers(head):
        put_fact(head, region)  # the fused loss splits its rows over these ranks
        return None
    if find_fact(head, Split) is not None:
        return None  # tensor parallelism splits the logits already
    if not use_split_loss(model, plan, is_split_over_tokens, sum_losses_by_tokens):
        return None
    place = SplitHeadPlace(region=region, mesh=mesh)
    extend_module(head, SplitHead, place)
    return place


class SplitHead:
    """The output layer: takes all tokens, and in training keeps this rank's."""

    def forward(self, hidden: Tensor) -> Tensor:
        place = get_fact(self, SplitHeadPlace)
        region, length = place.region, hidden.shape[TOKENS] if hidden.dim() == 3 else 0
        is_whole = lacks_padding(hidden) or not place.keeps_slice
        if is_whole or not (length and region.can_split(length)):
            return super().forward(hidden)  # type: ignore[misc]
        part = region.grow(super().forward(region.enter(hidden)))  # type: ignore[misc]
        shape = (part.shape[0], length, part.shape[2])
        return join_parts(part, place.mesh, [Shard(TOKENS)], shape)
