"""Whether a model keeps the documents of a row apart, where the flags ask for it.

What a reader would get wrong: that a model takes a mask does not mean that it heeds it. Recurrent
layers carry text past any mask, and some models have no positions to number anew. So no list of
families decides: the model itself is run once on two documents, and refused if they meet.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

from rapidformer.errors import ModelError

if TYPE_CHECKING:
    from rapidformer.tasks.pretraining.objectives import NextToken

_LENGTH = 14
# Of what one document does to the next without a mask. Where they are apart it does nothing, but
# in a mixture of experts other tokens take other experts, and round-off changes.
_LARGEST_EFFECT = 1e-3
_LARGEST_DIFFERENCE = 1e-3
"""Between a document in a row and alone, of the largest loss."""


def check_documents(objective: NextToken, model: Any) -> None:
    """Refuse a model on which --reset-attention-mask or --reset-position-ids has no effect."""
    args = objective.args
    if args.reset_attention_mask:
        _check_window(model, args.seq_length or 0)
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad():
                _try_two_documents(objective, model)
        finally:
            model.train(was_training)
        return
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    if args.reset_position_ids and not takes_positions:
        raise _refuse("--reset-position-ids", model, "takes no position_ids")


def _check_window(model: Any, seq_length: int) -> None:
    """A mask that is handed over replaces the model's own, with its sliding window."""
    window = getattr(model.config, "sliding_window", None)
    if isinstance(window, int) and 0 < window < seq_length:
        raise _refuse(
            "--reset-attention-mask",
            model,
            f"looks {window} tokens back, fewer than --seq-length {seq_length}, and would forget "
            "that",
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
        reason = f"takes no mask of rows x columns ({error})"
        raise _refuse("--reset-attention-mask", model, reason) from error
    if effect > _LARGEST_EFFECT * joined.abs().max():
        share = float(effect / joined.abs().max())
        reason = f"lets a document see the one before it all the same (by {share:.0%})"
        raise _refuse("--reset-attention-mask", model, reason)
    is_numbered_anew = (apart - alone).abs().max() <= _LARGEST_DIFFERENCE * alone.max()
    if objective.args.reset_position_ids and not is_numbered_anew:
        raise _refuse("--reset-position-ids", model, "does not number each document anew")


def _refuse(flag: str, model: Any, reason: str) -> ModelError:
    return ModelError(
        f"{flag}: {type(model).__name__} {reason}. Leave the flag out, or choose another model."
    )
