"""Whether a batch may get padding, so that a few CUDA graphs replay all lengths: tried once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rapidformer.accel.context.exchanged_attention import find_configs
from rapidformer.accel.cuda_graph.columns import Filling, choose_columns, choose_sides, widen
from rapidformer.accel.unpad.batches import is_on
from rapidformer.accel.unpad.calls import Removal
from rapidformer.accel.unpad.on_demand import put_zeros
from rapidformer.accel.unpad.proof import call_plainly, find_difference
from rapidformer.accel.unpad.rows import Rows, Sides
from rapidformer.accel.unpad.sides import is_encoder_decoder, read_filled_sides
from rapidformer.accel.unpad.unpadding import call_without_padding, find_problem
from rapidformer.compat.torch_modules import uncompiled
from rapidformer.errors import ModelError
from rapidformer.models.plan import ModelPlan
from rapidformer.overlay import find_fact, put_fact


def prove_filling(
    model: nn.Module, plan: ModelPlan, dtype: torch.dtype | None, *, may_yield: bool = False
) -> None:
    """Find out whether a batch may get padding, so that a few CUDA graphs replay all lengths.

    With ``may_yield``, padding is kept from now on if a graph can add it but not remove it, since
    graphs save more.
    """
    removal = find_fact(model, Removal)

    def is_same(call: Callable[..., Any]) -> bool:
        with uncompiled(model.modules()):
            return find_difference(model, plan, functools.partial(call, model), dtype) is None

    fills = removal is not None and is_same(_call_filled)
    if removal is not None and not fills and may_yield:
        removal.is_on, removal.yields = False, True
    if not find_configs(model) or getattr(model, "config", None) is None:
        # Nothing says what such a model takes: it is tried on its own batches (``widths.py``).
        put_fact(model, Filling(fills=False, widens=True, limits=_list_limits(model)))
        return
    # Of an encoder-decoder model, some batches keep their padding.
    may_widen = is_encoder_decoder(model) or not is_on(model)
    widens = may_widen and find_problem(model, plan) is None and is_same(_call_widened)
    put_fact(model, Filling(fills=fills, widens=widens))
    if removal is not None and not widens:
        removal.stop_yielding()


def _list_limits(model: nn.Module) -> tuple[int, ...]:
    """All numbers that may be the longest row a model takes.

    A GPU does not survive an index beyond the end of a table of positions. A table of distances has
    about twice as many rows.
    """
    limits: set[int] = set()
    for module in model.modules():
        held = vars(module)
        config = held.get("config")
        values = [*held.values(), *(vars(config).values() if hasattr(config, "__dict__") else ())]
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        limits |= {value for value in values if type(value) is int}
        limits |= {size for each in (*tensors, *values) if isinstance(each, Tensor)
                   for size in each.shape}  # fmt: skip
    return tuple(sorted({*limits, *((limit + 1) // 2 for limit in limits)}))


def _call_filled(model: nn.Module, batch: dict[str, Any]) -> Any:
    mask = batch["attention_mask"]
    rows: Rows | Sides | None = Rows.read_filled(mask.bool().cpu().numpy())
    if is_encoder_decoder(model):
        rows = read_filled_sides(batch)
    assert rows is not None
    run, trial = functools.partial(model.forward, **batch), Removal(is_trial=True)
    outputs = call_without_padding(model, run, rows.move_to(mask.device), trial)
    if not trial.is_on:
        raise ModelError("it reads what its blocks return for padding")
    # Of added tokens, an index by a mask would take the padded pass.
    return _change_values(outputs, put_zeros)


def _call_widened(model: nn.Module, batch: dict[str, Any]) -> Any:
    if is_encoder_decoder(model):
        columns, lead = choose_sides(model, batch), "labels"
    else:
        columns, lead = choose_columns(model, batch, batch["attention_mask"]), "attention_mask"
    width = batch[lead].shape[1]
    if not columns or columns[lead].width == width:
        raise ModelError("its rows cannot be any longer")
    outputs = call_plainly(model, widen(batch, columns))
    return _change_values(
        outputs, lambda values: values[:, :width] if values.dim() == 3 else values
    )


def _change_values(outputs: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The outputs with other logits; a model without a head is used for its hidden states."""
    if isinstance(outputs, Tensor):
        return change(outputs)
    name = "logits" if hasattr(outputs, "logits") else "last_hidden_state"
    setattr(outputs, name, change(getattr(outputs, name)))
    return outputs
