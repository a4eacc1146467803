"""What embeddings and rerankers learn.

The loss of a row depends on all rows of the update, so vectors are computed twice: the first pass
has no gradient and gives every rank all vectors, from which it computes the losses and their
gradients by each vector. The second pass of a micro-batch, with the same dropout, only carries the
gradients of its own vectors into the model. Memory is that of one micro-batch, and nothing depends
on how the update was cut.

All texts of a micro-batch are rows of one padded tensor, and the model is called once for queries
and documents together. ``slots`` says which of its rows belong to which item: ``[items, texts]``,
-1 where an item has fewer texts than others.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rapidformer.accel.unpad.promises import reading_no_padding
from rapidformer.data.collate import PadCollator
from rapidformer.errors import DataError
from rapidformer.objectives import Context, Objective, Term, take_value


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


Batch = dict[str, torch.Tensor]
_FIELDS = ("input_ids", "token_type_ids")


class ItemCollator:
    """Makes a batch of items; each has room for at least ``texts`` texts and ``scores`` scores, so
    that the batches of an update can be joined."""

    def __init__(
        self, pads: Mapping[str, int | float], side: str, *, texts: int, scores: int
    ) -> None:
        self._pad = PadCollator(pads, side=side)
        self._texts, self._scores = texts, scores

    def join(self, other: ItemCollator) -> ItemCollator:
        """One with room for the items of both."""
        joined = copy.copy(self)
        joined._texts = max(self._texts, other._texts)
        joined._scores = max(self._scores, other._scores)
        return joined

    def check(self, item: dict[str, Any]) -> dict[str, Any]:
        """An item of a stream, if there is room for it."""
        if (texts := len(item["text_ids"])) > self._texts:
            raise DataError(
                f"{texts} texts (the query and its documents), but the first rows of the stream "
                f"have at most {self._texts}: a row with the most texts must be among them."
            )
        return item

    def __call__(self, items: list[dict[str, Any]]) -> Batch:
        counts = torch.tensor([len(item["input_ids"]) for item in items])
        ids = _fill([item["text_ids"] for item in items], self._texts, 0)
        places = torch.arange(ids.shape[1])
        slots = (counts.cumsum(0) - counts)[:, None] + places
        # First, since the first tensor of a batch says how many rows it has.
        batch = {"slots": slots.masked_fill(places >= counts[:, None], -1), "text_ids": ids}
        if self._scores:
            batch["scores"] = _fill([item["scores"] for item in items], self._scores, float("nan"))
        rows = [
            {name: item[name][number] for name in _FIELDS if name in item}
            for item in items
            for number in range(len(item["input_ids"]))
        ]
        batch |= self._pad(rows)
        if "prompts" in items[0]:
            lengths = torch.tensor([length for item in items for length in item["prompts"]])
            batch["pooled"] = leave_out(batch["attention_mask"], lengths)
        return batch


def _fill(values: Sequence[Sequence[Any]], width: int, pad: float) -> torch.Tensor:
    width = max(width, *map(len, values))
    return torch.tensor([[*row, *[pad] * (width - len(row))] for row in values])


def leave_out(mask: torch.Tensor, prompts: torch.Tensor) -> torch.Tensor:
    """The mask without the first tokens of each row."""
    return mask * (mask.cumsum(1) > prompts[:, None])


def get_inputs(batch: Batch) -> Batch:
    """What the model takes of a batch."""
    return {name: batch[name] for name in (*_FIELDS, "attention_mask") if name in batch}


# Losses of vectors, by the definitions of sentence-transformers. Per item, a loss is a sum with its
# count.
WHOLE = ("infonce", "cosent")
"""Losses of a row that depend on other rows: they are given those of the whole update."""


@dataclass(frozen=True)
class Items:
    """Queries with their documents."""

    vectors: Tensor
    """[items, texts, width]: the query, the positive, the negatives."""
    is_present: Tensor
    """[items, texts]"""
    text_ids: Tensor
    """[items, texts], equal for equal texts."""
    scores: Tensor | None = None
    """[items, scores]"""

    @property
    def queries(self) -> Tensor:
        return self.vectors[:, 0]

    def compare(self) -> Tensor:
        """The cosine of each item's query and positive."""
        return torch.cosine_similarity(self.queries, self.vectors[:, 1])


Losses = tuple[Tensor, Tensor]
"""The sum of each item, and how many things it is a sum over."""


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    name: str
    scale: float = 20.0
    is_symmetric: bool = False
    masks_duplicates: bool = True
    margin: float = 5.0
    dims: Sequence[int] = ()
    """Matryoshka: the loss is the sum of those of the first so many numbers of each vector."""


def compute_losses(items: Items, settings: LossSettings) -> Losses:
    compute = _LOSSES[settings.name]
    if not settings.dims:
        return compute(items, settings)
    shorter = [functional.normalize(items.vectors[..., :dim], dim=-1) for dim in settings.dims]
    parts = [compute(replace(items, vectors=vectors), settings) for vectors in shorter]
    return torch.stack([losses for losses, _ in parts]).sum(0), parts[0][1]


def compute_infonce(items: Items, settings: LossSettings) -> Losses:
    """Which of all documents belongs to each query; symmetric: and which query to each positive."""
    vectors = functional.normalize(items.vectors, dim=-1)
    documents = vectors[:, 1:]
    count, width = documents.shape[:2]
    scores = settings.scale * vectors[:, 0] @ documents.flatten(0, 1).T
    scores = scores.view(count, count, width)
    # Of the query in dimension 0: which documents of which items are no negatives.
    is_hidden = ~items.is_present[:, 1:].expand(count, -1, -1)
    is_own = torch.eye(count, dtype=torch.bool, device=scores.device)
    if settings.masks_duplicates:
        ids = items.text_ids
        is_equal = ids[:, 1:][None] == ids[:, 1][:, None, None]
        is_equal[:, :, 0] |= ids[:, 0] == ids[:, :1]
        is_equal[:, :, 0] &= ~is_own
        is_hidden = is_hidden | is_equal
    right = scores[:, :, 0].diagonal()
    losses = scores.masked_fill(is_hidden, -torch.inf).flatten(1).logsumexp(1) - right
    if settings.is_symmetric:
        back = scores[:, :, 0].T
        if settings.masks_duplicates:
            is_same = (ids[:, :1] == ids[:, 0]) | (ids[:, 1:2] == ids[:, 1])
            back = back.masked_fill(is_same & ~is_own, -torch.inf)
        losses = (losses + back.logsumexp(1) - right) / 2
    return losses, torch.ones_like(losses)


def compute_cosent(items: Items, settings: LossSettings) -> Losses:
    """Every pair of items whose cosines are not in the order of their scores.

    A loss of all items together, and so that of each of them.
    """
    assert items.scores is not None
    cosines, wanted = settings.scale * items.compare(), items.scores[:, 0]
    differences = cosines[:, None] - cosines[None, :]
    is_wrong = wanted[:, None] < wanted[None, :]
    terms = differences.masked_fill(~is_wrong, -torch.inf).flatten()
    loss = torch.cat([terms.new_zeros(1), terms]).logsumexp(0)
    return loss.expand(len(cosines)), torch.ones_like(cosines)


def compute_cosine(items: Items, settings: LossSettings) -> Losses:
    """The squared difference of each cosine and its score."""
    assert items.scores is not None
    losses = (items.compare() - items.scores[:, 0]).square()
    return losses, torch.ones_like(losses)


def compute_triplet(items: Items, settings: LossSettings) -> Losses:
    """How much closer than a margin each negative is, compared with the positive."""
    distances = torch.linalg.vector_norm(items.vectors[:, :1] - items.vectors[:, 1:], dim=-1)
    near, far = distances[:, :1], distances[:, 1:]
    losses = (near - far + settings.margin).relu()
    return _sum_present(losses, items)


def compute_margin_mse(items: Items, settings: LossSettings) -> Losses:
    """The squared difference of the margin of two dot products and the score of the negative."""
    assert items.scores is not None
    products = (items.queries[:, None] * items.vectors[:, 1:]).sum(-1)
    margins, wanted = products[:, :1] - products[:, 1:], items.scores.nan_to_num(0)
    return _sum_present((margins - wanted).square(), items)


def _sum_present(losses: Tensor, items: Items) -> Losses:
    """The sum over the negatives that an item has, and how many they are."""
    is_present = items.is_present[:, 2:]
    return losses.masked_fill(~is_present, 0).sum(1), is_present.sum(1)


_LOSSES: dict[str, Callable[[Items, LossSettings], Losses]] = {
    "infonce": compute_infonce,
    "cosent": compute_cosent,
    "cosine": compute_cosine,
    "triplet": compute_triplet,
    "margin_mse": compute_margin_mse,
}
