"""Masks and positions for left-to-right models, from the document boundaries in a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def get_ltor_masks_and_position_ids(
    data: torch.Tensor,
    eod_token: int,
    reset_position_ids: bool,
    reset_attention_mask: bool,
    eod_mask_loss: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention mask (True is hidden), loss mask and positions of tokens ``[batch, sequence]``.

    The attention mask is ``[1, 1, sequence, sequence]``, one for all rows, unless it is reset at
    document boundaries. An end-of-document token belongs to the document it ends. A plain causal
    mask has the attribute ``is_plain_causal``: a model that knows it, like GPTModel, can take the
    fast path without looking at the mask.
    """
    import torch

    rows, length = data.shape
    is_end = data == eod_token
    place = torch.arange(length, device=data.device)
    hidden = (place > place[:, None])[None, None]
    if reset_attention_mask:
        # The document index of each token: the number of document ends before it.
        document = is_end.cumsum(dim=1) - is_end.long()
        hidden = hidden | (document[:, None, None, :] != document[:, None, :, None])
    else:
        hidden.is_plain_causal = True  # type: ignore[attr-defined]
    position_ids = place.expand(rows, length).contiguous()
    if reset_position_ids:
        starts = torch.zeros_like(position_ids)
        starts[:, 1:] = torch.where(is_end[:, :-1], place[1:], 0)
        position_ids = position_ids - starts.cummax(dim=1).values
    loss_mask = torch.ones(data.shape, dtype=torch.float, device=data.device)
    if eod_mask_loss:
        loss_mask[is_end] = 0.0
    return hidden, loss_mask, position_ids
