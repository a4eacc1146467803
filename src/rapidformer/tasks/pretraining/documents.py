"""Check that a model keeps the documents of a row apart if the flags ask for it.

A model that accepts a mask does not necessarily obey it: recurrent layers carry state past any
mask, and some models have no position ids to restart. Instead of keeping a list of model families,
we run the model once on two documents and refuse it if one affects the other.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

from rapidformer.errors import ModelError
from rapidformer.models.evaluation_mode import evaluation_mode

if TYPE_CHECKING:
    from rapidformer.tasks.pretraining.objectives import NextToken

_LENGTH = 14
# Relative to the effect that one document has on the next without a mask. If they are separate, it
# is zero, except in a mixture of experts: other tokens go to other experts, which changes the
# round-off.
_LARGEST_EFFECT = 1e-3
_LARGEST_DIFFERENCE = 1e-3
"""Between a document in a row and the same document alone, relative to the largest loss."""


def check_documents(objective: NextToken, model: Any) -> None:
    """Refuse a model on which --reset-attention-mask or --reset-position-ids has no effect."""
    args = objective.args
    if args.reset_attention_mask:
        _check_window(model, args.seq_length or 0)
        with evaluation_mode(model), torch.no_grad():
            _try_two_documents(objective, model)
        return
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    if args.reset_position_ids and not takes_positions:
        raise _refuse("--reset-position-ids", model, "does not accept position_ids")


def _check_window(model: Any, seq_length: int) -> None:
    """Our mask would replace the model's own, and with it the sliding window."""
    window = getattr(model.config, "sliding_window", None)
    if isinstance(window, int) and 0 < window < seq_length:
        raise _refuse(
            "--reset-attention-mask",
            model,
            f"has a sliding window of {window} tokens, shorter than --seq-length {seq_length}, "
            "which the mask would replace",
        )


def _try_two_documents(objective: NextToken, model: Any) -> None:
    end, length = objective.tokenizer.eod, min(_LENGTH, objective.args.seq_length or _LENGTH)
    first = length // 2
    count = model.get_input_embeddings().num_embeddings
    dice = torch.Generator().manual_seed(0)
    rows = (end + torch.randint(1, count, (2, length), generator=dice)) % count  # never the end
    rows[:, first - 1] = end
    rows[1, first:] = rows[0, first:]
    labels = rows[:1]

    def run(row: torch.Tensor, *, is_apart: bool) -> torch.Tensor:
        hidden, positions, _ = objective.get_masks(row) if is_apart else (None, None, None)
        mine = labels[:, -row.shape[1] :]
        losses, _ = objective.get_token_losses(model, row, mine, hidden, positions)
        return losses[0, first - length :].double()

    joined = run(rows[:1], is_apart=False) - run(rows[1:], is_apart=False)
    alone = run(rows[:1, first:], is_apart=False)
    try:
        apart = run(rows[:1], is_apart=True)
        effect = (apart - run(rows[1:], is_apart=True)).abs().max()
    except (ValueError, TypeError, IndexError, RuntimeError) as error:
        reason = f"does not accept a query-by-key attention mask ({error})"
        raise _refuse("--reset-attention-mask", model, reason) from error
    if effect > _LARGEST_EFFECT * joined.abs().max():
        fraction = float(effect / joined.abs().max())
        reason = f"lets a document see the one before it despite the mask (by {fraction:.0%})"
        raise _refuse("--reset-attention-mask", model, reason)
    restarts_positions = (apart - alone).abs().max() <= _LARGEST_DIFFERENCE * alone.max()
    if objective.args.reset_position_ids and not restarts_positions:
        raise _refuse(
            "--reset-position-ids", model, "does not restart the positions in each document"
        )


def _refuse(flag: str, model: Any, reason: str) -> ModelError:
    return ModelError(
        f"{flag}: {type(model).__name__} {reason}. Omit the flag, or choose another model."
    )
