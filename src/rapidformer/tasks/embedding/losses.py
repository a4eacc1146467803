"""Losses of vectors, by the definitions of sentence-transformers; each is a function of all items.

Per item, a loss is a sum with its count. InfoNCE and CoSENT depend on all items that they are
given: the objective gives them those of the whole update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

WHOLE = ("infonce", "cosent")
"""Losses of a row that depend on other rows."""


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
