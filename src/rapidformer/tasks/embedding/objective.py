"""What embeddings and rerankers learn.

The loss of a row depends on all rows of the update, so vectors are computed twice: the first pass
has no gradient and gives every rank all vectors, from which it computes the losses and their
gradients by each vector. The second pass of a micro-batch, with the same dropout, only carries the
gradients of its own vectors into the model. Memory is that of one micro-batch, and nothing depends
on how the update was cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rapidformer.accel.unpad.promises import reading_no_padding
from rapidformer.objectives import Context, Objective, Term, take_value
from rapidformer.tasks.embedding.collate import Batch, get_inputs
from rapidformer.tasks.embedding.losses import WHOLE, Items, Losses, LossSettings, compute_losses


class EmbeddingObjective(Objective):
    """A loss of the vectors of queries and documents."""

    is_whole_alone = reads_no_padding = True

    def __init__(
        self, loss: LossSettings, pooling: str, *, normalizes: bool, looks_at_update: bool = True
    ) -> None:
        self._loss = loss
        self._pooling, self._normalizes = pooling, normalizes
        self.has_first_pass = looks_at_update and loss.name in WHOLE

    def first_pass(self, model: Any, batch: Batch, context: Context) -> Mapping[str, Tensor]:
        rows = vars(self.embed(model, batch))
        return {name: values for name, values in rows.items() if values is not None}

    def summarize(self, rows: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The loss of each row, and the gradient of their sum by each vector."""
        vectors = rows["vectors"].detach().requires_grad_()
        with torch.enable_grad():
            losses, _ = compute_losses(Items(**{**rows, "vectors": vectors}), self._loss)
            (gradients,) = torch.autograd.grad(losses.sum(), vectors)
        return {"losses": losses.detach(), "gradients": gradients}

    def compute(self, model: Any, batch: Batch, context: Context) -> Term:
        items = self.embed(model, batch)
        if not context.rows:
            losses, counts = compute_losses(items, self._loss)
            return Term.from_rows(losses, counts)
        assert context.places is not None
        losses, gradients = context.rows["losses"], context.rows["gradients"]
        places = context.places
        gradient_of = (items.vectors * gradients[places]).sum()
        mine = losses[places]
        term = Term.from_sum(take_value(mine.sum(), gradient_of), len(places))
        return replace(term, rows=(mine, torch.ones_like(mine)))

    def embed(self, model: Any, batch: Batch) -> Items:
        """The vectors of a batch; those of texts that an item does not have are zero."""
        vectors = embed_texts(model, batch, self._pooling, normalizes=self._normalizes)
        slots = batch["slots"]
        is_present = slots >= 0
        vectors = vectors[slots.clamp(min=0)].masked_fill(~is_present[..., None], 0)
        return Items(vectors, is_present, batch["text_ids"], batch.get("scores"))


def embed_texts(model: Any, batch: Batch, pooling: str, *, normalizes: bool) -> Tensor:
    """The vector of each text, in fp32."""
    with reading_no_padding():
        hidden = _widen(model(**get_inputs(batch)).last_hidden_state)
    vectors = pool(hidden, batch.get("pooled", batch["attention_mask"]), pooling)
    return functional.normalize(vectors, dim=-1) if normalizes else vectors


def _widen(output: Tensor) -> Tensor:
    return output.float() if output.dtype in (torch.float16, torch.bfloat16) else output


def pool(hidden: Tensor, mask: Tensor, pooling: str) -> Tensor:
    """The mean over the tokens in the mask, or the first or last of them, padded on any side.

    What a model returns for padding may be anything, even NaN, so it is never multiplied.
    """
    if pooling == "mean":
        total = hidden.masked_fill(mask[..., None] == 0, 0).sum(1)
        return total / mask.sum(1, keepdim=True).clamp(min=1).to(total.dtype)
    place = mask.argmax(1) if pooling == "first" else mask.shape[1] - 1 - mask.flip(1).argmax(1)
    return hidden[torch.arange(len(hidden), device=hidden.device), place]


class RerankingObjective(Objective):
    """A loss of the scores of documents for their query."""

    reads_no_padding = True

    def __init__(self, loss: str, positive_weight: float = 1.0) -> None:
        self._loss, self._positive_weight = loss, positive_weight

    def compute(self, model: Any, batch: Batch, context: Context) -> Term:
        losses, counts = self.compare(score_documents(model, batch), batch)
        return Term.from_rows(losses, counts)

    def compare(self, logits: Tensor, batch: Batch) -> Losses:
        """The losses of items: of each document, or of all documents of an item together."""
        is_present, labels = batch["slots"] >= 0, batch["scores"].nan_to_num(0).to(logits.dtype)
        if self._loss == "margin_mse":
            is_present, logits = is_present[:, 1:], logits[:, :1] - logits[:, 1:]
        if self._loss in ("mse", "margin_mse"):
            losses = (logits - labels).square()
            return losses.masked_fill(~is_present, 0).sum(1), is_present.sum(1)
        if self._loss == "bce":
            losses = functional.binary_cross_entropy_with_logits(
                logits, labels, reduction="none",
                pos_weight=logits.new_tensor(self._positive_weight),
            )  # fmt: skip
            return losses.masked_fill(~is_present, 0).sum(1), is_present.sum(1)
        if self._loss == "listnet":
            shares = labels.masked_fill(~is_present, -torch.inf).softmax(1)
        else:
            shares = labels.masked_fill(~is_present, 0)
            shares = shares / shares.sum(1, keepdim=True)
        logprobs = logits.masked_fill(~is_present, -torch.inf).log_softmax(1)
        losses = -(shares * logprobs.masked_fill(~is_present, 0)).sum(1)
        return losses, torch.ones_like(losses)


def score_documents(model: Any, batch: Batch) -> Tensor:
    """The score of each document, as a logit: [items, documents]."""
    with reading_no_padding():
        logits = _widen(model(**get_inputs(batch)).logits).squeeze(-1)
    return logits[batch["slots"].clamp(min=0)]
