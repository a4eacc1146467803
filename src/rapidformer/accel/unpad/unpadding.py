"""Applies ``--dynamic-shape``: blocks compute on real tokens only.

The model itself shows whether that is exact: a small batch must give the same logits and gradients
with and without padding (``proof.py``). ``batches.py`` then decides for each batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rapidformer.accel.applied import Applied
from rapidformer.accel.assembly import Assembly
from rapidformer.accel.context.exchanged_attention import find_configs
from rapidformer.accel.unpad.batches import Filling
from rapidformer.accel.unpad.blocks import extend_blocks, restore_blocks
from rapidformer.accel.unpad.calls import Help, Removal
from rapidformer.accel.unpad.columns import choose_sides, widen
from rapidformer.accel.unpad.model import call_packed, call_unpadded, extend_model
from rapidformer.accel.unpad.on_demand import WATCHING
from rapidformer.accel.unpad.proof import call_plainly, find_difference
from rapidformer.accel.unpad.rows import Rows
from rapidformer.accel.unpad.sides import (
    extend_sides,
    find_biased,
    find_stacks,
    is_encoder_decoder,
    read_sides,
    restore_sides,
)
from rapidformer.accel.unpad.token_attention import BY_ROW, NAME
from rapidformer.compat.torch_modules import uncompiled
from rapidformer.compat.transformers_models import get_attention, set_attention
from rapidformer.errors import ConfigurationError, ModelError
from rapidformer.models.own_loss import shifts_labels
from rapidformer.models.plan import LAYER_DROPS, ModelPlan
from rapidformer.models.watched import find_requested, list_inner_modules
from rapidformer.overlay import find_fact, put_fact


def apply(assembly: Assembly) -> str | None:
    """Run the blocks on real tokens, if the model allows it."""
    is_asked = assembly.args.dynamic_shape == "on"
    obstacle = _find_obstacle(assembly) or apply_unpadding(
        assembly.model,
        assembly.plan,
        assembly.precision.dtype,
        is_compiled=assembly.args.compile,
        applied=assembly.applied,
        help_of_others=_get_help(assembly),
    )
    if obstacle is None:
        return "blocks compute on real tokens only"
    if is_asked:
        raise ConfigurationError(f"--dynamic-shape on: {obstacle}. Leave the flag out.")
    return None


def _find_obstacle(assembly: Assembly) -> str | None:
    """Why this model cannot be unpadded in this run, beside what the row says."""
    if assembly.args.compile and assembly.device.type == "cuda" and find_biased(assembly.model):
        return "on a GPU, --compile needs flash attention, which takes no position bias"
    is_default = assembly.args.dynamic_shape == "auto"
    if is_default and assembly.device.type == "cuda" and is_encoder_decoder(assembly.model):
        return "on a GPU, it makes encoder-decoder models faster only with very large batches"
    if assembly.deferred is not None:
        return "the model has no weights yet, so results without padding cannot be checked"
    return None


def _get_help(assembly: Assembly) -> Help:
    """Whether a rank can repeat a forward pass alone: not with sharded weights."""
    args = assembly.args
    if not args.zero_stage or args.world_size == 1:
        return Help.NONE
    return Help.PROMISED if args.dynamic_shape == "on" else Help.NEEDED


def apply_unpadding(
    model: nn.Module,
    plan: ModelPlan,
    dtype: torch.dtype | None = None,
    *,
    is_compiled: bool = False,
    applied: Applied | None = None,
    help_of_others: Help = Help.NONE,
) -> str | None:
    """Unpad the batches of a model; returns why not, in which case the model is unchanged.

    ``dtype`` is that of autocast, under which the model will run. If blocks are compiled, the
    number of tokens is rounded up to one of a few. ``help_of_others`` is for ``Removal``.
    """
    problem = _find_problem(model, plan)
    if problem is not None:
        return problem
    BY_ROW.keep(applied)
    restore = _extend_parts(model, plan)
    WATCHING.keep(applied)
    trial = Removal(is_trial=True)
    unpadded = functools.partial(_call_unpadded, model, trial, rounds_up=is_compiled)
    with uncompiled(model.modules()):
        difference = find_difference(model, plan, unpadded, dtype)
        packs = difference is None and shifts_labels(model)
        packs = packs and not find_difference(model, plan, unpadded, dtype, is_packed=True)
    if difference is None and not trial.is_on:
        difference = "it reads what its blocks return for padding"
    if difference is not None:
        restore()
        return f"{type(model).__name__} gives other results without padding ({difference})"
    removal = Removal(help_of_others=help_of_others)
    put_fact(model, removal)
    inner_modules = list_inner_modules(model, plan.blocks)
    extend_model(model, inner_modules, removal, rounds_up=is_compiled, packs=packs)
    return None


def _extend_parts(model: nn.Module, plan: ModelPlan) -> Callable[[], None]:
    """Let attention, blocks and stacks run unpadded when asked to; returns how to undo it."""
    configs = [config for config in find_configs(model) if get_attention(config) == "sdpa"]
    stacks = find_stacks(model) if is_encoder_decoder(model) else None
    for config in configs:
        set_attention(config, NAME)
    extend_blocks(model, plan)
    if stacks is not None:
        extend_sides(model, *stacks)

    def restore() -> None:
        restore_blocks(model, plan)
        if stacks is not None:
            restore_sides(model, *stacks)
        for config in configs:
            set_attention(config, "sdpa")

    return restore


def prove_filling(model: nn.Module, plan: ModelPlan, dtype: torch.dtype | None) -> None:
    """Find out whether padding may be added to a batch, up to one of a few sizes.

    That lets a few CUDA graphs replay batches of all lengths. An encoder or a decoder that runs
    unpadded gets rows of padding, an encoder-decoder model that runs padded columns on both sides.
    """
    is_unpadded = find_fact(model, Removal) is not None
    if is_encoder_decoder(model):
        if is_unpadded or _find_problem(model, plan) is not None:
            return
        filled = functools.partial(_call_widened, model)
    elif is_unpadded:
        filled = functools.partial(_call_filled, model)
    else:
        return
    with uncompiled(model.modules()):
        difference = find_difference(model, plan, filled, dtype)
    put_fact(model, Filling(is_exact=difference is None))


def _find_problem(model: Any, plan: ModelPlan) -> str | None:
    """Why a model cannot be unpadded, as far as its configuration shows."""
    config = getattr(model, "config", None)
    if config is None or not plan.blocks or not find_configs(model):
        return f"{type(model).__name__} is not a transformers model with repeated blocks"
    main_input = getattr(model, "main_input_name", "input_ids")
    if main_input != "input_ids":
        return f"{type(model).__name__} takes {main_input}, which are not tokens"
    if "MultipleChoice" in type(model).__name__:
        return f"{type(model).__name__} has several rows per sample, which is not supported yet"
    if getattr(config, "model_type", "") == "encoder-decoder":
        # Its decoder masks every label that equals the padding token, wherever it is.
        return f"{type(model).__name__} derives its decoder's mask from the labels"
    if is_encoder_decoder(model) and find_stacks(model) is None:
        return f"{type(model).__name__} does not use both an encoder and a decoder"
    if is_encoder_decoder(model) and model.get_output_embeddings() is None:
        # Its decoder reads the input again, and its labels say nothing about padding.
        return f"{type(model).__name__} is an encoder-decoder whose labels are not text"
    if not any(get_attention(part) == "sdpa" for part in find_configs(model)):
        return f"it needs sdpa attention, and {type(model).__name__} uses {get_attention(config)}"
    if any(getattr(config, name, 0) for name in LAYER_DROPS):
        return "layerdrop skips blocks"
    asked = find_requested(model, {})
    return asked and f"its configuration sets {asked}, whose result includes padding"


def _call_unpadded(
    model: nn.Module, trial: Removal, batch: dict[str, Any], *, rounds_up: bool
) -> Any:
    """Run a small batch of ``proof.py`` without padding, or with packed examples apart."""
    run = functools.partial(model.forward, **batch)
    if "position_ids" in batch:
        positions = batch["position_ids"]
        rows = Rows.read_packed(positions.cpu(), positions.device, rounds_up=rounds_up)
        return call_packed(run, rows, batch)
    if is_encoder_decoder(model):
        sides = read_sides(batch, rounds_up=rounds_up)
        assert sides is not None
        return call_unpadded(model, run, sides, trial)
    mask = batch["attention_mask"]
    rows = Rows.read(mask.bool().cpu().numpy(), mask.device, rounds_up=rounds_up)
    return call_unpadded(model, run, rows, trial)


def _call_filled(model: nn.Module, batch: dict[str, Any]) -> Any:
    mask = batch["attention_mask"]
    rows = Rows.read_filled(mask.bool().cpu().numpy()).move_to(mask.device)
    run = functools.partial(model.forward, **batch)
    return call_unpadded(model, run, rows, Removal(is_trial=True))


def _call_widened(model: nn.Module, batch: dict[str, Any]) -> Any:
    columns = choose_sides(model, batch)
    if not columns or columns["labels"].width == batch["labels"].shape[1]:
        raise ModelError("its rows cannot be any longer")
    outputs = call_plainly(model, widen(batch, columns))
    outputs.logits = outputs.logits[:, : batch["labels"].shape[1]]
    return outputs
