"""Applies ``--dynamic-shape``: padding leaves before the first block and returns after the last.

A batch is unpadded only if that cannot change its loss: the model must get its labels, and every
label must belong to a real token. All other calls run padded, as without the switch.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rapidformer.accel.assembly import Assembly
from rapidformer.accel.context.arguments import find_argument_names
from rapidformer.accel.context.attention import find_configs
from rapidformer.accel.unpad.attention import register, use_rows
from rapidformer.accel.unpad.fixed import Filling, FixedRows, get_fixed_rows
from rapidformer.accel.unpad.masks import RowMask
from rapidformer.accel.unpad.proof import find_difference
from rapidformer.accel.unpad.reading import PaddingReader, observe_output
from rapidformer.accel.unpad.rows import Mask, Rows
from rapidformer.accel.unpad.sides import (
    Sides,
    extend_sides,
    find_biased,
    find_stacks,
    is_encoder_decoder,
    read_sides,
    restore_sides,
    use_sides,
)
from rapidformer.accel.watched import find_asked, find_watched, list_inner_modules
from rapidformer.compat.torch_modules import uncompiled
from rapidformer.compat.transformers_models import get_attention, set_attention
from rapidformer.data.batch import get_host_copy
from rapidformer.errors import ConfigurationError
from rapidformer.models.plan import LAYER_DROPS, ModelPlan, shifts_labels
from rapidformer.overlay import extend, find_fact, get_fact, put_fact, remove

_LEAST_PADDING = 0.05
"""Below this fraction of padding, removing it costs more than it saves."""


def apply(assembly: Assembly) -> str | None:
    """Run the blocks on real tokens, if the model allows it."""
    is_asked = assembly.args.dynamic_shape == "on"
    obstacle = _find_obstacle(assembly) or apply_unpadding(
        assembly.model,
        assembly.plan,
        assembly.precision.dtype,
        is_compiled=assembly.args.compile,
        is_asked=is_asked,
    )
    if obstacle is None:
        return "blocks compute on real tokens only"
    if is_asked:
        raise ConfigurationError(f"--dynamic-shape on: {obstacle}. Leave the flag out.")
    return None


def _find_obstacle(assembly: Assembly) -> str | None:
    topology = assembly.topology
    if assembly.device.type not in ("cpu", "cuda"):
        return "attention over rows of different lengths is implemented for CPUs and CUDA"
    if assembly.pipeline is not None or topology.tensor * topology.context > 1:
        return "it does not combine with tensor, pipeline and context parallelism yet"
    if topology.expert > 1 or assembly.uses_deepspeed:
        return "it does not combine with expert parallelism and DeepSpeed yet"
    if assembly.args.compile and assembly.device.type == "cuda" and not assembly.precision.dtype:
        return "compiled blocks need flash attention on a GPU, which takes 16 bits only"
    if assembly.args.compile and assembly.device.type == "cuda" and find_biased(assembly.model):
        return "compiled blocks need flash attention on a GPU, which takes no position bias"
    is_default = assembly.args.dynamic_shape == "auto"
    if is_default and assembly.device.type == "cuda" and is_encoder_decoder(assembly.model):
        return "an encoder-decoder model gains on a GPU only with very large batches"
    if assembly.deferred is not None:
        return "the model has no weights yet, so the two ways cannot be compared"
    return None


def apply_unpadding(
    model: nn.Module,
    plan: ModelPlan,
    dtype: torch.dtype | None = None,
    *,
    is_compiled: bool = False,
    is_asked: bool = True,
) -> str | None:
    """Unpad the batches of a model; returns why not, in which case the model is unchanged.

    ``dtype`` is that of autocast, under which the model will run. If blocks are compiled, the
    number of tokens is rounded up to one of a few. Unless the user has asked for it, a loss must
    first be seen to ignore padding.
    """
    problem = _find_problem(model, plan)
    if problem is not None:
        return problem
    configs = [config for config in find_configs(model) if get_attention(config) == "sdpa"]
    for config in configs:
        set_attention(config, register())
    for block, place in _list_blocks(model, plan):
        extend(block, "unpad", _build_block, is_shared=True)
        put_fact(block, place)
    stacks = find_stacks(model) if is_encoder_decoder(model) else None
    if stacks is not None:
        extend_sides(model, *stacks)
    plain = functools.partial(_call, model)
    unpadded = functools.partial(_call_unpadded, model, rounds_up=is_compiled)
    with uncompiled(model.modules()):
        difference = find_difference(model, plan, plain, unpadded, dtype)
        packs = difference is None and shifts_labels(model)
        packs = packs and not find_difference(model, plan, plain, unpadded, dtype, is_packed=True)
    if difference is not None:
        for block, _ in _list_blocks(model, plan):
            remove(block, "unpad")
        if stacks is not None:
            restore_sides(model, *stacks)
        for config in configs:
            set_attention(config, "sdpa")
        return f"{type(model).__name__} is not the same without padding ({difference})"
    inside = list_inner_modules(model, plan.blocks)
    reader = PaddingReader(is_trusted=is_asked)
    put_fact(model, reader)
    build = functools.partial(
        _build_model, inside=inside, rounds_up=is_compiled, reader=reader, packs=packs
    )
    extend(model, "unpad", build)
    return None


def prove_filling(model: nn.Module, plan: ModelPlan, dtype: torch.dtype | None) -> None:
    """Find out whether padding may fill up the rows of an unpadded batch (``--cuda-graph``)."""
    if find_fact(model, PaddingReader) is None or is_encoder_decoder(model):
        return  # nothing is unpadded, or not with padding that fills up
    with uncompiled(model.modules()):
        plain = functools.partial(_call, model)
        filled = functools.partial(_call_filled, model)
        difference = find_difference(model, plan, plain, filled, dtype)
    put_fact(model, Filling(is_exact=difference is None))


def _find_problem(model: Any, plan: ModelPlan) -> str | None:
    config = getattr(model, "config", None)
    if config is None or not plan.blocks or not find_configs(model):
        return f"{type(model).__name__} is not a model of transformers with repeated blocks"
    if "MultipleChoice" in type(model).__name__:
        return f"{type(model).__name__} has several rows per sample, which is not supported yet"
    if getattr(config, "model_type", "") == "encoder-decoder":
        # Its decoder does not see labels that equal the padding token, wherever they are.
        return f"{type(model).__name__} reads its decoder's mask off the labels"
    if is_encoder_decoder(model) and find_stacks(model) is None:
        return f"{type(model).__name__} does not use both an encoder and a decoder"
    if not any(get_attention(each) == "sdpa" for each in find_configs(model)):
        return f"it needs sdpa attention, and {type(model).__name__} uses {get_attention(config)}"
    if any(getattr(config, name, 0) for name in LAYER_DROPS):
        return "layerdrop skips blocks"
    asked = find_asked(model, {})
    if asked is not None:
        return f"its configuration sets {asked}, whose result has a place for padding"
    return None


def _list_blocks(model: Any, plan: ModelPlan) -> list[tuple[nn.Module, _Place]]:
    """Each block, and where it is."""
    stacks: dict[str, list[nn.Module]] = defaultdict(list)
    for name, block in zip(plan.blocks, plan.get_blocks(model), strict=True):
        stacks[name.rpartition(".")[0]].append(block)
    both = find_stacks(model) if is_encoder_decoder(model) else None
    decoder = set() if both is None else set(both[1].modules())
    return [
        (
            block,
            _Place(
                is_last=block is stack[-1],
                is_decoder=block in decoder,
                names=find_argument_names(block),
            ),
        )
        for stack in stacks.values()
        for block in stack
    ]


def _call(model: nn.Module, batch: dict[str, Any]) -> Any:
    # Not model(...): a user's hooks must not see a batch that is not theirs.
    return model.forward(**batch)


def _call_unpadded(model: nn.Module, batch: dict[str, Any], *, rounds_up: bool) -> Any:
    if "position_ids" in batch:
        positions = batch["position_ids"]
        rows = Rows.read_packed(positions.cpu(), positions.device, rounds_up=rounds_up)
        with use_rows(rows):
            return _call(model, _add_mask(batch))
    if is_encoder_decoder(model):
        sides = read_sides(batch, rounds_up=rounds_up)
        assert sides is not None
        with use_sides(sides):
            return _call(model, batch)
    mask = batch["attention_mask"]
    with use_rows(Rows.read(mask.bool().cpu().numpy(), mask.device, rounds_up=rounds_up)):
        return _call(model, batch)


def _call_filled(model: nn.Module, batch: dict[str, Any]) -> Any:
    mask = batch["attention_mask"]
    with use_rows(Rows.read_filled(mask.bool().cpu().numpy()).move_to(mask.device)):
        return _call(model, batch)


def _add_mask(batch: dict[str, Any]) -> dict[str, Any]:
    """Packed examples are apart by their rows: the model need not build a mask of all pairs."""
    positions = batch["position_ids"]
    return {**batch, "attention_mask": torch.ones_like(positions)}


# ---- blocks --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Place:
    """Where a block is in its stack. Not in its class: equal blocks share one compiled graph."""

    is_last: bool
    is_decoder: bool
    """Whether it is in the decoder of a model that has an encoder too."""
    names: tuple[str, ...]
    """The block's positional arguments."""


def _build_block(cls: Any) -> dict[str, Any]:
    return {"__call__": functools.partialmethod(_run_block, cls)}


def _run_block(self: nn.Module, cls: Any, *args: Any, **kwargs: Any) -> Any:
    mask = next((v for v in (*args, *kwargs.values()) if isinstance(v, RowMask)), None)
    place = get_fact(self, _Place)
    if mask is None:
        output = cls.__call__(self, *args, **kwargs)
        if place.is_last:
            hidden = output[0] if isinstance(output, tuple) else output
            observe_output(hidden, is_decoder=place.is_decoder)
        return output
    rows = mask.rows
    hidden = args[0] if args else kwargs["hidden_states"]
    encoder = next((m.keys for m in (*args, *kwargs.values()) if _is_about_encoder(m)), None)

    def convert(name: str, value: Any) -> Any:
        # Hidden states are packed by the first block, and only there: all real tokens together may
        # be as many as a padded row has, so their shape does not tell.
        if value is hidden:
            return rows.pack(value) if rows.is_padded(value) else value
        if encoder is not None and name == "encoder_hidden_states":
            return encoder.pack_beside(value)
        return rows.pack_beside(value)

    names = (*place.names, *[""] * len(args))
    given = [convert(name, value) for name, value in zip(names, args, strict=False)]
    named = {name: convert(name, value) for name, value in kwargs.items()}
    output = cls.__call__(self, *given, **named)
    if not place.is_last:
        return output
    if isinstance(output, tuple):
        return (rows.unpack(output[0]), *output[1:])
    return rows.unpack(output)


def _is_about_encoder(value: Any) -> bool:
    return isinstance(value, RowMask) and value.keys is not None


# ---- the model -----------------------------------------------------------------------------------


def _build_model(
    cls: Any, inside: dict[str, nn.Module], rounds_up: bool, reader: PaddingReader, packs: bool
) -> dict[str, Any]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_encoder_decoder(self):
            return forward_sides(self, *args, **kwargs)
        # A user's hook on a block must see what it would see without the switch.
        find = find_packed_rows if packs and is_packed(kwargs) else find_rows
        rows = None if find_watched(inside) else find(self, kwargs, rounds_up=rounds_up)
        if rows is None:
            return cls.forward(self, *args, **kwargs)
        # With a label for each row, there are no logits for padding.
        is_by_row = kwargs["labels"].shape != rows.shape
        way = use_rows if is_by_row or reader.ignores_padding else reader.observe
        if way is use_rows and find is find_packed_rows:
            kwargs = _add_mask(kwargs)
        with way(rows):
            return cls.forward(self, *args, **kwargs)

    def forward_sides(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        sides = None if find_watched(inside) else find_sides(self, kwargs, rounds_up=rounds_up)
        if sides is None:
            return cls.forward(self, *args, **kwargs)
        way = use_sides if reader.ignores_padding else reader.observe
        if way is use_sides:
            kwargs["use_cache"] = False  # a cache of packed tokens would be of no use
        with way(sides):
            return cls.forward(self, *args, **kwargs)

    # The signature is read to choose a batch's columns.
    functools.update_wrapper(forward, cls.forward)
    return {"forward": forward}


def find_rows(model: Any, given: dict[str, Any], *, rounds_up: bool = False) -> Rows | None:
    """The rows of a batch if removing its padding cannot change the loss, otherwise None."""
    mask, labels = given.get("attention_mask"), given.get("labels")
    if not isinstance(mask, Tensor) or mask.dim() != 2 or not isinstance(labels, Tensor):
        return None
    if find_asked(model, given) or given.get("past_key_values") is not None:
        return None
    fixed = get_fixed_rows(mask)
    if fixed is not None:
        return fixed.rows
    is_real = get_host_copy(mask).bool().numpy()
    # A label for each row says nothing here, and reading it would wait for the device.
    targets = get_host_copy(labels) if labels.shape == mask.shape else labels
    if not _is_removable(model, is_real, targets):
        return None
    rows = Rows.read(is_real, mask.device, rounds_up=rounds_up)
    # Compiled blocks only know the window of a mask. In rows with gaps, it has none.
    return None if rounds_up and not rows.is_contiguous else rows


def read_fixed_rows(
    model: Any, is_real: Mask, labels: Tensor, sizes_up: int = 0
) -> FixedRows | None:
    """What ``find_rows`` must return on every replay of a batch, from its values in host memory.

    None if the loss must be seen on a padded batch first.
    """
    reader, filling = find_fact(model, PaddingReader), find_fact(model, Filling)
    is_known = reader is not None and filling is not None and filling.is_exact
    if reader is not None and is_known and _is_removable(model, is_real, labels):
        if labels.shape != is_real.shape or reader.ignores_padding:
            rows = Rows.read_filled(is_real, sizes_up)
            if rows.is_contiguous:
                return FixedRows(rows)
        elif not reader.is_decided:
            return None
    return FixedRows(None, is_full=bool(is_real.all()))


def _is_removable(model: Any, is_real: Mask, labels: Tensor) -> bool:
    """Whether there is enough padding, and removing it cannot change the loss."""
    if np.count_nonzero(is_real) > (1 - _LEAST_PADDING) * is_real.size:
        return False
    is_causal = shifts_labels(model)
    if labels.shape == is_real.shape and not _are_labels_real(labels, is_real, is_causal):
        return False
    # A classifier reads its first token. It must be real, as it was when the two were compared.
    return is_causal or bool(is_real[:, 0].all())


def find_sides(model: Any, given: dict[str, Any], *, rounds_up: bool = False) -> Sides | None:
    """The rows of both sides, under the same conditions; None for a batch that a graph replays."""
    if find_asked(model, given) or given.get("past_key_values") is not None:
        return None
    if get_fixed_rows(given.get("attention_mask")) is not None:
        return None
    # There is no cache of unpadded tokens to return, and a tuple would be shorter without it.
    if given.get("use_cache") or given.get("return_dict") is False:
        return None
    return read_sides(given, _LEAST_PADDING, rounds_up=rounds_up)


def is_packed(given: dict[str, Any]) -> bool:
    """Whether a batch has examples that only its positions keep apart."""
    positions = given.get("position_ids")
    is_plain = isinstance(positions, Tensor) and positions.dim() == 2
    return is_plain and given.get("attention_mask") is None and given.get("use_cache") is False


def find_packed_rows(model: Any, given: dict[str, Any], *, rounds_up: bool = False) -> Rows | None:
    """The examples of packed rows; None if there is one in each row, or if something else is."""
    labels, positions = given.get("labels"), given["position_ids"]
    if not isinstance(labels, Tensor) or find_asked(model, given):
        return None
    if labels.shape != positions.shape or given.get("past_key_values") is not None:
        return None
    rows = Rows.read_packed(get_host_copy(positions), positions.device, rounds_up=rounds_up)
    return rows if len(rows.lengths) > len(positions) else None


def _are_labels_real(labels: Tensor, is_real: Mask, is_shifted: bool) -> bool:
    """Whether every label is predicted from a real token."""
    is_trained = (labels != -100).numpy()
    if is_shifted:
        is_trained, is_real = is_trained[:, 1:], is_real[:, :-1]
    return not bool((is_trained & ~is_real).any())
